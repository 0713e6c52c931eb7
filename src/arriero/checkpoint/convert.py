"""Open a model of any format, convert it to another, and average models, one tensor at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from arriero.checkpoint.base_model import find_base
from arriero.checkpoint.directory import find_checkpoints
from arriero.checkpoint.formats.dcp_directory import (
    TORCH_NAME,
    open_dcp,
    open_torch,
    write_dcp,
    write_torch,
)
from arriero.checkpoint.formats.hf_directory import open_hf, write_hf
from arriero.checkpoint.formats.meta_directory import open_meta, write_meta
from arriero.checkpoint.formats.model_reader import DEFAULT_OPTIONS, Adapter, ModelReader, WriteOptions
from arriero.checkpoint.formats.peft_directory import open_peft, write_peft
from arriero.config.options import run_path
from arriero.data.text.hub import local_model
from arriero.errors import UserError
from arriero.files import Advance, check_free_space, no_progress, staged_directory
from arriero.model.description import ADAPTER, base_of_adapter
from arriero.model.family import build_model
from arriero.model.language_model import LanguageModel
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import BASE_FILE
from arriero.units import counted

Format = Literal["hf", "meta", "dcp", "torch", "peft"]
Write = Callable[[ModelReader, Path, WriteOptions, Advance], None]

WRITERS: dict[str, Write] = {
    "hf": write_hf,
    "meta": write_meta,
    "dcp": write_dcp,
    "torch": write_torch,
    "peft": write_peft,
}
_LOOKED_FOR = (
    "config.json and *.safetensors or pytorch_model.bin (Hugging Face), "
    f"params.json and consolidated.* (Meta, Mistral), .metadata (DCP), {TORCH_NAME} (torch), {ADAPTER} (PEFT)"
)
_HF_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_CHUNK = 1 << 22


def open_model(path: Path) -> ModelReader:
    """Open a model; its format is recognised by the files in the directory."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", "give the directory of a model or a checkpoint")
    if path.is_file():
        if path.suffix in (".pt", ".pth") and not path.name.startswith("consolidated."):
            return open_torch(path)
        raise UserError(f"{path} is a file", f"give the directory it is in, or a file like {TORCH_NAME}")
    if (path / BASE_FILE).is_file():
        # a speculator is no part of the model that it was trained for
        return open_model(Path(find_base(path)["path"]))
    if (path / ".metadata").is_file():
        return open_dcp(path)
    if (path / ADAPTER).is_file():
        return open_peft(path, partial(_open_base, path))
    # Mistral's repositories have both forms; Hugging Face's config.json says more
    is_hf = (path / "config.json").is_file() and any(map(any, map(path.glob, _HF_WEIGHTS)))
    if not is_hf and ((path / "params.json").is_file() or any(path.glob("consolidated.*.pth"))):
        return open_meta(path)
    if (path / TORCH_NAME).is_file():
        return open_torch(path)
    if any(any(path.glob(name)) for name in ("config.json", "*.safetensors", "pytorch_model*.bin")):
        return open_hf(path)
    usable = [
        saved.directory for saved in find_checkpoints(path, report_unreadable=True) if not saved.problem
    ]
    inside = [*filter(Path.is_dir, [path / "model"]), *usable[-1:]]
    if (path / "run.toml").is_file() and inside:
        names = " or ".join(map(str, inside))
        raise UserError(f"{path} is a run, not a model", f"give {names}")
    raise UserError(f"{path} holds no model: looked for {_LOOKED_FOR}", "check the path")


def _open_base(adapter: Path, name: str) -> ModelReader:
    """Open the base model that an adapter names: a path, also beside the adapter, or a model of the hub."""
    return open_model(_model_directory(base_of_adapter(adapter, name)))


def open_adapter(path: Path, spec: ModelSpec) -> Adapter:
    """Open the adapter of a PEFT directory, a checkpoint or a run; its base model may be elsewhere."""
    directory = _model_directory(path)
    if (directory / ADAPTER).is_file():
        base = ModelReader("memory", "the base model", spec, own_tensors(spec), _no_weights)
        source = open_peft(directory, lambda _: base)
    else:
        source = open_model(directory)
    if source.adapter is None:
        raise UserError(f"{path} has no adapter", "give a PEFT directory, or a run with an adapter")
    return source.adapter


def _no_weights(name: str) -> Tensor:
    raise AssertionError(f"{name} of a base model that was not opened")


def find_model(path: str | Path) -> ModelReader:
    """Open a model in any format, or of a run: its newest valid checkpoint, or else its exported model.

    `path` may be `hf://OWNER/MODEL` or the name of a run under runs/.
    """
    return open_model(_model_directory(run_path(local_model(str(path)))))


