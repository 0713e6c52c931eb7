"""The aggregation of members or models into the next global model, in parts, by a few threads."""

import math
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import resolve_checkpoint
from arriero.checkpoint.formats.model_reader import EXTRA_FILES
from arriero.checkpoint.formats.peft_directory import CONFIG
from arriero.checkpoint.formats.tensor_files import SafetensorsReader, SafetensorsWriter
from arriero.errors import UserError
from arriero.federate.members import (
    OUTER,
    GlobalManifest,
    MemberManifest,
    Refused,
    Share,
    check_member,
    delta_file,
    model_hash,
    open_global,
    publish_first_model,
    write_manifest,
    write_member,
)
from arriero.federate.outer import (
    CHUNK,
    OuterOptimizer,
    Part,
    chunks,
    cosines,
    inner_products,
    outer_step,
    pseudo_gradient,
    read_delta,
)
from arriero.federate.schema import Codec
from arriero.files import Advance, link_or_copy, no_progress, sha256_of_file, staged_directory
from arriero.model.description import read_json

_PARTS_BYTES = 2**28
_BASE_NAME = "base_model_name_or_path"


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
            optimizer=optimizer,
            files=files,
            parent=known.model,
            members=tuple(
                Share(site=each.site, round=each.round, weight=each.weight, norm=norm)
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


def aggregate_models(
    models: Sequence[Path],
    out: Path,
    base: Path | None,
    weights: Sequence[float] | None,
    optimizer: dict[str, Any],
    advance: Advance = no_progress,
) -> GlobalManifest:
    """Write the next global model from members or models. Without a base, the first model is the base.

    With FedAvg and learning rate 1 the base has no effect.
    """
    if weights and len(weights) != len(models):
        raise UserError(f"{len(weights)} weights for {len(models)} models", "give one weight per model")
    if weights and (min(weights) < 0 or sum(weights) <= 0):
        raise UserError(f"the weights {weights} have no mean", "give positive numbers")
    outer = OuterOptimizer(**optimizer)
    is_mean = outer.name == "fedavg" and outer.lr == 1
    needs_base = not is_mean or any((path / MemberManifest.FILE).is_file() for path in models)
    if base is None and needs_base:
        raise UserError("deltas need the model they start from", "give it with --base")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        scratch = Path(name)
        _check_adapters([each for each in (base, *models) if each is not None])
        start = _base(base or models[0], scratch, outer)
        parts = [_contribution(path, i, start, scratch) for i, path in enumerate(models)]
        if weights:
            parts = [replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)]
        return aggregate(start, parts, outer, out, advance=advance)


def _check_adapters(paths: Sequence[Path]) -> None:
    """Reject adapters beside whole models, and adapters that differ in scale or in their base model."""
    configs = {path: read_json(path / CONFIG) for path in paths if (path / CONFIG).is_file()}
    wholes = [path for path in paths if path not in configs and not (path / MemberManifest.FILE).is_file()]
    if configs and wholes:
        raise UserError(f"{next(iter(configs))} is an adapter, and {wholes[0]} is a model", "give one kind")
    first: tuple[Path, Any] | None = None
    for path, config in configs.items():
        base = _base_digest(path, config.get(_BASE_NAME))
        about = {**config, _BASE_NAME: base}
        first = first or (path, about)
        if about != first[1]:
            raise UserError(
                f"{first[0]} and {path} differ in their settings or base model",
                "give adapters of one base model",
            )


def _base_digest(adapter: Path, base: str | None) -> str | None:
    """Return the checksum of the weights that an adapter belongs to; its name if it is not a directory."""
    places = [each for each in (Path(base or ""), adapter / (base or "")) if base and each.is_dir()]
    if not places:
        return base
    weights = sorted(path for path in places[0].iterdir() if path.suffix in (".safetensors", ".pth", ".bin"))
    return model_hash({path.name: sha256_of_file(path) for path in weights}, [path.name for path in weights])


def _base(path: Path, scratch: Path, outer: OuterOptimizer) -> Path:
    if (path / GlobalManifest.FILE).is_file():
        open_global(path)
        return path
    publish_first_model(open_model(resolve_checkpoint(path)), scratch / "base", outer)
    return scratch / "base"


def _contribution(path: Path, index: int, base: Path, scratch: Path) -> Contribution:
    """Return a member as it is; ship other models in fp32 as their sites would."""
    directory = path
    if not (path / MemberManifest.FILE).is_file():
        directory = scratch / f"member-{index}"
        # names order the sum, so equal directory names of different models stay apart
        site = f"{path.resolve().as_posix()}"
        about = {"site": site, "round": 0, "tokens": 1, "first_step": 0, "step": 1}
        write_member(base, open_model(resolve_checkpoint(path)), directory, "fp32", **about)
    try:
        member, _ = check_member(directory, open_global(base, verify=False), base)
    except Refused as error:
        raise UserError(str(error), "leave it out, or make it again") from None
    return Contribution(
        directory, member.site, member.round, member.codec, float(member.tokens), member.tokens, base
    )
