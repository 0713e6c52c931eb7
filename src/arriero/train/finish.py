"""The end of a run: export the model, sample text from it, recognise a run that has already ended.

All ranks send their parts of the model to rank 0, which writes it, one tensor at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.checkpoint.convert import open_model, read_model
from arriero.checkpoint.directory import find_checkpoints
from arriero.checkpoint.formats.hf_directory import set_bos_template, write_hf
from arriero.checkpoint.formats.model_reader import (
    DEFAULT_OPTIONS,
    Adapter,
    ModelReader,
    WriteOptions,
    copy_extra_files,
)
from arriero.checkpoint.formats.peft_directory import CONFIG as PEFT_CONFIG
from arriero.checkpoint.formats.peft_directory import check_peft_names, with_adapter, write_peft
from arriero.checkpoint.formats.tensor_files import write_safetensors
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import LocalPart, local_parts
from arriero.config.fields import to_toml
from arriero.config.schema import RunConfig
from arriero.config.timeline import total_steps
from arriero.data.order.ledger import LEDGER, read_ledger
from arriero.data.tokens.tokenizer import Separators, Tokenizer, chat_template_beside, read_definition
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, end_of, events_since
from arriero.files import check_free_space, replaced_directory
from arriero.model.description import write_json
from arriero.model.family import build_model
from arriero.model.generation import Sampling, generate
from arriero.model.language_model import LanguageModel
from arriero.model.name_maps import has_hf_names, hf_from_own, own_tensors
from arriero.model.quantized import PACKED, quantize_layers, unpack
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import INSIDE, STORED, speculator_config, speculator_shapes
from arriero.plan.hardware import available_ram
from arriero.plan.resolve import Decision
from arriero.train.model_state import adapter_settings
from arriero.train.rundir import run_directory, starts_over
from arriero.train.saving import Outcome, read_state
from arriero.train.session import Session

StopRequested = Callable[[], bool]
Location = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a part
_CONTINUE, _STOP, _FAILED = range(3)
_MAX_DIMS = 4
MODEL, ADAPTER = "model", "adapter"
TRAINING = "training.json"
_EXPORT_AGAIN = "free some space; the same command, or `arriero ckpt convert` of a checkpoint, exports again"
_TOP_K, _TEMPERATURE, _SAMPLED_TOKENS = 40, 0.7, 96


def check_export(
    config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, separators: Separators
) -> list[Decision]:
    """Reject before the first step what would make the export fail after the last."""
    if not config.checkpoint.export:
        return []
    run_dir, adapter, speculator = run_directory(config), adapter_settings(config), config.speculator
    if not (speculator.n_predict or has_hf_names(spec)):
        raise UserError(
            f"the model family '{spec.family}' has no Hugging Face name map, which the export needs",
            "set checkpoint.export = false, or give the family `hf` when it is registered",
        )
    if adapter is not None and not adapter.merges:
        why = check_peft_names(spec, own_tensors(spec), adapter)
        if why is not None:
            what = f"{adapter.label} cannot be exported as a PEFT directory: {why}"
            raise UserError(what, "set checkpoint.export = false; checkpoints hold the adapter")
    sizes = {MODEL: spec.parameters}
    if speculator.n_predict:
        sizes = {MODEL: sum(math.prod(shape) for shape in speculator_shapes(speculator, spec).values())}
    elif adapter is not None:
        small = {ADAPTER: sum(each.numel() for each in adapter.tensors(own_tensors(spec)).values())}
        sizes = sizes | small if adapter.merges else small
    for name in sizes:
        if (run_dir / name).exists() and not (run_dir / name).is_dir():
            raise UserError(f"{run_dir / name} is in the way of the exported model", "move it away")
    size = _master_dtype(config).itemsize * sum(sizes.values())
    check_free_space(run_dir, size, "the model", "free some space, or set checkpoint.export = false")
    if speculator.n_predict:
        return [Decision("export", str(run_dir / MODEL), "the speculator, as vLLM reads it")]
    set_bos_template(read_definition(tokenizer.path), separators.bos.id if separators.bos else None)
    reason = f"{separators}, as in the data"
    if spec.dim % spec.heads:
        reason += f"; transformers cannot load it: dim {spec.dim} is not a multiple of heads {spec.heads}"
    return [Decision("export", str(run_dir / exported_name(config)), reason)]


def export_model(session: Session, stop: StopRequested = lambda: False) -> Path | None:
    """Write the master weights and the tokenizer as a Hugging Face directory. Called by all ranks together.

    `stop` is asked before each tensor; if it is true on any rank, nothing is published.
    """
    if session.config.speculator.n_predict:
        return _export_speculator(session, stop)
    world, directory, data = session.mesh.world, session.run_dir / MODEL, session.data
    # not the process group of checkpoints: a thread may still be saving the last one
    ranks = Ranks(world.rank, world.size)
    tensors = {name: t.to(_master_dtype(session.config)) for name, t in own_tensors(session.spec).items()}
    adapter = adapter_settings(session.config)
    adapters = adapter.tensors(tensors) if adapter is not None else {}
    packed = _packed_tensors(session.spec, session.config.precision.base_weights)
    gather = Gather(tensors | adapters | packed, session.model.tensors(), ranks, stop)
    source = ModelReader(
        "memory",
        "the model",
        session.spec,
        tensors,
        gather.weight,
        tokenizer_files(data.tokenizer.path),
        data.separators.token_ids(),
    )
    if adapter is not None:
        base = session.config.checkpoint.start_from
        source = with_adapter(source, Adapter(adapter, adapters, gather.tensor, base))
        exported = _export_adapter(source, gather, session.run_dir / ADAPTER)
        if not exported or not adapter.merges:
            return session.run_dir / ADAPTER if exported else None
    about = training_record(session) if world.is_leader else None
    return directory if export_hf(source, gather, directory, about=about) else None


def training_record(session: Session) -> dict[str, Any]:
    """Return what a model directory tells about its training: for `data trace` and the model card."""
    outcome, config, stream = session.record.outcome, session.config, session.data.stream
    samples = session.timeline.samples_after(outcome.steps)
    ledger = read_ledger(session.run_dir).skipped if (session.run_dir / LEDGER).is_file() else []
    data = {"samples": samples, "skipped": sorted({*session.guard.skipped, *ledger})}
    data |= {"order": stream.identity_until(samples), "names": [each.name for each in stream.sources]}
    reached = {key: getattr(outcome, key) for key in ("tokens", "seconds", "last_loss", "last_eval_loss")}
    about = {"run": config.run.name, "step": outcome.steps, **reached, **session.describe()}
    return about | {"data": data | {"fingerprint": about["data"]}, "config": to_toml(config)}


def _packed_tensors(spec: ModelSpec, base_weights: str) -> dict[str, Tensor]:
    """Return the quantised weights of a model on the meta device."""
    if base_weights not in ("int8", "nf4"):
        return {}
    with torch.device("meta"):
        model = build_model(spec)
    quantize_layers(model.blocks, base_weights)
    return {name: each for name, each in model.named_parameters() if name.endswith(PACKED)}


def _export_adapter(source: ModelReader, gather: "Gather", directory: Path) -> bool:
    """Write the adapter alone as a PEFT directory, where PEFT has names for all of its layers."""
    adapter = source.adapter
    assert adapter is not None
    if check_peft_names(source.spec, source.tensors, adapter.settings) is not None:
        return True

    def write() -> None:
        held = {name: gather.tensor(name) for name in adapter.tensors}
        if gather.ranks.is_leader:
            with replaced_directory(directory) as making:
                whole = replace(source, adapter=replace(adapter, load=held.__getitem__))
                write_peft(whole, making, DEFAULT_OPTIONS)
                copy_extra_files(source, making)

    return _written(write, gather, directory)


def _export_speculator(session: Session, stop: StopRequested) -> Path | None:
    """Write the speculator alone, as vLLM reads it."""
    section, spec, directory = session.config.speculator, session.spec, session.run_dir / MODEL
    dtype = _master_dtype(session.config)
    shapes = speculator_shapes(section, spec)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    gather = Gather(
        tensors, session.model.tensors(), Ranks(session.mesh.world.rank, session.mesh.world.size), stop
    )
    base = (session.model.base or {}).get("path", "")
    config = speculator_config(section, spec, str(dtype).removeprefix("torch."), base)

    def write() -> None:
        held = {STORED + name.removeprefix(INSIDE): gather.tensor(name) for name in tensors}
        if gather.ranks.is_leader:
            with replaced_directory(directory) as making:
                write_safetensors(making / "model.safetensors", held, held.__getitem__)
                write_json(making / "config.json", config)

    return directory if _written(write, gather, directory) else None


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the tokenizer of a dataset and the chat template beside it, if there is one."""
    return {"tokenizer.json": path} | {each.name: each for each in chat_template_beside(path)}


