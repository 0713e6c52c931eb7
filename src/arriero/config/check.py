"""Rules that tie keys of different sections together."""

from collections.abc import Iterator, Mapping
from typing import Any

from arriero.config.problems import Problem
from arriero.config.timeline import Timeline
from arriero.units import Span

_MOST_SEQUENCES = 2**22  # all divisors are tried as micro-batches


def cross_check(sections: Mapping[str, Any]) -> list[Problem]:
    """Every broken rule whose sections are valid in themselves."""
    problems = []
    for names, rule in _RULES:
        if all(name in sections for name in names):
            problems += rule(*(sections[name] for name in names))
    return problems


def _lengths(data) -> Iterator[tuple[str, int]]:
    """Every sequence length of a run, with its key."""
    yield "data.seq_len", data.seq_len
    for i, phase in enumerate(data.phases):
        if phase.seq_len is not None:
            yield f"data.phases[{i}].seq_len", phase.seq_len


def _sequence_fits_model(data, model) -> list[Problem]:
    return [
        Problem(
            key,
            f"{length} is longer than the model allows ({model.max_seq_len})",
            "shorten it, or raise model.max_seq_len",
        )
        for key, length in _lengths(data)
        if model.max_seq_len is not None and length > model.max_seq_len
    ]


def _batch_is_whole_sequences(data, train) -> list[Problem]:
    problems, batch, length = [], train.batch.amount, data.seq_len
    keys = ("train.batch", "data.seq_len")
    for i, phase in enumerate([None, *data.phases]):
        if phase is not None:
            if phase.batch is None and phase.seq_len is None:
                continue
            batch = phase.batch.amount if phase.batch else batch
            length = phase.seq_len or length
            at = f"data.phases[{i - 1}]"
            keys = (f"{at}.batch" if phase.batch else f"{at}.seq_len", f"{at}.seq_len")
        if batch % length:
            lower = batch // length * length
            near = " or ".join(f"'{Span(n, 'tok')}'" for n in (lower, lower + length) if n)
            what = f"a batch of '{Span(batch, 'tok')}' is not a multiple of {keys[1]} ({length})"
            problems.append(Problem(keys[0], what, f"let the batch be {near}"))
        elif batch // length > _MOST_SEQUENCES:
            what = f"'{Span(batch, 'tok')}' is {batch // length:,} sequences of {length} tokens in one step"
            problems.append(Problem(keys[0], what, f"take at most {_MOST_SEQUENCES:,} sequences"))
    return problems


def _phases_change_something(data) -> list[Problem]:
    problems = []
    for i, phase in enumerate(data.phases):
        if not (phase.sources or phase.batch or phase.seq_len or phase.lr):
            todo = "give its sources, batch, seq_len or lr, or remove it"
            problems.append(Problem(f"data.phases[{i}]", "changes nothing", todo))
        if phase.seq_len is not None and data.packing != "concat":
            what = f"rows of packing '{data.packing}' are planned for one sequence length"
            todo = "set data.packing to 'concat', or start another run from the weights of this one"
            problems.append(Problem(f"data.phases[{i}].seq_len", what, todo))
    return problems


def _prompts_meet_whole_documents(data) -> list[Problem]:
    if data.packing != "concat":
        return []
    later = [(f"data.phases[{i}]", phase.sources or ()) for i, phase in enumerate(data.phases)]
    return [
        Problem(
            f"{where}.sources[{i}].prompt",
            "a prompt stands before a document, and packing 'concat' cuts documents anywhere",
            "set data.packing to 'bestfit' or 'none'",
        )
        for where, sources in [("data", data.sources), *later]
        for i, source in enumerate(sources)
        if source.prompt is not None
    ]


def _shares_sum_to_one(data) -> list[Problem]:
    """Weights that are all below 1 read as shares; a mistyped one would quietly change the others."""
    later = [(f"data.phases[{i}].sources", p.sources) for i, p in enumerate(data.phases) if p.sources]
    problems = []
    for key, sources in [("data.sources", data.sources), *later]:
        weights = [source.weight for source in sources]
        if max(weights) < 1 and abs(sum(weights) - 1) > 1e-6:
            what = f"the weights are shares and sum to {sum(weights):g}"
            problems.append(Problem(key, what, "let them sum to 1, or give proportions like 9 and 1"))
    return problems


def _phases_begin_within_the_run(data, train) -> list[Problem]:
    if train.horizon.unit == "s":
        return []
    timeline = Timeline(data, train)
    end = timeline.steps_of(train.horizon)
    return [
        Problem(
            f"data.phases[{i}].at",
            f"'{phase.at}' is not before train.horizon ('{train.horizon}')",
            "bring it forward",
        )
        for i, phase in enumerate(data.phases)
        if timeline.phases[i + 1].step >= end
    ]


def _phases_follow_each_other(data, train) -> list[Problem]:
    problems, before = [], 0
    timeline = Timeline(data, train)
    for i, phase in enumerate(data.phases):
        step = timeline.phases[i + 1].step
        if step <= before:
            what = f"'{phase.at}' is step {step}, not after step {before}, where the phase before begins"
            problems.append(
                Problem(f"data.phases[{i}].at", what, "let each phase begin after the one before")
            )
        before = step
    return problems


