"""Model families: one record per architecture and the registry that holds them. Imports no torch.

The folders of `arriero.model` are the built-in families. Another family is a `Family` record passed to
`register_model`; nothing outside its own folder needs to know its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from arriero.errors import UserError, nearest

if TYPE_CHECKING:
    from arriero.model.costs import BlockMemory, Mode
    from arriero.model.language_model import LanguageModel
    from arriero.model.name_maps import HuggingFaceNames
    from arriero.model.spec import ModelSpec

# How tensor parallelism splits a module over ranks; arriero.parallel.tensor implements each.
Placement = Literal[
    "sequence parallel",
    "gather sequence",
    "column-wise",
    "row-wise",
    "per head",
    "column-wise groups",
    "own rows",
    "own groups",
    "vocabulary embedding",
    "position embedding",
    "vocabulary head",
]

# The placements of `arriero.model.layers.Block` and of what every LanguageModel has around the blocks.
DECODER_PLACEMENTS: dict[str, Placement] = {
    "embedding": "vocabulary embedding",
    "blocks.*.attention_norm": "sequence parallel",
    "blocks.*.attention": "gather sequence",
    "blocks.*.attention.q": "column-wise",
    "blocks.*.attention.k": "column-wise",
    "blocks.*.attention.v": "column-wise",
    "blocks.*.attention.q_norm": "per head",
    "blocks.*.attention.k_norm": "per head",
    "blocks.*.attention.o": "row-wise",
    "blocks.*.ffn_norm": "sequence parallel",
    "blocks.*.ffn": "gather sequence",
    "blocks.*.ffn.gate": "column-wise",
    "blocks.*.ffn.up": "column-wise",
    "blocks.*.ffn.down": "row-wise",
    "norm": "sequence parallel",
    "head": "vocabulary head",
}


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, without the token embedding and the head, which every family has."""

    block_matmul: int
    block_other: int
    final_norm: int
    other_embeddings: int = 0


def _no_problems(_: Mapping[str, Any]) -> list[str]:
    return []


def _attention_counts(spec: "ModelSpec") -> Mapping[str, int]:
    return {"heads": spec.heads, "kv_heads": spec.kv_heads, "ffn": spec.ffn}


@dataclass(frozen=True)
class Family:
    """One architecture: everything that the rest of the system needs to know about it.

    `build` returns the module and imports torch only when it is called. `defaults` are values of ModelSpec
    fields; `extra` are fields of this family alone with their defaults, set under [model.extra], of which
    those named `*_layers` list numbers of blocks; `options` are the options of attention that may differ from
    their default, such as `sliding_window`. `problems` takes the fields that are known and returns a sentence
    for each contradiction. `placements` maps patterns of module names to how tensor parallelism splits them;
    without them tp must be 1. `hf` and `meta` return the name maps of Hugging Face and of Meta; without them
    these formats are not available. `presets` is a TOML file of named models. `block_shapes` and
    `block_memory` are formulas for the parameters and the memory of a block; without them the module is
    traced, which imports torch. `sequence_flops` returns the FLOPs per token of what mixes tokens in all
    blocks, forward, at an attended length, if not attention. `kinds` returns for each block a model of one
    block like it, if blocks differ. `tp_counts` are the numbers that tensor parallelism divides.
    `whole_sequences` are those that context parallelism divides in a family whose mixers cannot use a ring.
    """

    name: str
    build: Callable[["ModelSpec"], "LanguageModel"]
    count_parameters: Callable[["ModelSpec"], ParameterCounts]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    problems: Callable[[Mapping[str, Any]], list[str]] = _no_problems
    placements: Mapping[str, Placement] = field(default_factory=dict)
    hf: Callable[[], "HuggingFaceNames"] | None = None
    meta: Callable[[], ModuleType] | None = None
    presets: Path | None = None
    block_shapes: Callable[["ModelSpec"], Mapping[str, tuple[int, ...]]] | None = None
    block_memory: "Callable[[ModelSpec, Mode], BlockMemory] | None" = None
    sequence_flops: "Callable[[ModelSpec, float], float] | None" = None
    kinds: "Callable[[ModelSpec], Sequence[ModelSpec]] | None" = None
    tp_counts: "Callable[[ModelSpec], Mapping[str, int]]" = _attention_counts
    whole_sequences: "Callable[[ModelSpec], Mapping[str, int]] | None" = None


def lazily(where: str) -> Callable[[], Any]:
    """Return a function that imports `module` or `module:name`, so that families are known without torch."""
    module, _, name = where.partition(":")
    return lambda: getattr(import_module(module), name) if name else import_module(module)


def built_by(where: str) -> "Callable[[ModelSpec], LanguageModel]":
    """Return a function that builds the class `module:name`."""
    return lambda spec: lazily(where)()(spec)


_registry: dict[str, Family] = {}


def register_model(family: Family) -> None:
    """Make a model family known to this process, for `model.family` in run files and for checkpoints."""
    known = families().setdefault(family.name, family)
    if known is not family:
        raise ValueError(f"there is already a model family named '{family.name}'")


def families() -> dict[str, Family]:
    """Return the registered families by name, the built-in ones first."""
    if not _registry:
        from arriero.model.diffllama.family import DIFFLLAMA
        from arriero.model.gpt2.family import GPT2
        from arriero.model.llama.family import LLAMA
        from arriero.model.mamba.family import BAMBA, MAMBA2
        from arriero.model.mistral.family import MISTRAL
        from arriero.model.qwen.family import QWEN2, QWEN3

        built_in = (LLAMA, GPT2, MISTRAL, QWEN2, QWEN3, DIFFLLAMA, MAMBA2, BAMBA)
        _registry.update({family.name: family for family in built_in})
    return _registry


def family_of(name: str) -> Family:
    """Return a registered family."""
    if name in families():
        return families()[name]
    close = nearest(name, list(families()))
    raise UserError(
        f"there is no model family '{name}'" + (f" (did you mean '{close}'?)" if close else ""),
        f"use {' or '.join(families())}, or register it with arriero.register_model",
    )


def build_model(spec: "ModelSpec") -> "LanguageModel":
    """Build the module of a model on the current device, with weights that `init_weights` must fill."""
    return family_of(spec.family).build(spec)


def meta_names(family: str | None = None) -> ModuleType:
    """Return the name map of Meta's format: that of a family, or of the first family that has one."""
    found = [each for each in families().values() if each.meta and family in (None, each.name)]
    if not found or found[0].meta is None:
        raise UserError(
            f"the model family '{family}' has no name map for Meta's format", "convert to hf, dcp or torch"
        )
    return found[0].meta()
