"""Filter and deduplicate text with datatrove; `arriero data prepare OUTPUT/curated ...` reads what it leaves.

    python -m venv curation && curation/bin/pip install -r recipes/datatrove/requirements.txt
    curation/bin/python recipes/datatrove/curate.py raw/ out/ --tasks 8 --workers 8

Five stages, each resumable (finished tasks are skipped when the same command is given again):
filter, then MinHash in four: signatures, buckets, clusters, removal. What is dropped lies in OUTPUT/removed.
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = {"datatrove": "datatrove", "xxhash": "xxhash<4", "spacy": "spacy", "orjson": "orjson"}
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
FILTERS = ("gopher-repetition", "gopher-quality", "c4", "fineweb")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path, help="folder of .jsonl, .jsonl.gz, .jsonl.zst or .parquet files")
    parser.add_argument("output", type=Path, help="folder to write; on a filesystem all nodes see")
    parser.add_argument("--text-key", default="text", help="the field that holds the text")
    parser.add_argument(
        "--language", default="en", help="of the words and stop words; kept by the language filter"
    )
    parser.add_argument(
        "--language-model", type=Path, help="fastText model, e.g. lid.176.bin; without it no filter"
    )
    parser.add_argument("--language-threshold", type=float, default=0.65)
    parser.add_argument("--skip", nargs="*", default=[], choices=FILTERS, help="quality filters to leave out")
    parser.add_argument("--no-dedup", action="store_true", help="filter only")
    parser.add_argument(
        "--buckets", type=int, default=14, help="MinHash bands of 8 hashes: 14 cuts near 0.72"
    )
    parser.add_argument("--parquet", action="store_true", help="write Parquet instead of JSONL.gz")
    parser.add_argument(
        "--tasks", type=int, default=1, help="parts to distribute the files over; at most one per file"
    )
    parser.add_argument("--workers", type=int, default=1, help="tasks at once on this machine")
    parser.add_argument("--slurm", metavar="PARTITION", help="submit to Slurm instead of running here")
    parser.add_argument("--time", default="20:00:00", help="Slurm time limit of a task")
    parser.add_argument("--mem-per-cpu", type=int, default=4, help="GiB, Slurm; clusters take the most")
    parser.add_argument(
        "--sbatch", nargs="*", default=[], metavar="KEY=VALUE", help="like account=my_project"
    )
    return parser.parse_args()


def check(chosen: argparse.Namespace) -> None:
    missing = [pip_name for name, pip_name in NEEDED.items() if not _installed(name)]
    if chosen.language_model and not _installed("fasttext-numpy2-wheel"):
        missing.append("fasttext-numpy2-wheel")
    if missing:
        sys.exit(
            f"error: not installed: {', '.join(missing)}; pip install -r recipes/datatrove/requirements.txt"
        )
    if int(version("xxhash").split(".")[0]) >= 4:
        sys.exit(f"error: datatrove's MinHash fails with xxhash {version('xxhash')}; pip install 'xxhash<4'")
    if chosen.language_model and not chosen.language_model.is_file():
        sys.exit(f"error: {chosen.language_model} does not exist; nothing is downloaded, so fetch it first")
    if not _files(chosen.input):
        sys.exit(f"error: {chosen.input} has no .jsonl(.gz, .zst) or .parquet file")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(SUFFIXES)]


def readers(folder: Path, text_key: str) -> list:
    """One per kind of file that is there; each passes on what the one before it read."""
    from datatrove.pipeline.readers import JsonlReader, ParquetReader

    return [
        (ParquetReader if suffix == ".parquet" else JsonlReader)(
            str(folder), text_key=text_key, glob_pattern=f"**/*{suffix}"
        )
        for suffix in SUFFIXES
        if any(folder.rglob(f"*{suffix}"))
    ]


def writer(folder: Path, parquet: bool):
    from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

    return ParquetWriter(str(folder)) if parquet else JsonlWriter(str(folder))


def language_filter(chosen: argparse.Namespace, removed):
    """datatrove knows models by URL alone; this one is opened where it lies, without a network."""
    from datatrove.pipeline.filters import LanguageFilter
    from datatrove.utils.lid import FastTextLID

    class LocalModel(FastTextLID):
        def __init__(self, path: str, languages: list[str]) -> None:
            super().__init__(languages)
            self.path = path

        @property
        def model(self):
            if self._model is None:
                from fasttext.FastText import _FastText

                self._model = _FastText(self.path)
            return self._model

    languages = [chosen.language]
    made = LanguageFilter(languages, chosen.language_threshold, exclusion_writer=removed("language"))
    made.model = LocalModel(str(chosen.language_model.resolve()), languages)
    return made


def word_splitter(language: str) -> str:
    """datatrove names languages by three letters, fastText by two."""
    import csv

    from datatrove.utils._import_utils import ASSETS_PATH

    with Path(ASSETS_PATH, "tokenizer_assignment.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            if language == row["code_3"] or (language == row["code_1"] and row["default_code_1"] == "TRUE"):
                return row["code_3"]
    sys.exit(
        f"error: datatrove splits no words of language '{language}'; give its ISO 639 code, like en or it"
    )


def filters(chosen: argparse.Namespace) -> list:
    """As in FineWeb: C4 without its rule on terminal punctuation. Gopher's stop words are English only."""
    from datatrove.pipeline import filters as known
    from datatrove.utils.typeshelper import Languages

    def removed(name: str):
        return writer(chosen.output / "removed" / name, parquet=False)

    words = word_splitter(chosen.language)
    stop_words = 2 if words == Languages.english else None
    steps = [language_filter(chosen, removed)] if chosen.language_model else []
    quality = {
        "gopher-repetition": lambda out: known.GopherRepetitionFilter(language=words, exclusion_writer=out),
        "gopher-quality": lambda out: known.GopherQualityFilter(
            min_stop_words=stop_words, language=words, exclusion_writer=out
        ),
        "c4": lambda out: known.C4QualityFilter(
            filter_no_terminal_punct=False, language=words, exclusion_writer=out
        ),
        "fineweb": lambda out: known.FineWebQualityFilter(language=words, exclusion_writer=out),
    }
    return steps + [quality[name](removed(name)) for name in FILTERS if name not in chosen.skip]