def _schedule_has_an_end(train, schedule) -> list[Problem]:
    if train.horizon.unit != "s" or schedule.kind == "constant" or schedule.horizon is not None:
        return []
    what = f"is missing: '{schedule.kind}' must end at some token or step, and train.horizon is wall time"
    return [Problem("schedule.horizon", what, "give it, or set schedule.kind = 'constant'")]


def _decay_is_wsd(schedule) -> list[Problem]:
    if schedule.decay is None or schedule.kind == "wsd":
        return []
    return [
        Problem(
            "schedule.decay",
            f"has no meaning for '{schedule.kind}'",
            "remove it, or set schedule.kind = 'wsd'",
        )
    ]


def _eval_has_data(evaluation) -> list[Problem]:
    if not evaluation.every or evaluation.heldout:
        return []
    return [
        Problem("eval.every", "there is nothing held out to evaluate on", "give eval.heldout, like '1M tok'")
    ]


def _budget_is_for_compiled_blocks(memory, precision) -> list[Problem]:
    if memory.remat.kind != "budget" or precision.compile is not False:
        return []
    what = f"'{memory.remat}' is kept by the compiler, and precision.compile is false"
    todo = "set precision.compile to true, or take 'selective' or 'fraction:P'"
    return [Problem("memory.remat", what, todo)]


def _float8_is_reached_from_bf16(precision) -> list[Problem]:
    if precision.float8 == "off" or precision.compute != "fp32":
        return []
    what = f"'{precision.float8}' is float8 beside bf16, and precision.compute is 'fp32'"
    return [Problem("precision.float8", what, "set precision.compute to 'bf16', or float8 to 'off'")]


def _float8_head_follows_the_blocks(precision) -> list[Problem]:
    if not precision.float8_head or precision.float8 != "off":
        return []
    what = "the head is the last to go to float8, and precision.float8 is 'off'"
    return [Problem("precision.float8_head", what, "set precision.float8 to 'tensorwise', or this to false")]


def _float8_gathers_with_one_scale(precision) -> list[Problem]:
    if not precision.float8_all_gather or precision.float8 == "tensorwise":
        return []
    what = f"gathered weights have one scale each, and precision.float8 is '{precision.float8}'"
    return [Problem("precision.float8_all_gather", what, "set precision.float8 to 'tensorwise'")]


def _float8_gathers_shards(precision, parallel) -> list[Problem]:
    if not precision.float8_all_gather or parallel.dp_shard != 1 or parallel.cp != 1:
        return []
    what = "no weights are sharded (parallel.dp_shard is 1), so none are gathered"
    return [Problem("precision.float8_all_gather", what, "remove it, or raise parallel.dp_shard")]


def _float8_multiplies_in_sixteens(precision, data, parallel) -> list[Problem]:
    """Weight gradients are sums over the tokens of a micro-batch, and float8 sums go by sixteens."""
    if precision.float8 == "off":
        return []
    if data.packing == "none":
        what = "rows of any length do not go with precision.float8, which multiplies in sixteens"
        return [Problem("data.packing", what, "take 'bestfit' or 'concat'")]
    cp = max(1, parallel.cp)
    ranks = f" on each of {cp} ranks" if cp > 1 else ""
    return [
        Problem(
            key,
            f"{length} is not a multiple of 16{ranks}, as precision.float8 needs",
            f"take a multiple of {16 * cp}",
        )
        for key, length in _lengths(data)
        if length % (16 * cp)
    ]


def _momentum_has_a_use(optim) -> list[Problem]:
    if optim.momentum is None or optim.name != "adamw":
        return []
    what = "has no meaning for 'adamw', whose first moment decays by optim.betas[0]"
    return [Problem("optim.momentum", what, "remove it, or set optim.name to 'muon' or 'sgd'")]


def _bf16_masters_compute_in_bf16(precision) -> list[Problem]:
    if precision.master != "bf16" or precision.compute in ("auto", "bf16"):
        return []
    what = f"weights in bf16 compute in bf16, and precision.compute is '{precision.compute}'"
    return [Problem("precision.master", what, "set precision.compute = 'bf16', or this to 'fp32'")]


def _a_run_has_one_beginning(checkpoint) -> list[Problem]:
    if checkpoint.start_from is None or checkpoint.resume_from is None:
        return []
    what = "a run starts from weights alone, or continues another (checkpoint.resume_from): not both"
    return [Problem("checkpoint.start_from", what, "remove one of them")]


_RULES = [
    (("data", "model"), _sequence_fits_model),
    (("data", "train"), _batch_is_whole_sequences),
    (("data",), _phases_change_something),
    (("data",), _prompts_meet_whole_documents),
    (("data",), _shares_sum_to_one),
    (("data", "train"), _phases_follow_each_other),
    (("data", "train"), _phases_begin_within_the_run),
    (("train", "schedule"), _schedule_has_an_end),
    (("schedule",), _decay_is_wsd),
    (("eval",), _eval_has_data),
    (("memory", "precision"), _budget_is_for_compiled_blocks),
    (("precision",), _float8_is_reached_from_bf16),
    (("precision",), _float8_head_follows_the_blocks),
    (("precision",), _float8_gathers_with_one_scale),
    (("precision", "parallel"), _float8_gathers_shards),
    (("precision", "data", "parallel"), _float8_multiplies_in_sixteens),
    (("optim",), _momentum_has_a_use),
    (("precision",), _bf16_masters_compute_in_bf16),
    (("checkpoint",), _a_run_has_one_beginning),
]
