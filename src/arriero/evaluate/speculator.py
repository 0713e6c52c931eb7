"""Speculators: the model's own continuations as training data, and the acceptance length of a speculator."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from arriero.checkpoint.convert import find_model, read_model
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.config.schema import SpeculatorSection
from arriero.data.dataset import Dataset
from arriero.data.order.shuffle import HELDOUT_SEED
from arriero.data.prepare.builtin import dataset_of
from arriero.data.store.loss_mask import attach_prompt_lengths
from arriero.data.store.manifest import MANIFEST, write_manifest
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.data.tokens.prompts import find_tokenizer
from arriero.data.tokens.tokenizer import read_definition, separators_of
from arriero.errors import UserError
from arriero.files import publish_file, staged_directory
from arriero.model.description import read_json
from arriero.model.generation import Sampling, generate
from arriero.model.language_model import LanguageModel
from arriero.model.name_maps import check_tensors
from arriero.model.speculator.module import Speculator
from arriero.model.speculator.settings import INSIDE, STORED, speculator_shapes

_CONFIG = "config.json"


@dataclass(frozen=True)
class Prompts:
    """Beginnings of documents: `tokens` tokens of up to `count` documents of a dataset or of text."""

    data: str
    count: int
    tokens: int
    tokenizer: Path | None = None
    cache: str = "data"

    def open(self, base: ModelReader) -> tuple[Dataset, list[list[int]]]:
        """Return the dataset, which is prepared with the base model's tokenizer if it is text."""
        is_prepared = (Path(self.data) / MANIFEST).is_file()
        tokenizer = None
        if not is_prepared and not self.data.startswith("builtin:"):
            tokenizer = str(find_tokenizer(base.extra_files, self.tokenizer, base.where))
        dataset = Dataset(dataset_of(self.data, tokenizer, cache=Path(self.cache)))
        if dataset.store.vocab_size > base.spec.vocab_size:
            what = f"{self.data} has token ids up to {dataset.store.vocab_size - 1}"
            raise UserError(f"{what}, and the model {base.spec.vocab_size}", "give data of its tokenizer")
        found: list[list[int]] = []
        for document in dataset:
            # a document that is a prompt and nothing else would end there
            if len(document) > self.tokens and len(found) < self.count:
                found.append(document[: self.tokens].tolist())
            if len(found) == self.count:
                break
        if not found:
            what = f"no document of {self.data} has more than {self.tokens} tokens"
            raise UserError(what, "lower --prompt-tokens")
        return dataset, found


def _ends(dataset: Dataset) -> set[int]:
    eos = separators_of(dataset.store).eos
    return {eos.id} if eos else set()


def continuations(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    most: int,
    sampling: Sampling,
    stop: set[int],
    batch: int,
) -> Iterator[list[int]]:
    """Yield the tokens that the model generates after each prompt."""
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        steps = list(generate(model, rows, most, replace(sampling, seed=sampling.seed + first), stop))
        for row in zip(*steps, strict=True):
            yield [token for token in row if token is not None]


