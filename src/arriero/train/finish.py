"""What a finished run leaves behind: the exported model, and a sample of its text."""

import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.checkpoint.convert import flush_to_disk, refuse_full_disk
from arriero.checkpoint.directory import saved_in
from arriero.checkpoint.formats.hf import load_hf, write_hf
from arriero.checkpoint.formats.hf_tokenizer import with_template
from arriero.checkpoint.formats.source import AS_IT_IS, Source, Writing
from arriero.checkpoint.manifest import make_durable
from arriero.checkpoint.pieces import Piece, pieces_of
from arriero.checkpoint.ranks import Ranks
from arriero.config.schema import RunConfig
from arriero.config.timeline import total_steps
from arriero.data.tokens.separators import Separators
from arriero.data.tokens.tokenizer import Tokenizer, read_definition
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, events_since
from arriero.model.build import build_model
from arriero.model.hf_names import hf_from_own
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec
from arriero.train.device import available_ram
from arriero.train.outcome import Outcome
from arriero.train.rundir import run_directory, starts_over
from arriero.train.sample import continue_text
from arriero.train.saving import read_state
from arriero.train.session import Decision, Session

MODEL = "model"
Stop = Callable[[], bool]
Place = tuple[tuple[int, ...], tuple[int, ...]]
_GO, _STOP, _FAILED = range(3)
_DIMS = 4


def never() -> bool:
    return False


def finished_model(session: Session, stop: Stop = never) -> Path | None:
    return export_model(session, stop) if session.config.checkpoint.export else None


def check_export(
    config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, separators: Separators
) -> list[Decision]:
    """Refuse before the first step whatever would make the export fail after the last."""
    if not config.checkpoint.export:
        return []
    directory, size = run_directory(config) / MODEL, spec.parameters * _dtype(config).itemsize
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is in the way of the exported model", "move it away")
    refuse_full_disk(directory, size, "make room, or set checkpoint.export = false")
    with_template(read_definition(tokenizer.path), separators.bos.id if separators.bos else None)
    reason = f"{separators} around a document, as in the data"
    if spec.dim % spec.heads:
        reason += f"; transformers cannot load it: dim {spec.dim} is no multiple of heads {spec.heads}"
    return [Decision("export", str(directory), reason)]


def export_model(session: Session, stop: Stop = never) -> Path | None:
    """Write the weights and the tokenizer as a Hugging Face directory. Called by all ranks together.

    `stop` is asked between tensors; when any rank's says so, nothing is published, and None is returned.
    """
    world, directory = session.mesh.world, session.run_dir / MODEL
    # not the group of checkpoints: a thread may still be saving the last one
    ranks = Ranks(world.rank, world.size)
    tensors = {name: t.to(_dtype(session.config)) for name, t in own_tensors(session.spec).items()}
    weights = WholeWeights(tensors, session.optimizer.weights(), ranks, stop)
    source = Source(
        "memory",
        "the model",
        session.spec,
        tensors,
        weights.gather,
        {"tokenizer.json": session.tokenizer.path},
        session.separators.token_ids(),
    )
    return directory if stream_model(source, weights, directory) else None


def stream_model(
    source: Source, weights: "WholeWeights", directory: Path, writing: Writing = AS_IT_IS
) -> bool:
    """Rank 0 writes the model while all ranks send it their parts, tensor by tensor. False if stopped."""
    making = directory.with_name(f"{directory.name}.tmp")
    try:
        if weights.ranks.leads:
            try:
                _write(source, making, directory, writing)
            except OSError as error:
                raise UserError(
                    f"the model cannot be written to {directory} ({error})",
                    "make room; the same command, or `arriero ckpt convert` of a checkpoint, exports again",
                ) from None
        else:
            for made in hf_from_own(source.spec).values():
                for name in made.parts:
                    source.load(name)
        weights.end()
    except _Stopped:
        return False
    except Exception as error:
        if weights.ranks.leads:
            weights.fail(error)
        raise
    finally:
        if weights.ranks.leads:
            shutil.rmtree(making, ignore_errors=True)
    return True


