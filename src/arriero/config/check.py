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


def _momentum_has_a_use(optim) -> list[Problem]:
    if optim.momentum is None or optim.name != "adamw":
        return []
    what = "has no meaning for 'adamw', whose first moment decays by optim.betas[0]"
    return [Problem("optim.momentum", what, "remove it, or set optim.name to 'muon' or 'sgd'")]


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
    (("optim",), _momentum_has_a_use),
    (("checkpoint",), _a_run_has_one_beginning),
]
