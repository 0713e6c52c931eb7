"""Upload a model to the Hugging Face hub with a model card that is made from its run.

Only files of the Hugging Face format are sent: weights, config, tokenizer and the card. Optimizer state, the
run file and paths of the machine stay where they are.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.config.options import AsJson, run_path
from arriero.errors import UserError
from arriero.ui import Table, byte_progress, make_console, print_json
from arriero.units import JOULES_PER_KWH, human_bytes, human_count, human_time

if TYPE_CHECKING:
    from arriero.checkpoint.formats.model_reader import ModelReader

HUB = "hf://"
_WEIGHTS = frozenset({"model.safetensors", "model.safetensors.index.json"})
CARD = "README.md"
_SENT = (
    *("*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt"),
)


@dataclass(frozen=True)
class Upload:
    """What is sent: files by their names in the repository, and the card."""

    files: Mapping[str, Path]
    card: str

    def sizes(self) -> dict[str, int]:
        return {CARD: len(self.card.encode())} | {n: p.stat().st_size for n, p in self.files.items()}


def push(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A run, a checkpoint or a model in any format.")
    ],
    target: Annotated[str, typer.Argument(metavar="hf://OWNER/NAME", help="The repository on the hub.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a private repository, if it does not exist yet.")
    ] = False,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Dtype of the weights; as stored if not given.", show_default=False),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="The licence of the model card, like apache-2.0.")
    ] = None,
    card: Annotated[
        Path | None, typer.Option(help="Your own model card (Markdown) instead of the one from the run.")
    ] = None,
    revision: Annotated[str, typer.Option(help="The branch to commit to.")] = "main",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card, and send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model to the Hugging Face hub with a model card: data, tokens, layout, losses, evaluations.

    Other formats are converted to Hugging Face's first. Optimizer state, run files and paths are never sent.
    Log in with `hf auth login` or set HF_TOKEN; HF_ENDPOINT names another hub.

    Example: arriero ckpt push runs/demo hf://OWNER/NAME --dry-run
    """
    name = target.removeprefix(HUB)
    if not target.startswith(HUB) or name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"'{target}' is not a repository of the hub", "write it like hf://OWNER/NAME")
    if card is not None and not card.is_file():
        raise UserError(f"--card {card} is not a file", "give a Markdown file")
    console = make_console(as_json)
    with _prepared(source, dtype, name, licence, card) as upload:
        sizes = upload.sizes()
        url = None if dry_run else _send(upload, name, private, revision)
    if as_json:
        print_json({"repository": name, "sent": not dry_run, "url": url, "files": sizes, "card": upload.card})
        return
    table = Table("file", ">size")
    for file, size in sizes.items():
        table.row(file, human_bytes(size))
    console.print(table)
    if dry_run:
        console.plain(upload.card)
        console.print(f"nothing was sent: without --dry-run these files go to {target}")
    else:
        console.plain(f"sent to {url}")


@contextmanager
def _prepared(
    source: str, dtype: str | None, name: str, licence: str | None, card: Path | None
) -> Iterator[Upload]:
    """Yield the files of the model in Hugging Face format, converted to a temporary folder if necessary."""
    from arriero.checkpoint.convert import convert, open_model
    from arriero.checkpoint.formats.model_reader import DTYPES, WriteOptions

    directory = _model_of(source)
    found = open_model(directory)
    text = _card_at(card) if card else _card_of(name, found, directory, licence)
    files = _files(directory) if found.format == "hf" and dtype is None else {}
    if not _WEIGHTS.isdisjoint(files):
        yield Upload(files, text)
        return
    found.require_weights("upload the PEFT directory RUN/adapter with `hf upload`")
    console = make_console(as_json=True)
    with tempfile.TemporaryDirectory(prefix="arriero-push-") as folder:
        chosen = DTYPES[dtype] if dtype else None
        with byte_progress(console, "converting", found.nbytes(chosen)) as advance:
            convert(found, Path(folder) / "model", "hf", WriteOptions(chosen), advance)
        yield Upload(_files(Path(folder) / "model"), text)


def _card_at(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--card {path} cannot be read ({error})", "give a text file in UTF-8") from None


def _card_of(name: str, found: "ModelReader", directory: Path, licence: str | None) -> str:
    try:
        return model_card(name, found, directory, licence)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{directory}: the record of its training is damaged ({type(error).__name__}: {error})"
        raise UserError(what, "give your own card with --card") from None


def _model_of(source: str) -> Path:
    """Return the model of a run: the exported one, else its newest checkpoint; other paths as they are."""
    from arriero.checkpoint.directory import resolve_checkpoint

    path = run_path(Path(source))
    if not path.exists():
        raise UserError(f"{source} does not exist", "give a run, a checkpoint or a model")
    if (path / "run.toml").is_file() and not (path / ".metadata").is_file():
        return path / "model" if (path / "model" / "config.json").is_file() else resolve_checkpoint(path)
    return path


def _files(directory: Path) -> dict[str, Path]:
    every = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: path for path in every if any(fnmatchcase(path.name, each) for each in _SENT)}


def _send(upload: Upload, name: str, private: bool, revision: str) -> str:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise UserError(
            "ckpt push needs the 'huggingface_hub' package", "pip install 'arriero[hub]'"
        ) from None
    operations = [CommitOperationAdd(CARD, upload.card.encode())]
    operations += [CommitOperationAdd(file, str(path)) for file, path in upload.files.items()]
    try:
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        made = api.create_commit(
            name, operations, commit_message="Upload the model with Arriero", revision=revision
        )
    except Exception as error:  # the library raises many kinds for a missing network, name or account
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(
            f"hf://{name} cannot be written ({type(error).__name__}: {reason})",
            "log in with `hf auth login` or set HF_TOKEN, and check the name and the network",
        ) from None
    return str(made.commit_url)


