"""The run file: every section and key, with its meaning, default and allowed values."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from arriero.config.fields import (
    AnySpan,
    AnySpanOrOff,
    Progress,
    ProgressOrOff,
    ProgressOrZero,
    RematKind,
    Tokens,
    TokensOrOff,
)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Degree = Positive | Literal[-1]


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "run", description="Name of the run; its directory is DIR/NAME."
    )
    dir: str = Field("runs", description="Where run directories live.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1, description="Seed of initial weights and data order."
    )
    deterministic: bool = Field(
        False, description="Bit-identical losses over two runs on the same machine, at some cost in speed."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Where to compute; 'cuda' means any NVIDIA or AMD GPU, 'auto' takes one if there is one.",
    )


class RopeScalingSection(Section):
    factor: Annotated[float, Field(ge=1)] = Field(
        8.0, description="How much further than before the context reaches."
    )
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Wavelengths beyond original/this are stretched."
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        4.0, description="Wavelengths below original/this are kept."
    )
    original_max_seq_len: Positive = Field(8192, description="Context length before the stretch.")


class ModelSection(Section):
    preset: str | None = Field(
        None,
        description="A model of `arriero config models`; the other keys here override its dimensions.",
    )
    family: Literal["llama", "gpt2"] | None = Field(None, description="Architecture.")
    vocab_size: Positive | None = Field(None, description="Rows of the embedding table.")
    dim: Positive | None = Field(None, description="Width of the residual stream.")
    layers: Positive | None = Field(None, description="Number of transformer blocks.")
    heads: Positive | None = Field(None, description="Query heads.")
    kv_heads: Positive | None = Field(
        None, description="Key/value heads; fewer than heads is grouped-query attention."
    )
    head_dim: Positive | None = Field(None, description="Width of one head; dim / heads unless given.")
    ffn: Positive | None = Field(None, description="Hidden width of the feed-forward layer.")
    max_seq_len: Positive | None = Field(None, description="Longest sequence the model accepts.")
    norm_eps: Annotated[float, Field(gt=0)] | None = Field(None, description="Epsilon inside the norms.")
    rope_theta: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Base of the rotary frequencies."
    )
    rope_scaling: RopeScalingSection | Literal[False] | None = Field(
        None, description="Llama-3.1 stretching of the rotary frequencies; false takes a preset's away."
    )
    tied: bool | None = Field(None, description="Whether the head shares the embedding table.")


class SourceSection(Section):
    path: str = Field(description="A prepared dataset directory, or 'builtin:stdlib'.")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0,
        description="Share of the tokens seen; numbers all below 1 must sum to 1, others are proportions.",
    )
    prompt: str | None = Field(
        None,
        description="Text put before each document and not learnt; needs packing 'bestfit' or 'none'.",
    )
    max_epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="How often it may be read; a run that would read it more often is refused."
    )


class PhaseSection(Section):
    at: Progress = Field(description="Where the phase begins; rounded up to a whole step.")
    sources: Annotated[tuple[SourceSection, ...], Field(min_length=1)] = Field(
        description="What to train on from there; a source that goes on continues where it stood."
    )


class DataSection(Section):
    sources: Annotated[tuple[SourceSection, ...], Field(min_length=1)] = Field(
        description="What to train on, mixed by weight, by tokens."
    )
    phases: tuple[PhaseSection, ...] = Field(
        (), description="Later mixtures, each from its token or step on."
    )
    seq_len: Positive = Field(2048, description="Tokens per training sequence.")
    packing: Literal["concat", "bestfit", "none"] = Field(
        "concat",
        description="Windows over the stream of documents; rows of documents not cut where they fit; or "
        "one document a row, padded to the longest of its batch.",
    )
    long_docs: Literal["split", "truncate", "drop"] = Field(
        "split", description="What 'bestfit' and 'none' do with a document longer than a sequence."
    )
    document_mask: bool = Field(
        False,
        description="Attention stays inside each document, positions restart at its beginning, and its last "
        "token does not predict the next document.",
    )
    cache: str = Field("data", description="Where built-in corpora and packing plans are kept, made once.")


class TrainSection(Section):
    batch: Tokens = Field(
        "524288 tok", validate_default=True, description="Tokens per optimizer step, over all ranks."
    )
    horizon: AnySpan = Field("1000 steps", validate_default=True, description="How long to train.")
    micro_batch: Positive | None = Field(
        None, description="Sequences computed at once; derived from the device's memory unless given."
    )
    z_loss: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the squared log of the softmax's sum, which keeps logits small; it acts on "
        "gradients, and reported losses stay without it.",
    )


class OptimSection(Section):
    name: Literal["adamw", "muon", "sgd"] = Field(
        "adamw",
        description="The optimizer; 'muon' takes the matrices inside blocks and leaves the rest to AdamW.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(3e-4, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="Decay of the first and second moment."
    )
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Added to the root of the second moment.")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Momentum of 'muon' (0.95 unless given) and 'sgd' (0)."
    )
    state: Literal["fp32", "bf16", "int8", "float8"] = Field(
        "fp32",
        description="Precision of the moments; 8 bits with a scale for every 256 elements. Below fp32 they "
        "are rounded by chance.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="Decoupled decay of matrices; norms and biases are never decayed."
    )
    clip: Annotated[float, Field(gt=0)] | Literal[False] = Field(
        1.0, description="Largest global gradient norm; false does not clip."
    )


class ScheduleSection(Section):
    kind: Literal["constant", "linear", "cosine", "wsd", "frontier", "fms", "fms-annealing"] = Field(
        "cosine", description="Shape of the learning rate over tokens; 'wsd' is warm-up, stable, decay."
    )
    warmup: ProgressOrZero | None = Field(
        None,
        description="Linear warm-up; false or '0 steps' has none. 'auto' has none either, except that 'fms' "
        "derives one.",
    )
    floor: Fraction | None = Field(
        None, description="Share of the peak at the end; 0.1 for cosine and fms, 0 for linear and wsd."
    )
    decay: Progress | None = Field(
        None, description="Length of the final decay of 'wsd'; a fifth of the horizon."
    )
    horizon: Progress | None = Field(None, description="Where the shape ends; train.horizon unless given.")


class EvalSection(Section):
    heldout: TokensOrOff = Field(
        False, description="Tokens at the end of each source kept out of training, cut between documents."
    )
    every: AnySpanOrOff = Field(
        False, description="How often to compute the held-out loss; always at start and end."
    )


class ParallelSection(Section):
    dp_replicate: Degree = Field(
        1, description="Copies of the sharded model. One of the five degrees may be -1 and takes the rest."
    )
    dp_shard: Degree = Field(-1, description="Ranks a copy is sharded over.")
    cp: Degree = Field(1, description="Ranks a sequence is split over.")
    tp: Degree = Field(1, description="Ranks a layer is split over.")
    pp: Degree = Field(1, description="Ranks the blocks are dealt to.")
    schedule: Literal[
        "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
    ] = Field("1f1b", description="The order in which pipeline stages take micro-batches.")
    stages_per_rank: Positive | None = Field(
        None, description="Pipeline stages on each rank; what the schedule needs unless given."
    )
    reshard: Literal["auto", "always", "never"] | Positive = Field(
        "auto",
        description="Gathered weights after forward: 'always' gives them back (ZeRO-3), 'never' keeps them "
        "until backward (ZeRO-2), a number keeps them spread over groups of so many ranks, like a node's; "
        "'auto' is 'never' in a pipeline, else 'always'.",
    )
    context: Literal["auto", "ulysses", "ring"] = Field(
        "auto",
        description="How cp ranks share attention: 'ulysses' trades tokens for heads, 'ring' passes keys and "
        "values round; 'auto' is Ulysses as far as the heads divide, and a ring of such groups beyond.",
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        1, description="Blocks whose weights are gathered ahead of use."
    )
    sync: Literal["last", "each"] = Field(
        "last",
        description="When gradients of accumulated micro-batches are reduced over shards: after the last, or "
        "after each, which communicates more and keeps only a shard of them.",
    )
    async_tp: bool = Field(
        False, description="Overlap tensor-parallel communication with its matmuls; GPUs, compiled."
    )


class PrecisionSection(Section):
    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Precision of activations and matmuls; 'auto' takes bf16 where the device computes it; "
        "'fp16' scales the loss.",
    )
    master: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Precision of the weights the optimizer updates; 'bf16' keeps no other and rounds by "
        "chance.",
    )
    reduce: Literal["fp32", "bf16"] = Field(
        "fp32", description="Precision in which gradients are summed over data-parallel ranks."
    )
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp"] = Field(
        "off",
        description="Multiply in the blocks' linear layers in float8, with one scale per tensor (fastest) or "
        "per row; 'rowwise_gw_hp' is per row with weight gradients in bf16. Needs torchao.",
    )
    float8_all_gather: bool = Field(
        False, description="Gather sharded weights as float8: half the traffic; needs 'tensorwise'."
    )
    float8_head: bool = Field(
        False,
        description="The head's matmuls in float8 too, with one scale per tensor: faster where the vocabulary"
        " is a large part of the model, and its logits are rounded for it.",
    )
    float8_exclude: tuple[str, ...] = Field(
        (),
        description="Layers that stay in the compute precision, by name: 'blocks.0.*' or '*.attention.k'.",
    )
    kernels: bool = Field(
        True,
        description="On GPUs, kernels of Arriero's own where they are faster; false computes the same by "
        "PyTorch's alone, with float8 emulated: to compare.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="torch.compile each block; 'auto' compiles on GPUs, unless blocks are tiny."
    )


class MemorySection(Section):
    loss_chunk: Positive | Literal[False, "auto"] = Field(
        "auto",
        description="Tokens whose logits exist at once; 'auto' lets them take a sixteenth of a GPU's memory, "
        "false computes those of a micro-batch together.",
    )
    remat: RematKind = Field(
        "none",
        validate_default=True,
        description="Activations computed again in the backward pass instead of kept: 'none', 'full' (all "
        "blocks), 'every:K' (each K-th), 'fraction:P' (that share, evenly spread), 'attention' (all but "
        "attention), 'selective' (all but "
        "attention and every second matmul), 'budget:B' (what compiled blocks keep, 0 to 1).",
    )
    ffn_tile: Positive | Literal[False] = Field(
        False,
        description="Tokens of a sequence that go through the feed-forward half of a block at once, and are "
        "computed again in the backward pass: for sequences so long that its width would not fit.",
    )
    offload_activations: bool | Annotated[float, Field(gt=0, lt=1)] = Field(
        False,
        description="What blocks keep for the backward pass waits in the host's memory: of all blocks, or of "
        "that share of them.",
    )
    offload_state: bool = Field(
        False,
        description="Sharded weights, gradients and optimizer state live in the host's memory, and the "
        "optimizer works there.",
    )


class LoadSection(Section):
    allow_missing: tuple[str, ...] = Field(
        (),
        description="Tensors a checkpoint may lack, by name: 'model.head.*'; they keep their values.",
    )
    allow_unexpected: tuple[str, ...] = Field(
        (), description="Tensors a checkpoint may have without use, by name: 'optim.*'."
    )


class CheckpointSection(Section):
    every: AnySpanOrOff = Field(
        "1000 steps",
        validate_default=True,
        description="How often to save; also on SIGTERM, SIGUSR1 and `touch RUN/save-now`.",
    )
    at_end: bool = Field(True, description="Save when training ends.")
    export: bool = Field(True, description="Write the finished model as a Hugging Face directory, RUN/model.")
    keep: Positive = Field(3, description="How many of the newest to keep; older ones go.")
    keep_every: ProgressOrOff = Field(
        False, description="The first checkpoint after each such stretch is kept for ever."
    )
    background: bool = Field(
        True,
        description="Copy to host memory and write while training goes on; false waits for the disk.",
    )
    start_from: str | None = Field(
        None,
        description="Weights a new run starts from: a checkpoint, a run directory or a model in any format "
        "`arriero ckpt convert` reads. Step, optimizer and data begin anew.",
    )
    resume_from: str | None = Field(
        None,
        description="A checkpoint or run directory that a new run continues: weights, optimizer, step and "
        "data position are kept. A run continues its own newest checkpoint without being told.",
    )
    start_over: bool = Field(
        False,
        description="Start at step 0 although the run has consumed data: its checkpoints are moved to "
        "RUN/checkpoints.old, never deleted. Applied once; a restart with the same run file resumes.",
    )
    load: LoadSection = Field(
        default_factory=LoadSection, description="What may differ between a checkpoint and the model."
    )


class ObserveSection(Section):
    log_every: Positive = Field(10, description="Steps between lines of metrics.jsonl.")
    tensorboard: bool = Field(True, description="Write TensorBoard files.")
    sample: str | Literal[False] = Field(
        False, description="Text the finished model continues, shown at the end."
    )


class RunConfig(Section):
    run: RunSection = Field(default_factory=RunSection, description="The run itself.")
    model: ModelSection = Field(default_factory=ModelSection, description="What is trained.")
    data: DataSection = Field(description="What it is trained on.")
    train: TrainSection = Field(default_factory=TrainSection, description="How much at once and how long.")
    optim: OptimSection = Field(default_factory=OptimSection, description="How weights are updated.")
    schedule: ScheduleSection = Field(
        default_factory=ScheduleSection, description="How the learning rate moves."
    )
    eval: EvalSection = Field(default_factory=EvalSection, description="How it is judged on the way.")
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="How ranks share the work."
    )
    precision: PrecisionSection = Field(
        default_factory=PrecisionSection, description="Number formats and compilation."
    )
    memory: MemorySection = Field(
        default_factory=MemorySection, description="What is kept, and what is computed again."
    )
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="What is saved, and where a run goes on from."
    )
    observe: ObserveSection = Field(
        default_factory=ObserveSection, description="What is written while it trains."
    )
