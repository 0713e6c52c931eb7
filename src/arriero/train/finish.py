"""What a finished run leaves behind: the model in a form others read, and a taste of it."""

from pathlib import Path

from arriero.model.formats.hf import save_hf
from arriero.train.build import Session
from arriero.train.sample import continue_text


def export_model(session: Session) -> Path:
    """A Hugging Face directory with the fp32 weights and the tokenizer."""
    directory = session.run_dir / "model"
    tokenizer = session.tokenizer
    save_hf(directory, session.optimizer.weights(), session.spec, tokenizer.path, eos_token=tokenizer.eos)
    return directory


def sample_of(session: Session) -> str | None:
    text = session.config.observe.sample
    if text is None:
        return None
    return continue_text(
        session.model, session.tokenizer, text, session.config.data.seq_len, seed=session.config.run.seed
    )
