"""Datasets and models of the Hugging Face hub, used only when the user writes `hf://NAME`."""

import os
import tomllib
from functools import partial
from importlib import resources
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from arriero.data.text.sources import HUB
from arriero.errors import UserError

TOKENIZER_FILES = ["*.json", "tokenizer.model", "*.txt", "*.jinja"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
# the same weights again, downloaded only if a model has no others
_MISTRALS_FILES = ["consolidated*.safetensors"]
_PICKLED_FILES = ["pytorch_model*.bin"]


class HubCorpus(NamedTuple):
    """A dataset of the hub and where its text is. `files` is read instead of the dataset's own loader."""

    dataset: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    files: str | None = None


def hub_corpora() -> dict[str, HubCorpus]:
    raw = tomllib.loads(resources.files("arriero.data.text").joinpath("corpora.toml").read_text("utf-8"))
    return {name: HubCorpus(**about) for name, about in raw.items()}


def hub_corpus(name: str) -> HubCorpus:
    """Return the corpus of a known name or of `DATASET[:CONFIG][@SPLIT]`."""
    if name in (known := hub_corpora()):
        return known[name]
    if "/" not in name:
        raise UserError(
            f"'hf://{name}' is not a known corpus",
            f"choose one of {', '.join(known)}, or write hf://OWNER/DATASET[:CONFIG][@SPLIT]",
        )
    dataset, _, split = name.partition("@")
    dataset, _, config = dataset.partition(":")
    return HubCorpus(dataset, config or None, split or "train")


def stay_offline() -> None:
    """Forbid all libraries to contact the hub."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"


def download(name: str) -> list[Path]:
    """Download a dataset unless it is cached; return its Arrow files in the Hugging Face cache."""
    corpus = hub_corpus(name)
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf://{name} needs the 'datasets' package", "pip install 'arriero[hub]'") from None
    try:
        if corpus.files:
            reader = "parquet" if corpus.files.endswith(".parquet") else "json"
            revision = quote(corpus.revision or "main", safe="")
            where = f"{HUB}datasets/{corpus.dataset}@{revision}/{corpus.files}"
            loaded = datasets.load_dataset(reader, data_files=where, split=corpus.split)
        else:
            loaded = datasets.load_dataset(
                corpus.dataset, corpus.config, split=corpus.split, revision=corpus.revision
            )
    except Exception as error:  # the library raises many kinds for a missing network, name or account
        raise _unavailable(name, error) from None
    files = [Path(file["filename"]) for file in loaded.cache_files]
    if not files:
        raise UserError(
            f"hf://{name} has no files in the cache", "save it with save_to_disk and give that directory"
        )
    return files


def local_model(path: str, weights: bool = True) -> Path:
    """Return a path unchanged; download `hf://OWNER/MODEL[@REVISION]` and return its cache directory.

    Without `weights` only the configuration and the tokenizer are downloaded.
    """
    if not path.startswith(HUB):
        return Path(path)
    name, _, revision = path.removeprefix(HUB).partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{path} needs the 'huggingface_hub' package", "pip install 'arriero[hub]'") from None
    try:
        fetch = partial(snapshot_download, name, revision=revision or None)
        files = MODEL_FILES if weights else TOKENIZER_FILES
        folder = Path(fetch(allow_patterns=files, ignore_patterns=_MISTRALS_FILES))
        for others in (_MISTRALS_FILES, _PICKLED_FILES) if weights else ():
            if not any(folder.glob("*.safetensors")):
                fetch(allow_patterns=others)
        return folder
    except Exception as error:  # the library raises many kinds for a missing network, name or account
        raise _unavailable(path.removeprefix(HUB), error) from None


def _unavailable(name: str, error: Exception) -> UserError:
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return UserError(
        f"cannot load hf://{name} ({type(error).__name__}: {reason})",
        "check the name, the network and your Hugging Face account",
    )
