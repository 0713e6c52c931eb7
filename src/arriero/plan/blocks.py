"""What one rank computes in a training step, and the seconds of its blocks, embedding and head.

Imports no torch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import RunConfig
from arriero.model.costs import block_costs
from arriero.model.family import family_of
from arriero.model.spec import ModelSpec, Recompute
from arriero.plan.layout import Layout
from arriero.plan.rates import Group, Passes, Precision, Rates
from arriero.plan.recompute import recomputed

# seconds that the host needs to start the kernels of a block: forward, backward
_HOST_COMPILED, _HOST_EAGER = Passes(120e-6, 160e-6), Passes(420e-6, 520e-6)
_HOST_FSDP, _HOST_TP = Passes(150e-6, 200e-6), Passes(300e-6, 500e-6)
# share of tensor-parallel communication that asynchronous tensor parallelism hides
_ASYNC_TP = 0.3
_STATE = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "float8": 1.0}
_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
_NAMES = {2: "bf16", 4: "fp32"}
_NONE = ActivationCheckpointing("none")


@dataclass(frozen=True)
class Work:
    """One training step: the model, the layout and every setting that changes its time.

    `stages` are the blocks of each pipeline stage. `reshard` frees gathered weights after forward (ZeRO-3).
    With `early_stop` an uncompiled block is recomputed up to what backward needs, not to its end; torch
    before 2.1 had none. With `fused_sums` the matmul of a weight's gradient adds it to the sum of earlier
    micro-batches. `attended` is the mean document length where a document mask is used.
    """

    spec: ModelSpec
    layout: Layout
    seq_len: int
    micro_batch: float
    micro_batches: int
    checkpointing: ActivationCheckpointing = _NONE
    compiled: bool = True
    precision: Precision = "bf16"
    float8_head: bool = False
    float8_gather: bool = False
    ulysses: int = 1
    ring: int = 1
    reduce_bytes: int = 4
    master_bytes: int = 4
    optimizer_name: str = "adamw"
    state_name: str = "fp32"
    reshard: bool = True
    sync_each: bool = False
    schedule: str = "1f1b"
    stages: tuple[int, ...] = ()
    async_tp: bool = False
    attended: float | None = None
    ffn_tile: bool = False
    offload_activations: float = 0.0
    offload_state: bool = False
    fused_kernels: bool = True
    fused_qkv: bool = False
    fused_float8: bool = False
    early_stop: bool = True
    fused_sums: bool = False

    def varied(self, **values: Any) -> "Work":
        """Return the step with other values; faster than `replace`, because a search makes so many."""
        other = object.__new__(Work)
        vars(other).update(vars(self), **values)
        return other

    @property
    def optimizer(self) -> str:
        """The name under which `bench ops` stores the times of this optimizer."""
        return f"{self.optimizer_name} {_NAMES[self.master_bytes]} {self.state_name}"

    @property
    def state(self) -> float:
        """Bytes of all moments per parameter."""
        return _MOMENTS[self.optimizer_name] * _STATE[self.state_name]

    @property
    def compute_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def visible(self) -> float | None:
        """The attended length where attention is masked by documents or a sliding window."""
        windowed = self.spec.sliding_window is not None and self.spec.sliding_window < self.seq_len
        return self.spec.attended(self.attended or self.seq_len) if windowed else self.attended

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq_len / self.layout.cp

    @property
    def tokens_per_step(self) -> float:
        return self.micro_batch * self.seq_len * self.micro_batches * self.layout.batch

    @property
    def checkpointed(self) -> float:
        """The share of the blocks that recompute something."""
        return 1 - self.checkpointing.shares(self.spec.layers).get("none", 0.0)

    @property
    def recompute(self) -> Recompute:
        """The shares of the blocks' forward pass that backward repeats."""
        return recomputed(
            self.spec,
            self.checkpointing,
            self.compiled or not self.early_stop,
            fused_qkv=self.fused_qkv,
            float8=self.fused_float8,
            tiled=self.ffn_tile,
        )


