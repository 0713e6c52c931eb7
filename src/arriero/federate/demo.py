"""The federation without a file: sites with disjoint parts of the embedded corpus, and one run with all."""

import json
from dataclasses import dataclass
from pathlib import Path

from arriero.config.load import load_run
from arriero.data.prepare.builtin import prepare_builtin
from arriero.data.text.builtin import stdlib_documents
from arriero.data.text.sources import STDLIB
from arriero.data.workers import ProgressCallback, no_progress
from arriero.federate.schema import FederationConfig, parse_federation
from arriero.files import publish_file
from arriero.model.presets import expand

ROUNDS, STEPS, BATCH = 6, 50, 1024
_RUN = """\
[run]
name = "{name}"

[model]
preset = "llama-demo"

[data]
seq_len = 128
sources = [{sources}]

[train]
batch = "{batch} tok"
horizon = "{steps} steps"

[optim]
lr = 4e-3

[schedule]
kind = "cosine"
warmup = "30 steps"
horizon = "{steps} steps"

[eval]
heldout = "20k tok"

[checkpoint]
every = "50 steps"
export = false

[observe]
tensorboard = false
"""


@dataclass(frozen=True)
class Demo:
    """`centralised` is the run file that trains on the data of all sites, with the batch of all sites."""

    config: FederationConfig
    centralised: Path
    sets: tuple[str, ...] = ()


def make_demo(
    folder: Path,
    sites: int = 2,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    outer: dict[str, object] | None = None,
    sets: tuple[str, ...] = (),
    batch: int = BATCH,
    cache: Path = Path("data"),
    progress: ProgressCallback = no_progress,
) -> Demo:
    """Write the run files of a federation on disjoint parts of the embedded corpus.

    `sets` overrides keys of all run files; `batch` is the batch of one site.
    """
    prepared = prepare_builtin(STDLIB, cache, progress)
    tokenizer = (prepared / "tokenizer.json").absolute()
    texts = split_corpus(cache.absolute() / "federation", sites)
    sources = [f'{{ path = "{text}", tokenizer = "{tokenizer}" }}' for text in texts]
    names = [f"site-{chr(ord('a') + i)}" for i in range(sites)]
    total = rounds * steps
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in zip(names, sources, strict=True):
        content = _RUN.format(name=name, sources=source, batch=batch, steps=total)
        publish_file(folder / f"{name}.toml", content.encode())
    both = _RUN.format(name="centralised", sources=", ".join(sources), batch=batch * sites, steps=total)
    publish_file(folder / "centralised.toml", both.encode())
    table = {
        "federation": {
            "name": "federated",
            "dir": ".",
            "rounds": rounds,
            "tokens": f"{steps} steps",
            "mode": "synchronous",
            "balance": False,
            "tokenizer": str(tokenizer),
        },
        "outer": outer or {},
        "sites": [{"name": name, "run_file": f"{name}.toml", "set": sets} for name in names],
    }
    return Demo(parse_federation(table, "the demo", folder), folder / "centralised.toml", sets)


def split_corpus(folder: Path, parts: int) -> list[Path]:
    """Write disjoint parts of the standard library's source, one JSON Lines file per site."""
    paths = [folder / f"stdlib-{i + 1}-of-{parts}.jsonl" for i in range(parts)]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        documents = [document.text for document in stdlib_documents()]
        for i, path in enumerate(paths):
            lines = (json.dumps({"text": text}) + "\n" for text in documents[i::parts])
            publish_file(path, "".join(lines).encode())
    return paths


def train_centralised(demo: Demo, folder: Path) -> float | None:
    """Train one model on the data of all sites; return its validation loss."""
    from arriero.train.run import run

    config = load_run(demo.centralised, [*demo.sets, f"run.dir='{folder}'"], expand).config
    return run(config).last_eval_loss
