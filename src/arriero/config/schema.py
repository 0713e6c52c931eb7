"""The run file: every section and key, with its meaning, default and allowed values."""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from arriero.config.fields import (
    AnySpan,
    AnySpanOrOff,
    CheckpointingField,
    Progress,
    ProgressOrOff,
    ProgressOrZero,
    Tokens,
    TokensOrOff,
    WallTime,
)


@cache
def _meanings(module: str) -> dict[str, str]:
    """Return the text below each field of the sections in a module, by SECTION.FIELD; none without source."""
    found = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(section.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[f"{section.name}.{name}"] = " ".join(text.split())
    return found


def meaning_of(section: type[BaseModel], name: str) -> str:
    """Return what a key of a section means. The source is read when a key is explained, not at import."""
    return _meanings(section.__module__).get(f"{section.__name__}.{name}", "")


def _describe(schema: dict[str, Any], section: type[BaseModel]) -> None:
    for name, key in schema.get("properties", {}).items():
        if text := meaning_of(section, name):
            key["description"] = text


class Section(BaseModel):
    """A frozen table of the run file. The text below a field tells users what its key means."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_describe)


Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Degree = Positive | Literal[-1, "auto"]


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run; its directory is DIR/NAME."""
    dir: str = "runs"
    """Directory that holds the run directories."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of initial weights and data order."""
    deterministic: bool = False
    """Use deterministic algorithms: two runs on one machine have bit-identical losses, at some cost in speed.
    """
    share_gpu: bool = False
    """For tests: several ranks share one GPU, and collectives go through host memory. They are asynchronous
    like NCCL's: a result that is read too early is NaN."""
    cluster: str | None = None
    """Cluster for degrees that are "auto": a name or file of `arriero plan --cluster`. Unless given, the
    shipped one with the same device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: 'cuda' is any NVIDIA or AMD GPU, 'auto' uses a GPU if there is one."""


class RopeScalingSection(Section):
    factor: Annotated[float, Field(ge=1)] = 8.0
    """Factor by which the context length grows."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths longer than original_max_seq_len / this are scaled."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths shorter than original_max_seq_len / this are kept."""
    original_max_seq_len: Annotated[int, Field(gt=0, le=10**9)] = 8192
    """Context length before scaling."""
    type: Literal["llama3", "linear", "dynamic", "yarn"] = "llama3"
    """Kind of scaling; for yarn the two factors are beta_slow and beta_fast (1 and 32)."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """yarn: factor of the rotated q and k; 0.1 ln(factor) + 1 unless given."""
    truncate: bool = True
    """yarn: round the range of scaled dimensions to whole ones."""


class ModelSection(Section):
    preset: str | None = None
    """A model of `arriero config models`; the other keys here override its dimensions."""
    family: str | None = None
    """Architecture, such as llama or qwen3 (docs/models.md), or a family registered with
    `arriero.register_model`."""
    vocab_size: Positive | None = None
    """Vocabulary size: rows of the embedding table."""
    dim: Positive | None = None
    """Width of the residual stream (hidden size)."""
    layers: Positive | None = None
    """Number of transformer blocks."""
    heads: Positive | None = None
    """Query heads."""
    kv_heads: Positive | None = None
    """Key/value heads; fewer than heads is grouped-query attention."""
    head_dim: Positive | None = None
    """Width of one head; dim / heads unless given."""
    ffn: Annotated[int, Field(ge=0)] | None = None
    """Hidden width of the feed-forward layer; 0 in families without one."""
    max_seq_len: Positive | None = None
    """Longest sequence the model accepts; data.seq_len unless given."""
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon inside the norms."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingSection | Literal[False] | None = None
    """Scaling of the rotary frequencies for longer contexts; false removes the preset's."""
    tied: bool | None = None
    """Whether the head shares the embedding table."""
    sliding_window: Positive | Literal[False] | None = None
    """Number of tokens that a token attends to, itself included (mistral, qwen2, qwen3); false removes the
    preset's window."""
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    """Number of first blocks that attend to all tokens in spite of sliding_window."""
    extra: dict[str, bool | int | float | str | tuple[int | float, ...]] | None = None
    """Fields that only this model family has, for example { activation = 'gelu' }."""


class SourceSection(Section):
    path: str
    """A prepared dataset directory, 'builtin:stdlib', or text as `arriero data prepare` takes it (a file, a
    folder, a pattern, hf://NAME), prepared once into data.cache."""
    tokenizer: str | None = None
    """For text: a tokenizer.json, a Llama tokenizer.model, their folder or hf://OWNER/MODEL."""
    column: str | None = None
    """For text: the column that holds it, 'text' unless given."""
    template: str | None = None
    """For text: a template with fields of a record in braces, 'Question: {question} Answer: {answer}'. The
    loss includes the last field and what follows it."""
    chat: bool | str = False
    """For text: true if records are chats, a column 'messages' that the tokenizer's chat template turns into
    text; a path names another template. The loss includes the assistant's turns."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Weight in the mixture, by tokens. Weights that are all below 1 must sum to 1; others are proportions.
    """
    prompt: str | None = None
    """Text put before each document and excluded from the loss; needs packing 'bestfit' or 'none'."""
    max_epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest number of epochs over this source; a run that needs more is rejected."""


def _read_sources(value: Any) -> Any:
    """A path alone, or a list of paths, in place of a list of tables."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    return tuple({"path": each} if isinstance(each, str) else each for each in listed)


Sources = Annotated[
    tuple[SourceSection, ...],
    BeforeValidator(_read_sources, json_schema_input_type=str | tuple[SourceSection | str, ...]),
    Field(min_length=1),
]


class PhaseSection(Section):
    at: Progress
    """Start of the phase, rounded up to a whole step."""
    sources: Sources | None = None
    """Mixture of the phase, with the keys of data.sources; a source used before continues at its position. A
    phase keeps what it does not set."""
    batch: Tokens | None = None
    """Global batch size of the phase, in tokens per optimizer step."""
    seq_len: Positive | None = None
    """Sequence length of the phase; needs packing 'concat'."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the phase; the shape of the schedule stays."""


class DataSection(Section):
    sources: Sources
    """Datasets to train on, mixed by weight: a list of tables or of paths, or one path."""
    phases: tuple[PhaseSection, ...] = ()
    """Phases: changes of mixture, batch, sequence length or learning rate at a token or step."""
    seq_len: Positive = 2048
    """Tokens per training sequence."""
    packing: Literal["concat", "bestfit", "none"] = "concat"
    """'concat': windows over the concatenated documents. 'bestfit': whole documents packed into rows. 'none':
    one document per row, padded to the longest of its batch."""
    long_docs: Literal["split", "truncate", "drop"] = "split"
    """What 'bestfit' and 'none' do with a document longer than seq_len."""
    document_mask: bool = False
    """Document mask: attention stays inside each document, positions restart with it, and its last token does
    not predict the next document."""
    open_shards: Positive | None = None
    """Dataset files that a process keeps open; 'auto' is half of the system's limit (`ulimit -Hn`), at most
    16,384."""
    reader_threads: Positive | None = None
    """Threads per rank that read batches; 'auto' is 1, or 4 where a dataset has more than 64 shards."""
    cache: str = "data"
    """Directory of prepared text, built-in corpora and packing plans."""


class TrainSection(Section):
    batch: Tokens = Field("524288 tok", validate_default=True)
    """Global batch size: tokens per optimizer step, over all ranks."""
    horizon: AnySpan = Field("1000 steps", validate_default=True)
    """How long to train."""
    micro_batch: Positive | None = None
    """Micro-batch size: sequences per rank and forward pass; 'auto' is derived from the device memory, and
    gradient accumulation follows. The last micro-batch of a step may be smaller."""
    gc_every: Positive | Literal[False] = 100
    """Steps between Python's garbage collections, which all ranks run at the same step; with false Python
    chooses the step on each rank, and a rank delays all others."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the z-loss, the squared log of the softmax's denominator, which keeps logits small. Reported
    losses do not include it."""


class GroupSection(Section):
    match: str
    """Name pattern of the parameters: '*norm.weight', 'blocks.0.*'."""
    lr_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiplies the learning rate of every step."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Weight decay of all parameters of the group, vectors included; unless given, that of parameters outside
    groups."""


class OptimSection(Section):
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """The optimizer; 'muon' updates the matrices inside blocks, AdamW the rest."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of 'muon' (default 0.95) and 'sgd' (default 0)."""
    state: Literal["fp32", "bf16", "int8", "float8", "auto"] = "fp32"
    """Precision of the optimizer state; 8-bit state has one scale per 256 elements. Below fp32 it uses
    stochastic rounding. 'auto' is the fastest of fp32, bf16 and int8 that fits."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none, unless optim.groups gives them one."""
    groups: tuple[GroupSection, ...] = ()
    """Parameter groups with their own learning rate and weight decay. A parameter belongs to the first group
    that matches its name."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by name pattern: 'embedding.*'. They are saved and exported."""
    clip: Annotated[float, Field(gt=0)] | Literal[False] = 1.0
    """Gradient clipping: largest global gradient norm; false does not clip."""
    max_skips: Annotated[int, Field(ge=0)] = 20
    """Updates in a row that may be skipped because the gradient norm or the loss is not finite; after more,
    the run stops at the next logged step."""


class LoraSection(Section):
    rank: Positive | Literal[False] = False
    """Rank of the LoRA adapters; false trains the model itself."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the input of an adapter, during training."""
    targets: tuple[str, ...] = ("blocks.*.attention.q", "blocks.*.attention.v")
    """Linear layers that get an adapter, by name pattern: 'blocks.*.ffn.*'."""


class SpeculatorSection(Section):
    n_predict: Annotated[int, Field(ge=1, le=32)] | Literal[False] = False
    """Number of heads of an MLP speculator, which is trained on the frozen model of checkpoint.start_from;
    each predicts one token further ahead. false trains the model itself."""
    inner_dim: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Width of the speculator; 0 is the width of the model."""
    tie_weights: bool = False
    """Whether the heads share their weights."""
    scale_input: bool = False
    """Whether the model's hidden states are normalised before the first head."""


class PrefixSection(Section):
    tokens: Positive | Literal[False] = False
    """Number of trained keys and values before the tokens in every block; false trains none."""


class LlamaAdapterSection(Section):
    tokens: Positive | Literal[False] = False
    """Number of trained prompts per block, with a gate that is zero at first; false trains none."""
    layers: Positive | None = None
    """Number of blocks with prompts, counted from the last; all unless given."""


class ScheduleSection(Section):
    kind: Literal["constant", "linear", "cosine", "wsd", "frontier", "fms", "fms-annealing"] = "cosine"
    """Shape of the learning rate over tokens. 'wsd' is warm-up, stable, decay; 'frontier' is the schedule of
    frontier-torchtitan, 'fms' and 'fms-annealing' are those of fms-fsdp."""
    warmup: ProgressOrZero | None = None
    """Linear warm-up; false or '0 steps' has none. 'auto' has none either, except that 'fms' derives one."""
    floor: Fraction | None = None
    """Final learning rate as a fraction of the peak; 'auto' is 0.1 for cosine and fms, else 0."""
    decay: Progress | None = None
    """Length of the final decay of 'wsd'; 'auto' is a fifth of the horizon."""
    horizon: Progress | None = None
    """End of the schedule; 'auto' is train.horizon."""


class EvalSection(Section):
    heldout: TokensOrOff = False
    """Validation (held-out) tokens of each source, whole documents that are not trained on."""
    every: AnySpanOrOff = False
    """Interval between evaluations of the held-out loss; also at start and end."""


class ParallelSection(Section):
    dp_replicate: Degree = 1
    """Data parallelism: replicas of the sharded model (HSDP, DDP). One of the five degrees may be -1: the
    remaining ranks. "auto" is chosen by the planner, as in `arriero plan`; `parallel = "auto"` plans all
    five."""
    dp_shard: Degree = -1
    """Data parallelism: ranks that shard one copy of the weights (FSDP, ZeRO)."""
    cp: Degree = 1
    """Context parallelism: ranks that divide the tokens of a sequence."""
    tp: Degree = 1
    """Tensor parallelism, with sequence parallel norms: ranks that divide the matrices of a layer."""
    pp: Degree = 1
    """Pipeline parallelism: ranks that divide the blocks."""
    schedule: Literal[
        "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """Pipeline schedule; docs/parallel.md says what each needs."""
    stages_per_rank: Positive | None = None
    """Pipeline stages per rank; 'auto' is what the schedule needs."""
    reshard: Literal["auto", "always", "never"] | Positive = "auto"
    """Reshard gathered weights after forward: 'always' (ZeRO-3), 'never' (weights are gathered once and kept
    for all micro-batches of a step: ZeRO-1, or ZeRO-2 with sync = 'each'), or a number: keep them sharded
    over groups of that many ranks, such as a node. 'auto' is 'never' in a pipeline, 'always' on CPUs, else
    the faster of the two that fits."""
    context: Literal["auto", "ulysses", "ring"] = "auto"
    """Context parallel method: 'ulysses' (all-to-all) or 'ring' attention. 'auto' is Ulysses as far as the
    heads divide, and a ring of such groups beyond."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Number of blocks whose weights are prefetched."""
    sync: Literal["auto", "last", "each"] = "auto"
    """With gradient accumulation, reduce gradients after the 'last' micro-batch, or after 'each': more
    communication, but only a shard of the gradients is kept. 'auto' is 'each' where the run would
    otherwise not fit or would recompute more."""
    init_timeout: WallTime = Field("30min", validate_default=True)
    """How long ranks wait for each other until the first step has been taken, which may compile or load for
    minutes; the error names the ranks that did not start."""
    train_timeout: WallTime = Field("10min", validate_default=True)
    """How long a collective waits for a rank after the first step; then the run fails."""
    async_tp: bool = False
    """Overlap tensor-parallel communication with matmuls; needs GPUs and compilation."""


class PrecisionSection(Section):
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of activations and matmuls; 'auto' is bf16 where the device supports it. 'fp16' scales the
    loss."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Precision of the master weights; 'bf16' stores the weights in bf16 only, with stochastic rounding."""
    base_weights: Literal["master", "compute", "int8", "nf4"] = "master"
    """Precision of the frozen weights if an adapter is trained: that of the master weights, that of the
    computation, or with linear layers in 8 bits ('int8') or 4 bits ('nf4') and a scale per 64 elements."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Precision of the gradient reduction over data-parallel ranks."""
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp", "auto"] = "off"
    """Float8 matmuls in the blocks' linear layers, with one scale per tensor (fastest) or per row;
    'rowwise_gw_hp' is per row with weight gradients in bf16. Rowwise scales, tensor parallelism,
    float8_all_gather and AMD GPUs need torchao. 'auto' is 'tensorwise' where it is predicted to be faster."""
    float8_all_gather: bool = False
    """All-gather sharded weights as float8: half the traffic; needs 'tensorwise'."""
    float8_head: bool = False
    """Float8 matmuls in the head too, with one scale per tensor: faster with a large vocabulary, at the cost
    of rounded logits."""
    float8_exclude: tuple[str, ...] = ()
    """Layers that stay in the compute precision, by name pattern: 'blocks.0.*', '*.attention.k'."""
    kernels: bool = True
    """Use Arriero's Triton kernels on GPUs; false uses only PyTorch's, for comparison, and emulates float8.
    """
    compile: bool | Literal["auto"] = "auto"
    """torch.compile each block; 'auto' compiles on GPUs, unless blocks are tiny."""


class MemorySection(Section):
    loss_chunk: Positive | Literal[False, "auto"] = "auto"
    """Tokens per chunk of the loss, which bounds the memory of logits; with 'auto' they take a sixteenth of a
    GPU's memory, or less if the run would not fit otherwise; false computes a whole micro-batch at once."""
    activation_checkpointing: CheckpointingField = Field("auto", validate_default=True)
    """Activation checkpointing (recompute in the backward pass): 'none', 'full' (all blocks), 'every:K' (each
    K-th), 'fraction:P' (that share of blocks, evenly spread), 'attention' (keeps the output of attention),
    'selective' (keeps attention and every second matmul), 'MODE:P' or 'MODE:P+MODE' (a share of the blocks
    in one mode, the others in another: 'attention:1/4+selective'), 'budget:B' (memory budget of compiled
    blocks, 0 to 1). 'auto' is the fastest that is predicted to fit."""
    ffn_tile: Positive | Literal[False] = False
    """Tokens per tile of the feed-forward layer, recomputed in the backward pass: for very long sequences."""
    offload_activations: bool | Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = False
    """Offload activations to CPU memory: of all blocks, or of that share of them. 'auto' does it where the
    run would otherwise not fit or be slower."""
    offload_state: bool | Literal["auto"] = False
    """Offload sharded weights, gradients and optimizer state to CPU memory, where the optimizer runs. 'auto'
    does it where the run would otherwise not fit or be slower."""


class LoadSection(Section):
    allow_missing: tuple[str, ...] = ()
    """Tensors a checkpoint may lack, by name pattern: 'model.head.*'; they keep their initial values."""
    allow_unexpected: tuple[str, ...] = ()
    """Tensors of a checkpoint to ignore, by name pattern: 'optim.*'."""
    allow_model_changes: tuple[str, ...] = ()
    """Keys of [model] that may differ from the model the run starts from, by name pattern: 'rope_theta',
    'max_seq_len'."""
    allow_other_tokenizer: bool = False
    """Start from weights that were trained with another tokenizer than the data's."""
    reset_optimizer: bool = False
    """Where start_from replaces the weights of the checkpoint of resume_from, reset the optimizer state too;
    step and data position continue."""


class CheckpointSection(Section):
    every: AnySpanOrOff = Field("1000 steps", validate_default=True)
    """Interval between saves; also on SIGTERM, SIGUSR1 and `touch RUN/save-now`."""
    on_usr1: Literal["continue", "stop"] = "continue"
    """What follows the save that SIGUSR1 asks for: 'continue' training, or 'stop' with exit code 0, as after
    SIGTERM. Slurm sends it before the time limit with --signal=USR1@SECONDS."""
    at_end: bool = True
    """Save when training ends."""
    export: bool = True
    """Export the finished model as a Hugging Face directory, RUN/model."""
    keep: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_every: ProgressOrOff = False
    """Never delete the first checkpoint after each such interval."""
    background: bool = True
    """Write checkpoints in the background from a copy in CPU memory; false waits for the disk."""
    start_from: str | None = None
    """Warm start: initialise the weights of a new run from a checkpoint, a run directory or a model in any
    format `arriero ckpt convert` reads, hf://OWNER/MODEL included. Step, optimizer and data start from
    scratch, unless resume_from names the checkpoint they come from."""
    adapter_from: str | None = None
    """A PEFT directory, or a checkpoint or run with an adapter, that gives the initial values of the run's
    adapter ([lora], [prefix] or [llama_adapter]); start_from names the base model."""
    resume_from: str | None = None
    """A checkpoint or run directory that a new run continues: weights, optimizer, step and data position.
    With start_from, everything but the weights. A run that has a checkpoint of its own resumes from the
    newest without these keys; if resume_from names that very checkpoint, start_from replaces its weights."""
    start_over: bool = False
    """Start at step 0 although the run has consumed data: its checkpoints are moved to RUN/checkpoints.old,
    never deleted. Applied once; a restart with the same run file resumes."""
    load: LoadSection = Field(default_factory=LoadSection)
    """Allowed differences between a checkpoint and the model."""


class GuardSection(Section):
    nonfinite: Literal["skip", "rollback"] = "skip"
    """After a loss or gradient norm that is not finite: 'skip' the update, or 'rollback' to the last
    checkpoint before it and skip the batch. events.jsonl names its documents."""
    spike: Literal["off", "skip", "rollback"] = "off"
    """The same after a loss spike: a loss whose robust z-score over the last guard.window losses exceeds
    guard.spike_z."""
    spike_z: Annotated[float, Field(gt=0)] = 8.0
    """A spike is this many deviations above the median; the deviation is 1.4826 times the median absolute
    deviation, and at least 0.1 % of the loss."""
    window: Annotated[int, Field(ge=8, le=10_000)] = 128
    """Number of past losses that a loss is compared with; spikes are detected once half of them are known."""
    skip_batches: Positive = 1
    """Batches that a rollback skips: the bad one and those before it. A spike may have its cause some
    steps earlier."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 5
    """Rollbacks within 10,000 steps, also over restarts, after which the run stops."""
    hang_factor: Annotated[float, Field(ge=2)] | Literal[False] = 20.0
    """A run whose step takes this many times the median step hangs: every rank writes its Python stacks, the
    ranks that did not answer are named, and the run ends with code 75. false waits for ever. Compilation,
    evaluation and export may take 30 minutes."""
    hang_min_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a step may always take, however short the median step is."""


class ObserveSection(Section):
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    trackers: tuple[Literal["wandb", "mlflow", "aim"], ...] = ()
    """Experiment trackers that receive the metrics: Weights & Biases, MLflow, Aim. Each tracker's environment
    variables set the destination; without them MLflow and Aim write beside the run directory."""
    sample: str | Literal[False] = False
    """Prompt that the finished model continues; shown at the end."""


class RunConfig(Section):
    run: RunSection = Field(default_factory=RunSection)
    """Name, seed and device of the run."""
    model: ModelSection = Field(default_factory=ModelSection)
    """The model: a preset, or dimensions."""
    data: DataSection
    """Datasets, sequence length and packing."""
    train: TrainSection = Field(default_factory=TrainSection)
    """Batch sizes and length of training."""
    optim: OptimSection = Field(default_factory=OptimSection)
    """The optimizer."""
    lora: LoraSection = Field(default_factory=LoraSection)
    """Train low-rank adapters of a frozen model (LoRA)."""
    speculator: SpeculatorSection = Field(default_factory=SpeculatorSection)
    """Train a speculator for faster generation on the frozen model."""
    prefix: PrefixSection = Field(default_factory=PrefixSection)
    """Train keys and values before the tokens (prefix tuning)."""
    llama_adapter: LlamaAdapterSection = Field(default_factory=LlamaAdapterSection)
    """Train gated prompts (LLaMA-Adapter)."""
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    """The learning-rate schedule."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """Evaluation on validation (held-out) data."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    """Parallelism: how ranks divide the work."""
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Number formats and compilation."""
    memory: MemorySection = Field(default_factory=MemorySection)
    """Activation memory and offloading."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Saving, resuming and warm starts."""
    guard: GuardSection = Field(default_factory=GuardSection)
    """Faults while training: hangs, bad losses."""
    observe: ObserveSection = Field(default_factory=ObserveSection)
    """Logging."""

    def with_values(self, values: Mapping[str, Any]) -> "RunConfig":
        """Return the run with other values of keys like 'parallel.tp'. They are not validated."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        update = {name: getattr(self, name).model_copy(update=found) for name, found in sections.items()}
        return self.model_copy(update=update)
