"""The aggregation alone, on members or on models of any format."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import resolve_checkpoint
from arriero.checkpoint.formats.tensor_files import Advance, no_progress
from arriero.errors import UserError
from arriero.federate.members import (
    GLOBAL,
    MEMBER,
    Contribution,
    GlobalManifest,
    MemberManifest,
    Refused,
    aggregate,
    check_member,
    open_global,
    publish_first_model,
    write_member,
)
from arriero.federate.outer import OuterOptimizer


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
    needs_base = not is_mean or any((path / MEMBER).is_file() for path in models)
    if base is None and needs_base:
        raise UserError("deltas need the model they start from", "give it with --base")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        scratch = Path(name)
        start = _base(base or models[0], scratch, outer)
        parts = [_contribution(path, i, start, scratch) for i, path in enumerate(models)]
        if weights:
            parts = [replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)]
        return aggregate(start, parts, outer, out, advance=advance)


def _base(path: Path, scratch: Path, outer: OuterOptimizer) -> Path:
    if (path / GLOBAL).is_file():
        open_global(path)
        return path
    publish_first_model(open_model(resolve_checkpoint(path)), scratch / "base", outer)
    return scratch / "base"


def _contribution(path: Path, index: int, base: Path, scratch: Path) -> Contribution:
    """Return a member as it is; ship other models in fp32 as their sites would."""
    directory = path
    if not (path / MEMBER).is_file():
        directory = scratch / f"member-{index}"
        # names order the sum, so equal directory names of different models stay apart
        site = f"{path.resolve().as_posix()}"
        about = MemberManifest(site, 0, "", "fp32", 1, 0, 1, {})
        write_member(
            base,
            open_model(resolve_checkpoint(path)),
            directory,
            "fp32",
            lambda model, files, size: replace(about, base=model, files=files, bytes=size),
        )
    try:
        member, _ = check_member(directory, open_global(base, verify=False), base)
    except Refused as error:
        raise UserError(str(error), "leave it out, or make it again") from None
    return Contribution(
        directory, member.site, member.round, member.codec, float(member.tokens), member.tokens, base
    )
