"""The result of `bench parity` as a page of the documentation."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from arriero.bench.cases import BASE, BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Tolerance, cases
from arriero.bench.parity import UNSEEN, Verdict
from arriero.model.presets import resolve

_PAGE = """\
# Any layout, the same loss

Written by `make parity`, that is `arriero bench parity --write docs/parity.md`; do not edit.

**{held} of {judged} cases hold**, of {every} there are, with torch {torch} on {place}.

## What is compared
The same {horizon} of {batch} in sequences of {seq_len}, with the same seed, in each layout and in one
process. Unless said otherwise AdamW, lr {lr:g} after {warmup} of warm-up, clipped at 1, fp32, not compiled;
on text of known entropy (`builtin:synthetic`).

{models}

A case holds when these relative differences are within bounds and the run ended without an error:

- *loss*: the largest over the losses of all steps;
- *gradient*: that of the first step's global gradient norm, before clipping;
- *weights*: of the final weights as exported. |found - expected| / |expected| is taken for each kind of
  weight, a kind being a name without its block's number; the largest counts.

GPT-2's `{unseen}` is left out of the last: a bias on all keys alike does not change a softmax, so its
gradient is zero but for rounding, and AdamW makes steps of any gradient, however small.

| cases | loss | gradient | weights |
|---|---:|---:|---:|
{bounds}
"""

_BOUNDS = {
    "fp32, all layouts": FP32,
    "bf16 beside fp32; fp16 beside fp16": BF16,
    "bf16 weights, beside fp32": BF16_WEIGHTS,
    "float8, beside fp32": FLOAT8,
} | {f"optimizer state in {bits}, beside fp32": bounds for bits, bounds in STATES.items()}

_HEAD = "| layout | ranks | loss | gradient | weights | seconds | |\n|---|---:|---:|---:|---:|---:|---|"


def page(verdicts: Mapping[str, Sequence[Verdict]], device: str) -> str:
    judged = [verdict for each in verdicts.values() for verdict in each]
    top = _PAGE.format(
        held=sum(verdict.holds for verdict in judged),
        judged=len(judged),
        every=sum(len(cases(model)) for model in verdicts),
        torch=torch.__version__,
        place="one GPU that all ranks share" if device == "cuda" else "a CPU (gloo)",
        models="\n".join(f"- {_describe(model)}" for model in verdicts),
        unseen=UNSEEN,
        bounds="\n".join(f"| {name} | {_cells(bounds)} |" for name, bounds in _BOUNDS.items()),
        **{key.partition(".")[2]: value for key, value in BASE.items()},
    )
    return top + "\n".join(_tables(verdicts)) + "\n"


def _describe(model: str) -> str:
    own = {key.removeprefix("model."): value for key, value in BASE.items() if key.startswith("model.")}
    spec = resolve(f"{model}-test", own)
    tied = "head tied to the embedding" if spec.tied else "head and embedding apart"
    return (
        f"{model}: {spec.parameters:,} parameters, {spec.layers} blocks of width {spec.dim}, "
        f"{spec.heads} heads, {spec.kv_heads} of keys and values, vocabulary {spec.vocab_size}, {tied}."
    )


def _cells(tolerance: Tolerance) -> str:
    return " | ".join(f"{value:.0e}" for value in (tolerance.loss, tolerance.norm, tolerance.weights))


def _tables(verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    for model, judged in verdicts.items():
        yield f"\n## {model}"
        for group, members in groupby(judged, lambda verdict: verdict.case.group):
            yield f"\n### {group}"
            yield _HEAD
            yield from map(_row, members)


def _row(verdict: Verdict) -> str:
    numbers = [f"{value:.1e}" for value in (verdict.loss, verdict.norm, verdict.weights)]
    holds = "holds" if verdict.holds else "**fails**"
    cells = [verdict.case.name, str(verdict.case.ranks), *numbers, f"{verdict.seconds:.0f}", holds]
    return f"| {' | '.join(cells)} |"