def exported_name(config: RunConfig) -> str:
    """Return the name of the directory that a run exports last."""
    adapter = adapter_settings(config)
    return MODEL if adapter is None or adapter.merges else ADAPTER


def _master_dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision.master == "bf16" else torch.float32


def export_hf(
    source: ModelReader,
    gather: "Gather",
    directory: Path,
    writing: WriteOptions = DEFAULT_OPTIONS,
    about: Mapping[str, Any] | None = None,
) -> bool:
    """Write a Hugging Face directory on rank 0 while all ranks send it their parts.

    Called by all ranks; `source.load` must be `gather.weight`. Returns False if a rank asked to stop. `about`
    becomes training.json.
    """

    def write() -> None:
        if gather.ranks.is_leader:
            with replaced_directory(directory) as making:
                check_free_space(making, source.nbytes(writing.dtype), "the model", _EXPORT_AGAIN)
                write_hf(source, making, writing)
                if about is not None:
                    write_json(making / TRAINING, about)
        else:
            for made in hf_from_own(source.spec).values():
                for name in made.parts:
                    source.load(name)

    return _written(write, gather, directory)


def _written(write: Callable[[], None], gather: "Gather", directory: Path) -> bool:
    """Call `write` on all ranks. Returns False if one asked to stop; an error of rank 0 is raised on all."""
    try:
        try:
            write()
        except OSError as error:
            raise UserError(f"the model cannot be written to {directory} ({error})", _EXPORT_AGAIN) from None
        gather.end()
    except _Stopped:
        return False
    except Exception as error:
        if gather.ranks.is_leader:
            gather.fail(error)
        raise
    return True


