"""Predict the memory of a rank: what lives at the moments of a step at which most memory is allocated.

The prediction is the peak of allocated memory. It follows the code of `parallel` and `train`, moment by
moment; `tests/plan/test_measured_memory.py` compares it with measurements. See docs/planner.md, "Memory".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from math import prod
from typing import Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing, BlockMode
from arriero.config.schema import RunConfig
from arriero.model.costs import Affine, BlockMemory, Mode, block_memory, block_shapes
from arriero.model.family import family_of
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import inner_dim, speculator_shapes
from arriero.plan.layout import SCHEDULES, Layout, cut_stages, distinct_kinds, in_flight, stages_of

FP32 = 4
_ADAPTER = ".adapter"
# elements of a quantised weight that share a scale
QUANTIZED_BLOCK = 64
# bytes per element of quantised weights, with a scale of four bytes per block
_QUANTIZED = {"int8": 68 / QUANTIZED_BLOCK, "nf4": 36 / QUANTIZED_BLOCK}
_STATE = {"fp32": 4, "bf16": 2}
# elements of 8-bit optimizer state that share a scale
_STATE_BLOCK = 256
# a CPU updates one parameter at a time: bytes per element to unpack 8-bit moments, and to round to bf16
_UNPACKED, _ROUNDED = 64, 40
# rows of the head that GPUs multiply by are padded to a multiple
_ROW_MULTIPLE = 64
# what a process on a GPU allocates besides the tensors here: workspaces of matmuls, optimizer constants
_WORKSPACE = 96 * 2**20
_TOKEN_BYTES = 32
# buffers of the communication library, outside torch's allocator
_COMMUNICATION = 2**30

# the share of a GPU's free memory that the predicted peak may fill; the rest is for fragments
USABLE = 0.97
# a CPU's memory is predicted less exactly
_USABLE_ON_CPU = 0.9

Parts = dict[str, float]
_PARTS = (
    *("weights", "optimizer state", "gradients", "activations", "gathered weights", "working memory", "loss"),
    *("workspace", "communication"),
)
# what `with_choices` must compute again
_DEPENDENT = {"_stages", "state_parts"}


def usable_bytes(free: int, on_gpu: bool) -> float:
    """Return the bytes of free memory that the predicted peak may fill."""
    return (USABLE if on_gpu else _USABLE_ON_CPU) * free


class Sizes(NamedTuple):
    """Elements of parameters on one rank: before FSDP shards them, after it, and their optimizer state.

    `trainable` and `sharded_trainable` leave out frozen parameters; `moments` is in bytes. `unsplit` is what
    the gradient of a vocabulary-parallel embedding has beyond this rank's rows, until the update.
    """

    elements: int = 0
    trainable: int = 0
    sharded: int = 0
    sharded_trainable: int = 0
    moments: int = 0
    matrices: int = 0
    unsplit: int = 0

    def plus(self, other: "Sizes", times: int = 1) -> "Sizes":
        return Sizes(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Choices:
    """Settings that memory depends on and that are derived if the run file leaves them open.

    `reshard`: True frees gathered weights after forward, False keeps them, a number keeps them sharded over
    groups of that many ranks.
    """

    checkpointing: ActivationCheckpointing
    chunk: int | Literal[False]
    sync: Literal["last", "each"] = "last"
    reshard: bool | int = True


class _Stage(NamedTuple):
    """What one pipeline rank holds: its blocks by mode of checkpointing, the embedding, the head, and sizes.

    `ends` are the modes of the first and of the last block.
    """

    rank: int
    sizes: Sizes
    blocks: Mapping[BlockMode, int]
    ends: tuple[BlockMode, BlockMode]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of the rank that needs most, as a function of the micro-batch size.

    `sequences` is the number of sequences per rank and step, `tokens` that of tokens of a sequence on a rank.
    `copies` are bytes per logit that other systems need in addition.
    """

    config: RunConfig
    spec: ModelSpec
    layout: Layout
    choices: Choices
    mode: Mode
    tokens: int
    sequences: int
    copies: int = 0

    def with_choices(self, choices: Choices) -> "MemoryEstimate":
        """Return the estimate of other choices; it keeps the sizes that do not depend on them."""
        # without __init__: a search makes ten thousands of them
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        for name in _DEPENDENT & vars(self).keys():
            del vars(other)[name]
        vars(other)["choices"] = choices
        return other

    def host_bytes(self, micro_batch: int) -> int:
        """Return the bytes that offloading moves from the device to the host."""
        if not self.config.memory.offload_state and not self.config.memory.offload_activations:
            return 0
        kept = self.config.with_values({"memory.offload_state": False, "memory.offload_activations": False})
        return replace(self, config=kept).bytes(micro_batch) - self.bytes(micro_batch)

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and optimizer state before an update."""
        return round(sum(self.state_parts.values()))

    @cached_property
    def state_parts(self) -> Parts:
        """Bytes of weights, gradients and optimizer state on the rank that has most of them."""
        ranks = [
            {
                "weights": self._weights(stage),
                "gradients": self._all_gradients(stage.sizes),
                "optimizer state": self._moments(stage),
            }
            for stage in self._stages
        ]
        return max(ranks, key=lambda each: sum(each.values()))

    def bytes(self, micro_batch: int) -> int:
        """Return the peak of allocated memory at a micro-batch size."""
        return round(sum(self._peak(micro_batch)))

    def parts(self, micro_batch: int) -> Parts:
        """Return what lives at the peak, in bytes: the rows of a memory table."""
        sizes = zip(_PARTS, self._peak(micro_batch), strict=True)
        return {name: size for name, size in sizes if size}

    def _peak(self, micro_batch: int) -> tuple[float, ...]:
        """Return the bytes of each of `_PARTS` at the peak, on the rank that needs most."""
        count, most, parts = -(-self.sequences // micro_batch), -1.0, ()
        for stage in self._stages:
            moment = max(self._timeline(stage, micro_batch, count), key=sum)
            own = self._weights(stage), self._moments(stage)
            if (total := sum(own) + sum(moment)) > most:
                most, parts = total, (*own, *moment)
        if not self.mode.on_gpu:
            return (*parts, 0.0, 0.0)
        workspace = _WORKSPACE + self.sequences * self.tokens * _TOKEN_BYTES
        return (*parts, workspace, _COMMUNICATION if self.layout.ranks > 1 else 0.0)

    def _timeline(self, stage: _Stage, micro_batch: int, count: int) -> list[tuple[float, ...]]:
        """Return what lives at both ends of the backward pass, in the update and at the loss.

        Gradients, activations, gathered weights, working memory and loss, in bytes.
        """
        tokens = micro_batch * self.tokens
        held = in_flight(self.config.parallel.schedule, stage.rank, self.layout.pp, self._per_rank, count)
        states = self.mode.element * self.spec.dim * tokens / self.layout.tp
        activations = self._activations(stage, tokens)
        # a pipeline keeps what it received and sent for each micro-batch in flight
        kept = held * (activations + (2 * states if self.layout.pp > 1 else 0))
        first, last = (self._working(mode, tokens) for mode in stage.ends)
        key = (stage.rank, self.choices.sync, self.choices.reshard, min(count, 3))
        if (steady := self._steady.get(key)) is None:
            steady = self._steady[key] = self._without_tokens(stage, count)
        start, at_head, at_end, at_table, at_update, gathered, reduced, with_head, update = steady
        moments: list[tuple[float, ...]] = [
            (at_head, kept, gathered, last + with_head, 0.0),
            (at_end, kept - activations, gathered, first + reduced + states, 0.0),
            (at_table, kept - activations, gathered, 0.0, 0.0),
            (at_update, 0.0, 0.0, update, 0.0),
        ]
        if stage.has_head:
            # the buffer that gathered the head is still held
            held_head = gathered + (self.mode.element * self._vocabulary if self._uses_fsdp else 0)
            loss = start, kept + 2 * states, held_head, 0.0
            moments += [(*loss, each + states) for each in self._loss(tokens)]
        return moments

    @cached_property
    def _steady(self) -> dict[tuple[object, ...], tuple[float, ...]]:
        return {}

    def _without_tokens(self, stage: _Stage, count: int) -> tuple[float, ...]:
        """Return the bytes that depend neither on the micro-batch nor on activation checkpointing."""
        sizes = stage.sizes
        start, end = self._gradients(sizes, count)
        reduced, head, table = (
            self._reduced(self._block_sizes.trainable),
            self._head_gradient(stage),
            self._table(stage),
        )
        return (
            start,
            start + (head if count == 1 or self._uses_fsdp else 0),
            max(end - (0 if start else table), 0.0),
            end + table + self._reduced(self._vocabulary if table else 0),
            self._all_gradients(sizes, count),
            self._gathered(stage, sizes),
            reduced,
            reduced + (self._reduced(self._vocabulary) if head else 0),
            self._update(stage),
        )

    # weights, gradients and optimizer state

    @cached_property
    def _per_rank(self) -> int:
        parallel = self.config.parallel
        return parallel.stages_per_rank or SCHEDULES[parallel.schedule].stages_per_rank

    @cached_property
    def _uses_fsdp(self) -> bool:
        return self.layout.uses_fsdp

    @property
    def _master(self) -> int:
        return 2 if self.config.precision.master == "bf16" else FP32

    @property
    def _has_masters(self) -> bool:
        return not self._uses_fsdp and self.mode.element < self._master

    @cached_property
    def _gradient_bytes(self) -> int:
        return self._master if self._uses_fsdp else min(self.mode.element, self._master)

    def _weights(self, stage: _Stage) -> float:
        if self._uses_fsdp and self.config.memory.offload_state:
            return 0.0
        copy = self.mode.element if self.config.precision.compute == "fp16" and not self._uses_fsdp else 0
        held, trained = self._held(stage.sizes)
        if self._frozen_bytes is None:
            return (self._master + copy) * held
        block, block_trained = self._held(self._block_sizes)
        inside = sum(stage.blocks.values()) * (block - block_trained)
        outside = held - trained - inside
        return (self._master + copy) * trained + self._frozen_bytes * inside + self.mode.element * outside

    def _held(self, sizes: Sizes) -> tuple[int, int]:
        """Return the elements that a rank holds, and how many of them are trained."""
        if self._uses_fsdp:
            return sizes.sharded, sizes.sharded_trainable
        return sizes.elements, sizes.trainable

    @cached_property
    def _frozen_bytes(self) -> float | None:
        """Bytes per element of the frozen weights of blocks, if they are stored in fewer bits."""
        base = self.config.precision.base_weights
        return None if base == "master" else {"compute": float(self.mode.element), **_QUANTIZED}[base]

    def _moments(self, stage: _Stage) -> float:
        return 0.0 if self.config.memory.offload_state and self._uses_fsdp else stage.sizes.moments

    def _all_gradients(self, sizes: Sizes, count: int = 1) -> float:
        """Return the bytes of the gradients that the update reads."""
        if self._uses_fsdp:
            return 0.0 if self.config.memory.offload_state else self._gradient_bytes * sizes.sharded_trainable
        summed = self._has_masters and count > 1
        return (FP32 if summed else self._gradient_bytes) * (sizes.trainable + sizes.unsplit)

    def _gradients(self, sizes: Sizes, count: int) -> tuple[float, float]:
        """Return the bytes of gradients at the start and at the end of the last backward pass but one."""
        end = self._all_gradients(sizes, count)
        if count == 1:
            return 0.0, end
        if self._uses_fsdp and self.choices.sync == "last":
            reduce = 2 if self.config.precision.reduce == "bf16" else FP32
            both = max(reduce, self.mode.element) * sizes.trainable
            return both, both
        if self._has_masters and count == 2:
            return self._gradient_bytes * sizes.trainable, end
        return end, end

    @cached_property
    def _vocabulary(self) -> int:
        """Elements of the embedding table or the head, on one of the tensor-parallel ranks."""
        return -(-self.spec.vocab_size // self.layout.tp) * self.spec.dim

    def _head_gradient(self, stage: _Stage) -> float:
        trained = stage.has_head and "*" not in self._frozen
        return self._gradient_bytes * self._vocabulary if trained else 0.0

    def _table(self, stage: _Stage) -> float:
        """Return the dense gradient of the embedding, and of a tied head, which waits for it."""
        if not stage.has_embedding or "*" in self._frozen:
            return 0.0
        tied = self.spec.tied and stage.has_head
        return self.mode.element * self._vocabulary * (2 if tied else 1)

    def _gathered(self, stage: _Stage, sizes: Sizes) -> float:
        """Return the bytes of weights that FSDP holds gathered while blocks compute."""
        if not self._uses_fsdp:
            return 0.0
        size, block = self.mode.element, float(self._block_sizes.elements)
        if self._frozen_bytes is not None:
            block *= self._frozen_bytes / size
        if self.choices.reshard is False:
            return size * sizes.elements + size * block
        ends = (stage.has_head or (self.spec.tied and stage.has_embedding)) * self._vocabulary
        if self.choices.reshard is not True:
            ends += sizes.elements / self.choices.reshard
        # the current block, those prefetched, and the buffer that an all-gather writes
        return size * (ends + (2 + self.config.parallel.prefetch) * block)

    def _reduced(self, elements: int) -> float:
        """Return the bytes of whole gradients, and of their copy that FSDP reduces."""
        if not self._uses_fsdp:
            return 0.0
        reduce = 2 if self.config.precision.reduce == "bf16" else FP32
        return (self.mode.element + reduce + reduce / self.layout.fsdp) * elements

    def _update(self, stage: _Stage) -> float:
        """Return what the optimizer needs in addition to gradients: GPU kernels of AdamW need nothing."""
        optim, sizes = self.config.optim, stage.sizes
        ends = stage.has_embedding or stage.has_head
        largest = max(self._largest_matrix, self._vocabulary if ends else 0) / self.layout.fsdp
        if optim.name == "muon":
            # all directions, and one matrix in fp32 beside three in bf16
            return 2 * sizes.matrices / self.layout.fsdp + 10 * self._largest_matrix
        if optim.name == "sgd":
            return 3 * FP32 * largest
        if self.mode.on_gpu or (self._all_fp32 and optim.state == "fp32"):
            return 0.0
        return (_ROUNDED if optim.state in _STATE else _UNPACKED) * largest

    @property
    def _all_fp32(self) -> bool:
        return self._master == FP32 and not self._has_masters

    @cached_property
    def _largest_matrix(self) -> int:
        tensors = [each for kind in distinct_kinds(self.spec) for each in block_tensors(kind)]
        return max(_local(shape, split, self.layout.tp, 1) for _, shape, split in tensors)

    @cached_property
    def _block_sizes(self) -> Sizes:
        """The sizes of a block, of the largest one where they differ."""
        kinds = self.spec.kinds
        return max(
            (self._sizes_of(kinds.index(kind)) for kind in distinct_kinds(self.spec)),
            key=lambda each: each.elements,
        )

    def _sizes_of(self, block: int) -> Sizes:
        names = block_tensors(self.spec.kinds[block])
        named = [(f"blocks.{block}.{name}", shape, split) for name, shape, split in names]
        named += _adapters(named, self.config)
        return _sizes(named, self.layout, self._frozen, _moments_each(self.config, inside=True))

    @property
    def _frozen(self) -> tuple[str, ...]:
        config = self.config
        prompts = config.prefix.tokens or config.llama_adapter.tokens
        has_adapter = config.lora.rank or prompts or config.speculator.n_predict
        return ("*",) if has_adapter else self.config.optim.freeze

    @cached_property
    def _held_blocks(self) -> list[tuple[int, list[int], Sizes, bool, bool]]:
        """Return the pipeline ranks that may need most, both ends and the second: blocks, sizes and ends."""
        pp = self.layout.pp
        count = pp * self._per_rank if pp > 1 else 1
        cuts = cut_stages(self.spec, self.config.data.seq_len, count)
        found = []
        for rank in sorted({0, min(1, pp - 1), pp - 1}):
            places = stages_of(self.config.parallel.schedule, rank, pp, self._per_rank) if pp > 1 else [0]
            blocks = [i for place in places for i in cuts[place]]
            ends = 0 in places, count - 1 in places
            found.append((rank, blocks, self._stage_sizes(blocks, *ends), *ends))
        return found

    @cached_property
    def _stages(self) -> list[_Stage]:
        modes = self.choices.checkpointing.modes(self.spec.layers)
        found = []
        for rank, blocks, sizes, has_embedding, has_head in self._held_blocks:
            ends = modes[blocks[0]], modes[blocks[-1]]
            uniform = self.choices.checkpointing.kind in ("none", "full", "selective", "attention")
            counts = {ends[0]: len(blocks)} if uniform else Counter(modes[i] for i in blocks)
            found.append(_Stage(rank, sizes, counts, ends, has_embedding, has_head))
        return found

    def _stage_sizes(self, blocks: Sequence[int], has_embedding: bool, has_head: bool) -> Sizes:
        ends = _end_tensors(self.spec, has_embedding, has_head)
        if has_head and self.config.speculator.n_predict:
            shapes = speculator_shapes(self.config.speculator, self.spec)
            ends += [(name + _ADAPTER, shape, "") for name, shape in shapes.items()]
        total = _sizes(ends, self.layout, self._frozen, _moments_each(self.config, inside=False))
        if not self._frozen and len(distinct_kinds(self.spec)) == 1:
            return total.plus(self._block_sizes, len(blocks))
        for block in blocks:
            total = total.plus(self._sizes_of(block))
        return total

    # activations and loss

    @cached_property
    def _block(self) -> BlockMemory:
        memory, tile = block_memory(self.spec, self.mode), self.config.memory.ffn_tile
        if not tile:
            return memory
        # the input of the tiles is kept instead of what the feed-forward layer keeps
        size, ffn = self.mode.element, self.spec.ffn
        kept = memory.kept._replace(per_token=memory.kept.per_token - size * 3 * ffn)
        tiled = size * 6 * ffn * min(tile, self.tokens)
        working = Affine(2 * size * self.spec.dim, tiled + FP32 * 3 * self.spec.dim * ffn)
        return BlockMemory(kept, memory.selective, memory.attention, working, memory.gathered)

    def _on_rank(self, amount: Affine, tokens: int, gathered: float = 0.0) -> float:
        tp = self.layout.tp
        per_token = amount.per_token if tp == 1 else (amount.per_token - gathered) / tp + gathered
        return per_token * tokens + amount.fixed / tp

    def _kept(self, mode: BlockMode, tokens: int) -> float:
        """Return what a block keeps for the backward pass."""
        block = self._block
        if mode == "none":
            return self._on_rank(block.kept, tokens, block.gathered)
        states = self.mode.element * self.spec.dim * tokens / self.layout.tp
        if mode == "full":
            return states
        kept = self._on_rank(block.selective if mode == "selective" else block.attention, tokens)
        # the results of the two reduce-scatters are kept
        return kept + (2 * states if self.layout.tp > 1 else 0)

    def _activations(self, stage: _Stage, tokens: int) -> float:
        """Return what the blocks of a rank keep for one micro-batch."""
        if speculator := self.config.speculator.n_predict:
            # the frozen model keeps nothing but its last states; a head keeps about eight tensors
            inner = inner_dim(self.config.speculator, self.spec)
            return tokens * (self.mode.element * self.spec.dim + FP32 * 8 * int(speculator) * inner)
        checkpointing, count = self.choices.checkpointing, sum(stage.blocks.values())
        if checkpointing.kind == "budget":
            full = self._kept("full", tokens)
            total = count * (full + float(checkpointing.amount) * (self._kept("none", tokens) - full))
        else:
            total = sum(number * self._kept(mode, tokens) for mode, number in stage.blocks.items())
        if offloaded := float(self.config.memory.offload_activations):
            return (1 - offloaded) * total + 2 * total / count
        return total

    def _working(self, mode: BlockMode, tokens: int) -> float:
        """Return what the backward pass of a block needs beyond what was kept for it."""
        working = self._on_rank(self._block.working, tokens)
        if self.layout.tp > 1:
            # the gradient of the result is gathered; asynchronous tensor parallelism needs no second copy
            whole = self.mode.element * self.spec.dim * tokens
            working += whole * (1 - 1 / self.layout.tp)
            working = max(working, (1 if self.config.parallel.async_tp else 2) * whole)
        mode = "full" if self.choices.checkpointing.kind == "budget" else mode
        working += self._kept("none", tokens) - self._kept(mode, tokens)
        if self.config.precision.base_weights in _QUANTIZED:
            # the weight that is dequantised for a matmul, on a CPU from copies in fp32
            working += (self.mode.element if self.mode.on_gpu else 4 * FP32) * self._largest_matrix
        return working

    def _loss(self, tokens: int) -> list[float]:
        """Return the bytes of the head's chunks at their peaks: logits, gradients of states and weight."""
        size, spec, tp = self.mode.element, self.spec, self.layout.tp
        chunk = min(tokens, self.choices.chunk or tokens)
        states, weight = size * spec.dim * tokens, self._vocabulary
        # 8-bit copies of weight and logits, by rows and by columns
        cast = 2 if self.config.precision.float8_head else 0
        rows = -(-spec.vocab_size // tp)
        rows += -rows % _ROW_MULTIPLE if self.mode.on_gpu else 0
        # a GPU writes the gradient of the logits in their place, and so does fp32
        scores = 0 if self.mode.on_gpu or size == FP32 else FP32
        logits = chunk * rows * (size + cast + scores + self.copies) + weight * (cast + (size if cast else 0))
        weight = 0 if "*" in self._frozen else weight
        summed = FP32 if tokens > chunk or self.config.precision.compute == "fp16" else size
        return [
            states + logits + weight * summed,
            states + weight * (summed + size),
            2 * (states + size * weight),
        ]


def estimate_memory(
    config: RunConfig, spec: ModelSpec, layout: Layout, choices: Choices, mode: Mode
) -> MemoryEstimate:
    """Estimate the memory of a run of one phase."""
    sequences = layout.rows(config.train.batch.amount // config.data.seq_len)
    return MemoryEstimate(config, spec, layout, choices, mode, config.data.seq_len // layout.cp, sequences)


def _moments_each(config: RunConfig, inside: bool) -> tuple[str, int, int]:
    """Return the format of the optimizer state, and moments per matrix and per other parameter."""
    optim = config.optim
    if optim.name == "sgd":
        count = 1 if optim.momentum else 0
        return optim.state, count, count
    return optim.state, 1 if optim.name == "muon" and inside else 2, 2


Tensor = tuple[str, tuple[int, ...], str]


@cache
def block_tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """Return name, shape and tensor-parallel placement of each parameter of a block."""
    placements = family_of(spec.family).placements
    return tuple(
        (name, shape, _placement(f"blocks.0.{name}", placements))
        for name, shape in block_shapes(spec).items()
    )


def _adapters(tensors: Sequence[Tensor], config: RunConfig) -> list[Tensor]:
    """Return the parameters of each adapter as one tensor that is not split."""
    found: list[Tensor] = []
    lora, prefix, prompts = config.lora, config.prefix.tokens, config.llama_adapter.tokens
    for name, shape, _ in tensors:
        layer = name.removesuffix(".weight")
        targeted = lora.rank and any(fnmatchcase(layer, pattern) for pattern in lora.targets)
        if len(shape) == 2 and targeted:
            found.append((layer + _ADAPTER, (int(lora.rank), sum(shape)), ""))
        if layer.endswith(".attention.k") and (prefix or prompts):
            width = 2 * shape[0] if prefix else shape[1]
            found.append((layer + _ADAPTER, (int(prefix or prompts), width), ""))
    return found


def _end_tensors(spec: ModelSpec, has_embedding: bool, has_head: bool) -> list[Tensor]:
    counts = spec.counts
    found: list[Tensor] = []
    if has_embedding:
        found.append(("embedding.weight", (spec.vocab_size, spec.dim), "column-wise"))
        rows = counts.other_embeddings // spec.dim
        found += [("positions.weight", (rows, spec.dim), "")] if rows else []
    if has_head:
        kinds = ("weight", "bias")[: counts.final_norm // spec.dim]
        found += [(f"norm.{kind}", (spec.dim,), "") for kind in kinds]
        if not (spec.tied and has_embedding):
            found.append(("head.weight", (spec.vocab_size, spec.dim), "column-wise"))
    return found


def _placement(name: str, placements: Mapping[str, str]) -> str:
    module = name.rpartition(".")[0]
    return next((kind for pattern, kind in placements.items() if fnmatchcase(module, pattern)), "")


def _local(shape: tuple[int, ...], placement: str, tp: int, shards: int) -> int:
    """Return the elements of a parameter on the rank that holds most of it."""
    rows, *others = shape
    if placement == "column-wise":
        rows = -(-rows // tp)
    elif placement == "row-wise" and others:
        others[0] //= tp
    rows = -(-rows // shards)
    for other in others:
        rows *= other
    return rows


def _sizes(
    tensors: Sequence[Tensor], layout: Layout, freeze: Sequence[str], moments: tuple[str, int, int]
) -> Sizes:
    return _cached_sizes(tuple(tensors), layout.tp, layout.fsdp, tuple(freeze), moments)


@cache
def _cached_sizes(
    tensors: tuple[Tensor, ...], tp: int, shards: int, freeze: tuple[str, ...], moments: tuple[str, int, int]
) -> Sizes:
    total = Sizes()
    state, of_matrices, of_others = moments
    for name, shape, placement in tensors:
        whole, local = (_local(shape, placement, tp, n) for n in (1, shards))
        if any(fnmatchcase(name, pattern) for pattern in freeze) and not name.endswith(_ADAPTER):
            total = total.plus(Sizes(whole, 0, local))
            continue
        count = of_matrices if len(shape) > 1 else of_others
        matrix = whole if len(shape) > 1 else 0
        moved = prod(shape) - whole if name == "embedding.weight" else 0
        state_bytes = count * _moment_bytes(local, state)
        total = total.plus(Sizes(whole, whole, local, local, state_bytes, matrix, moved))
    return total


def _moment_bytes(elements: int, state: str) -> int:
    if state in _STATE:
        return _STATE[state] * elements
    return -(-elements // _STATE_BLOCK) * (_STATE_BLOCK + FP32)