def _write(source: Source, making: Path, directory: Path, writing: Writing) -> None:
    """The new model replaces an old one when all of it is on the disk."""
    old = directory.with_name(f"{directory.name}.old.tmp")
    if old.exists() and not directory.exists():
        old.rename(directory)
    for left in (making, old):
        shutil.rmtree(left, ignore_errors=True)
    making.mkdir(parents=True)
    refuse_full_disk(making, source.nbytes(writing.dtype))
    write_hf(source, making, writing)
    flush_to_disk(making)
    if directory.exists():
        directory.rename(old)
    making.rename(directory)
    make_durable(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


class _Stopped(Exception):
    """Some rank was told to stop."""


class WholeWeights:
    """Assembles tensors that are spread over ranks on rank 0, one at a time. All ranks make the same calls.

    `tensors` has their shapes and types, `held` what this rank has of them. Messages go from CPU to CPU, so
    that no device memory is needed.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], ranks: Ranks, stop: Stop = never
    ) -> None:
        self._tensors, self._pieces = tensors, pieces_of(held)
        self.ranks, self._stop = ranks, stop

    def gather(self, name: str) -> Tensor:
        """The whole tensor on rank 0; elsewhere an empty one."""
        planned, piece = self._tensors[name], self._pieces.get(name)
        places = self._agree(_STOP if self._stop() else _GO, piece)
        # of ranks that hold the same part, the first one sends it
        senders = {place: rank for rank, place in reversed(list(enumerate(places))) if place is not None}
        mine = self.ranks.rank in senders.values()
        local = piece.local.detach().to("cpu", planned.dtype) if piece is not None and mine else planned
        if not self.ranks.leads:
            if mine:
                dist.send(local.contiguous(), dst=0, group=self.ranks.group)
            return torch.empty(0)
        assert sum(math.prod(size) for _, size in senders) == planned.numel(), f"parts of {name} are missing"
        if local.shape == planned.shape and mine:
            return local
        whole = torch.empty(planned.shape, dtype=planned.dtype)
        for (offset, size), rank in sorted(senders.items(), key=lambda item: item[1]):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            if rank == 0:
                part.copy_(local)
            elif part.is_contiguous():
                dist.recv(part, src=rank, group=self.ranks.group)
            else:
                part.copy_(self._received(size, planned.dtype, rank))
        return whole

    def end(self) -> None:
        """Wait until rank 0 has published the model."""
        self._agree(_GO, None)

    def fail(self, error: Exception) -> None:
        """Called by rank 0 alone, and answered by the others' next call: all ranks raise its error."""
        if self.ranks.size > 1:
            self._exchange(_FAILED, None)
            self.ranks.by_leader(partial(_raise, error))

    def _received(self, size: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        buffer = torch.empty(size, dtype=dtype)
        dist.recv(buffer, src=rank, group=self.ranks.group)
        return buffer

    def _agree(self, word: int, piece: Piece | None) -> list[Place | None]:
        """Where each rank's part lies; ends the export on all ranks where one of them says so."""
        words, places = self._exchange(word, piece)
        if _FAILED in words:
            self.ranks.by_leader(lambda: None)
        if _STOP in words:
            raise _Stopped
        return places

    def _exchange(self, word: int, piece: Piece | None) -> tuple[list[int], list[Place | None]]:
        place = None
        if piece is not None and piece.local.numel():
            place = tuple(piece.offset), tuple(piece.local.shape)
        if self.ranks.size == 1:
            return [word], [place]
        told = torch.zeros(self.ranks.size, 2 + 2 * _DIMS, dtype=torch.int64)
        mine = [word, len(place[0]), *place[0], *place[1]] if place else [word]
        note = torch.tensor(mine + [0] * (told.shape[1] - len(mine)))
        dist.all_gather(list(told.unbind()), note, group=self.ranks.group)
        places: list[Place | None] = []
        for _, dims, *numbers in told.tolist():
            at = tuple(numbers[:dims]), tuple(numbers[dims : 2 * dims])
            places.append(at if dims else None)
        return told[:, 0].tolist(), places


def _raise(error: Exception) -> None:
    raise error


def _dtype(config: RunConfig) -> torch.dtype:
    """The type of the weights that the optimizer updates."""
    return torch.bfloat16 if config.precision.master == "bf16" else torch.float32


def ended_already(config: RunConfig) -> Outcome | None:
    """The result of a run that is at its end and has its model; answered without building anything.

    A run that was never saved is known by its last event.
    """
    run_dir = run_directory(config)
    if starts_over(config) or not (run_dir / MODEL / "config.json").is_file():
        return None
    usable = [saved for saved in saved_in(run_dir) if saved.problem is None]
    try:
        outcome = Outcome.recalled(read_state(usable[-1].directory)) if usable else _ended_unsaved(run_dir)
    except (OSError, ValueError, KeyError):
        return None
    if outcome is None:
        return None
    steps = total_steps(config)
    if steps is None:
        return outcome if outcome.seconds >= config.train.horizon.amount else None
    return outcome if outcome.steps >= steps else None


def _ended_unsaved(run_dir: Path) -> Outcome | None:
    history = events_since(run_dir / EVENTS, START_OVER)
    kinds = [event["event"] for event in history]
    return Outcome.recalled(history[-1]) if kinds[-1:] == ["end"] and "save" not in kinds else None


def sample(session: Session, directory: Path | None) -> str | None:
    """From the model at hand where one process holds all of it, else from the exported one if that fits."""
    config = session.config
    if config.observe.sample is False or not session.mesh.world.leads:
        return None
    model = session.parts[0]
    if session.mesh.world.size > 1:
        # the weights as read, and the model they are copied to
        if directory is None or 2 * 4 * session.spec.parameters > available_ram():
            return None
        state, spec = load_hf(directory)
        model = build_model(spec)
        model.load_state_dict(state, strict=False)
    # a text that grows by a token would be compiled for every length
    with torch.compiler.set_stance("force_eager"):
        return continue_text(
            model,
            session.tokenizer,
            session.separators,
            config.observe.sample,
            config.data.seq_len,
            seed=config.run.seed,
        )
