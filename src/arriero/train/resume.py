"""Where a run starts: at its own newest checkpoint, at another run's, from weights alone, or from scratch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero import events
from arriero.checkpoint.convert import open_source
from arriero.checkpoint.directory import CHECKPOINTS, Saved, checkpoint_at
from arriero.checkpoint.formats.source import Source
from arriero.checkpoint.manager import START_OVER, Checkpoints, damage_of
from arriero.checkpoint.manifest import MANIFEST, Invalid, Manifest, read_manifest, unreadable
from arriero.checkpoint.pieces import pieces_of
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import MODEL, OPTIM, Tolerated, flat, flat_weights, load_tensors
from arriero.config.schema import CheckpointSection
from arriero.data.order.ledger import LEDGER, check_same_order, read_ledger
from arriero.data.order.order import Stream
from arriero.data.text.hub import local_model
from arriero.data.tokens.tokenizer import Tokenizer, read_definition, same_ids
from arriero.errors import UserError
from arriero.events import EVENTS, EventLog
from arriero.model.description import described, refuse_model_changes
from arriero.model.spec import ModelSpec
from arriero.plan.resolve import Decision
from arriero.train.optim import Optimizer
from arriero.train.outcome import Outcome
from arriero.train.saving import read_state


@dataclass(frozen=True)
class Beginning:
    """`checkpoint` is what is continued; `remarks` are sentences to print."""

    outcome: Outcome
    sample: int
    checkpoint: Path | None
    decision: Decision
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Restorer:
    """Called by all ranks together. `everywhere` joins what the ranks of a pipeline hold."""

    section: CheckpointSection
    ranks: Ranks
    everywhere: Callable[[dict[str, Any]], dict[str, Any]]
    optimizer: Optimizer
    spec: ModelSpec

    def begin(
        self, checkpoints: Checkpoints, stream: Stream, tokenizer: Tokenizer, start_over: bool = False
    ) -> Beginning:
        """`start_over`: checkpoint.start_over is set and was not applied yet."""
        moved = checkpoints.start_over() if start_over else []
        newest, remarks = checkpoints.newest(self.section.start_over)
        if newest is None:
            run_dir = checkpoints.folder.parent
            moved += self.ranks.by_leader(lambda: refuse_lost_progress(run_dir, self.section))
        remarks = moved + remarks
        if newest is not None:
            return self._resume(
                newest.directory, newest.manifest, stream, tokenizer, "the run's newest", remarks
            )
        if self.section.resume_from is not None:
            saved = self._given(self.section.resume_from, "checkpoint.resume_from")
            self._refuse_changes(saved.directory, described(saved.directory).spec)
            return self._resume(
                saved.directory, saved.manifest, stream, tokenizer, "checkpoint.resume_from", remarks
            )
        outcome = Outcome()
        if self.section.start_from is not None:
            start = self.section.start_from
            # one rank downloads; the others find it in a shared cache, or fetch their own copy
            self.ranks.by_leader(lambda: local_model(start))
            path = local_model(start)
            compared = self.ranks.by_leader(lambda: self._compare_tokenizers(path, tokenizer))
            source = self._weights_alone(path)
            why = f"weights alone; optimizer, step and data position start from scratch{compared}"
            return Beginning(outcome, 0, None, Decision("start from", source, why), remarks)
        return Beginning(outcome, 0, None, Decision("start", "new weights", "no checkpoint yet"), remarks)

    def _resume(
        self,
        directory: Path,
        manifest: Manifest | None,
        stream: Stream,
        tokenizer: Tokenizer,
        reason: str,
        remarks: Sequence[str],
    ) -> Beginning:
        assert manifest is not None
        state = self.ranks.by_leader(lambda: read_state(directory))
        refuse_other_tokenizer(directory, manifest, tokenizer)
        check_same_order(state["data"], stream, str(directory))
        self._load(directory, manifest, flat(self.optimizer.weights(), self.optimizer.state()))
        outcome = Outcome.recalled(state)
        kept = f"{reason}; optimizer, step and data position continue"
        decision = Decision("resume", f"step {outcome.steps} of {directory}", kept)
        return Beginning(outcome, int(state["data"]["sample"]), directory, decision, remarks)

    def _given(self, path: str, key: str) -> Saved:
        """The checkpoint a user named; refused where it is damaged. All ranks share the reading."""
        saved = self.ranks.by_leader(lambda: named_checkpoint(Path(path), key))
        if problem := damage_of(saved, self.ranks):
            raise UserError(f"{key}: {saved.directory} is damaged ({problem})", "give another checkpoint")
        return saved

    def _weights_alone(self, path: Path) -> str:
        weights = self.optimizer.weights()
        if not (path / MANIFEST).is_file() and not (path / CHECKPOINTS).is_dir():
            # together, so that a read error on one rank ends all of them
            self.ranks.together(lambda: self._fill_from(open_source(path), weights))
        else:
            saved = self._given(str(path), "checkpoint.start_from")
            assert saved.manifest is not None
            self._refuse_changes(saved.directory, described(saved.directory).spec)
            self._load(saved.directory, saved.manifest, flat_weights(weights), prefix=MODEL)
            path = saved.directory
        return str(path)

    @torch.no_grad()
    def _fill_from(self, source: Source, weights: Mapping[str, torch.Tensor]) -> None:
        """From a model of any format, tensor by tensor; each rank reads its own part."""
        self._refuse_changes(Path(source.where), source.spec)
        for name, weight in weights.items():
            piece = pieces_of({name: weight})[name]
            told = source.tensors.get(name)
            if told is None or told.shape != piece.shape:
                found = "nothing" if told is None else list(told.shape)
                raise UserError(
                    f"{source.where} has {found} for {name}, and the model wants {list(piece.shape)}",
                    "start from weights of the same model: see [model]",
                )
            cut = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
            piece.local.copy_(source.part(name, cut))
            self.optimizer.load_weight(name, weight)

    def _refuse_changes(self, where: Path, found: ModelSpec) -> None:
        refuse_model_changes(str(where), found, self.spec, self.section.load.allow_model_changes)

    def _compare_tokenizers(self, source: Path, tokenizer: Tokenizer) -> str:
        """Refuse weights trained with another tokenizer than the data's; returns what to remark."""
        directory = checkpoint_at(source) if source.is_dir() else source.parent
        names = ("tokenizer.json", "tokenizer.model")
        file = next((directory / name for name in names if (directory / name).is_file()), None)
        if self.section.load.allow_other_tokenizer:
            return ""
        if file is None:
            return "; it has no tokenizer to compare with the data's"
        allow = "set checkpoint.load.allow_other_tokenizer = true"
        try:
            same = same_ids(read_definition(file), read_definition(tokenizer.path))
        except UserError as error:
            raise UserError(error.what, f"{error.todo}; or {allow}") from None
        if not same:
            raise UserError(
                f"checkpoint.start_from: {source} was trained with another tokenizer ({file}) than the data "
                f"({tokenizer.path})",
                f"prepare the data with {file}, or {allow}",
            )
        return ""

    def _load(
        self, directory: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], prefix: str = ""
    ) -> None:
        allowed = self.section.load
        tolerated = Tolerated(allowed.allow_missing, allowed.allow_unexpected)
        load_tensors(directory, manifest, tensors, self._keep, self.ranks, self.everywhere, tolerated, prefix)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith(MODEL):
            self.optimizer.load_weight(name.removeprefix(MODEL), tensor)
        else:
            parameter, _, kind = name.removeprefix(OPTIM).rpartition(".")
            self.optimizer.load_moment(parameter, kind, tensor)