def shared_work(config: RunConfig, spec: ModelSpec, compute: str) -> Work:
    """Return the step of a run in one process, with the settings that do not depend on the layout."""
    precision: Precision = "fp32" if compute == "fp32" else "bf16"
    return Work(
        spec=spec,
        layout=Layout(),
        seq_len=config.data.seq_len,
        micro_batch=1,
        micro_batches=1,
        precision="float8" if config.precision.float8 != "off" else precision,
        float8_head=config.precision.float8_head,
        float8_gather=config.precision.float8_all_gather,
        reduce_bytes=2 if config.precision.reduce == "bf16" else 4,
        master_bytes=2 if config.precision.master == "bf16" else 4,
        optimizer_name=config.optim.name,
        state_name=config.optim.state,
        async_tp=config.parallel.async_tp,
        ffn_tile=bool(config.memory.ffn_tile),
        offload_activations=float(config.memory.offload_activations),
        offload_state=config.memory.offload_state is True,
    )


class BlockTime(NamedTuple):
    """Seconds of one transformer block on one rank, per micro-batch."""

    matmul: Passes
    attention: Passes
    elementwise: Passes
    recompute: float
    tensor: Passes
    context: Passes

    @property
    def compute(self) -> Passes:
        passes = self.matmul + self.attention + self.elementwise
        return Passes(passes.forward, passes.backward + self.recompute)


def block_time(work: Work, rates: Rates) -> BlockTime:
    """Return the time of one block of one rank for one micro-batch.

    Built-in families have formulas; the block of another family is traced.
    """
    known = family_of(work.spec.family).block_memory is not None
    matmul, attention, elementwise = (_formulas if known else _traced)(work, rates)
    if work.ring > 1:
        attention = rates.ring_attention(attention, work.seq_len, work.ring)
    recompute = _recomputed(work, matmul, attention, elementwise)
    tensor, context = _tensor_parallel(work, rates), _context(work, rates, attention)
    return BlockTime(matmul, attention, elementwise, recompute, tensor, context)


def _formulas(work: Work, rates: Rates) -> tuple[Passes, Passes, Passes]:
    """Return the seconds of matmuls, attention and elementwise kernels of a Llama or GPT-2 block."""
    spec, tp, dim = work.spec, work.layout.tp, work.spec.dim
    query, kv = spec.attention_width / tp, spec.kv_heads * spec.head_dim / tp
    ffn = spec.ffn / tp
    shapes = [(dim, query + 2 * kv), (query, dim), (dim, (ffn_matrices(spec) - 1) * ffn), (ffn, dim)]
    matmul = Passes(0.0, 0.0)
    for inputs, outputs in shapes:
        matmul += rates.linear(work.tokens, inputs, outputs, work.precision)
    # Ulysses gathers the tokens of its group for a share of the heads; a ring divides the causal work evenly
    attention = rates.attention(
        work.micro_batch,
        work.seq_len,
        spec.heads / tp / work.ulysses / work.ring,
        max(1.0, spec.kv_heads / tp / work.ulysses),
        spec.head_dim,
        work.precision,
        work.visible,
    )
    return matmul, attention, _elementwise(work, rates)


def _traced(work: Work, rates: Rates) -> tuple[Passes, Passes, Passes]:
    """Return the same of a block that is traced on the meta device, operator by operator."""
    spec, tp, tokens = work.spec, work.layout.tp, work.tokens
    costs = block_costs(spec, work.compiled, work.compute_bytes)
    length = work.visible or work.seq_len
    matmul, moved, flops = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for number, operations in enumerate((costs.forward, costs.backward)):
        for each in operations:
            if each.kind == "matmul":
                rows, columns, inner = (tokens if size is None else size for size in each.shape)
                whole = each.flops_at(round(tokens), length)
                matmul[number] += rates.matmul(whole, rows, columns, inner, work.precision) / tp
            elif each.kind == "attention":
                flops[number] += each.flops_at(round(tokens), length) / tp
            else:
                moved[number] += rates.bytes(each.bytes_at(round(tokens))) / tp
    masked = work.visible is not None
    attention = rates.fused_attention(flops[0], flops[1], work.seq_len, spec.head_dim, masked)
    return Passes(*matmul), attention, Passes(*moved)


