"""What a finished run leaves behind: the model in a form others read, and a taste of it."""

from pathlib import Path

from arriero.errors import UserError
from arriero.model.formats.hf import save_hf
from arriero.train.build import Session
from arriero.train.sample import continue_text


def export_model(session: Session) -> Path:
    """A Hugging Face directory with the fp32 weights and the tokenizer."""
    directory, tokenizer = session.run_dir / "model", session.tokenizer
    try:
        save_hf(directory, session.optimizer.weights(), session.spec, tokenizer.path, eos_token=tokenizer.eos)
    except OSError as error:
        raise UserError(f"the model cannot be written to {directory} ({error})", "make room there") from None
    return directory


def sample(session: Session) -> str | None:
    config = session.config
    if config.observe.sample is False:
        return None
    return continue_text(
        session.model, session.tokenizer, config.observe.sample, config.data.seq_len, seed=config.run.seed
    )