def write_generations(
    model: str,
    prompts: Prompts,
    output: Path,
    most: int,
    sampling: Sampling,
    batch: int,
    device: torch.device,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write a dataset of the model's continuations of prompts; the prompts are excluded from the loss."""
    base = find_model(model)
    dataset, given = prompts.open(base)
    stop = _ends(dataset)
    with staged_directory(output) as making:
        loaded = read_model(base, device)
        name = "tokenizer.json"
        publish_file(making / name, read_definition(dataset.tokenizer.path).encode())
        unended = 0
        with ShardWriter(making, "00000", dataset.store.vocab_size) as writer:
            # rows of the head without a token of the tokenizer end a text too
            beyond = set(range(dataset.store.vocab_size, base.spec.vocab_size))
            made = continuations(loaded, given, most, sampling, stop | beyond, batch)
            for prompt, own in zip(given, made, strict=True):
                own = [token for token in own if token not in beyond]
                writer.add(np.asarray([*prompt, *own], dtype=np.int64))
                unended += not stop.intersection(own[-1:])
                advance(1)
            shard = writer.close()
        about = dict(dataset.store.about) | {
            "source": f"generated by {model} from {prompts.data}",
            "documents_without_eos": unended,
            HELDOUT_SEED: sampling.seed,
        }
        write_manifest(
            making,
            [shard],
            tokenizer=name,
            vocab_size=dataset.store.vocab_size,
            eos_id=dataset.tokenizer.eos_id,
            dtype=dtype_for(dataset.store.vocab_size),
            about=about,
        )
        attach_prompt_lengths(making, [[len(prompt) for prompt in given]])
    return {"dataset": str(output), "documents": len(given), "tokens": shard.tokens}


def read_speculator(path: Path, base: str | None) -> tuple[SpeculatorSection, Path, str]:
    """Return the settings of a speculator, its directory, and the base model: given, or as it was trained."""
    directory = path / "model" if (path / "model" / _CONFIG).is_file() else path
    if not (directory / _CONFIG).is_file():
        what = f"{path} holds no speculator"
        raise UserError(what, "give a finished run with [speculator], or its folder model/")
    config = read_json(directory / _CONFIG)
    if config.get("model_type") != "mlp_speculator":
        what = f"{directory / _CONFIG}: model_type is {config.get('model_type')!r}, not 'mlp_speculator'"
        raise UserError(what, "give a finished run with [speculator], or its folder model/")
    fields = {name: config[name] for name in SpeculatorSection.model_fields if name in config}
    try:
        section = SpeculatorSection.model_validate(fields)
    except ValidationError as error:
        raise UserError(f"{directory / _CONFIG}: {error.errors()[0]['msg']}", "copy it again") from None
    base = base or config.get("base_model") or _started_from(path)
    if not base:
        raise UserError(f"{directory / _CONFIG} does not name the base model", "give it with --base")
    return section, directory, base


def _started_from(path: Path) -> str | None:
    file = path / "run.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table.get("checkpoint", {}).get("start_from")


def load_speculator(directory: Path, section: SpeculatorSection, model: LanguageModel) -> Speculator:
    """Read the weights of a speculator of this base model."""
    try:
        stored = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be read ({error})", "copy or train it again") from None
    found = {name.removeprefix(STORED): tensor for name, tensor in stored.items()}
    shapes = speculator_shapes(section, model.spec)
    with torch.device("meta"):
        wanted = {name.removeprefix(INSIDE): torch.empty(shape) for name, shape in shapes.items()}
    check_tensors(found, wanted, str(directory))
    weight = next(model.parameters())
    speculator = Speculator(section, model.spec)
    speculator.load_state_dict(found)
    return speculator.to(weight.device, weight.dtype).eval()


@dataclass
class Acceptance:
    """Greedy speculative decoding: `steps` of the base model, and how many of them accepted each head."""

    steps: int
    accepted: list[int]

    @property
    def length(self) -> float:
        """The tokens per step of the base model: its own, and the proposals that it accepts."""
        return 1 + sum(self.accepted) / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        rates = [count / max(1, self.steps) for count in self.accepted]
        return {"acceptance_length": self.length, "steps": self.steps, "acceptance_by_head": rates}


@torch.no_grad()
def count_accepted(
    model: LanguageModel, speculator: Speculator, prompt: list[int], own: list[int], total: Acceptance
) -> None:
    """Replay greedy speculative decoding of a continuation that the base model generated greedily.

    Accepted proposals are the base model's own tokens, so that one forward pass has all its hidden states.
    """
    tokens = torch.tensor([prompt + own], device=next(model.parameters()).device)
    hidden = model.hidden(tokens[:, :-1])[0, len(prompt) - 1 :]
    # row t: what follows the t-th generated token
    proposals = speculator.propose(hidden, tokens[0, len(prompt) :]).tolist()
    at = 0
    while at < len(own):
        total.steps += 1
        pairs = zip(proposals[at], own[at + 1 :], strict=False)
        right = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        right = min(speculator.count, len(own) - at - 1) if right is None else right
        for head in range(right):
            total.accepted[head] += 1
        at += right + 1


def measure_acceptance(
    path: Path,
    base: str | None,
    prompts: Prompts,
    most: int,
    batch: int,
    device: torch.device,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return the acceptance length of a speculator on greedy continuations of held-out prompts."""
    section, directory, base = read_speculator(path, base)
    source = find_model(base)
    dataset, given = prompts.open(source)
    stop = _ends(dataset)
    model = read_model(source, device)
    speculator = load_speculator(directory, section, model)
    total = Acceptance(0, [0] * speculator.count)
    made = continuations(model, given, most, Sampling(), stop, batch)
    for prompt, own in zip(given, made, strict=True):
        count_accepted(model, speculator, prompt, own, total)
        advance(1)
    facts = {"speculator": str(directory), "base": source.where, "data": prompts.data, "prompts": len(given)}
    return facts | total.to_dict()