def named_checkpoint(path: Path, key: str) -> Saved:
    directory = checkpoint_at(path)
    try:
        manifest = read_manifest(directory)
    except Invalid as error:
        raise UserError(
            f"{key}: {directory} is not a checkpoint ({error})", f"give a directory with a {MANIFEST}"
        ) from None
    return Saved(directory, manifest.step, manifest)


def refuse_lost_progress(run_dir: Path, section: CheckpointSection) -> list[str]:
    """For a run directory without checkpoints: refuse to train again what was saved once, or finished.

    A run that was stopped before its first save has nothing to resume from: it starts again, with a remark.
    """
    if section.start_over:
        if run_dir.exists():
            EventLog(run_dir / EVENTS).write(events.START_OVER)
        return []
    try:
        history = events.events_since(run_dir / EVENTS, events.START_OVER)
    except OSError as error:
        raise unreadable(run_dir / EVENTS, error) from None
    saves = [event.get("step") for event in history if event["event"] == "save"]
    if saves:
        raise UserError(
            f"{run_dir} has no checkpoint, although {len(saves)} were saved, the last at step {saves[-1]}",
            f"restore its {CHECKPOINTS} folder; or {START_OVER}",
        )
    if any(event["event"] == "end" for event in history):
        raise UserError(
            f"{run_dir} is finished and was never saved, so there is nothing to resume from",
            f"choose another run with --set run.name=NAME; or {START_OVER}",
        )
    # with resume_from, a ledger begins with the samples of that checkpoint
    known = section.resume_from is None and (run_dir / LEDGER).exists()
    if known and (samples := read_ledger(run_dir).samples):
        raise UserError(
            f"{run_dir} has no checkpoint, although its {LEDGER} shows {samples:,} consumed samples",
            f"restore its {CHECKPOINTS} folder; or {START_OVER}",
        )
    if not any(event["event"] == "start" for event in history):
        return []
    return [f"{run_dir} was never saved: training starts again at step 0"]


def refuse_other_tokenizer(directory: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    if manifest.tokenizer != tokenizer.sha256:
        raise UserError(
            f"{directory} was trained on text of another tokenizer "
            f"({manifest.tokenizer[:12]}, the data's is {tokenizer.sha256[:12]})",
            "prepare the data with its tokenizer.json",
        )
