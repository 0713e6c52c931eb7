"""The end of a run: export the model, sample text from it, recognise a run that has already ended."""

from pathlib import Path

import torch

from arriero.checkpoint.directory import find_checkpoints
from arriero.checkpoint.export import Gather, StopRequested, export_hf, never
from arriero.checkpoint.formats.hf_directory import load_hf, set_bos_template
from arriero.checkpoint.formats.model_reader import ModelReader
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
from arriero.train.rundir import run_directory, starts_over
from arriero.train.saving import Outcome, read_state
from arriero.train.session import Session

MODEL = "model"
_TOP_K, _TEMPERATURE = 40, 0.7


def finished_model(session: Session, stop: StopRequested = never) -> Path | None:
    return export_model(session, stop) if session.config.checkpoint.export else None


def check_export(
    config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, separators: Separators
) -> list[Decision]:
    """Reject before the first step what would make the export fail after the last."""
    if not config.checkpoint.export:
        return []
    if not has_hf_names(spec):
        raise UserError(
            f"the model family '{spec.family}' has no Hugging Face name map, which the export needs",
            "set checkpoint.export = false, or give the family `hf` when it is registered",
        )
    directory, size = run_directory(config) / MODEL, spec.parameters * _master_dtype(config).itemsize
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is in the way of the exported model", "move it away")
    check_free_space(directory, size, "the model", "make room, or set checkpoint.export = false")
    set_bos_template(read_definition(tokenizer.path), separators.bos.id if separators.bos else None)
    reason = f"{separators}, as in the data"
    if spec.dim % spec.heads:
        reason += f"; transformers cannot load it: dim {spec.dim} is not a multiple of heads {spec.heads}"
    return [Decision("export", str(directory), reason)]


def export_model(session: Session, stop: StopRequested = never) -> Path | None:
    """Write the master weights and the tokenizer as a Hugging Face directory. Called by all ranks together.

    `stop` is asked before each tensor; if it is true on any rank, nothing is published.
    """
    world, directory, data = session.mesh.world, session.run_dir / MODEL, session.data
    # not the process group of checkpoints: a thread may still be saving the last one
    ranks = Ranks(world.rank, world.size)
    tensors = {name: t.to(_master_dtype(session.config)) for name, t in own_tensors(session.spec).items()}
    gather = Gather(tensors, session.model.tensors(), ranks, stop)
    source = ModelReader(
        "memory",
        "the model",
        session.spec,
        tensors,
        gather.tensor,
        {"tokenizer.json": data.tokenizer.path},
        data.separators.token_ids(),
    )
    return directory if export_hf(source, gather, directory) else None


def _master_dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision.master == "bf16" else torch.float32


def outcome_if_ended(config: RunConfig) -> Outcome | None:
    """Return the result of a run that is at its end and has its model, without building anything.

    A run that was never saved is recognised by its last event.
    """
    run_dir = run_directory(config)
    if starts_over(config) or not (run_dir / MODEL / "config.json").is_file():
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
    history = events_since(run_dir / EVENTS, START_OVER)
    kinds = [event["event"] for event in history]
    return Outcome.from_state(history[-1]) if kinds[-1:] == ["end"] and "save" not in kinds else None


def sample(session: Session, directory: Path | None) -> str | None:
    """Continue the prompt of observe.sample on rank 0.

    A single process uses its own model; with several ranks the exported model is read if it fits into RAM.
    """
    config = session.config
    if config.observe.sample is False or not session.mesh.world.is_leader:
        return None
    model = session.model.parts[0]
    if session.mesh.world.size > 1:
        # the weights as read, and the model they are copied to
        if directory is None or 2 * 4 * session.spec.parameters > available_ram():
            return None
        state, spec = load_hf(directory)
        model = build_model(spec)
        model.load_state_dict(state, strict=False)
    # compiled code would be compiled again for every length of the text
    with torch.compiler.set_stance("force_eager"):
        return continue_text(
            model,
            session.data.tokenizer,
            session.data.separators,
            config.observe.sample,
            config.data.seq_len,
            seed=config.run.seed,
        )


@torch.no_grad()
def continue_text(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    separators: Separators,
    text: str,
    context: int,
    tokens: int = 96,
    seed: int = 0,
) -> str:
    """Sample (top-k 40, temperature 0.7) until the end of a document or `tokens` tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    prompt = separators.prompt(tokenizer.encode(text)) or [tokenizer.eos_id]
    ids = list(prompt)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        values, choices = model(window)[0, -1].float().cpu().topk(min(_TOP_K, tokenizer.vocab_size))
        pick = torch.multinomial((values / _TEMPERATURE).softmax(-1), 1, generator=generator)
        ids.append(int(choices[pick]))
        if separators.eos is not None and ids[-1] == separators.eos.id:
            break
    return tokenizer.decode(ids[len(prompt) :])
