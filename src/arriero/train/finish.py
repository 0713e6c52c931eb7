"""What a finished run leaves behind: the exported model, and a sample of its text."""

from pathlib import Path

import torch

from arriero.checkpoint.directory import saved_in
from arriero.checkpoint.export import Gather, StopRequested, export_hf, never
from arriero.checkpoint.formats.hf import load_hf
from arriero.checkpoint.formats.hf_tokenizer import with_template
from arriero.checkpoint.formats.source import Source
from arriero.checkpoint.ranks import Ranks
from arriero.config.schema import RunConfig
from arriero.config.timeline import total_steps
from arriero.data.tokens.tokenizer import Separators, Tokenizer, read_definition
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, events_since
from arriero.files import check_free_space
from arriero.model.family import build_model
from arriero.model.name_maps import has_hf_names, own_tensors
from arriero.model.spec import ModelSpec
from arriero.plan.hardware import available_ram
from arriero.plan.resolve import Decision
from arriero.train.outcome import Outcome
from arriero.train.rundir import run_directory, starts_over
from arriero.train.sample import continue_text
from arriero.train.saving import read_state
from arriero.train.session import Session

MODEL = "model"


def finished_model(session: Session, stop: StopRequested = never) -> Path | None:
    return export_model(session, stop) if session.config.checkpoint.export else None


def check_export(
    config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, separators: Separators
) -> list[Decision]:
    """Refuse before the first step whatever would make the export fail after the last."""
    if not config.checkpoint.export:
        return []
    if not has_hf_names(spec):
        raise UserError(
            f"the model family '{spec.family}' has no Hugging Face name map, which the export needs",
            "set checkpoint.export = false, or give the family `hf` when it is registered",
        )
    directory, size = run_directory(config) / MODEL, spec.parameters * _dtype(config).itemsize
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is in the way of the exported model", "move it away")
    check_free_space(directory, size, "the model", "make room, or set checkpoint.export = false")
    with_template(read_definition(tokenizer.path), separators.bos.id if separators.bos else None)
    reason = f"{separators} around a document, as in the data"
    if spec.dim % spec.heads:
        reason += f"; transformers cannot load it: dim {spec.dim} is no multiple of heads {spec.heads}"
    return [Decision("export", str(directory), reason)]


def export_model(session: Session, stop: StopRequested = never) -> Path | None:
    """Write the weights and the tokenizer as a Hugging Face directory. Called by all ranks together.

    `stop` is asked between tensors; when any rank's says so, nothing is published, and None is returned.
    """
    world, directory = session.mesh.world, session.run_dir / MODEL
    # not the group of checkpoints: a thread may still be saving the last one
    ranks = Ranks(world.rank, world.size)
    tensors = {name: t.to(_dtype(session.config)) for name, t in own_tensors(session.spec).items()}
    gather = Gather(tensors, session.optimizer.weights(), ranks, stop)
    source = Source(
        "memory",
        "the model",
        session.spec,
        tensors,
        gather.tensor,
        {"tokenizer.json": session.tokenizer.path},
        session.separators.token_ids(),
    )
    return directory if export_hf(source, gather, directory) else None


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