class _Stopped(Exception):
    """A rank was asked to stop."""


class Gather:
    """Assembles sharded tensors on rank 0, one at a time. All ranks make the same calls.

    `tensors` has their shapes and dtypes, `local` what this rank holds of them. Messages go from CPU to CPU,
    so that the export needs no device memory. `stop` is asked before each tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        local: Mapping[str, Tensor],
        ranks: Ranks,
        stop: StopRequested = lambda: False,
    ) -> None:
        self._tensors, self._parts = tensors, local_parts(local)
        self.ranks, self._stop = ranks, stop

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor on rank 0, an empty one elsewhere."""
        expected, part = self._tensors[name], self._parts.get(name)
        locations = self._agree(_STOP if self._stop() else _CONTINUE, part)
        # of ranks that hold the same part, the first one sends it
        senders = {place: rank for rank, place in reversed(list(enumerate(locations))) if place is not None}
        sends = self.ranks.rank in senders.values()
        local = part.local.detach().to("cpu", expected.dtype) if part is not None and sends else expected
        if not self.ranks.is_leader:
            if sends:
                dist.send(local.contiguous(), dst=0, group=self.ranks.group)
            return torch.empty(0)
        found = sum(math.prod(shape) for _, shape in senders)
        assert found == expected.numel(), f"parts of {name} are missing"
        if local.shape == expected.shape and sends:
            return local
        whole = torch.empty(expected.shape, dtype=expected.dtype)
        for (offset, shape), rank in sorted(senders.items(), key=lambda item: item[1]):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            if rank == 0:
                part.copy_(local)
            elif part.is_contiguous():
                dist.recv(part, src=rank, group=self.ranks.group)
            else:
                buffer = torch.empty(shape, dtype=expected.dtype)
                dist.recv(buffer, src=rank, group=self.ranks.group)
                part.copy_(buffer)
        return whole

    def weight(self, name: str) -> Tensor:
        """Return a weight of the model like `tensor`; a quantised one is dequantised."""
        packed = name.removesuffix(".weight") + PACKED
        if packed not in self._tensors:
            return self.tensor(name)
        found = self.tensor(packed)
        return unpack(found, self._tensors[name].shape[1]) if self.ranks.is_leader else found

    def end(self) -> None:
        """Wait until rank 0 has published the model."""
        self._agree(_CONTINUE, None)

    def fail(self, error: Exception) -> None:
        """Raise rank 0's error on all ranks: called by rank 0 while the others are in their next call."""
        if self.ranks.size > 1:
            self._exchange(_FAILED, None)
            self.ranks.on_leader(partial(_raise, error))

    def _agree(self, status: int, part: LocalPart | None) -> list[Location | None]:
        """Return where each rank's part lies; end the export on all ranks if one of them asks for it."""
        statuses, locations = self._exchange(status, part)
        if _FAILED in statuses:
            self.ranks.on_leader(lambda: None)
        if _STOP in statuses:
            raise _Stopped
        return locations

    def _exchange(self, status: int, part: LocalPart | None) -> tuple[list[int], list[Location | None]]:
        location = None
        if part is not None and part.local.numel():
            location = tuple(part.offset), tuple(part.local.shape)
        if self.ranks.size == 1:
            return [status], [location]
        everyones = torch.zeros(self.ranks.size, 2 + 2 * _MAX_DIMS, dtype=torch.int64)
        mine = [status, len(location[0]), *location[0], *location[1]] if location else [status]
        message = torch.tensor(mine + [0] * (everyones.shape[1] - len(mine)))
        dist.all_gather(list(everyones.unbind()), message, group=self.ranks.group)
        locations: list[Location | None] = []
        for _, dims, *numbers in everyones.tolist():
            at = tuple(numbers[:dims]), tuple(numbers[dims : 2 * dims])
            locations.append(at if dims else None)
        return everyones[:, 0].tolist(), locations


