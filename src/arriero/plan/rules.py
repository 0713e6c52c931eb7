"""Rules about settings that exclude each other, or that a layout, a model or a machine does not allow.

Each rule yields problems with the key to change and what to do. Most layout rules belong here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import Problem
from arriero.config.schema import PrecisionSection, RunConfig
from arriero.config.timeline import Timeline, config_of
from arriero.model.costs import Mode
from arriero.model.family import family_of
from arriero.model.spec import ModelSpec
from arriero.plan.blocks import Work, shared_work
from arriero.plan.hardware import Machine
from arriero.plan.layout import SCHEDULES, Layout, cut_stages, distinct_kinds, divide_context, tokens_divisor
from arriero.plan.memory import QUANTIZED_BLOCK, Choices, MemoryEstimate, block_tensors, estimate_memory
from arriero.units import human_count

Compute = Literal["fp32", "bf16", "fp16"]
BYTES: Mapping[Compute, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
# parameters of a block below which compiling it does not pay
_WORTH_COMPILING = 1_000_000
# float8 matmuls take dimensions that are multiples of this
_FLOAT8_MULTIPLE = 16
_KEY = "memory.activation_checkpointing"
_OTHER_SCHEDULE = "set parallel.schedule to 'interleaved-1f1b'"


@dataclass(frozen=True)
class Draft:
    """A run in one layout, before its micro-batch and memory settings are chosen.

    `reasons` are why the precision is `compute`, and why blocks are compiled or not.
    """

    config: RunConfig
    machine: Machine
    spec: ModelSpec
    layout: Layout
    compute: Compute
    compiled: bool
    reasons: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, config: RunConfig, machine: Machine, spec: ModelSpec, layout: Layout) -> "Draft":
        """Derive the precision and whether blocks are compiled."""
        compute, why = _compute(config.precision, machine)
        compiled, because = _compiled(config, spec, layout, machine)
        return cls(config, machine, spec, layout, compute, compiled, (why, because))

    @property
    def schedule(self) -> str:
        return self.config.parallel.schedule

    @property
    def splits_backward(self) -> bool:
        return self.layout.pp > 1 and SCHEDULES[self.schedule].splits_backward

    @property
    def stages_per_rank(self) -> int:
        schedule, asked = SCHEDULES[self.schedule], self.config.parallel.stages_per_rank
        return asked if asked and schedule.allows_stages(asked) else schedule.stages_per_rank

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.layout.pp * self.stages_per_rank if self.layout.pp > 1 else 1

    @cached_property
    def context(self) -> tuple[int, int]:
        """The degrees of Ulysses and of ring attention."""
        return divide_context(self.layout.cp, *self.heads, self.config.parallel.context)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads of a tensor-parallel rank."""
        tp = self.layout.tp
        return max(1, self.spec.heads // tp), max(1, self.spec.kv_heads // tp)

    @property
    def element(self) -> int:
        """Bytes of an element of the activations."""
        return BYTES[self.compute]

    @cached_property
    def mode(self) -> Mode:
        """How the blocks run, as far as their memory depends on it."""
        precision, layout, on_gpu = self.config.precision, self.layout, self.machine.is_gpu
        # the kernels for tensorwise float8 keep 8-bit copies; torchao casts again in the backward pass
        float8 = precision.float8 == "tensorwise" and layout.tp == 1 and not precision.float8_all_gather
        whole = on_gpu and layout.tp == 1 and not layout.uses_fsdp
        fused_qkv = whole and precision.float8 == "off"
        return Mode(self.compiled, self.element, on_gpu, fused_qkv, float8 and on_gpu)

    @cached_property
    def phase_configs(self) -> list[RunConfig]:
        return [config_of(self.config, phase) for phase in Timeline.of(self.config).phases]

    def estimates(self, choices: Choices) -> list[MemoryEstimate]:
        """Return the memory estimate of each phase."""
        return [each.with_choices(choices) for each in self._any_estimates]

    @cached_property
    def _any_estimates(self) -> list[MemoryEstimate]:
        choices = Choices(ActivationCheckpointing("none"), False)
        sizes = self.spec, self.layout, choices, self.mode
        found = [estimate_memory(config, *sizes) for config in self.phase_configs]
        for each in found:
            # computes the sizes that all choices share
            each.bytes(1)
        return found

    @cached_property
    def _work(self) -> Work:
        """The step with the settings that are not chosen."""
        cuts = cut_stages(self.spec, self.config.data.seq_len, self.stages)
        return replace(
            shared_work(self.config, self.spec, self.compute),
            layout=self.layout,
            compiled=self.compiled,
            fused_qkv=self.mode.fused_qkv,
            fused_float8=self.mode.float8,
            ulysses=self.context[0],
            ring=self.context[1],
            schedule=self.schedule,
            stages=tuple(map(len, cuts)),
        )

    def work(self, choices: Choices, micro_batch: int, phase: int = 0) -> Work:
        """Return the step of a phase with these choices, for its predicted time."""
        config = self.phase_configs[phase]
        sequences = self.layout.rows(config.train.batch.amount // config.data.seq_len)
        count = -(-sequences // micro_batch)
        return self._work.varied(
            seq_len=config.data.seq_len,
            micro_batch=sequences / count,
            micro_batches=count,
            checkpointing=choices.checkpointing,
            reshard=choices.reshard is not False,
            sync_each=choices.sync == "each",
        )

    def problems(self) -> Iterator[Problem]:
        """Yield what the layout, the model or the machine does not allow."""
        yield from _precision_problems(self)
        yield from _model_problems(self)
        yield from _context_problems(self)
        yield from _float8_problems(self)
        yield from _adapter_problems(self)
        yield from _setting_problems(self)


def _compute(section: PrecisionSection, machine: Machine) -> tuple[Compute, str]:
    """Return the precision of activations and matmuls, and the reason."""
    if section.compute != "auto":
        return section.compute, "as configured"
    if section.master == "bf16":
        return "bf16", "precision.master is 'bf16'"
    if not machine.is_gpu:
        return "fp32", "the default on a CPU"
    return ("bf16", f"{machine.name} supports bf16") if machine.bf16 else ("fp32", "the GPU has no bf16")


def _compiled(config: RunConfig, spec: ModelSpec, layout: Layout, machine: Machine) -> tuple[bool, str]:
    if config.precision.compile != "auto":
        return config.precision.compile, "as configured"
    if not machine.is_gpu:
        return False, "faster on GPUs only"
    if layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward:
        return False, f"the schedule '{config.parallel.schedule}' splits the backward pass"
    if spec.block_parameters < _WORTH_COMPILING:
        return False, f"blocks have fewer than {human_count(_WORTH_COMPILING)} parameters"
    return True, "faster on a GPU"


def spec_of(config: RunConfig) -> ModelSpec:
    return ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))


def phase_key(phase: int, name: str, first: str) -> str:
    return f"data.phases[{phase - 1}].{name}" if phase else first


def device_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    wanted = config.run.device
    if wanted == "cuda" and not machine.is_gpu:
        yield Problem(
            "run.device", f"is 'cuda', but {machine.name} is not a GPU", "set it to 'auto' or 'cpu'"
        )
    if wanted == "cpu" and machine.is_gpu:
        yield Problem("run.device", f"is 'cpu', but {machine.name} is a GPU", "set it to 'auto' or 'cuda'")


def _precision_problems(draft: Draft) -> Iterator[Problem]:
    section, machine = draft.config.precision, draft.machine
    if draft.compute == "bf16" and not machine.bf16:
        what = f"{machine.name} does not support bf16"
        yield Problem("precision.compute", what, "set it to 'fp32' or 'fp16'")
    if section.master == "bf16" and draft.compute != "bf16":
        what = f"weights in bf16 compute in bf16, and precision.compute is '{draft.compute}'"
        todo = "set precision.compute = 'bf16', or this to 'fp32'"
        yield Problem("precision.master", what, todo)


def _model_problems(draft: Draft) -> Iterator[Problem]:
    spec, tp, stages = draft.spec, draft.layout.tp, draft.stages
    if tp > 1 and not family_of(spec.family).placements:
        what = f"the model family '{spec.family}' has no tensor-parallel placements"
        yield Problem("parallel.tp", what, "set it to 1")
    for name, count in family_of(spec.family).tp_counts(spec).items():
        if count % tp:
            what = f"model.{name} ({count}) does not divide over tp {tp}"
            yield Problem("parallel.tp", what, f"use a divisor of {count}")
    if -(-spec.vocab_size // tp) * (tp - 1) >= spec.vocab_size:
        what = f"a vocabulary of {spec.vocab_size} leaves one of tp {tp} ranks without a row"
        yield Problem("parallel.tp", what, "use a smaller tp")
    if spec.layers < stages:
        what = f"{spec.layers} layers cannot fill {stages} pipeline stages"
        yield Problem("parallel.pp", what, "lower parallel.pp or parallel.stages_per_rank")


def _adapter_problems(draft: Draft) -> Iterator[Problem]:
    config, layout, base = draft.config, draft.layout, draft.config.precision.base_weights
    if base in ("int8", "nf4"):
        yield from _quantized_problems(draft.spec, layout.tp, base)
    prefix = config.prefix.tokens
    if prefix and layout.cp > 1:
        what = "does not work with context parallelism, which has no place for it in its exchange of keys"
        yield Problem("prefix.tokens", what, "set parallel.cp = 1, or use [lora] or [llama_adapter]")
    longest = max(phase.seq_len for phase in Timeline.of(config).phases)
    if prefix and prefix + longest > draft.spec.max_seq_len:
        what = f"{prefix} and sequences of {longest} tokens exceed the model's context of "
        what += f"{draft.spec.max_seq_len} (model.max_seq_len)"
        yield Problem("prefix.tokens", what, f"set data.seq_len to {draft.spec.max_seq_len - prefix} or less")


def _quantized_problems(spec: ModelSpec, tp: int, base: str) -> Iterator[Problem]:
    """Tensor parallelism cuts rows of quantised weights between blocks that share a scale."""
    tensors = (each for kind in distinct_kinds(spec) for each in block_tensors(kind))
    widths = {shape[1]: name for name, shape, split in tensors if split == "row-wise" and len(shape) == 2}
    if odd := [width for width in widths if width % (QUANTIZED_BLOCK * tp) and tp > 1]:
        what = f"'{base}' stores {QUANTIZED_BLOCK} elements of a row together, and tp {tp} divides the "
        what += f"{odd[0]} columns of {widths[odd[0]].removesuffix('.weight')} into parts of {odd[0] / tp:g}"
        todo = "use a smaller parallel.tp (dp_shard and pp have no such limit), or 'compute'"
        yield Problem("precision.base_weights", what, todo)


def _context_problems(draft: Draft) -> Iterator[Problem]:
    cp, tp, (ulysses, ring) = draft.layout.cp, draft.layout.tp, draft.context
    heads, kv_heads = draft.heads
    if cp > 1 and (counts := family_of(draft.spec.family).whole_sequences):
        yield from _whole_sequence_problems(counts(draft.spec), cp, tp, ring)
    if draft.config.parallel.context == "ulysses" and ulysses < cp:
        what = f"'ulysses' cannot share {heads} heads and {kv_heads} kv heads over cp {cp}"
        yield Problem("parallel.context", what, "set it to 'auto', which adds a ring")
        return
    window, longest = draft.spec.sliding_window, max(p.seq_len for p in Timeline.of(draft.config).phases)
    if ring > 1 and window is not None and window < longest:
        what = f"cp {cp} over {heads} heads and {kv_heads} kv heads needs ring attention, "
        what += f"which has no sliding window (model.sliding_window is {window})"
        todo = "use a cp that divides the heads, with parallel.context = 'auto' (Ulysses)"
        yield Problem("parallel.cp", what, todo)
    pieces = tokens_divisor(ulysses, ring)
    both = " x ".join(f"{axis} {degree}" for axis, degree in (("cp", cp), ("tp", tp)) if degree > 1)
    for i, phase in enumerate(Timeline.of(draft.config).phases):
        for ranks, divisor in ((f"cp {cp}", pieces), (both, cp * tp)):
            if phase.seq_len % divisor:
                halves = ", in two chunks each" if ring > 1 and divisor == pieces else ""
                what = f"{phase.seq_len} does not divide over {ranks}{halves}"
                key = phase_key(i, "seq_len", "data.seq_len")
                yield Problem(key, what, f"make it a multiple of {divisor}")
                break


def _whole_sequence_problems(counts: Mapping[str, int], cp: int, tp: int, ring: int) -> Iterator[Problem]:
    """Each rank computes some heads of whole sequences (Ulysses), or shares a group with other ranks."""
    for name, count in counts.items():
        each = max(1, count // tp)
        if each % cp and (cp % each or name == next(iter(counts))):
            what = f"cp {cp} does not divide the {each} {name} of a rank"
            yield Problem("parallel.cp", what, f"use a divisor of {each}")
    if ring > 1:
        what = "recurrent states cannot pass round a ring, which these heads and this parallel.context need"
        yield Problem("parallel.cp", what, "use a cp that divides heads and kv_heads, and context = 'auto'")


def _setting_problems(draft: Draft) -> Iterator[Problem]:
    config, layout = draft.config, draft.layout
    if layout.pp > 1:
        yield from _pipeline_problems(draft)
    if config.data.packing == "none" and layout.cp * layout.tp * layout.pp > 1:
        what = "'none' makes batches of varying width, which cp, tp and pp cannot divide"
        yield Problem("data.packing", what, "set it to 'bestfit', or give the ranks to dp_shard")
    if config.memory.offload_state and not layout.uses_fsdp:
        what = f"moves shards, and the layout {layout} has none"
        yield Problem("memory.offload_state", what, "remove it, or give ranks to dp_shard")
    group = config.parallel.reshard
    if isinstance(group, int) and layout.fsdp % group:
        what = f"{group} does not divide the {layout.fsdp} ranks that share a copy of the weights"
        yield Problem("parallel.reshard", what, "use a divisor, such as the number of GPUs per node")
    if config.parallel.async_tp and not (layout.tp > 1 and draft.compiled and draft.machine.is_gpu):
        what = "overlaps the communication of compiled, tensor-parallel layers on GPUs"
        todo = "remove it, or set parallel.tp and precision.compile on a GPU"
        yield Problem("parallel.async_tp", what, todo)
    given = config.memory.activation_checkpointing
    if given.kind != "auto":
        yield from checkpointing_problems(draft, given)


def checkpointing_problems(draft: Draft, checkpointing: ActivationCheckpointing) -> Iterator[Problem]:
    if draft.config.memory.ffn_tile and checkpointing.is_selective:
        what = f"recomputes its tiles itself, and '{checkpointing}' selects what to recompute"
        yield Problem("memory.ffn_tile", what, f"set {_KEY} to 'full' or 'none', or this to false")
    if checkpointing.kind == "budget" and not draft.compiled:
        what = f"'{checkpointing}' is applied by the compiler, and blocks are not compiled in this run"
        yield Problem(_KEY, what, "set precision.compile to true, or use 'selective' or 'fraction:P'")
    if draft.splits_backward and checkpointing.is_selective:
        what = (
            f"the schedule '{draft.schedule}' runs two backward passes; "
            f"'{checkpointing}' keeps results for one"
        )
        yield Problem(_KEY, what, f"set it to 'full' or 'none', or {_OTHER_SCHEDULE}")


def _pipeline_problems(draft: Draft) -> Iterator[Problem]:
    name, asked = draft.schedule, draft.config.parallel.stages_per_rank
    if asked and not SCHEDULES[name].allows_stages(asked):
        needs = "two or more" if SCHEDULES[name].looped else str(SCHEDULES[name].stages_per_rank)
        what = f"is {asked}, and the schedule '{name}' needs {needs} stages per rank"
        todo = "leave it out, or choose another parallel.schedule"
        yield Problem("parallel.stages_per_rank", what, todo)
    if draft.splits_backward and draft.compiled:
        what = f"the schedule '{name}' splits the backward pass, and compiled blocks cannot"
        yield Problem("precision.compile", what, f"set it to false, or {_OTHER_SCHEDULE}")
    if draft.config.parallel.sync == "each":
        what = "'each' is not possible in a pipeline, which reduces gradients after the last micro-batch"
        yield Problem("parallel.sync", what, "set it to 'last'")
    if SCHEDULES[name].v_shaped and not draft.machine.is_gpu and draft.machine.torch < (2, 13):
        # before torch 2.13 gloo cannot send to its own rank, as a V does at its tip
        version = ".".join(map(str, draft.machine.torch))
        what = f"'{name}' needs torch 2.13 on a CPU, and this is {version}"
        yield Problem("parallel.schedule", what, "set it to 'zero-bubble' or 'interleaved-1f1b'")


def _float8_problems(draft: Draft) -> Iterator[Problem]:
    section, cp = draft.config.precision, draft.layout.cp
    if section.float8_head:
        yield from _float8_head_problems(draft)
    if section.float8_all_gather:
        yield from _float8_gather_problems(draft)
    if section.float8 == "off":
        return
    if draft.compute != "bf16":
        what = f"needs precision.compute 'bf16', and this run computes in {draft.compute}"
        yield Problem("precision.float8", what, "set precision.compute = 'bf16', or this to 'off'")
    if draft.config.data.packing == "none":
        what = f"rows of any length are not possible with float8, which multiplies in {_FLOAT8_MULTIPLE}s"
        yield Problem("data.packing", what, "use 'bestfit' or 'concat'")
        return
    # weight gradients are sums over the tokens of a micro-batch
    multiple, ranks = _FLOAT8_MULTIPLE * cp, f" on each of {cp} ranks" if cp > 1 else ""
    for i, phase in enumerate(Timeline.of(draft.config).phases):
        if phase.seq_len % multiple:
            what = f"{phase.seq_len} is not a multiple of {_FLOAT8_MULTIPLE}{ranks}, as float8 needs"
            yield Problem(phase_key(i, "seq_len", "data.seq_len"), what, f"use a multiple of {multiple}")


def _float8_head_problems(draft: Draft) -> Iterator[Problem]:
    key, machine = "precision.float8_head", draft.machine
    if draft.config.precision.float8 == "off":
        what = "needs float8 in the blocks too, and precision.float8 is 'off'"
        yield Problem(key, what, "set precision.float8 to 'tensorwise', or this to false")
    if draft.spec.dim % _FLOAT8_MULTIPLE:
        what = f"multiplies in {_FLOAT8_MULTIPLE}s, and the model is {draft.spec.dim} wide"
        yield Problem(key, what, f"turn it off, or use a width that is a multiple of {_FLOAT8_MULTIPLE}")
    if machine.is_gpu and not (machine.kind == "cuda" and machine.float8):
        what = f"has no kernels for {machine.name}, where it would be slower than bf16"
        yield Problem(key, what, "turn it off")


def _float8_gather_problems(draft: Draft) -> Iterator[Problem]:
    key, spec, layout = "precision.float8_all_gather", draft.spec, draft.layout
    if (kind := draft.config.precision.float8) != "tensorwise":
        what = f"gathers weights with one scale per tensor, and precision.float8 is '{kind}'"
        yield Problem(key, what, "set precision.float8 to 'tensorwise', or this to false")
    widths = (spec.attention_width, spec.kv_heads * spec.head_dim, spec.ffn)
    rows = [spec.dim, *(width // layout.tp for width in widths)]
    if layout.fsdp == 1:
        what = f"no weights are sharded in the layout {layout}, so none are gathered"
        yield Problem(key, what, "remove it, or raise parallel.dp_shard")
    elif any(n % layout.fsdp for n in rows):
        what = f"needs layers whose rows divide over {layout.fsdp} ranks"
        yield Problem(key, what, "turn it off, or use another parallel.dp_shard")
