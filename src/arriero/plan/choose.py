"""Choose what the run file leaves open, so that a run fits in memory and is fast.

Micro-batch, activation checkpointing, loss chunk, gradient reduction and resharding are chosen together: the
fastest combination by the predicted time of a step that fits by the memory estimate. A setting of the run
file is kept. `arriero plan` searches the same combinations for every layout.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any, Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import Problem
from arriero.config.timeline import Timeline
from arriero.plan.layout import divisors, micro_batch_counts
from arriero.plan.memory import Choices, MemoryEstimate, usable_bytes
from arriero.plan.rates import Rates
from arriero.plan.rules import Draft, checkpointing_problems, phase_key
from arriero.plan.timing import block_seconds, step_time
from arriero.units import counted

_CPU_CHUNK = 2048
_CHUNKS = (4096, 1024, 256)
# more tokens in a micro-batch do not make a GPU faster
_MOST_TOKENS = 65_536
# a combination that is at most this much slower and needs less memory is preferred
_INDIFFERENT = 1.01
_NONE, _FULL = ActivationCheckpointing("none"), ActivationCheckpointing("full")
_KINDS = (_NONE, _FULL, ActivationCheckpointing("selective"), ActivationCheckpointing("attention"))


class Setting(NamedTuple):
    """A combination of settings, with the micro-batch size of each phase and the predicted peak in bytes."""

    choices: Choices
    micro_batches: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Chooser:
    """The combinations of settings of one layout.

    `sizes` are the micro-batch sizes that each phase allows, `kept` settings of a run that is resumed, and
    `exclude` names kinds of activation checkpointing and 'sync each'.
    """

    draft: Draft
    sizes: Sequence[Sequence[int]]
    rates: Rates
    kept: Mapping[str, Any] = field(default_factory=dict)
    exclude: Collection[str] = ()

    @cached_property
    def usable(self) -> float:
        return usable_bytes(self.draft.machine.memory_free, self.draft.machine.is_gpu)

    def best(self) -> tuple[Setting, bool]:
        """Return the fastest setting that fits and True, or the smallest one and False."""
        every = list(self.settings())
        fitting = [each for each in every if each.bytes <= self.usable]
        if not fitting:
            return min(every, key=lambda each: each.bytes), False
        if len(fitting) == 1:
            return fitting[0], True
        work = [self.draft.work(each.choices, each.micro_batches[0]) for each in fitting]
        seconds = [step_time(each, self.rates).seconds for each in work]
        rows = zip(seconds, work, fitting, strict=True)
        options = [(taken, each.micro_batch, setting.bytes) for taken, each, setting in rows]
        return fitting[preferred(options, self.draft.machine.is_gpu)], True

    def settings(self) -> Iterator[Setting]:
        """Yield combinations with their predicted peak, also those that do not fit.

        A micro-batch that fits is not tried with more recomputation. A smaller loss chunk is tried if nothing
        fits and the loss needs most.
        """
        for chunk in self._loss_chunks():
            least = None
            for sync, reshard in product(self._syncs, self._reshards):
                for setting in self._sized(Choices(_NONE, chunk, sync, reshard)):
                    least = setting if least is None or setting.bytes < least.bytes else least
                    yield setting
            if least is None or least.bytes <= self.usable or not self._is_at_the_loss(least):
                return

    def _loss_chunks(self) -> list[int | Literal[False]]:
        default, key = loss_chunk(self.draft), "memory.loss_chunk"
        if self.draft.config.memory.loss_chunk != "auto" or not self.draft.machine.is_gpu:
            return [default]
        if key in self.kept:
            return [self.kept[key]]
        return [default, *(chunk for chunk in _CHUNKS if not default or chunk < default)]

    def _is_at_the_loss(self, setting: Setting) -> bool:
        pairs = zip(self._estimates(setting.choices), setting.micro_batches, strict=True)
        return any("loss" in estimate.parts(size) for estimate, size in pairs)

    @cached_property
    def _syncs(self) -> Sequence[Literal["last", "each"]]:
        given, layout = self.draft.config.parallel.sync, self.draft.layout
        if given != "auto":
            return [given]
        if "parallel.sync" in self.kept:
            return [self.kept["parallel.sync"]]
        reduces = layout.pp == 1 and layout.fsdp > 1 and "sync each" not in self.exclude
        return ["last", "each"] if reduces else ["last"]

    @cached_property
    def _reshards(self) -> Sequence[bool | int]:
        given, layout = self.draft.config.parallel.reshard, self.draft.layout
        if given != "auto":
            return [{"always": True, "never": False}[given] if isinstance(given, str) else given]
        if layout.pp > 1:
            return [False]
        return [False, True] if layout.uses_fsdp and self.draft.machine.is_gpu else [True]

    @cached_property
    def _kinds(self) -> Sequence[ActivationCheckpointing]:
        key, given = "memory.activation_checkpointing", self.draft.config.memory.activation_checkpointing
        if given.kind != "auto":
            return [given]
        if key in self.kept:
            return [ActivationCheckpointing.parse(self.kept[key])]
        found = [each for each in _KINDS if each.kind not in self.exclude]
        return [each for each in found if not any(checkpointing_problems(self.draft, each))]

    @cached_property
    def _estimated(self) -> dict[Choices, list[MemoryEstimate]]:
        return {}

    def _estimates(self, choices: Choices) -> list[MemoryEstimate]:
        if choices not in self._estimated:
            self._estimated[choices] = self.draft.estimates(choices)
        return self._estimated[choices]

    def _sized(self, base: Choices) -> Iterator[Setting]:
        """Yield the combinations of all micro-batch sizes."""
        sequences, failed = self._estimates(base)[0].sequences, False
        for size in sorted(self.sizes[0]):
            whole = size >= sequences
            if whole and base.sync == "each" and len(self._syncs) > 1:
                continue
            # larger ones need more, except for all sequences at once, which accumulates no gradients
            if not failed or whole:
                found = list(self._checkpointed(base, size))
                failed = all(each.bytes > self.usable for each in found)
                yield from found

    def _checkpointed(self, base: Choices, size: int) -> Iterator[Setting]:
        """Yield the kinds of activation checkpointing, up to the first that fits without recomputation."""
        found = {}
        for kind in self._kinds:
            found[kind] = setting = self._setting(replace(base, checkpointing=kind), size)
            yield setting
            if kind == _NONE and setting.bytes <= self.usable:
                return
        if "fraction" not in self.exclude and len(found) > 1:
            yield from self._mixed(base, found, size)

    def _mixed(
        self, base: Choices, found: Mapping[ActivationCheckpointing, Setting], size: int
    ) -> Iterator[Setting]:
        """Yield the setting whose blocks have two modes and that fits with the least recomputation.

        Memory is almost linear in the number of blocks with the mode that keeps less.
        """
        layers, usable, work = self.draft.spec.layers, self.usable, self.draft.work(base, size)
        seconds = {each: block_seconds(work.varied(checkpointing=each), self.rates) for each in found}
        mixes = []
        for less, more in product(found, found):
            small, large = found[less].bytes, found[more].bytes
            if small <= usable < large:
                share = (large - usable) / (large - small)
                mean = share * seconds[less] + (1 - share) * seconds[more]
                mixes.append((mean, share, (large - small) / layers, less.modes(1)[0], more.modes(1)[0]))
        if not mixes:
            return
        _, share, saved, mode, rest = min(mixes)
        count, best = ceil(share * layers), None
        while 1 <= count < layers:
            mix = ActivationCheckpointing("fraction", Fraction(count, layers), mode, rest)
            tried = self._setting(replace(base, checkpointing=mix), size)
            if tried.bytes <= usable:
                best, count = tried, count - 1
                if usable - tried.bytes < saved:
                    break
            elif best:
                break
            else:
                count += 1
        if best:
            yield best

    def _setting(self, choices: Choices, size: int) -> Setting:
        """Return the setting with this micro-batch in the first phase, and as many tokens in the others."""
        first, *others = self._estimates(choices)
        sizes, peak = [min(size, first.sequences)], first.bytes(min(size, first.sequences))
        for estimate, allowed in zip(others, self.sizes[1:], strict=True):
            tokens = sizes[0] * first.tokens
            small = [each for each in allowed if each * estimate.tokens <= tokens] or [min(allowed)]
            fitting = [each for each in small if estimate.bytes(each) <= self.usable]
            sizes.append(max(fitting, default=min(small)))
            peak = max(peak, estimate.bytes(sizes[-1]))
        return Setting(choices, tuple(sizes), peak)


def preferred(options: Sequence[tuple[float, float, int]], on_gpu: bool) -> int:
    """Return the number of the best option of a layout, from seconds, micro-batch and bytes of each.

    Of those that are almost as fast as the fastest, it is the one that needs least memory. A last micro-batch
    of another size is avoided, because it is compiled too.
    """
    limit = min(seconds for seconds, _, _ in options) * (_INDIFFERENT if on_gpu else 1.0)
    near = [
        (micro_batch % 1 > 0, needed, seconds, number)
        for number, (seconds, micro_batch, needed) in enumerate(options)
        if seconds <= limit
    ]
    return min(near)[-1]


def loss_chunk(draft: Draft) -> int | Literal[False]:
    """Return the number of tokens whose logits are computed at once, if the memory has room for them.

    Few large matmuls are faster than many. The size follows from the total memory of a GPU, not from the free
    memory: a resumed run must sum in the same order.
    """
    given = draft.config.memory.loss_chunk
    if given != "auto":
        return given
    if not draft.machine.is_gpu:
        return _CPU_CHUNK
    cast = 2 if draft.config.precision.float8_head else 0
    bytes_each = draft.spec.vocab_size * (draft.element + cast)
    fitting = draft.machine.memory_total // 16 * draft.layout.tp // bytes_each
    return max(_CHUNKS[-1], 1 << max(fitting, 1).bit_length() - 1)


def micro_batch_sizes(draft: Draft, kept: Mapping[str, Any], problems: list[Problem]) -> list[list[int]]:
    """Return the micro-batch sizes that each phase allows; a pipeline needs enough equal ones."""
    found = []
    phases = Timeline.of(draft.config).phases
    shares = [draft.layout.rows(phase.sequences) for phase in phases]
    given, largest = draft.config.train.micro_batch, max(shares)
    started = kept.get("train.micro_batch", []) if given is None else []
    for i, (phase, sequences) in enumerate(zip(phases, shares, strict=True)):
        key = phase_key(i, "batch", "train.batch")
        if phase.sequences < draft.layout.batch:
            batch = counted(phase.sequences, "sequence")
            what = (
                f"a batch of {batch} leaves some of the {draft.layout.batch} data-parallel ranks without any"
            )
            problems.append(Problem(key, what, "raise it, or give more ranks to cp, tp or pp"))
            continue
        asked = min(given, sequences) if given and given <= largest else given
        sizes = _allowed_sizes(draft, asked, sequences, phase.seq_len // draft.layout.cp)
        if not sizes:
            problems.append(_indivisible(draft, asked, sequences, key))
        elif i < len(started) and (started[i] in sizes or (draft.layout.pp == 1 and started[i] <= sequences)):
            sizes = [started[i]]
        found.append(sizes)
    return found


def _allowed_sizes(draft: Draft, given: int | None, sequences: int, tokens: int) -> list[int]:
    pp = draft.layout.pp
    if pp > 1:
        counts = micro_batch_counts(draft.schedule, sequences, pp, draft.stages_per_rank)
        sizes = [sequences // n for n in counts]
    elif given is not None:
        return [given] if given <= sequences else []
    else:
        sizes = sorted({*divisors(sequences), *_uneven(sequences)})
    if given is not None:
        return [size for size in sizes if size == given]
    most = max(1, _MOST_TOKENS // max(1, tokens)) if draft.machine.is_gpu else sequences
    return [size for size in sizes if size <= most] or sizes[-1:]


def _indivisible(draft: Draft, given: int | None, sequences: int, key: str) -> Problem:
    pp = draft.layout.pp
    size = "micro-batches" if given is None else f"micro-batches of {given}"
    where = f" for the schedule '{draft.schedule}' over {pp} ranks" if pp > 1 else ""
    what = f"{counted(sequences, 'sequence')} of a rank cannot be divided into {size}{where}"
    if given is None:
        return Problem(key, what, "raise it")
    return Problem("train.micro_batch", what, f"leave it out, or raise {key}")


def _uneven(sequences: int) -> list[int]:
    """Return ceil(sequences / n) for all n: every size that the largest of n micro-batches can have."""
    sizes, count = [], 1
    while count < sequences:
        less = (sequences - 1) // count
        sizes.append(less + 1)
        count = (sequences - 1) // less + 1
    return [*sizes, 1]