def ffn_matrices(spec: ModelSpec) -> int:
    """Return the number of matrices of the feed-forward layer: three where it is gated, else two."""
    attention = 2 * spec.dim * (spec.heads + spec.kv_heads) * spec.head_dim
    return max(2, round((spec.block_matmul_parameters - attention) / (spec.dim * spec.ffn)))


def _elementwise(work: Work, rates: Rates) -> Passes:
    """Norms, rotary embedding, activation function and residuals: bytes that their kernels move.

    Compiled blocks read and write each tensor about once. Without compilation a Llama's norms and rotary
    embedding pass through fp32 in several kernels; LayerNorm and GELU are one kernel each.
    """
    spec, tp = work.spec, work.layout.tp
    dim, query, kv, ffn = spec.dim, spec.attention_width, spec.kv_heads * spec.head_dim, spec.ffn
    if work.compiled:
        forward = 16 * dim + 4 * (query + kv) + 6 * ffn
        backward = 16 * dim + 4 * (query + kv) + 10 * ffn
    elif ffn_matrices(spec) == 3:
        forward = 84 * dim + 24 * query + 20 * kv + 10 * ffn
        backward = 100 * dim + 33 * query + 25 * kv + 18 * ffn
    else:
        forward = 20 * dim + 6 * query + 4 * ffn
        backward = 28 * dim + 6 * query + 6 * ffn
    # a measured float8 layer includes its casts
    casts = work.precision == "float8" and not rates.has_measured("linear", "float8")
    if casts:
        # scales and casts of inputs and gradients; weights are cast once per micro-batch
        inputs = 2 * dim + query + ffn
        outputs = query + 2 * kv + 2 * dim + (ffn_matrices(spec) - 1) * ffn
        forward += (5 if work.compiled else 9) * inputs
        backward += (5 if work.compiled else 9) * outputs
    scale = work.tokens / tp * work.compute_bytes / 2
    weights = 3 * spec.block_matmul_parameters / tp if casts else 0.0
    # weights that are gathered in float8 are cast before, by each rank its shard
    weights /= work.layout.fsdp if work.float8_gather else 1
    return Passes(rates.bytes(scale * forward + weights), rates.bytes(scale * backward + weights))


def _recomputed(work: Work, matmul: Passes, attention: Passes, elementwise: Passes) -> float:
    """Return the seconds per block, on average over blocks, of the forward that backward repeats."""
    shares = work.recompute
    # the compiler recomputes elementwise kernels first
    light = 0.5 if work.checkpointing.kind == "budget" else work.checkpointed
    return shares.matmul * matmul.forward + shares.attention * attention.forward + light * elementwise.forward


def _tensor_parallel(work: Work, rates: Rates) -> Passes:
    """Two all-gathers and two reduce-scatters of the hidden states each way, of all tokens of the group."""
    tp = work.layout.tp
    if tp == 1:
        return Passes(0.0, 0.0)
    size, group = work.tokens * work.spec.dim * work.compute_bytes, Group(tp)
    one = rates.collective("all_gather", size, group) + rates.collective("reduce_scatter", size, group)
    shown = 2 * one * ((1 - _ASYNC_TP) if work.async_tp else 1.0)
    # selective checkpointing keeps the results of reduce-scatters
    whole = work.checkpointing.shares(work.spec.layers).get("full", 0.0)
    repeats = whole + 0.5 * (work.checkpointed - whole)
    return Passes(shown, shown * (1 + repeats))


