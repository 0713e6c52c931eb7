"""The result of `bench parity` as a page of the documentation."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from arriero.bench.cases import BASE, BF16, FLOAT8, FP32, STATES, Case, Tolerance, cases
from arriero.bench.parity import UNSEEN, Verdict
from arriero.model.presets import resolve

_HEAD = "| layout | ranks | loss | gradient | weights | seconds | |\n|---|---:|---:|---:|---:|---:|---|"


def page(verdicts: Mapping[str, Sequence[Verdict]], device: str) -> str:
    return "\n".join([*_about(verdicts, device), *_criterion(), *_tables(verdicts)]) + "\n"


def _about(verdicts: Mapping[str, Sequence[Verdict]], device: str) -> Iterator[str]:
    judged = [verdict for each in verdicts.values() for verdict in each]
    every = sum(len(cases(model)) for model in verdicts)
    yield "# Any layout, the same loss"
    yield ""
    yield "Written by `make parity`, that is `arriero bench parity --write docs/parity.md`; do not edit."
    yield ""
    yield (
        f"**{sum(v.holds for v in judged)} of {len(judged)} cases hold**, of {every} there are, with torch "
        f"{torch.__version__} on {'a GPU' if device == 'cuda' else 'a CPU (gloo)'}."
    )
    yield ""
    yield "## What is compared"
    yield (
        f"The same {BASE['train.horizon']} of {BASE['train.batch']} in sequences of {BASE['data.seq_len']}, with the "
        "same seed, in each layout and in one process. AdamW unless said otherwise, "
        f"lr {BASE['optim.lr']:g} after {BASE['schedule.warmup']} of warm-up, clipped at 1, fp32, not compiled, on "
        "text of known entropy (`builtin:synthetic`)."
    )
    yield ""
    for model in verdicts:
        yield f"- {_describe(model)}"


def _describe(model: str) -> str:
    own = {key.removeprefix("model."): value for key, value in BASE.items() if key.startswith("model.")}
    spec = resolve(f"{model}-test", own)
    tied = "head tied to the embedding" if spec.tied else "head and embedding apart"
    return (
        f"{model}: {spec.parameters:,} parameters, {spec.layers} blocks of width {spec.dim}, {spec.heads} heads, "
        f"{spec.kv_heads} of keys and values, vocabulary {spec.vocab_size}, {tied}."
    )


def _criterion() -> Iterator[str]:
    yield ""
    yield "A case holds when these relative differences are within bounds, and the run ended without an error:"
    yield ""
    yield "- *loss*: the largest over the losses of all steps;"
    yield "- *gradient*: that of the first step's global gradient norm, before clipping;"
    yield (
        "- *weights*: of the final weights as exported. |found - expected| / |expected| is taken for each kind of "
        "weight, a kind being a name without its block's number; the largest counts."
    )
    yield ""
    yield (
        f"GPT-2's `{UNSEEN}` is left out of the last: a bias on all keys alike does not change a softmax, so its "
        "gradient is zero but for rounding, and AdamW makes steps of any gradient, however small."
    )
    yield ""
    yield "| cases | loss | gradient | weights |"
    yield "|---|---:|---:|---:|"
    named = [
        ("fp32, all layouts", FP32),
        ("bf16 and fp16, beside fp32", BF16),
        ("float8 or bf16 weights, beside fp32", FLOAT8),
        ("optimizer state in fewer bits, beside fp32", STATES),
    ]
    for name, bounds in named:
        yield f"| {name} | {_bounds(bounds)} |"


def _bounds(tolerance: Tolerance) -> str:
    return " | ".join(f"{value:.0e}" for value in (tolerance.loss, tolerance.norm, tolerance.weights))


def _tables(verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    for model, judged in verdicts.items():
        yield ""
        yield f"## {model}"
        for group, members in groupby(judged, lambda verdict: verdict.case.group):
            yield ""
            yield f"### {group}"
            yield _HEAD
            yield from map(_row, members)


def _row(verdict: Verdict) -> str:
    case: Case = verdict.case
    numbers = [f"{value:.1e}" for value in (verdict.loss, verdict.norm, verdict.weights)]
    holds = "holds" if verdict.holds else "**fails**"
    cells = [case.name, str(case.ranks), *numbers, f"{verdict.seconds:.0f}", holds]
    return f"| {' | '.join(cells)} |"