def _raise(error: Exception) -> None:
    raise error


def outcome_if_ended(config: RunConfig) -> Outcome | None:
    """Return the result of a run that is at its end and has its model, without building anything.

    A run that was never saved is recognised by its last event.
    """
    run_dir = run_directory(config)
    name = exported_name(config)
    file = "config.json" if name == MODEL else PEFT_CONFIG
    if starts_over(config) or not (run_dir / name / file).is_file():
        return None
    usable = [saved for saved in find_checkpoints(run_dir) if saved.problem is None]
    try:
        outcome = Outcome.from_state(read_state(usable[-1].directory)) if usable else _ended_unsaved(run_dir)
    except (OSError, ValueError, KeyError):
        return None
    if outcome is None:
        return None
    steps = total_steps(config)
    if steps is None:
        return outcome if outcome.seconds >= config.train.horizon.amount else None
    return outcome if outcome.steps >= steps else None


def _ended_unsaved(run_dir: Path) -> Outcome | None:
    end, history = end_of(run_dir), events_since(run_dir / EVENTS, START_OVER)
    is_saved = any(event["event"] == "save" for event in history)
    return Outcome.from_state(end) if end is not None and not is_saved else None


def sample(session: Session, directory: Path | None) -> str | None:
    """Continue the prompt of observe.sample on rank 0.

    A single process uses its own model; with several ranks the exported model is read if it fits into RAM.
    """
    config = session.config
    if config.observe.sample is False or config.speculator.n_predict or not session.mesh.world.is_leader:
        return None
    model = session.model.parts[0]
    if session.mesh.world.size > 1:
        # the weights as read, and the model they are copied to
        if directory is None or 2 * 4 * session.spec.parameters > available_ram():
            return None
        model = read_model(open_model(directory), "cpu")
    # compiled code would be compiled again for every length of the text
    with torch.compiler.set_stance("force_eager"):
        return continue_text(
            model,
            session.data.tokenizer,
            session.data.separators,
            config.observe.sample,
            _SAMPLED_TOKENS,
            config.run.seed,
        )


def continue_text(
    model: LanguageModel, tokenizer: Tokenizer, separators: Separators, text: str, tokens: int, seed: int
) -> str:
    """Sample (top-k 40, temperature 0.7) until the end of a document or `tokens` tokens."""
    prompt = separators.prompt(tokenizer.encode(text)) or [tokenizer.eos_id]
    # the end of a prompt that fills the context
    prompt = prompt[-max(1, model.spec.max_seq_len - model.offset - tokens) :]
    stop = () if separators.eos is None else (separators.eos.id,)
    steps = generate(model, [prompt], tokens, Sampling(_TEMPERATURE, _TOP_K, seed=seed), stop)
    return tokenizer.decode([token for step in steps for token in step if token is not None])