def stages(chosen: argparse.Namespace) -> list[tuple[str, list, int]]:
    """Name, steps and number of tasks of each stage."""
    out = chosen.output
    filtered = out / ("curated" if chosen.no_dedup else "filtered")
    first = [
        *readers(chosen.input, chosen.text_key),
        *filters(chosen),
        writer(filtered, chosen.no_dedup and chosen.parquet),
    ]
    plan = [("filter", first, chosen.tasks)]
    if chosen.no_dedup:
        return plan
    from datatrove.pipeline import dedup
    from datatrove.pipeline.readers import JsonlReader

    words = word_splitter(chosen.language)
    config = dedup.MinhashConfig(num_buckets=chosen.buckets)
    signatures, buckets, clusters = (
        str(out / "minhash" / name) for name in ("signatures", "buckets", "clusters")
    )
    again = JsonlReader(str(filtered))
    return [
        *plan,
        (
            "signatures",
            [again, dedup.MinhashDedupSignature(signatures, config=config, language=words)],
            chosen.tasks,
        ),
        ("buckets", [dedup.MinhashDedupBuckets(signatures, buckets, config=config)], chosen.buckets),
        ("clusters", [dedup.MinhashDedupCluster(buckets, clusters, config=config)], 1),
        (
            "removal",
            [
                again,
                dedup.MinhashDedupFilter(
                    clusters, exclusion_writer=writer(out / "removed" / "duplicates", False)
                ),
                writer(out / "curated", chosen.parquet),
            ],
            chosen.tasks,
        ),
    ]


def run_here(chosen: argparse.Namespace) -> None:
    from datatrove.executor import LocalPipelineExecutor

    for name, steps, tasks in stages(chosen):
        print(f"{name}: {tasks} tasks, {chosen.workers} at once", flush=True)
        logs = str(chosen.output / "logs" / name)
        LocalPipelineExecutor(steps, tasks=tasks, workers=min(chosen.workers, tasks), logging_dir=logs).run()
        if name == "filter" and not any(_files(chosen.output / part) for part in ("filtered", "curated")):
            sys.exit(
                f"error: no document passed the filters; what they took is in {chosen.output / 'removed'}"
            )


def submit(chosen: argparse.Namespace) -> None:
    """Five job arrays, each waiting for the one before it."""
    from datatrove.executor import SlurmPipelineExecutor

    before = None
    for name, steps, tasks in stages(chosen):
        before = SlurmPipelineExecutor(
            steps,
            tasks=tasks,
            time=chosen.time,
            partition=chosen.slurm,
            qos=None,
            mem_per_cpu_gb=chosen.mem_per_cpu,
            job_name=f"curate-{name}",
            logging_dir=str(chosen.output / "logs" / name),
            slurm_logs_folder=str(chosen.output / "logs" / name / "slurm"),
            sbatch_args=dict(pair.split("=", 1) for pair in chosen.sbatch),
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
            depends=before,
        )
    if before:
        before.run()


def main() -> None:
    chosen = options()
    check(chosen)
    if chosen.tasks > (files := len(_files(chosen.input))):
        print(f"{files} tasks instead of {chosen.tasks}: a file is not divided")
        chosen.tasks = files
    submit(chosen) if chosen.slurm else run_here(chosen)
    print(f"then: arriero data prepare {chosen.output / 'curated'} -o DIR --tokenizer tokenizer.json")


if __name__ == "__main__":
    main()
