"""`bench ops`: time the operations of a model on one device, as the trainer runs them.

The shapes are those of the model's own modules: one layer of it is built and transformed as for training.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.bench.result import quartiles
from arriero.bench.step import DocumentLengths
from arriero.config.schema import RunConfig
from arriero.kernels import kernels, usable
from arriero.kernels.float8 import linears
from arriero.model.attention import AttentionCore, attend_causally, document_mask
from arriero.model.family import family_of
from arriero.model.layers import Attention, SwiGLU, rotate
from arriero.model.spec import ModelSpec
from arriero.parallel.world import World
from arriero.plan.measured import OPS, OpTime, Precision, Spread, block_variant, optimizer_variant
from arriero.train.build import arrange, build_mesh, build_model_state, build_optimizer
from arriero.train.device import DTYPES, Device
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from arriero.units import Span

# a sample of a short operation repeats it for this long, because clocks are coarse
_SAMPLE_S = 1e-3
_FEWEST, _MOST, _LONG_S = 3, 30, 0.3
_HEAT_S = 0.08


@dataclass(frozen=True)
class OpsRequest:
    """What is measured: token counts of a micro-batch, sequence lengths, tensor-parallel degrees, operations.

    `seconds` is the time to spend on each operation.
    """

    tokens: Sequence[int]
    seq_lens: Sequence[int]
    precisions: Sequence[Precision]
    tp: Sequence[int] = (1,)
    only: Sequence[str] = tuple(OPS)
    documents: DocumentLengths | None = None
    seconds: float = 0.2


class OpCase(NamedTuple):
    """An operation to measure. `prepare` allocates its inputs and returns what one run of it computes.

    `inputs` of the prepared pass are the tensors whose gradients backward computes; none where forward
    includes everything.
    """

    op: str
    precision: Precision
    shape: dict[str, int]
    prepare: "Callable[[], Pass]"
    variant: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return self.op, self.precision, self.variant, tuple(sorted(self.shape.items()))

    @property
    def size(self) -> str:
        return " x ".join(str(self.shape[name]) for name in (OPS[self.op].size, *OPS[self.op].others))

    def __str__(self) -> str:
        return f"{self.op} {self.precision} {self.size}"


class Pass(NamedTuple):
    run: Callable[[], Any]
    inputs: Sequence[Tensor] = ()


def measure_op(case: OpCase, device: Device, seconds: float) -> OpTime | None:
    """Time one operation forward and, where it has gradients, forward and backward together.

    Backward is the difference, because a compiled graph can be run backward only once. None if the operation
    does not fit into the memory of the device.
    """
    try:
        return _measure(case, device, seconds)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.is_gpu:
            torch.cuda.empty_cache()


def _measure(case: OpCase, device: Device, seconds: float) -> OpTime:
    prepared = case.prepare()
    forward = sample_times(prepared.run, device, seconds)
    backward = None
    if prepared.inputs:
        out = prepared.run()
        gradient = torch.randn_like(out)

        def both() -> None:
            torch.autograd.grad(prepared.run(), prepared.inputs, gradient)

        backward = _difference(sample_times(both, device, seconds), forward)
    return OpTime(
        op=case.op,
        precision=case.precision,
        variant=case.variant,
        shape=case.shape,
        forward=spread_of(forward),
        backward=backward,
    )


def _difference(both: Sequence[float], forward: Sequence[float]) -> Spread:
    less = statistics.median(forward)
    # on a noisy machine the forward pass alone may take longer than both together
    return spread_of([max(each - less, 0.1 * each) for each in both])


def spread_of(seconds: Sequence[float]) -> Spread:
    """Return the median and the quartiles."""
    low, median, high = quartiles(seconds)
    return Spread(median=median, low=low, high=high, runs=len(seconds))


def sample_times(run: Callable[[], Any], device: Device, seconds: float) -> list[float]:
    """Return seconds per run of several samples, after runs that compile and fill caches."""
    run()
    device.synchronize()
    start = time.perf_counter()
    run()
    queued = time.perf_counter() - start
    device.synchronize()
    once = max(time.perf_counter() - start, 1e-7)
    repeats = min(1000, math.ceil(_SAMPLE_S / once))
    fewest = _FEWEST if once < _LONG_S else 2
    samples = min(_MOST, max(fewest, int(seconds / (repeats * once))))
    if not device.is_gpu:
        return [_cpu_sample(run, repeats) for _ in range(samples)]
    return _gpu_samples(run, repeats, samples, queued * repeats)


def _cpu_sample(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _gpu_samples(run: Callable[[], Any], repeats: int, samples: int, host_s: float) -> list[float]:
    """Time runs by events in the stream.

    A training step queues its kernels ahead of the GPU. So the GPU is kept busy until a sample is queued;
    otherwise a short kernel would be timed with the Python code that launches it. It also computes for a
    while before the first sample, because the power limit lowers its clock only after some time.
    """
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(10):
        busy @ busy
    marks[1].record()
    torch.cuda.synchronize()
    filler_s = marks[0].elapsed_time(marks[1]) / 1e4
    found = []
    for number in range(samples):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(math.ceil(max(1.5 * host_s, 0 if number else _HEAT_S) / filler_s)):
            busy @ busy
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / repeats)
    return found


class OneLayer(NamedTuple):
    """One layer of a model with embedding and head, transformed as for training on this device."""

    state: ModelState
    config: RunConfig
    spec: ModelSpec
    device: Device
    compiled: bool
    optimizer: Optimizer


def build_one_layer(config: RunConfig, seq_len: int, precision: Precision) -> OneLayer:
    """Build the run's model with one layer on this process's device, without parallelism or recompute."""
    changes = {
        # a name that no run has: an existing run directory would reject other settings
        "run": {"name": "bench-ops"},
        "model": {"layers": 1},
        "data": {"seq_len": seq_len, "phases": ()},
        "train": {"micro_batch": 1, "batch": Span(seq_len, "tok")},
        "precision": {
            "compute": "fp32" if precision == "fp32" else "bf16",
            "float8": _float8(config) if precision == "float8" else "off",
            "float8_all_gather": False,
        },
        "parallel": dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), 1),
        "memory": {"offload_activations": False, "offload_state": False, "ffn_tile": False},
    }
    sections = {name: getattr(config, name).model_copy(update=each) for name, each in changes.items()}
    plan = arrange(config.model_copy(update=sections), World())
    mesh, plan = build_mesh(plan)
    state, _ = build_model_state(plan, mesh)
    optimizer = build_optimizer(plan, state, mesh)
    return OneLayer(state, plan.config, plan.resolved.spec, plan.device, plan.resolved.compiled, optimizer)


def _float8(config: RunConfig) -> str:
    return "tensorwise" if config.precision.float8 in ("off", "auto") else config.precision.float8


def op_cases(layer: OneLayer, precision: Precision, request: OpsRequest) -> Iterator[OpCase]:
    """Yield the operations of a model in one precision; float8 changes linear layers and blocks only."""
    cases = _Cases(layer, precision, request)
    for op in request.only:
        if precision != "float8" or op in ("linear", "block"):
            yield from getattr(cases, op)()


class _Cases:
    """The cases of each operation; methods are named after the operations."""

    def __init__(self, layer: OneLayer, precision: Precision, request: OpsRequest) -> None:
        self.layer, self.precision, self.request = layer, precision, request
        self.spec, self.device, self.model = layer.spec, layer.device.torch_device, layer.state.parts[0]
        self.block_module: Any = self.model.blocks["0"]
        self.dtype = DTYPES["fp32" if precision == "fp32" else "bf16"]

    def _case(self, op: str, prepare: Callable[[], Pass], variant: str = "", **shape: Any) -> OpCase:
        return OpCase(op, self.precision, shape, prepare, variant)

    def _by_tokens(self, op: str, prepare: Callable[[int], Pass], **others: Any) -> Iterator[OpCase]:
        for tokens in self.request.tokens:
            yield self._case(op, partial(prepare, tokens), tokens=tokens, **others)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, device=self.device, dtype=self.dtype) * scale
        return x.requires_grad_()

    def _ids(self, tokens: int) -> Tensor:
        return torch.randint(self.spec.vocab_size, (1, tokens), device=self.device)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # dynamic: one compilation for all shapes
        return torch.compile(function, dynamic=True) if self.layer.compiled else function

    def linear(self) -> Iterator[OpCase]:
        request = self.request
        widths = {each for tp in request.tp for each in linear_widths(self.model, self.spec, tp)}
        if self.precision == "float8" and not self.layer.config.precision.float8_head:
            widths -= {(self.spec.dim, -(-self.spec.vocab_size // tp)) for tp in request.tp}

        def prepare(inputs: int, outputs: int, tokens: int) -> Pass:
            x, weight = self._random(tokens, inputs), self._random(outputs, inputs, scale=0.02)
            if self.precision == "float8":
                return Pass(lambda: linears(x, [weight]), (x, weight))
            return Pass(lambda: F.linear(x, weight), (x, weight))

        for inputs, outputs in sorted(widths):
            made = partial(prepare, inputs, outputs)
            yield from self._by_tokens("linear", made, inputs=inputs, outputs=outputs)

    def _qkv(self, batch: int, seq_len: int, heads: int, kv_heads: int) -> list[Tensor]:
        counts = (heads, kv_heads, kv_heads)
        return [self._random(batch, seq_len, count, self.spec.head_dim) for count in counts]

    def attention(self) -> Iterator[OpCase]:
        def prepare(*shape: int) -> Pass:
            q, k, v = self._qkv(*shape)
            return Pass(lambda: attend_causally(q, k, v), (q, k, v))

        for seq_len in self.request.seq_lens:
            for batch in sorted({max(1, tokens // seq_len) for tokens in self.request.tokens}):
                for tp in self.request.tp:
                    heads, kv_heads = self.spec.heads // tp, max(1, self.spec.kv_heads // tp)
                    if self.spec.heads % tp == 0:
                        shape = {"batch": batch, "seq_len": seq_len, "heads": heads, "kv_heads": kv_heads}
                        made = partial(prepare, *shape.values())
                        yield self._case("attention", made, **shape, head_dim=self.spec.head_dim)

    def document_attention(self) -> Iterator[OpCase]:
        def prepare(documents_BT: Tensor, *shape: int) -> Pass:
            q, k, v = self._qkv(*shape)
            core, mask = AttentionCore(), document_mask(documents_BT, self.device)
            return Pass(lambda: core(q, k, v, mask), (q, k, v))

        lengths, heads = self.request.documents, {"heads": self.spec.heads, "kv_heads": self.spec.kv_heads}
        for seq_len in self.request.seq_lens:
            if lengths is None:
                return
            batch = max(1, max(self.request.tokens) // seq_len)
            numbers, attended = lengths.pack(batch, seq_len)
            made = partial(prepare, torch.from_numpy(numbers), batch, seq_len, *heads.values())
            shape = {"batch": batch, "seq_len": seq_len, "attended": round(attended), **heads}
            yield self._case("document_attention", made, **shape, head_dim=self.spec.head_dim)

    def norm(self) -> Iterator[OpCase]:
        norm: Any = self.model.norm
        run = self._compiled(norm)

        def prepare(tokens: int) -> Pass:
            x = self._random(tokens, self.spec.dim)
            return Pass(lambda: run(x), (x, *norm.parameters()))

        return self._by_tokens("norm", prepare, width=self.spec.dim)

    def rope(self) -> Iterator[OpCase]:
        run, heads = self._compiled(rotate), self.spec.heads + self.spec.kv_heads

        def prepare(tokens: int) -> Pass:
            x, rotation = self._random(1, tokens, heads, self.spec.head_dim), self._rotation(tokens)
            return Pass(lambda: run(x, rotation), (x,))

        if self._rotation(1) is not None:
            yield from self._by_tokens("rope", prepare, heads=heads, head_dim=self.spec.head_dim)

    def _rotation(self, tokens: int) -> Any:
        return self.model.rotation(torch.arange(tokens, device=self.device)[None])

    def activation(self) -> Iterator[OpCase]:
        ffn = getattr(self.block_module, "ffn", None)
        gated = isinstance(ffn, SwiGLU)
        activation: Any = F.silu if gated else partial(F.gelu, approximate="tanh")

        def compute(*x: Tensor) -> Tensor:
            return activation(x[0]) * x[1] if gated else activation(x[0])

        run = self._compiled(compute)

        def prepare(tokens: int) -> Pass:
            x = [self._random(tokens, self.spec.ffn) for _ in range(1 + gated)]
            return Pass(lambda: run(*x), x)

        return self._by_tokens("activation", prepare, width=self.spec.ffn)

    def embedding(self) -> Iterator[OpCase]:
        table: Any = self.model.embedding

        def prepare(tokens: int) -> Pass:
            ids = self._ids(tokens)
            return Pass(lambda: table(ids), (table.weight,))

        return self._by_tokens("embedding", prepare, width=self.spec.dim, vocab=self.spec.vocab_size)

    def cross_entropy(self) -> Iterator[OpCase]:
        vocab = self.spec.vocab_size

        def prepare(tokens: int) -> Pass:
            logits, labels = self._random(tokens, vocab), self._ids(tokens)[0]
            if usable(logits):
                loss = kernels("cross_entropy").loss_and_logits_grad_
                return Pass(lambda: loss(logits.detach(), vocab, labels, -100, 0.0))

            def both() -> Any:
                total = F.cross_entropy(logits.float(), labels, reduction="sum")
                return torch.autograd.grad(total, logits)

            return Pass(both)

        tokens = min(self.request.tokens)
        yield self._case("cross_entropy", partial(prepare, tokens), tokens=tokens, vocab=vocab)

    def head_loss(self) -> Iterator[OpCase]:
        head: Any = self.model.head

        def prepare(tokens: int) -> Pass:
            x, labels = self._random(1, tokens, self.spec.dim), self._ids(tokens)
            return Pass(lambda: head(x, labels))

        return self._by_tokens("head_loss", prepare, width=self.spec.dim, vocab=self.spec.vocab_size)

    def block(self) -> Iterator[OpCase]:
        block = self.block_module

        def prepare(batch: int, seq_len: int) -> Pass:
            # each shape is compiled, and torch stops compiling a function after some
            torch.compiler.reset()
            x, rotation = self._random(batch, seq_len, self.spec.dim), self._rotation(seq_len)
            return Pass(lambda: block(x, rotation, None), (x, *block.parameters()))

        shapes = {(max(1, t // s), s) for t in self.request.tokens for s in self.request.seq_lens}
        for batch, seq_len in sorted(shapes):
            made, shape = partial(prepare, batch, seq_len), {"tokens": batch * seq_len, "seq_len": seq_len}
            yield self._case("block", made, block_variant(self.spec), **shape)

    def accumulation(self) -> Iterator[OpCase]:
        count = self.spec.parameters

        def prepare() -> Pass:
            total = torch.zeros(count, device=self.device)
            gradient = torch.zeros(count, device=self.device, dtype=self.dtype)
            return Pass(lambda: total.add_(gradient))

        yield self._case("accumulation", prepare, parameters=count)

    def optimizer(self) -> Iterator[OpCase]:
        config = self.layer.config
        weights = [each.parameter for each in self.layer.state.trainable.values()]

        def prepare() -> Pass:
            gradients = [torch.full_like(weight, 1e-3) for weight in weights]

            def update() -> None:
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient
                self.layer.optimizer.step(1e-6)

            return Pass(update)

        variant = optimizer_variant(config.optim.name, config.precision.master, config.optim.state)
        yield self._case("optimizer", prepare, variant, parameters=sum(w.numel() for w in weights))


def linear_widths(model: Any, spec: ModelSpec, tp: int) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of the linear layers of a block on one of `tp` ranks, and of the head.

    Layers that are one matmul on this device are yielded together.
    """
    placements: Mapping[str, str] = family_of(spec.family).placements
    block = model.blocks["0"]
    for name, layer in block.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        full = f"blocks.0.{name}"
        placed = next((how for pattern, how in placements.items() if fnmatchcase(full, pattern)), "")
        inputs = layer.in_features // (tp if placed.startswith("row") else 1)
        outputs = layer.out_features // (tp if placed.startswith("column") else 1)
        yield inputs, outputs
    attention, ffn = getattr(block, "attention", None), getattr(block, "ffn", None)
    if isinstance(attention, Attention) and type(attention) is not Attention:
        joint = sum(layer.out_features for layer in (attention.q, attention.k, attention.v))
        yield attention.q.in_features, joint // tp
    if isinstance(ffn, SwiGLU) and type(ffn) is not SwiGLU:
        yield spec.dim, 2 * spec.ffn // tp
    yield spec.dim, -(-spec.vocab_size // tp)