def model_card(name: str, source: "ModelReader", directory: Path, licence: str | None) -> str:
    """Return a model card in Markdown from what the model directory and its run tell."""
    spec, record = source.spec, _record(directory)
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["arriero", spec.family],
    }
    head |= {"license": licence} if licence else {}
    if record and (base := record["base"]) and base.startswith(HUB):
        head["base_model"] = base.removeprefix(HUB).partition("@")[0]
    rows = [("parameters", f"{spec.parameters:,} ({spec.family})")]
    rows += [("context", f"{spec.max_seq_len:,} tokens"), ("vocabulary", f"{spec.vocab_size:,}")]
    if record:
        rows += _training_rows(record)
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---"]
    lines += [f"# {name.split('/')[1]}", "", *_table(("", ""), rows)]
    if record and record["sources"]:
        data = [(each, f"{share:.1%}" if share is not None else "") for each, share in record["sources"]]
        lines += ["", "## Data", *_table(("source", "share of the tokens"), data)]
        lines += ["", f"Fingerprint of the data order: `{record['fingerprint']}`."]
    if scores := _scores(directory, record):
        lines += ["", "## Evaluation", *_table(("metric", "value"), scores)]
    lines += ["", "## Use", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")', "```", ""]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[tuple[str, str]]) -> list[str]:
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(heads)} |", "|---|---|", *(f"| {row} |" for row in cells)]


def _training_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("trained tokens", f"{record['tokens']:,} ({human_count(record['tokens'])})")]
    rows.append(("optimizer steps", f"{record['step']:,}"))
    if base := record["base"]:
        rows.append(("initial weights", base if base.startswith(HUB) else _name(base)))
    for key, shown in (("last_loss", "training loss"), ("last_eval_loss", "validation loss")):
        if record.get(key) is not None:
            rows.append((shown, f"{record[key]:.4f}"))
    for key in ("optimizer", "precision", "layout", "device"):
        if record.get(key):
            rows.append((key, str(record[key])))
    if record.get("seconds"):
        rows.append(("training time", human_time(record["seconds"])))
    if record.get("joules"):
        rows.append(("energy", f"{record['joules'] / JOULES_PER_KWH:,.3g} kWh"))
    made_by = ", ".join(f"{key} {value}" for key, value in record.get("versions", {}).items())
    return [*rows, ("made with", made_by)] if made_by else rows


def _record(directory: Path) -> dict[str, Any] | None:
    """Return what is known about the training of a model or checkpoint; None for a model of others."""
    import tomllib

    if (directory / "training.json").is_file():
        about = json.loads((directory / "training.json").read_bytes())
        config = tomllib.loads(about.pop("config"))
        data = about["data"]
        shares: dict[str, float | None] = dict.fromkeys(data["names"])
    elif (directory / "state.json").is_file() and (directory / "run.toml").is_file():
        about = json.loads((directory / "state.json").read_bytes())
        manifest = json.loads((directory / "manifest.json").read_bytes())
        about |= {"step": about["steps"], "versions": manifest["versions"]}
        about["layout"] = (
            " x ".join(f"{k} {n}" for k, n in manifest["layout"].items() if n > 1) or "1 process"
        )
        config, data = tomllib.loads((directory / "run.toml").read_text(encoding="utf-8")), about["data"]
        shares = {}
    else:
        return None
    ledger = next(
        (each / "ledger.json" for each in (directory, directory.parent) if (each / "ledger.json").is_file()),
        None,
    )
    if ledger is not None:
        sources = json.loads(ledger.read_bytes())["sources"]
        total = sum(each["tokens"] for each in sources) or 1
        shares |= {each["name"]: each["tokens"] / total for each in sources}
    optim, precision = config.get("optim", {}), config.get("precision", {})
    about["optimizer"] = f"{optim.get('name', 'adamw')}, learning rate {optim.get('lr', 0):g}"
    about["precision"] = None if (given := precision.get("compute")) == "auto" else given
    # the last part of a path only: the rest tells about the machine
    about["sources"] = [(Path(each).name, share) for each, share in shares.items()]
    about["base"] = config.get("checkpoint", {}).get("start_from")
    return about | {"fingerprint": data["fingerprint"], "joules": about.get("joules") or _energy(directory)}


def _name(path: str) -> str:
    """Return the last part of a path; of the exported model of a run, the run."""
    found = Path(path)
    return found.parent.name if found.name == "model" else found.name


def _energy(directory: Path) -> float | None:
    """Return the joules of the run that a model lies in, if its devices measured them."""
    from arriero.events import EVENTS, read_records

    run_dir = next((each for each in directory.parents if (each / EVENTS).is_file()), None)
    ends = [each for each in read_records(run_dir / EVENTS) if each.get("event") == "end"] if run_dir else []
    return ends[-1].get("joules") if ends else None


def _scores(directory: Path, record: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the evaluations of the checkpoint, or of the run's checkpoint of the exported step."""
    from arriero.checkpoint.directory import CHECKPOINTS, directory_name
    from arriero.checkpoint.scores import read_evaluations

    places = [directory]
    if record is not None:
        places.append(directory.parent / CHECKPOINTS / directory_name(record["step"]))
    found: dict[str, str] = {}
    for place in places:
        for each in read_evaluations(place) if place.is_dir() else []:
            for metric, value in each.scores.items():
                kind, _, data = metric.partition(" ")
                shown = f"{kind} {Path(data).name}" if "/" in data else metric
                found[shown] = "not finite" if value is None else f"{value:.4g}"
    return list(found.items())
