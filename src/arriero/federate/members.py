"""Files of a federation: the global model of a round and a site's member.

Both are directories that are published by one rename after everything in them was synced to disk. Each holds
a manifest with the sha256 of every other file and of itself.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from arriero.checkpoint.convert import convert
from arriero.checkpoint.formats.model_reader import ModelReader, WriteOptions
from arriero.checkpoint.formats.peft_directory import WEIGHTS as ADAPTER
from arriero.checkpoint.formats.peft_directory import peft_parts
from arriero.checkpoint.formats.tensor_files import SafetensorsReader, SafetensorsWriter
from arriero.config.schema import Section
from arriero.errors import UserError, first_problem
from arriero.federate.outer import OuterOptimizer, chunks, encode, planned, read_delta
from arriero.federate.schema import Codec
from arriero.files import Advance, no_progress, publish_file, sha256_of_file, sha256_of_json, staged_directory
from arriero.model.name_maps import has_hf_names, hf_from_own

OUTER = "outer"
_SHARDS = WriteOptions(dtype=torch.float32)


class Refused(Exception):
    """A member or global model that must not be used; the text is a sentence for the user."""


class Damaged(Refused):
    """The files are not what was written: the same content may be sent again."""


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0)]


class Record(Section):
    """A JSON file of a federation, whose types are checked without conversions when it is read."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_file(path, (json.dumps(content, indent=1) + "\n").encode())


class Share(Record):
    """A member's part in a global model."""

    site: str
    round: Count
    weight: Seconds
    norm: Seconds


class GlobalManifest(Record):
    """The global model before round `round`. `model` identifies its weights, `tokens` counts all rounds."""

    FILE: ClassVar = "federation.json"

    round: Count
    tokens: Count
    model: Sha256
    weights: tuple[str, ...]
    optimizer: OuterOptimizer
    files: dict[str, Sha256]
    parent: Sha256 | None = None
    members: tuple[Share, ...] = ()
    cosines: tuple[tuple[float, ...], ...] = ()
    format: Literal[1] = 1


class MemberManifest(Record):
    """What a site trained: from `first_step` to `step` of its own run, `tokens` in all, on the model `base`.

    `train_loss` is the last training loss. `eval_before` and `eval_after` are losses on the site's held-out
    data: of the global model that the round began with, and of the site's model at its end. `frozen`
    identifies the base model of an adapter.
    """

    FILE: ClassVar = "member.json"

    site: str
    round: Count
    base: Sha256
    codec: Codec
    tokens: Annotated[int, Field(gt=0, le=2**53)]
    first_step: Count
    step: Count
    files: dict[str, Sha256]
    bytes: Count = 0
    seconds: Seconds = 0.0
    waited: Seconds = 0.0
    tokenizer: str | None = None
    frozen: Sha256 | None = None
    train_loss: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    format: Literal[1] = 1


Manifest = TypeVar("Manifest", GlobalManifest, MemberManifest)


def write_manifest(directory: Path, manifest: GlobalManifest | MemberManifest) -> None:
    content = manifest.model_dump(mode="json")
    write_json(directory / manifest.FILE, content | {"sha256": sha256_of_json(content)})


def read_manifest(directory: Path, kind: type[Manifest]) -> Manifest:
    """Return the manifest of a directory; raise Refused if it is missing, damaged or of wrong types."""
    path = directory / kind.FILE
    try:
        content = json.loads(path.read_bytes())
        if content.pop("sha256") != sha256_of_json(content):
            raise Damaged(f"{path} is damaged: its checksum differs")
    except FileNotFoundError:
        raise Damaged(f"{directory} has no {path.name}: it was not completely written") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__})") from None
    if isinstance(version := content.get("format"), int) and version > 1:
        raise Refused(f"{directory} was written by a newer version of Arriero (format {version})")
    try:
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise Refused(f"{path}: {first_problem(error.errors())}") from None


def verify_files(directory: Path, files: Mapping[str, str], advance: Advance = no_progress) -> None:
    """Compare the checksum of every file; raise Refused with the first that differs."""
    for name, expected in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise Refused(f"{directory} names a file outside of itself: {name}")
        try:
            found = sha256_of_file(directory / name, advance)
        except OSError as error:
            raise Damaged(f"{directory / name} cannot be read ({error.strerror})") from None
        if found != expected:
            raise Damaged(f"{directory / name} has other bytes than were written")


def open_global(directory: Path, verify: bool = True, outer: bool = True) -> GlobalManifest:
    """Return the manifest of a global model, whose files are verified; raise UserError if it is unusable.

    A site needs no outer state, so none is sent to it: `outer` is false there.
    """
    try:
        manifest = read_manifest(directory, GlobalManifest)
        if verify:
            names = [name for name in manifest.files if outer or not name.startswith(f"{OUTER}/")]
            verify_files(directory, {name: manifest.files[name] for name in names})
    except Refused as error:
        raise UserError(str(error), "copy or transfer the global model again") from None
    return manifest


