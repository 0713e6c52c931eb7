"""Where a run starts: at its newest checkpoint, at another run's, from weights (warm start) or scratch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arriero import events
from arriero.checkpoint.base_model import describe_base, find_base, keep_base
from arriero.checkpoint.convert import open_adapter, open_model
from arriero.checkpoint.directory import (
    CHECKPOINTS,
    MANIFEST,
    Invalid,
    Manifest,
    SavedCheckpoint,
    read_manifest,
    resolve_checkpoint,
    unreadable,
)
from arriero.checkpoint.formats.model_reader import Adapter, ModelReader
from arriero.checkpoint.manager import START_OVER_ADVICE, Checkpoints, verify_by_ranks
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import (
    MODEL,
    OPTIM,
    AllowedDifferences,
    load_tensors,
    local_parts,
    named_tensors,
)
from arriero.config.schema import CheckpointSection, LoadSection
from arriero.data.order.ledger import LEDGER, check_same_order, read_ledger
from arriero.data.order.order import Stream
from arriero.data.text.hub import local_model
from arriero.data.tokens.tokenizer import Tokenizer, read_definition, same_ids
from arriero.errors import UserError
from arriero.events import EVENTS, METRICS, EventLog, last_record
from arriero.model.adapters import is_adapter
from arriero.model.description import check_model_unchanged, read_json, require_description
from arriero.model.lora import LoraLinear
from arriero.model.quantized import PACKED, columns_of, kind_of, pack
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import BASE_FILE, is_speculator
from arriero.parallel.mesh import Mesh
from arriero.plan.resolve import Decision
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from arriero.train.saving import Outcome, merge_over_stages, read_state
from arriero.units import JOULES_PER_KWH


@dataclass(frozen=True)
class CheckpointLoader:
    """Loads a model, and its optimizer if it has one, from any format and layout. All ranks call together.

    `run_dir` is where a run keeps the base model of its speculator; `start_from` is the run's setting.
    """

    model: ModelState
    mesh: Mesh
    allowed: LoadSection
    optimizer: Optimizer | None = None
    run_dir: Path | None = None
    start_from: str | None = None

    @property
    def ranks(self) -> Ranks:
        return checkpoint_ranks(self.mesh)

    def load_weights(
        self, where: str, key: str = "checkpoint.start_from", adapter: str | None = None
    ) -> Path:
        """Load weights alone from a checkpoint, a run or a model in any format, hf://OWNER/MODEL included.

        `adapter` is where the values of the model's adapter come from; else they stay as they are.
        """
        # rank 0 downloads first; the others find the files in a shared cache or fetch their own
        self.ranks.on_leader(lambda: local_model(where))
        path = local_model(where)
        if not (path / MANIFEST).is_file() and not (path / CHECKPOINTS).is_dir():
            # together, so that a read error on one rank ends all of them
            self.ranks.on_all_ranks(lambda: self._load_from_source(open_model(path), adapter))
            self._record_base(path, where)
            return path
        saved = self.open(str(path), key)
        assert saved.manifest is not None
        stored = {name.removeprefix(MODEL) for name in saved.manifest.tensors}
        speculator = {name for name in self.model.tensors() if is_speculator(name)}
        # a second stage continues the speculator of the first
        if speculator and speculator <= stored:
            self._load_base(saved.directory)
            self._load(saved, named_tensors(self._tensors_of(saved), {}), MODEL)
            return saved.directory
        names = (*stored, *self.model.tensors())
        if any(is_adapter(name) or name.endswith(PACKED) for name in names):
            # LoRA of the checkpoint is merged, that of the model starts from its initial values
            self.ranks.on_all_ranks(lambda: self._load_from_source(open_model(saved.directory), adapter))
        else:
            self._load(saved, named_tensors(self.model.tensors(), {}), MODEL)
        self._record_base(saved.directory, where)
        return saved.directory

    def _tensors_of(self, saved: SavedCheckpoint) -> Mapping[str, torch.Tensor]:
        """Return the weights that a checkpoint holds; those of older versions hold the base model too."""
        return self.model.stored() if (saved.directory / BASE_FILE).is_file() else self.model.tensors()

    def _record_base(self, path: Path, where: str) -> None:
        """Remember where the frozen model of a speculator is: checkpoints do not hold it."""
        if any(map(is_speculator, self.model.weights)):
            self.model.base = self.ranks.on_leader(lambda: self._kept(describe_base(path, where)))

    def _kept(self, base: dict[str, Any]) -> dict[str, Any]:
        return base if self.run_dir is None else keep_base(base, self.run_dir)

    def _load_base(self, directory: Path) -> None:
        """Load the frozen model of a stored speculator, unless this process has loaded it already."""
        loaded = self.model.base
        if not (directory / BASE_FILE).is_file():
            # the checkpoint of an older version holds the model itself
            if loaded is None:
                self._record_base(directory, str(directory))
            return
        stored = self.ranks.on_leader(lambda: read_json(directory / BASE_FILE).get("sha256"))
        if loaded is not None and loaded["sha256"] == stored:
            return
        base = self.ranks.on_leader(lambda: self._kept(find_base(directory, self.start_from)))

        def load() -> None:
            path = Path(base["path"])
            if not path.exists():
                # a node with a cache of its own; one rank of it compares checksums
                checked = self.mesh.world.local_rank == 0
                path = Path(find_base(directory, self.start_from, checked)["path"])
            self._load_from_source(open_model(path))

        self.ranks.on_all_ranks(load)
        self.model.base = base

    def load_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Load weights and optimizer state."""
        assert self.optimizer is not None
        if any(map(is_speculator, self.model.weights)):
            self._load_base(saved.directory)
        self._load(saved, named_tensors(self._tensors_of(saved), self.optimizer.state()))

    def load_optimizer(self, saved: SavedCheckpoint) -> None:
        """Load optimizer state alone, beside weights from elsewhere."""
        assert self.optimizer is not None
        self._load(saved, named_tensors({}, self.optimizer.state()), OPTIM)

    def open(self, path: str, key: str) -> SavedCheckpoint:
        """Return the checkpoint a user named; reject a damaged one and one of another model."""
        saved = open_checkpoint(Path(path), key, self.ranks)
        self._check_model(saved.directory, require_description(saved.directory).spec)
        return saved

    def _load(self, saved: SavedCheckpoint, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        assert saved.manifest is not None
        tolerated = AllowedDifferences(self.allowed.allow_missing, self.allowed.allow_unexpected)
        merge = partial(merge_over_stages, self.mesh)
        load_tensors(
            saved.directory, saved.manifest, tensors, self._keep, self.ranks, merge, tolerated, prefix
        )

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith(MODEL):
            self.model.load(name.removeprefix(MODEL), tensor)
        elif self.optimizer is not None:
            parameter, _, kind = name.removeprefix(OPTIM).rpartition(".")
            self.optimizer.load_moment(parameter, kind, tensor)

    @torch.no_grad()
    def _load_from_source(self, source: ModelReader, adapter: str | None = None) -> None:
        """Load tensor by tensor; each rank reads its own shards."""
        self._check_model(Path(source.where), source.spec)
        unmerged = source.unmerged
        if unmerged is not None:
            self._check_adapter(source.where, unmerged, "which cannot be merged into weights")
        if adapter is not None:
            unmerged = open_adapter(local_model(adapter), self.model.parts[0].spec)
            self._check_adapter(f"checkpoint.adapter_from: {adapter}", unmerged, "and the run has another")
        for name, weight in self.model.tensors().items():
            piece = local_parts({name: weight})[name]
            cut = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
            if name.endswith(PACKED):
                name_of_weight = name.removesuffix(PACKED) + ".weight"
                columns = columns_of(cut[1], source.tensors[name_of_weight].shape[1])
                part = source.read_slice(name_of_weight, (cut[0], columns))
                piece.local.copy_(pack(part.to(piece.local.device), kind_of(piece.local)))
            elif is_adapter(name):
                if unmerged is None:
                    continue
                piece.local.copy_(unmerged.load(name)[cut])
            else:
                stored = source.tensors.get(name)
                if stored is None or stored.shape != piece.shape:
                    found = "nothing" if stored is None else list(stored.shape)
                    raise UserError(
                        f"{source.where} has {found} for {name}, and the model wants {list(piece.shape)}",
                        "start from weights of the same model: see [model]",
                    )
                piece.local.copy_(source.read_slice(name, cut))
            self.model.load(name, weight)

    def _check_adapter(self, where: str, stored: Adapter, why: str) -> None:
        """Reject an adapter unless the model has one of the same dimensions, layers and scale."""
        blocks = {block for part in self.model.parts for block in part.blocks}
        wanted = {name: t.shape for name, t in stored.tensors.items() if name.split(".")[1] in blocks}
        found = {name: t.shape for name, t in self.model.tensors().items() if is_adapter(name)}
        layers = [layer for part in self.model.parts for layer in part.modules()]
        settings = stored.settings
        scale = getattr(settings, "scale", None)
        other = any(isinstance(layer, LoraLinear) and layer.scale != scale for layer in layers)
        if wanted != found or other:
            raise UserError(
                f"{where} has {settings.label} ({settings.summary}), {why}",
                "start from its base model, or train the same adapter",
            )

    def _check_model(self, where: Path, found: ModelSpec) -> None:
        spec = self.model.parts[0].spec
        check_model_unchanged(str(where), found, spec, self.allowed.allow_model_changes)


def checkpoint_ranks(mesh: Mesh) -> Ranks:
    return Ranks(mesh.world.rank, mesh.world.size, mesh.group("checkpoint"))


@dataclass(frozen=True)
class StartingPoint:
    """`checkpoint` is what the run resumes from; `remarks` are sentences to print.

    `new_weights`: the weights are not those of the checkpoint, so their validation loss is not known yet.
    """

    outcome: Outcome
    sample: int
    checkpoint: Path | None
    decision: Decision
    remarks: Sequence[str] = ()
    new_weights: bool = False
    guard: Mapping[str, Any] | None = None


def start_run(
    section: CheckpointSection,
    loader: CheckpointLoader,
    checkpoints: Checkpoints,
    stream: Stream,
    tokenizer: Tokenizer,
    start_over: bool = False,
) -> StartingPoint:
    """Load what a run starts from. `start_over`: checkpoint.start_over is set and was not applied yet.

    The run's own newest checkpoint comes first. Without one, checkpoint.resume_from is resumed, else
    checkpoint.start_from gives the weights of a warm start. Both keys together take the weights from
    start_from and everything else from the checkpoint that resume_from names, which may be the run's own.
    """
    loader = replace(loader, run_dir=checkpoints.folder.parent, start_from=section.start_from)
    moved = checkpoints.start_over() if start_over else []
    newest, remarks = checkpoints.newest(section.start_over)
    if newest is None:
        run_dir = checkpoints.folder.parent
        moved += loader.ranks.on_leader(lambda: check_lost_progress(run_dir, section))
    remarks = moved + remarks
    if newest is not None:
        new_weights = _replaces_weights(section, newest.directory)
        start = _resume(section, loader, newest, "the run's newest", new_weights, stream, tokenizer, remarks)
        metrics = checkpoints.folder.parent / METRICS
        spent = loader.ranks.on_leader(lambda: last_record(metrics, "energy_kwh").get("energy_kwh"))
        if spent is not None:
            # steps that were lost or rolled back have used energy too
            start.outcome.joules = max(start.outcome.joules or 0.0, spent * JOULES_PER_KWH)
        return start
    if section.resume_from is not None:
        key = "checkpoint.resume_from"
        saved = loader.open(section.resume_from, key)
        new_weights = section.start_from is not None
        return _resume(section, loader, saved, key, new_weights, stream, tokenizer, remarks)
    if section.start_from is not None:
        source, compared = _warm_start(section, loader, tokenizer)
        why = f"weights only; optimizer, step and data position start from scratch{compared}"
        return StartingPoint(Outcome(), 0, None, Decision("start from", source, why), remarks)
    if any(is_adapter(name) for name in loader.model.weights):
        remarks.append("the frozen weights are random; checkpoint.start_from names the model to adapt")
    return StartingPoint(Outcome(), 0, None, Decision("start", "from scratch", "no checkpoint yet"), remarks)


def _replaces_weights(section: CheckpointSection, newest: Path) -> bool:
    """Return whether start_from replaces the weights of the run's own newest checkpoint.

    Only if resume_from names that very checkpoint: once the run has saved a newer one, the new weights were
    taken, and a restart with the same keys must not take them again.
    """
    if section.start_from is None or section.resume_from is None:
        return False
    named, run_dir = Path(section.resume_from).resolve(), newest.parent.parent.resolve()
    if named in (run_dir, run_dir / CHECKPOINTS):
        raise UserError(
            f"checkpoint.resume_from names this run ({section.resume_from}) and checkpoint.start_from "
            "gives new weights: every restart would load them again",
            f"name the checkpoint whose weights are to be replaced: checkpoint.resume_from = '{newest}'",
        )
    return named == newest.resolve()


def _resume(
    section: CheckpointSection,
    loader: CheckpointLoader,
    saved: SavedCheckpoint,
    reason: str,
    new_weights: bool,
    stream: Stream,
    tokenizer: Tokenizer,
    remarks: Sequence[str],
) -> StartingPoint:
    assert saved.manifest is not None
    directory = saved.directory
    state = loader.ranks.on_leader(lambda: read_state(directory))
    check_same_tokenizer(directory, saved.manifest, tokenizer)
    check_same_order(state["data"], stream, str(directory))
    if new_weights:
        if not section.load.reset_optimizer:
            loader.load_optimizer(saved)
        source, compared = _warm_start(section, loader, tokenizer)
        reason += f"; weights of {source}{compared}"
    else:
        loader.load_checkpoint(saved)
    outcome = Outcome.from_state(state)
    reset = new_weights and section.load.reset_optimizer
    kept = "step and data position continue; the optimizer is reset" if reset else ""
    why = f"{reason}; {kept or 'optimizer, step and data position continue'}"
    decision = Decision("resume", f"step {outcome.steps} of {directory}", why)
    sample, guard = int(state["data"]["sample"]), state.get("guard")
    return StartingPoint(outcome, sample, directory, decision, remarks, new_weights, guard)


def _warm_start(
    section: CheckpointSection, loader: CheckpointLoader, tokenizer: Tokenizer
) -> tuple[str, str]:
    """Load the weights of checkpoint.start_from; return where they are and a remark on its tokenizer."""
    start = section.start_from
    assert start is not None
    allowed = section.load.allow_other_tokenizer
    compared = loader.ranks.on_leader(lambda: compare_tokenizers(local_model(start), tokenizer, allowed))
    where = loader.load_weights(start, adapter=section.adapter_from)
    adapter = f" with the adapter {section.adapter_from}" if section.adapter_from else ""
    return f"{where}{adapter}", compared


def compare_tokenizers(
    source: Path, tokenizer: Tokenizer, allowed: bool, key: str = "checkpoint.start_from"
) -> str:
    """Reject weights trained with another tokenizer than the data's; return a remark."""
    if allowed:
        return ""
    directory = resolve_checkpoint(source) if source.is_dir() else source.parent
    names = ("tokenizer.json", "tokenizer.model")
    file = next((directory / name for name in names if (directory / name).is_file()), None)
    if file is None:
        return "; it has no tokenizer to compare with the data's"
    allow = "set checkpoint.load.allow_other_tokenizer = true"
    try:
        same = same_ids(read_definition(file), read_definition(tokenizer.path))
    except UserError as error:
        raise UserError(error.what, f"{error.todo}; or {allow}") from None
    if not same:
        raise UserError(
            f"{key}: {source} was trained with another tokenizer ({file}) than the data ({tokenizer.path})",
            f"prepare the data with {file}, or {allow}",
        )
    return ""


def open_checkpoint(path: Path, key: str, ranks: Ranks) -> SavedCheckpoint:
    """Return the checkpoint at a path, after all ranks together have verified its files."""

    def read() -> SavedCheckpoint:
        directory = resolve_checkpoint(path)
        try:
            manifest = read_manifest(directory)
        except Invalid as error:
            raise UserError(
                f"{key}: {directory} is not a checkpoint ({error})", f"give a directory with a {MANIFEST}"
            ) from None
        return SavedCheckpoint(directory, manifest.step, manifest)

    saved = ranks.on_leader(read)
    if problem := verify_by_ranks(saved, ranks):
        raise UserError(f"{key}: {saved.directory} is damaged ({problem})", "give another checkpoint")
    return saved


def check_lost_progress(run_dir: Path, section: CheckpointSection) -> list[str]:
    """For a run directory without checkpoints: refuse to repeat training that was saved once, or finished.

    A run that was stopped before its first save starts again, with a remark.
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
            f"restore its {CHECKPOINTS} folder; or {START_OVER_ADVICE}",
        )
    if any(event["event"] == "end" for event in history):
        raise UserError(
            f"{run_dir} is finished and was never saved, so there is nothing to resume from",
            f"choose another run with --set run.name=NAME; or {START_OVER_ADVICE}",
        )
    # with resume_from, a ledger begins with the samples of that checkpoint
    known = section.resume_from is None and (run_dir / LEDGER).exists()
    if known and (samples := read_ledger(run_dir).samples):
        raise UserError(
            f"{run_dir} has no checkpoint, although its {LEDGER} shows {samples:,} consumed samples",
            f"restore its {CHECKPOINTS} folder; or {START_OVER_ADVICE}",
        )
    if not any(event["event"] == "start" for event in history):
        return []
    return [f"{run_dir} was never saved: training starts again at step 0"]


def check_same_tokenizer(directory: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    if manifest.tokenizer != tokenizer.sha256:
        raise UserError(
            f"{directory} was trained on text of another tokenizer "
            f"({manifest.tokenizer[:12]}, the data's is {tokenizer.sha256[:12]})",
            "prepare the data with its tokenizer.json",
        )
