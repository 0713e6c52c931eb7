"""How tensors under one naming are made of those under another: exactly, and one at a time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.model.build import build_model
from arriero.model.spec import ModelSpec


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Made:
    """One tensor, made of `parts` that bear the other naming's names."""

    parts: tuple[str, ...]
    make: Callable[..., Tensor] = as_it_is

    def of(self, load: Callable[[str], Tensor]) -> Tensor:
        return self.make(*map(load, self.parts))


Recipe = Mapping[str, Made]


def own_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Our names with their shapes, on meta. A tied head is the embedding and not named twice."""
    with torch.device("meta"):
        state = dict(build_model(spec).state_dict())
    if spec.tied:
        del state["head.weight"]
    return state


def refuse_other_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    _refuse(_other_names(set(found), set(wanted)), where)


def refuse_misfit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """By name and by shape, everything at once."""
    common = sorted(found.keys() & wanted.keys())
    odd = [n for n in common if found[n].shape != wanted[n].shape]
    shapes = [f"{n} is {_shape(found[n])}, not {_shape(wanted[n])}" for n in odd]
    _refuse([*_other_names(set(found), set(wanted)), ("of another shape", shapes)], where)


def _other_names(found: set[str], wanted: set[str]) -> list[tuple[str, list[str]]]:
    return [("missing", sorted(wanted - found)), ("unexpected", sorted(found - wanted))]


def _refuse(kinds: list[tuple[str, list[str]]], where: str) -> None:
    problems = [f"{len(names)} {word} ({', '.join(names)})" for word, names in kinds if names]
    if problems:
        raise UserError(
            f"the tensors of {where} do not fit the model: {'; '.join(problems)}",
            "check that the weights and the model's shape belong together",
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