def publish_first_model(
    source: ModelReader, target: Path, optimizer: OuterOptimizer, advance: Advance = no_progress
) -> GlobalManifest:
    """Write the model before round 0 as a Hugging Face directory in fp32, with its manifest.

    Of a model that is stored as an adapter, only the adapter is written, as a PEFT directory.
    """
    if not has_hf_names(source.spec):
        raise UserError(
            f"the model family '{source.spec.family}' has no Hugging Face name map, which a federation needs",
            "give the family `hf` when it is registered",
        )
    with staged_directory(target) as making:
        convert(source, making / "model", "peft" if source.format == "peft" else "hf", _SHARDS, advance)
        for path in list((making / "model").iterdir()):
            path.rename(making / path.name)
        (making / "model").rmdir()
        weights = tuple(sorted(path.name for path in making.glob("*model*.safetensors")))
        files = {path.name: sha256_of_file(path) for path in sorted(making.iterdir())}
        manifest = GlobalManifest(
            round=0,
            tokens=0,
            model=model_hash(files, weights),
            weights=weights,
            optimizer=optimizer,
            files=files,
        )
        write_manifest(making, manifest)
    return manifest


def model_hash(files: Mapping[str, str], weights: Sequence[str]) -> str:
    return sha256_of_json({name: files[name] for name in weights})


def write_member(
    base: Path, local: ModelReader, target: Path, codec: Codec, advance: Advance = no_progress, **about: Any
) -> MemberManifest:
    """Publish what a site ships, one tensor at a time; `about` are the other fields of the manifest."""
    known = open_global(base, verify=False)
    load = _loaders(local, known.weights == (ADAPTER,))
    files: dict[str, str] = {}
    with staged_directory(target) as making:
        for name in known.weights:
            reader = SafetensorsReader(base / name)
            if unknown := reader.tensors.keys() - load.keys():
                raise UserError(
                    f"{local.where} has no {min(unknown)}, which the global model has in {name}",
                    "a member must be a model of the same dimensions, or an adapter of the same layers",
                )
            layout = {
                each + suffix: tensor
                for each, meta in reader.tensors.items()
                for suffix, tensor in planned(meta, codec).items()
            }
            made = delta_file(name)
            with SafetensorsWriter(making / made, layout) as file:
                for each in reader.tensors:
                    tensor = load[each]()
                    for part in encode(reader.read(each), tensor, codec).values():
                        file.write(part)
                    advance(tensor.nbytes)
            files[made] = file.sha256
        size = sum(path.stat().st_size for path in making.iterdir())
        manifest = MemberManifest(base=known.model, codec=codec, files=files, bytes=size, **about)
        write_manifest(making, manifest)
    return manifest


def delta_file(weights: str) -> str:
    return weights.replace("model", "delta", 1)


def _loaders(local: ModelReader, is_adapter: bool) -> dict[str, Callable[[], Tensor]]:
    """Return how each tensor that a site ships is loaded, by its name in the global model."""
    if is_adapter and local.adapter is not None:
        parts = peft_parts(local.spec, local.tensors, local.adapter.settings)
        read = local.adapter.load
        return {
            name: lambda part=part: torch.cat([read(ours) for ours in part.names], -1).reshape(part.shape)
            for name, part in parts.items()
        }
    recipe = {} if is_adapter else hf_from_own(local.spec)
    return {name: partial(made.of, local.load) for name, made in recipe.items()}


def check_member(directory: Path, known: GlobalManifest, base: Path) -> tuple[MemberManifest, float]:
    """Return the manifest of a member and the norm of its delta; raise Refused with the reason otherwise.

    `known` is the global model at `base` that the member started from.
    """
    member = read_manifest(directory, MemberManifest)
    who = f"the member of {member.site} for round {member.round}"
    if member.base != known.model:
        raise Refused(f"{who} was trained from another model ({member.base[:12]}, not {known.model[:12]})")
    if member.step <= member.first_step:
        raise Refused(f"{who} says that it trained steps {member.first_step} to {member.step}")
    if set(member.files) != {delta_file(name) for name in known.weights}:
        raise Refused(f"{who} does not hold the files of the global model")
    verify_files(directory, member.files)
    total = 0.0
    for name in known.weights:
        weights, delta = SafetensorsReader(base / name), _reader(directory / delta_file(name), who)
        for each, meta in weights.tensors.items():
            _check_tensor(delta, each, meta, member.codec, who)
            for start, stop in chunks(meta):
                values = read_delta(delta, member.codec, each, start, stop).double()
                if member.codec == "fp32":
                    values = weights.read_flat(each, start, stop).double() - values
                square = float(values.square().sum())
                if not math.isfinite(square):
                    raise Refused(f"{who} has NaN or infinity in {each}")
                total += square
    return member, math.sqrt(total)


def _reader(path: Path, who: str) -> SafetensorsReader:
    try:
        return SafetensorsReader(path)
    except UserError as error:
        raise Refused(f"{who}: {error.what}") from None


def _check_tensor(delta: SafetensorsReader, name: str, meta: Tensor, codec: Codec, who: str) -> None:
    for suffix, wanted in planned(meta, codec).items():
        found = delta.tensors.get(name + suffix)
        if found is None or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            shown = "nothing" if found is None else f"{list(found.shape)} of {found.dtype}"
            raise Refused(f"{who} has {shown} for {name}{suffix}, not {list(wanted.shape)} of {wanted.dtype}")
