"""Files of a federation: the global model of a round, a site's member, and the aggregation that joins them.

Both are directories that are published by one rename after everything in them was synced to disk. Each holds
a manifest with the sha256 of every other file and of itself.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor

from arriero.checkpoint.convert import convert
from arriero.checkpoint.formats.model_reader import EXTRA_FILES, ModelReader, WriteOptions
from arriero.checkpoint.formats.tensor_files import (
    Advance,
    SafetensorsReader,
    SafetensorsWriter,
    no_progress,
)
from arriero.errors import UserError
from arriero.federate.outer import (
    CHUNK,
    Codec,
    OuterOptimizer,
    Part,
    chunks,
    cosines,
    encode,
    inner_products,
    outer_step,
    planned,
    pseudo_gradient,
    read_delta,
)
from arriero.files import link_or_copy, publish_file, sha256_of_file, sha256_of_json, staged_directory
from arriero.model.name_maps import has_hf_names, hf_from_own

GLOBAL, MEMBER = "federation.json", "member.json"
FORMAT = 1
OUTER = "outer"
_PARTS_BYTES = 2**28
_SHARDS = WriteOptions(dtype=torch.float32)


class Refused(Exception):
    """A member or global model that must not be used; the text is a sentence for the user."""


class Damaged(Refused):
    """The files are not what was written: the same content may be sent again."""


@dataclass(frozen=True)
class GlobalManifest:
    """The global model before round `round`. `model` identifies its weights, `tokens` counts all rounds."""

    round: int
    tokens: int
    model: str
    weights: tuple[str, ...]
    optimizer: Mapping[str, Any]
    files: Mapping[str, str]
    parent: str | None = None
    members: tuple[Mapping[str, Any], ...] = ()
    cosines: tuple[tuple[float, ...], ...] = ()
    format: int = FORMAT


@dataclass(frozen=True)
class MemberManifest:
    """What a site trained: from `first_step` to `step` of its own run, `tokens` in all, on the model `base`.

    `train_loss` is the last training loss. `eval_before` and `eval_after` are losses on the site's held-out
    data: of the global model that the round began with, and of the site's model at its end.
    """

    site: str
    round: int
    base: str
    codec: Codec
    tokens: int
    first_step: int
    step: int
    files: Mapping[str, str]
    bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokenizer: str | None = None
    train_loss: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    format: int = FORMAT


Manifest = TypeVar("Manifest", GlobalManifest, MemberManifest)


def write_manifest(directory: Path, manifest: GlobalManifest | MemberManifest) -> None:
    content = json.loads(json.dumps(asdict(manifest)))
    name = GLOBAL if isinstance(manifest, GlobalManifest) else MEMBER
    signed = content | {"sha256": sha256_of_json(content)}
    publish_file(directory / name, (json.dumps(signed, indent=1) + "\n").encode())


def read_manifest(directory: Path, kind: type[Manifest]) -> Manifest:
    """Return the manifest of a directory; raise Refused if it is missing or damaged."""
    name = GLOBAL if kind is GlobalManifest else MEMBER
    try:
        content = json.loads((directory / name).read_bytes())
        if content["format"] > FORMAT:
            raise Refused(
                f"{directory} was written by a newer version of Arriero (format {content['format']})"
            )
        if content.pop("sha256") != sha256_of_json(content):
            raise Damaged(f"{directory / name} is damaged: its checksum differs")
        lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
        return kind(**content | lists)
    except FileNotFoundError:
        raise Damaged(f"{directory} has no {name}: it was not completely written") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{directory / name} is damaged ({type(error).__name__})") from None


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


def open_global(directory: Path, verify: bool = True) -> GlobalManifest:
    """Return the manifest of a global model, whose files are verified; raise UserError if it is unusable."""
    try:
        manifest = read_manifest(directory, GlobalManifest)
        if verify:
            verify_files(directory, manifest.files)
    except Refused as error:
        raise UserError(str(error), "copy or transfer the global model again") from None
    return manifest


def publish_first_model(
    source: ModelReader, target: Path, optimizer: OuterOptimizer, advance: Advance = no_progress
) -> GlobalManifest:
    """Write the model before round 0 as a Hugging Face directory in fp32, with its manifest."""
    if not has_hf_names(source.spec):
        raise UserError(
            f"the model family '{source.spec.family}' has no Hugging Face name map, which a federation needs",
            "give the family `hf` when it is registered",
        )
    with staged_directory(target) as making:
        convert(source, making / "model", "hf", _SHARDS, advance)
        for path in list((making / "model").iterdir()):
            path.rename(making / path.name)
        (making / "model").rmdir()
        weights = tuple(sorted(path.name for path in making.glob("model*.safetensors")))
        files = {path.name: sha256_of_file(path) for path in sorted(making.iterdir())}
        manifest = GlobalManifest(0, 0, model_hash(files, weights), weights, asdict(optimizer), files)
        write_manifest(making, manifest)
    return manifest


def model_hash(files: Mapping[str, str], weights: Sequence[str]) -> str:
    return sha256_of_json({name: files[name] for name in weights})


def write_member(
    base: Path,
    local: ModelReader,
    target: Path,
    codec: Codec,
    describe: Callable[[str, Mapping[str, str], int], MemberManifest],
    advance: Advance = no_progress,
) -> MemberManifest:
    """Publish what a site ships, one tensor at a time.

    `describe` makes the manifest of the base model's hash, the files' checksums and their bytes.
    """
    known, recipe = open_global(base, verify=False), hf_from_own(local.spec)
    files: dict[str, str] = {}
    with staged_directory(target) as making:
        for name in known.weights:
            reader = SafetensorsReader(base / name)
            _check_names(recipe, reader, name, local)
            layout = {
                each + suffix: tensor
                for each, meta in reader.tensors.items()
                for suffix, tensor in planned(meta, codec).items()
            }
            made = delta_file(name)
            with SafetensorsWriter(making / made, layout) as file:
                for each in reader.tensors:
                    tensor = recipe[each].of(local.load)
                    for part in encode(reader.read(each), tensor, codec).values():
                        file.write(part)
                    advance(tensor.nbytes)
            files[made] = file.sha256
        size = sum(path.stat().st_size for path in making.iterdir())
        manifest = describe(known.model, files, size)
        write_manifest(making, manifest)
    return manifest


def delta_file(weights: str) -> str:
    return f"delta{weights.removeprefix('model')}"


def _check_names(recipe: Mapping[str, Any], reader: SafetensorsReader, name: str, local: ModelReader) -> None:
    if unknown := reader.tensors.keys() - recipe.keys():
        raise UserError(
            f"{local.where} has no {min(unknown)}, which the global model has in {name}",
            "a member must be a model of the same dimensions",
        )


def check_member(directory: Path, known: GlobalManifest, base: Path) -> tuple[MemberManifest, float]:
    """Return the manifest of a member and the norm of its delta; raise Refused with the reason otherwise.

    `known` is the global model at `base` that the member started from.
    """
    member = read_manifest(directory, MemberManifest)
    who = f"the member of {member.site} for round {member.round}"
    if member.base != known.model:
        raise Refused(f"{who} was trained from another model ({member.base[:12]}, not {known.model[:12]})")
    if member.tokens <= 0 or member.step <= member.first_step:
        raise Refused(f"{who} says that it trained {member.tokens} tokens")
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


@dataclass(frozen=True)
class Contribution:
    """A member that takes part in an aggregation: its directory and its weight."""

    directory: Path
    site: str
    round: int
    codec: Codec
    weight: float
    tokens: int
    base: Path


def aggregate(
    base: Path,
    contributions: Sequence[Contribution],
    optimizer: OuterOptimizer,
    target: Path,
    total: float | None = None,
    advance: Advance = no_progress,
) -> GlobalManifest:
    """Publish the next global model, read and written in parts of 262,144 elements by a few threads.

    Members are summed in the order of site and round, so the result does not depend on the order in which
    they are given. `total` is the weight of a full round, the sum of the members' weights if not given.
    """
    known = open_global(base, verify=False)
    ordered = sorted(contributions, key=lambda each: (each.site, each.round))
    total = math.fsum(each.weight for each in ordered) if total is None else total
    products = torch.zeros(len(ordered), len(ordered), dtype=torch.float64)
    files = dict(known.files)
    with staged_directory(target) as making:
        for name in known.files:
            if Path(name).name in EXTRA_FILES or name.endswith(".json"):
                link_or_copy(base / name, making / name, "copy")
        for name in known.weights:
            files |= _aggregate_file(base, making, name, ordered, optimizer, total, products, advance)
        stale = {each for each in files if each.startswith(f"{OUTER}/")} - _state_files(known, optimizer)
        files = {each: digest for each, digest in files.items() if each not in stale}
        manifest = GlobalManifest(
            round=known.round + 1,
            tokens=known.tokens + sum(each.tokens for each in ordered),
            model=model_hash(files, known.weights),
            weights=known.weights,
            optimizer=asdict(optimizer),
            files=files,
            parent=known.model,
            members=tuple(
                {"site": each.site, "round": each.round, "weight": each.weight, "norm": norm}
                for each, norm in zip(ordered, products.diagonal().sqrt().tolist(), strict=True)
            ),
            cosines=tuple(map(tuple, cosines(products))),
        )
        write_manifest(making, manifest)
    return manifest


def _state_files(known: GlobalManifest, optimizer: OuterOptimizer) -> set[str]:
    return {f"{OUTER}/{kind}/{name}" for kind in optimizer.state_names for name in known.weights}


def _aggregate_file(
    base: Path,
    making: Path,
    name: str,
    members: Sequence[Contribution],
    optimizer: OuterOptimizer,
    total: float,
    products: Tensor,
    advance: Advance,
) -> dict[str, str]:
    """Write one file of weights and its outer state; return the checksums."""
    weights = SafetensorsReader(base / name)
    deltas = [SafetensorsReader(each.directory / delta_file(name)) for each in members]
    # a late member is a delta from an older model; its exact weights are compared with that one
    bases = [weights if each.base == base else SafetensorsReader(each.base / name) for each in members]
    kept = {kind: base / OUTER / kind / name for kind in optimizer.state_names}
    state = {kind: SafetensorsReader(path) for kind, path in kept.items() if path.is_file()}
    with ExitStack() as stack:

        def opened(path: Path) -> SafetensorsWriter:
            path.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(SafetensorsWriter(path, weights.tensors))

        made = {name: opened(making / name)}
        made |= {
            f"{OUTER}/{kind}/{name}": opened(making / OUTER / kind / name) for kind in optimizer.state_names
        }

        def compute(place: tuple[str, int, int]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            current = weights.read_flat(*place)
            parts = [
                _part(member, delta, own, weights, *place)
                for member, delta, own in zip(members, deltas, bases, strict=True)
            ]
            before = {kind: reader.read_flat(*place) for kind, reader in state.items()}
            gradient = pseudo_gradient(current, parts, total)
            return *outer_step(current, gradient, before, optimizer), inner_products(current, parts)

        places = [(each, *bounds) for each, meta in weights.tensors.items() for bounds in chunks(meta)]
        for new, after, product in _in_order(compute, places, len(members)):
            products += product
            made[name].write(new)
            for kind, values in after.items():
                made[f"{OUTER}/{kind}/{name}"].write(values)
            advance(new.nbytes)
    return {path: writer.sha256 for path, writer in made.items()}


def _in_order(work: Callable[[Any], Any], items: Sequence[Any], members: int) -> Iterator[Any]:
    """Apply `work` by threads, a few items ahead; yield the results in order.

    Their number is such that the parts in memory stay below a gigabyte.
    """
    threads = max(1, min(8, os.cpu_count() or 1, _PARTS_BYTES // (8 * CHUNK * (members + 8))))
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Any] = deque()
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _part(
    member: Contribution,
    delta: SafetensorsReader,
    own_base: SafetensorsReader,
    weights: SafetensorsReader,
    name: str,
    start: int,
    stop: int,
) -> Part:
    values = read_delta(delta, member.codec, name, start, stop)
    if member.codec != "fp32" or own_base is weights:
        return Part(member.weight, values, member.codec == "fp32")
    return Part(member.weight, own_base.read_flat(name, start, stop) - values)
