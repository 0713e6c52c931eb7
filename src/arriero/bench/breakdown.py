"""Where the time of a step goes: events of a profile, each in one category, that sum to the step."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from arriero.parallel.loss import LOSS
from arriero.train.ranges import OPTIMIZER

# at an instant when several are under way the first of these has it
COMPUTE = ("GEMM", "attention", "elementwise", "loss", "optimizer")
CATEGORIES = (*COMPUTE, "communication", "copies", "idle")

_ATTENTION = r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product"
_BY_NAME = [
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        (
            "communication",
            r"nccl|rccl|^gloo|^c10d|_c10d|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all",
        ),
        ("copies", r"^mem(cpy|set)|^aten::(copy_|_to_copy|to|clone|contiguous)$"),
        # Inductor names a kernel after all it was fused from, attention's neighbours after attention too
        ("elementwise", r"^triton_(poi|red|per|for)_"),
        ("attention", _ATTENTION),
        (
            "GEMM",
            r"gemm|gemv|cutlass|nvjet|cublas|xmma|split_?k|s\d+816|^triton_(tem|mm)|^Cijk_|scaled_mm"
            r"|^aten::(mm|addmm_?|bmm|baddbmm_?|matmul|linear)$|^mk[ld].*linear",
        ),
    )
]


class Event(NamedTuple):
    """Something a device did, in microseconds; `annotation` is the named range of code it was done for."""

    name: str
    start: float
    end: float
    stream: int
    annotation: str = ""


def category_of(name: str, annotation: str = "") -> str:
    """By name, then by range: the head's matmuls are GEMMs, whatever else the loss does is loss; all that
    the optimizer computes is optimizer, also Muon's matmuls. Kernels of no other name are elementwise."""
    known = next((category for category, pattern in _BY_NAME if pattern.search(name)), "elementwise")
    if known in ("communication", "copies"):
        return known
    if annotation == OPTIMIZER:
        return "optimizer"
    if annotation == LOSS and known == "elementwise":
        return "loss"
    return "attention" if is_attention(annotation) else known


def is_attention(name: str) -> bool:
    return re.search(_ATTENTION, name, re.IGNORECASE) is not None


def spent(events: Iterable[Event], begin: float, end: float) -> dict[str, float]:
    """Microseconds by category between two instants; they sum to what lies between.

    Streams overlap: an instant belongs to one category alone, and communication and copies have it only
    while nothing is computed.
    """
    changes: list[tuple[float, int, str]] = []
    for event in events:
        start, stop = max(event.start, begin), min(event.end, end)
        if stop > start:
            category = category_of(event.name, event.annotation)
            changes += [(start, 1, category), (stop, -1, category)]
    total = dict.fromkeys(CATEGORIES, 0.0)
    under_way: Counter[str] = Counter()
    now = begin
    for when, change, category in sorted(changes):
        if when > now:
            total[next((c for c in CATEGORIES if under_way[c]), "idle")] += when - now
            now = when
        under_way[category] += change
    total["idle"] += end - now
    return total
