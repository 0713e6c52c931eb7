"""Tensor names of other formats: how a tensor under one naming is made from tensors under another.

A family describes itself in Hugging Face's terms with a `HuggingFaceNames` record.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.model.family import build_model, families, family_of
from arriero.model.spec import ModelSpec

State = Mapping[str, Tensor]


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class TensorRule:
    """One tensor, made from tensors with the names `parts` in the other naming."""

    parts: tuple[str, ...]
    make: Callable[..., Tensor] = unchanged

    def of(self, load: Callable[[str], Tensor]) -> Tensor:
        return self.make(*map(load, self.parts))


NameMap = dict[str, TensorRule]
HF_HEAD = "lm_head.weight"
# keys of config.json that change what a model computes or how it is stored; only a family that writes a key
# has what it asks for
_FOREIGN = ("num_experts", "num_local_experts", "n_routed_experts", "vision_config", "text_config")
_FOREIGN += ("attn_logit_softcapping", "final_logit_softcapping", "quantization_config")


def own_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors of a model on the meta device. A tied head is not listed beside its embedding."""
    with torch.device("meta"):
        state = dict(build_model(spec).state_dict())
    if spec.tied:
        del state["head.weight"]
    return state


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise UserError unless both sets of tensor names are equal."""
    _raise_for(_other_names(set(found), set(wanted)), where)


def check_tensors(found: State, wanted: State, where: str) -> None:
    """Raise UserError with every tensor that is missing, unexpected or of another shape."""
    common = sorted(found.keys() & wanted.keys())
    different = [name for name in common if found[name].shape != wanted[name].shape]
    shapes = [f"{name} is {_shape(found[name])}, not {_shape(wanted[name])}" for name in different]
    _raise_for([*_other_names(set(found), set(wanted)), ("of another shape", shapes)], where)


def _other_names(found: set[str], wanted: set[str]) -> list[tuple[str, list[str]]]:
    return [("missing", sorted(wanted - found)), ("unexpected", sorted(found - wanted))]


def _raise_for(kinds: list[tuple[str, list[str]]], where: str) -> None:
    problems = [f"{len(names)} {word} ({', '.join(names)})" for word, names in kinds if names]
    if problems:
        raise UserError(
            f"the tensors of {where} do not fit the model: {'; '.join(problems)}",
            "check that the weights and the model's dimensions belong together",
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _no_keys(_: ModelSpec) -> dict[str, Any]:
    return {}


def _same_fields(fields: dict[str, Any], _config: Mapping[str, Any], _where: str) -> dict[str, Any]:
    return fields


Reorder = Callable[[ModelSpec, Tensor], Tensor]
# our tensors that are concatenated in one: of equal size, or with their numbers of rows
Fused = Sequence[str] | Mapping[str, int]


def _nothing_fused(_: ModelSpec) -> Mapping[str, Fused]:
    return {}


@dataclass(frozen=True)
class HuggingFaceNames:
    """A family as Hugging Face's config.json and tensor names describe it.

    `fields` maps ModelSpec fields to config keys; `fixed` are config keys for which only this value is
    supported. `tensors` returns the names of tensors outside the blocks and `block` those of modules inside
    one, ours to theirs; `kinds` are the parameters of each module. `fused` maps a name of theirs to those of
    ours that are concatenated in it, `further` returns more names of tensors, ours to theirs. Tensors whose
    name matches `transposed` are stored transposed; `reordered` is a pattern of names, and the functions that
    turn a tensor of ours into theirs and back. `config` returns further config keys, `from_config`
    completes the fields read. `current_name` turns a name that old files use into today's. `peft_prompts`
    says whether PEFT gives prompts to the attention of this model (LLaMA-Adapter).
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    tensors: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]
    kinds: tuple[str, ...] = ("weight",)
    fused: Callable[[ModelSpec], Mapping[str, Fused]] = _nothing_fused
    further: Callable[[ModelSpec], dict[str, str]] = _no_keys
    transposed: str = "$^"
    reordered: tuple[str, Reorder, Reorder] = ("$^", lambda _, x: x, lambda _, x: x)
    config: Callable[[ModelSpec], dict[str, Any]] = _no_keys
    from_config: Callable[[dict[str, Any], Mapping[str, Any], str], dict[str, Any]] = _same_fields
    current_name: Callable[[str], str] = str
    not_weights: str = "$^"
    peft_prompts: bool = False

    def one_to_one(self, spec: ModelSpec) -> dict[str, str]:
        names = {**self.tensors, **self.further(spec)}
        for layer in range(spec.layers):
            for ours, theirs in self.block.items():
                for kind in self.kinds:
                    names[f"blocks.{layer}.{ours}.{kind}"] = f"{self.blocks}.{layer}.{theirs}.{kind}"
        return names if spec.tied else names | {"head.weight": HF_HEAD}

    def conversion(
        self, theirs: str, spec: ModelSpec | None = None, to_ours: bool = False
    ) -> Callable[[Tensor], Tensor]:
        pattern, *both = self.reordered
        if spec is not None and re.search(pattern, theirs):
            return partial(both[to_ours], spec)
        return _transposed if re.search(self.transposed, theirs) else unchanged


