"""What a finished run leaves behind: the model in a form others read, and a taste of it."""

from dataclasses import dataclass
from pathlib import Path

from arriero.errors import UserError
from arriero.model.formats.hf import save_hf
from arriero.train.build import Session
from arriero.train.sample import continue_text


@dataclass(frozen=True)
class Ending:
    model: Path | None
    remark: str
    continuation: str | None


def finish(session: Session) -> Ending:
    """Export the fp32 weights and the tokenizer as a Hugging Face directory, and let the model speak."""
    directory, tokenizer = session.run_dir / "model", session.tokenizer
    continuation = _sample(session)
    try:
        save_hf(directory, session.optimizer.weights(), session.spec, tokenizer.path, eos_token=tokenizer.eos)
    except UserError as refused:
        return Ending(None, str(refused), continuation)
    return Ending(directory, "Hugging Face config, fp32 safetensors, tokenizer", continuation)


def _sample(session: Session) -> str | None:
    config = session.config
    if config.observe.sample is None:
        return None
    return continue_text(
        session.model, session.tokenizer, config.observe.sample, config.data.seq_len, seed=config.run.seed
    )