def _context(work: Work, rates: Rates, attention: Passes) -> Passes:
    """All-to-alls of queries, keys, values and outputs; transfers of a ring that attention does not hide."""
    layout, spec = work.layout, work.spec
    if layout.cp == 1:
        return Passes(0.0, 0.0)
    query = spec.attention_width / layout.tp
    kv = spec.kv_heads * spec.head_dim / layout.tp
    element = work.tokens * work.compute_bytes
    kv_sent = max(kv, work.ulysses * spec.head_dim)
    inner, outer = Group(work.ulysses, layout.tp), Group(work.ring, layout.tp * work.ulysses)
    change = rates.collective("all_to_all", element * (query + 2 * kv_sent), inner)
    change += rates.collective("all_to_all", element * query, inner)
    waits = _ring(work, rates, element * kv, attention, outer) if work.ring > 1 else Passes(0.0, 0.0)
    forward = change + waits.forward
    # selective checkpointing keeps the results of attention and of collectives
    return Passes(forward, change + waits.backward + work.recompute.attention * forward)


def _ring(work: Work, rates: Rates, kv: float, attention: Passes, group: Group) -> Passes:
    """Return what a ring adds to its attention kernels; `kv` are the bytes of the keys of a rank."""
    sent = rates.collective("p2p", 2 * kv, Group(2, group.stride))
    steps, ring = work.ring - 1, work.ring
    # gradients of keys and values are sent with them, in fp32; nothing hides the last transfer
    gradients = 2 * sent
    hidden = attention.times(1 / ring)
    waits = Passes(
        steps * max(0.0, sent - hidden.forward),
        steps * max(0.0, sent + gradients - hidden.backward) + gradients,
    )
    # outputs are merged in fp32 by separate kernels; so are gradients, which each kernel writes to new memory
    queries = work.tokens * work.spec.attention_width / work.layout.tp
    keys = 2 * kv / work.compute_bytes
    merged = 12 * queries + 42 * steps * queries
    summed = (10 + 10 * ring + 22 * steps) * queries + (6 + 10 * ring) * keys
    return waits + Passes(rates.bytes(merged), rates.bytes(summed))


class EndTime(NamedTuple):
    """Seconds of the embedding and of the head with its loss, per micro-batch."""

    embedding: Passes
    head: Passes


def end_time(work: Work, rates: Rates) -> EndTime:
    spec, tp, tokens = work.spec, work.layout.tp, work.tokens
    vocab, dim = spec.vocab_size / tp, spec.dim
    precision: Precision = "bf16" if work.precision == "float8" else work.precision
    precision = "float8" if work.float8_head else precision
    if work.fused_kernels and (
        found := rates.op("head_loss", precision, tokens=tokens, width=dim, vocab=vocab)
    ):
        logits, loss = Passes(found.forward / 3, found.forward * 2 / 3), 0.0
    else:
        logits = rates.linear(tokens, dim, vocab, precision)
        # fused: logits are read once, their gradient is written in place; else fp32 copies of them are made
        loss = rates.bytes(tokens * vocab * (4 if work.fused_kernels else 26))
    sums = rates.bytes(8 * vocab * dim)
    lookup = rates.bytes(4 * tokens * dim / tp)
    moved = 0.0
    if tp > 1:
        moved = rates.collective("all_gather", tokens * dim * work.compute_bytes, Group(tp))
    head = Passes(logits.forward + loss / 2 + moved, logits.backward + loss / 2 + moved + sums / 2)
    return EndTime(Passes(lookup + moved, lookup + sums + moved), head)


def host_time(work: Work) -> Passes:
    """Return the time in which the host can start the kernels of a block: no block is faster."""
    host = _HOST_COMPILED if work.compiled else _HOST_EAGER
    if work.layout.uses_fsdp:
        host += _HOST_FSDP
    if work.layout.tp > 1:
        host += _HOST_TP
    return Passes(host.forward, host.backward + work.checkpointed * host.forward)
