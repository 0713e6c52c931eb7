"""What a finished run leaves behind: the model in a form others read, and a taste of it."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from arriero.checkpoint.directory import saved_in
from arriero.checkpoint.formats.hf import load_hf, save_hf
from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.model.build import build_model
from arriero.parallel.precision import ordinary
from arriero.train.outcome import Outcome
from arriero.train.rundir import run_directory, starts_over
from arriero.train.sample import continue_text
from arriero.train.saving import read_state
from arriero.train.session import Session, total_steps

MODEL = "model"


def finished_model(session: Session) -> Path | None:
    return export_model(session) if session.config.checkpoint.export else None


def export_model(session: Session) -> Path:
    """A Hugging Face directory with the fp32 weights and the tokenizer. All ranks give their share."""
    directory, tokenizer = session.run_dir / MODEL, session.tokenizer
    making = directory.with_name(f"{MODEL}.tmp")
    weights = _whole_weights(session)
    try:
        if session.mesh.world.leads:
            for left in (making, directory):
                shutil.rmtree(left, ignore_errors=True)
            save_hf(making, weights, session.spec, tokenizer.path, eos_token=tokenizer.eos)
            making.rename(directory)
    except OSError as error:
        raise UserError(f"the model cannot be written to {directory} ({error})", "make room there") from None
    return directory


def ended_already(config: RunConfig) -> Outcome | None:
    """What a run reached that is at its end and has its model; answered without building anything."""
    run_dir = run_directory(config)
    usable = [saved for saved in saved_in(run_dir) if saved.problem is None]
    if starts_over(config) or not usable or not (run_dir / MODEL / "config.json").is_file():
        return None
    try:
        outcome = Outcome.recalled(read_state(usable[-1].directory))
    except (OSError, ValueError, KeyError):
        return None
    steps = total_steps(config)
    if steps is None:
        return outcome if outcome.seconds >= config.train.horizon.amount else None
    return outcome if outcome.steps >= steps else None


def _whole_weights(session: Session) -> Mapping[str, Tensor]:
    """Every weight on the first rank: of a single process as it is asked for, of several in host memory,
    stage by stage and one tensor at a time."""
    own = session.optimizer.weights()
    if session.mesh.world.size == 1:
        return own
    layout, stage = session.mesh.layout, session.mesh.coordinate("pp")
    mine = [(name, tuple(weight.shape)) for name, weight in own.items()]
    held = [mine]
    if (pipeline := session.mesh.group("pp")) is not None:
        held = [[] for _ in range(layout.pp)]
        dist.all_gather_object(held, mine, group=pipeline)
    weights = {}
    for number, names in enumerate(held):
        sender = number * (layout.ranks // layout.pp)
        for name, shape in names:
            whole = torch.empty(shape)
            if stage == number:
                weight = ordinary(own[name])
                whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).float().cpu()
            if number and session.mesh.world.rank == sender:
                dist.send(whole, dst=0)
            elif number and session.mesh.world.leads:
                dist.recv(whole, src=sender)
            if session.mesh.world.leads:
                weights[name] = whole
    return weights


def sample(session: Session, directory: Path | None) -> str | None:
    """From the model at hand where one process holds it whole, else from the exported one."""
    config = session.config
    if config.observe.sample is False or not session.mesh.world.leads:
        return None
    model = session.parts[0]
    if session.mesh.world.size > 1:
        if directory is None:
            return None
        state, spec = load_hf(directory)
        model = build_model(spec)
        model.load_state_dict(state, strict=False)
    # a text that grows by a token would be compiled for every length
    with torch.compiler.set_stance("force_eager"):
        return continue_text(
            model, session.tokenizer, config.observe.sample, config.data.seq_len, seed=config.run.seed
        )