def has_hf_names(spec: ModelSpec) -> bool:
    return family_of(spec.family).hf is not None


def _hf(spec: ModelSpec) -> HuggingFaceNames:
    names = family_of(spec.family).hf
    if names is None:
        raise UserError(
            f"the model family '{spec.family}' has no Hugging Face name map",
            "use the format dcp or torch, or give the family `hf` when it is registered",
        )
    return names()


def hf_from_own(spec: ModelSpec) -> NameMap:
    """Map each Hugging Face tensor to ours. A tied head is left out, as Hugging Face stores it once."""
    names = _hf(spec)
    rules = {
        theirs: TensorRule((ours,), names.conversion(theirs, spec))
        for ours, theirs in names.one_to_one(spec).items()
    }
    for theirs, parts in names.fused(spec).items():
        rules[theirs] = TensorRule(tuple(parts), partial(_fuse, names.conversion(theirs)))
    return rules


def own_from_hf(spec: ModelSpec) -> NameMap:
    """Map each tensor of ours to Hugging Face's."""
    names = _hf(spec)
    rules = {
        ours: TensorRule((theirs,), names.conversion(theirs, spec, to_ours=True))
        for ours, theirs in names.one_to_one(spec).items()
    }
    for theirs, parts in names.fused(spec).items():
        rows = list(parts.values()) if isinstance(parts, Mapping) else None
        for i, ours in enumerate(parts):
            rules[ours] = TensorRule(
                (theirs,), partial(_part, names.conversion(theirs), i, rows or len(parts))
            )
    return rules


def to_hf(state: State, spec: ModelSpec) -> dict[str, Tensor]:
    """Convert a whole state dict to Hugging Face's names and layouts."""
    own = [name for name in state if not _is_tied_head(name, spec)]
    check_names(own, own_from_hf(spec), "the model state")
    return {name: rule.of(state.__getitem__) for name, rule in hf_from_own(spec).items()}


def hf_names(names: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Map today's Hugging Face names to those found in files, without entries that are not weights."""
    hf = _hf(spec)
    weights = (n for n in names if not re.search(hf.not_weights, n) and not _is_tied_head(n, spec))
    return {hf.current_name(name): name for name in weights}


def hf_config(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the content of config.json."""
    hf, name = _hf(spec), str(dtype).removeprefix("torch.")
    config = {theirs: getattr(spec, ours) for ours, theirs in hf.fields.items()}
    # transformers before version 5 reads torch_dtype, later versions read dtype
    config |= {"model_type": hf.model_type, "dtype": name, "torch_dtype": name}
    config |= {key: value for key, value in hf.fixed.items() if value is not None}
    config |= {"initializer_range": 0.02, "bos_token_id": None, "eos_token_id": None}
    return config | {"architectures": [hf.architecture]} | hf.config(spec)


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Read the model from config.json. Errors name the file `where` and its own keys."""
    named = {
        hf.model_type: (name, hf) for name, family in families().items() if family.hf and (hf := family.hf())
    }
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in named:
        raise UserError(f"{where}: model_type is {kind!r}", f"only {', '.join(named)} can be read")
    family, hf = named[kind]
    _refuse(
        {key: config.get(key) for key, value in hf.fixed.items() if config.get(key, value) != value}, where
    )
    fields = {"family": family} | {ours: config.get(theirs) for ours, theirs in hf.fields.items()}
    fields = hf.from_config(fields, config, where)
    try:
        spec = ModelSpec.from_dict(fields)
    except UserError as error:
        words = re.sub(r"\w+", lambda word: hf.fields.get(word[0], word[0]), error.what)
        raise UserError(f"{where}: {words}", "correct it, or copy or download it again") from None
    written = hf_config(spec)
    _refuse({key: config[key] for key in _FOREIGN if config.get(key) and key not in written}, where)
    return spec


def _refuse(asked: Mapping[str, Any], where: str) -> None:
    if asked:
        what = ", ".join(
            key if isinstance(value, Mapping) else f"{key} = {value!r}" for key, value in asked.items()
        )
        raise UserError(f"{where} asks for {what}", "this variant of the model is not supported")


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied and name in ("head.weight", HF_HEAD)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


def _fuse(make: Callable[[Tensor], Tensor], *parts: Tensor) -> Tensor:
    return make(torch.cat(parts))


def _part(make: Callable[[Tensor], Tensor], which: int, parts: int | list[int], fused: Tensor) -> Tensor:
    whole = make(fused)
    return (whole.chunk(parts) if isinstance(parts, int) else whole.split(parts))[which].clone()