def load_model(path: str | Path, device: str | torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a model of any format, one tensor at a time, as a module whose call returns logits."""
    return read_model(find_model(path), device, dtype)


def read_model(
    source: ModelReader,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    advance: Advance = no_progress,
) -> LanguageModel:
    """Build the module of a stored model and fill it; `dtype` defaults to the widest stored one."""
    dtype = dtype or max((tensor.dtype for tensor in source.tensors.values()), key=lambda each: each.itemsize)
    with torch.device("meta"):
        model, adapter = build_model(source.spec).to(dtype), source.unmerged
        if adapter is not None:
            adapter.settings.add(model, source.spec.layers)
            model.offset = adapter.settings.offset
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in source.tensors:
            tensor = source.load(name)
            parameters[name].copy_(tensor)
            advance(tensor.nbytes)
        if adapter is not None:
            for name in adapter.tensors:
                parameters[name].copy_(adapter.load(name))
    return model.eval()


def _model_directory(path: Path) -> Path:
    """Return the newest valid checkpoint of a run, or its exported model; other paths as they are."""
    if not (path / "run.toml").is_file() or (path / ".metadata").is_file():
        return path
    usable = [saved.directory for saved in find_checkpoints(path) if saved.problem is None]
    return usable[-1] if usable else path / "model"


def convert(
    source: ModelReader,
    target: Path,
    to: Format,
    writing: WriteOptions = DEFAULT_OPTIONS,
    advance: Advance = no_progress,
) -> None:
    """Write a model in another format. `target` appears when all of it is on disk, or not at all."""
    target = Path(target)
    if to != "peft":
        source.require_weights()
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already", "choose another place, or remove it first")
    if target.suffix in (".pt", ".pth", ".safetensors"):
        raise UserError(
            f"{target} looks like a file, and a model is a directory",
            f"give a directory; with --to torch the weights will be DIRECTORY/{TORCH_NAME}",
        )
    todo = "free some space, or choose another place"
    try:
        with staged_directory(target) as making:
            if to != "peft":
                check_free_space(target, source.nbytes(writing.dtype), "the model", todo)
            WRITERS[to](source.with_dtype(writing.dtype), making, writing, advance)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error})", todo) from None


def average(sources: Sequence[ModelReader], weights: Sequence[float] | None = None) -> ModelReader:
    """Return a reader of the weighted mean; dtypes, tokenizer and format are those of the first model."""
    if len(sources) < 2:
        raise UserError("an average needs at least two models", "name more of them")
    shares = _shares(len(sources), weights)
    first = sources[0]
    for source in sources:
        source.require_weights()
        _check_same_model(first, source)

    def load(name: str) -> Tensor:
        # sum in the next wider dtype
        wide = any(source.tensors[name].dtype == torch.float32 for source in sources)
        total = torch.zeros(first.tensors[name].shape, dtype=torch.float64 if wide else torch.float32)
        for source, share in zip(sources, shares, strict=True):
            _add(total, source.load(name), share)
        return total.to(first.tensors[name].dtype)

    where = f"the mean of {', '.join(source.where for source in sources)}"
    return replace(first, where=where, load=load, load_slice=None, adapter=None)


def with_blocks(source: ModelReader, blocks: Sequence[int]) -> ModelReader:
    """Return a reader of a model that has only these blocks of another, numbered from 0."""
    source.require_weights()
    layers = source.spec.layers
    if not blocks or not all(0 <= block < layers for block in blocks):
        raise UserError(
            f"{source.where} has blocks 0 to {layers - 1}, not {list(blocks)}", "choose among them"
        )
    spec = source.spec.keep_blocks(blocks)

    def original(name: str) -> str:
        head, number, rest = [*name.split(".", 2), "", ""][:3]
        return f"blocks.{blocks[int(number)]}.{rest}" if head == "blocks" else name

    tensors = {name: source.tensors[original(name)] for name in own_tensors(spec)}
    where = f"{counted(len(blocks), 'block')} of {source.where}"
    return replace(
        source,
        where=where,
        spec=spec,
        tensors=tensors,
        load=lambda name: source.load(original(name)),
        load_slice=None,
        adapter=None,
    )


def _add(total: Tensor, tensor: Tensor, share: float) -> None:
    """Add in chunks, because adding tensors of two dtypes copies one of them."""
    for sums, part in zip(total.flatten().split(_CHUNK), tensor.flatten().split(_CHUNK), strict=True):
        sums.add_(part, alpha=share)


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    weights = [1.0] * count if weights is None else list(weights)
    if len(weights) != count:
        raise UserError(f"{len(weights)} weights for {count} models", "give one weight per model")
    if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UserError(f"the weights {weights} have no mean", "give positive numbers")
    return [weight / sum(weights) for weight in weights]


def _check_same_model(first: ModelReader, other: ModelReader) -> None:
    ours, theirs = ({**s.spec.to_dict(), "nominal_params": None} for s in (first, other))
    odd = [
        f"{n} {ours.get(n)} and {theirs.get(n)}" for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)
    ]
    if odd:
        raise UserError(
            f"{first.where} and {other.where} are different models: {', '.join(odd)}",
            "only models of one shape have a mean",
        )
