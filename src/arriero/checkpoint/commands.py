"""`arriero ckpt list | inspect | verify | prune | convert | average`."""

import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.config.options import AsJson, Verb, read_progress, read_size, run_path
from arriero.errors import UserError
from arriero.ui import Console, Table, byte_progress, escape, facts, make_console, print_json, styled
from arriero.units import counted, human_bytes, human_count, human_time

if TYPE_CHECKING:
    from arriero.checkpoint.directory import Manifest, SavedCheckpoint
    from arriero.checkpoint.formats.model_reader import ModelReader, WriteOptions

Run = Annotated[Path, typer.Argument(help="A run directory, or its name under runs/.", show_default=False)]
Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run directory for its newest one.", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="Compare file sizes only.")]
Format = Literal["hf", "meta", "dcp", "torch", "peft"]
Rule = Literal["llama2", "llama3"]
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(help="Dtype of the written weights; unchanged if not given."),
]
ShardSize = Annotated[str, typer.Option(help="hf: largest size of a safetensors file.")]
ModelParallel = Annotated[int, typer.Option(min=1, help="meta: number of consolidated.NN.pth files.")]
MetaRule = Annotated[
    Rule | None,
    typer.Option(
        help="meta: code that reads the shards; llama2 splits the embedding by columns. Default: by model."
    ),
]


def list_checkpoints(run: Run, quick: Quick = False, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: step, tokens, size, age, evaluations, and whether they are valid.

    Every file is read and its checksum compared, unless --quick. Damaged checkpoints, which a run has renamed
    to step-N.damaged, are listed too.

    Example: arriero ckpt list runs/demo
    """
    from arriero.checkpoint.directory import find_checkpoints, find_renamed
    from arriero.checkpoint.scores import checkpoint_row

    console, directory = make_console(as_json), run_directory_at(run)
    found, aside = find_checkpoints(directory, report_unreadable=True), find_renamed(directory)
    verdicts = _judged(console, found, quick)
    rows = [replace(checkpoint_row(each), problem=bad) for each, bad in zip(found, verdicts, strict=True)]
    if as_json:
        checked = "sizes" if quick else "checksums"
        renamed = [str(path) for _, path in aside]
        listed = [asdict(row) | {"valid": row.problem is None} for row in rows]
        facts = {"run": str(directory), "checked": checked, "checkpoints": listed, "renamed_aside": renamed}
        print_json(facts)
        return
    shown = ["evaluations"] if any(row.scores for row in rows) else []
    table = Table(">step", ">tokens", ">size", ">age", "complete" if quick else "valid", *shown)
    for row in rows:
        verdict = styled("yes", "green") if row.problem is None else styled(f"no: {row.problem}", "red")
        table.row(row.step, *row.shown(_age), verdict, *[row.scores for _ in shown])
    for step, path in aside:
        table.row(step, "", "", "", styled(f"no: renamed aside as {path.name}", "red"), *["" for _ in shown])
    console.print(table if found or aside else f"{run} has no checkpoints")


def _age(moment: float) -> str:
    return human_time(time.time() - moment)


def inspect(
    path: Checkpoint,
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: tensors with shapes and types, layout, versions, config.

    Example: arriero ckpt inspect runs/demo/checkpoints/step-00000600
    """
    directory, made = _read(path)
    if as_json:
        print_json(_inspected(directory, made, tensors))
        return
    console = make_console()
    layout = " x ".join(f"{axis} {n}" for axis, n in made.layout.items() if n > 1) or "1 process"
    rows = [
        ("checkpoint", str(directory)),
        ("step", f"{made.step:,}"),
        ("tokens", f"{made.tokens:,}"),
        ("saved", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(made.time))),
        ("layout", f"{layout} (read on any other)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("tokenizer", made.tokenizer[:12]),
        ("size", f"{human_bytes(made.size)} in {len(made.files) + 1} files"),
    ]
    console.print(facts(rows))
    if tensors:
        console.print(_tensor_table(made))
    console.print("[bold]run.toml[/]")
    console.plain(_run_toml(directory))


def _inspected(directory: Path, made: "Manifest", tensors: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "checkpoint": str(directory),
        "step": made.step,
        "tokens": made.tokens,
        "saved_at": made.time,
        "layout": dict(made.layout),
        "versions": dict(made.versions),
        "tokenizer_sha256": made.tokenizer,
        "bytes": made.size,
        "files": len(made.files) + 1,
        "config": tomllib.loads(_run_toml(directory)),
    }
    if tensors:
        found["tensors"] = {n: {"dtype": dtype, "shape": shape} for n, (dtype, shape) in made.tensors.items()}
    return found


def verify(path: Checkpoint, as_json: AsJson = False) -> None:
    """Compare the checksum of every file of a checkpoint and look for NaN and infinity in its tensors.

    If anything is wrong, lists it and exits with code 1.

    Example: arriero ckpt verify runs/demo
    """
    from arriero.checkpoint.directory import find_damage
    from arriero.checkpoint.state import non_finite_tensors

    console = make_console(as_json)
    directory, made = _read(path, damaged=1, as_json=as_json)
    with byte_progress(console, "reading", made.size) as advance:
        problems = find_damage(directory, made, progress=advance, report_unreadable=True)
    if not problems:
        with byte_progress(console, "reading", made.size) as advance:
            found = non_finite_tensors(directory, made, advance)
        problems = dict.fromkeys(found, "contains non-finite values")
    if as_json:
        counts = {"files": len(made.files), "bytes": made.size}
        print_json({"checkpoint": str(directory), "valid": not problems, **counts, "problems": problems})
        raise typer.Exit(1 if problems else 0)
    for name, problem in sorted(problems.items()):
        console.print(f"[red]{escape(name)}[/] {escape(problem)}")
    if problems:
        raise typer.Exit(1)
    counts = f"{len(made.files)} files, {len(made.tensors)} tensors, {human_bytes(made.size)}"
    console.print(f"{directory} is valid: {counts}")


def prune(
    run: Run,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Number of newest checkpoints to keep; default: checkpoint.keep."),
    ] = None,
    keep_every: Annotated[
        str | None,
        typer.Option(help="Also keep the first after each '10B tok'; default: checkpoint.keep_every."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
) -> None:
    """Delete old checkpoints of a run that is not training, by its run file or by these options.

    Nothing is deleted before the newest one has been read and found valid.

    Example: arriero ckpt prune runs/demo --keep 1
    """
    from arriero.checkpoint.directory import SavedStep, delete, expired_steps, find_checkpoints, find_damage
    from arriero.config.load import config_from_toml
    from arriero.config.timeline import Timeline

    console, directory = make_console(), run_directory_at(run)
    config = config_from_toml(directory / "run.toml")
    given = keep_every is not None
    span = read_progress("--keep-every", keep_every) if given else config.checkpoint.keep_every
    period = Timeline.of(config).tokens_of(span) if span else None
    usable = [saved for saved in find_checkpoints(directory) if saved.problem is None and saved.manifest]
    if not usable:
        raise UserError(f"{directory} has no checkpoint that can be used", "see `arriero ckpt list`")
    newest = usable[-1]
    assert newest.manifest is not None
    if find_damage(newest.directory, newest.manifest):
        raise UserError(
            f"{newest.directory} is damaged, so older ones must stay", "remove it, then prune again"
        )
    marks = [SavedStep(saved.step, saved.manifest.tokens) for saved in usable if saved.manifest]
    gone = set(expired_steps(marks, keep or config.checkpoint.keep, period))
    for saved in usable:
        if saved.step in gone:
            problem = None if dry_run else delete(saved.directory)
            done = "would remove" if dry_run else "removed" if problem is None else "could not remove"
            reason = f" ({problem})" if problem else ""
            console.plain(f"{done} {saved.directory}{reason}")
    stay = ", ".join(str(saved.step) for saved in usable if saved.step not in gone)
    console.print(f"kept: {stay}")


def run_directory_at(run: Path) -> Path:
    """Return a run directory given by its path or by its name under runs/."""
    run = run_path(run)
    if not (run / "run.toml").exists():
        raise UserError(
            f"{run} is not the directory of a run",
            "give one that holds a run.toml; `arriero runs` lists them",
        )
    return run


def _run_toml(directory: Path) -> str:
    try:
        text = (directory / "run.toml").read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory / 'run.toml'} cannot be read ({error})", "see `arriero ckpt verify`"
        ) from None
    return text


def _read(path: Path, damaged: int | None = None, as_json: bool = False) -> "tuple[Path, Manifest]":
    """Return a checkpoint and its manifest; `damaged` is the exit code if the manifest is invalid."""
    from arriero.checkpoint.directory import MANIFEST, Invalid, read_manifest, resolve_checkpoint

    directory = resolve_checkpoint(path)
    try:
        return directory, read_manifest(directory)
    except Invalid as error:
        if damaged is None:
            raise UserError(f"{directory} {error}", "give a valid checkpoint") from None
        if as_json:
            print_json({"checkpoint": str(directory), "valid": False, "problems": {MANIFEST: str(error)}})
            raise typer.Exit(damaged) from None
        make_console().print(f"[red]{escape(str(directory))}[/] {escape(str(error))}")
        raise typer.Exit(damaged) from None


def _judged(console: Console, found: "list[SavedCheckpoint]", quick: bool) -> list[str | None]:
    from arriero.checkpoint.directory import find_damage

    total = sum(saved.manifest.size for saved in found if saved.manifest)
    verdicts: list[str | None] = []
    with byte_progress(console, "reading", total) as advance:
        for saved in found:
            problem, made = saved.problem, saved.manifest
            if problem is None and made is not None:
                bad = find_damage(
                    saved.directory, made, progress=advance, report_unreadable=True, sizes_only=quick
                )
                problem = "; ".join(f"{name} {what}" for name, what in sorted(bad.items())) or None
            verdicts.append(problem)
    return verdicts


def _tensor_table(made: "Manifest") -> Table:
    table = Table("tensor", "type", "shape")
    for name, (dtype, shape) in made.tensors.items():
        table.row(name, dtype, " x ".join(map(str, shape)) or "scalar")
    return table


class SpreadWeights(Verb):
    """A command that accepts `--weights 0.3 0.7` for `--weights 0.3 --weights 0.7`."""

    def parse_args(self, ctx, args):
        spread, within = [], False
        for argument in args:
            if within and not _is_number(argument):
                within = False
            if argument == "--weights":
                within = True
                continue
            spread += ["--weights", argument] if within else [argument]
        return super().parse_args(ctx, spread)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A model or checkpoint in any format, or hf://OWNER/MODEL\\[@REVISION]."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to create.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    model_parallel: ModelParallel = 1,
    meta_rule: MetaRule = None,
) -> None:
    """Convert a model to another format, one tensor at a time. The format of SRC is recognised by its files.

    Tokenizer files and the generation config are copied. DST must not exist; it appears when it is complete.

    Example: arriero ckpt convert runs/demo/checkpoints/step-00001000 exported --to hf --dtype bf16
    """
    from arriero.checkpoint.convert import open_model
    from arriero.data.text.hub import local_model

    found = open_model(local_model(source))
    _write(found, target, to, _writing(dtype, shard_size, model_parallel, meta_rule))


def mini(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A model or checkpoint in any format, or hf://OWNER/MODEL.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to create.")],
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of first blocks to keep; default: 4.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="Keep these blocks instead: 0,1,30,31.")] = None,
    to: Annotated[Format | None, typer.Option(help="The format to write; that of SRC if not given.")] = None,
    dtype: Dtype = None,
) -> None:
    """Write a copy of a model with fewer blocks, for debugging; widths, vocabulary and tokenizer stay.

    Example: arriero ckpt mini runs/demo/model small --layers 2
    """
    from arriero.checkpoint.convert import find_model, with_blocks

    found = find_model(source)
    if blocks is not None and layers is not None:
        raise UserError("--layers and --blocks both choose blocks", "give one of them")
    try:
        chosen = [int(each) for each in blocks.split(",")] if blocks else list(range(layers or 4))
    except ValueError:
        raise UserError(f"--blocks {blocks} is not a list of numbers", "write it like 0,1,30,31") from None
    written: Format = to or ("hf" if found.format == "peft" else found.format)  # pyrefly: ignore[bad-assignment]
    _write(with_blocks(found, chosen), target, written, _writing(dtype, "5GB", 1, None))


def average(
    models: Annotated[
        list[Path], typer.Argument(metavar="A B ...", help="Models of the same dimensions, in any format.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DST", help="The directory to create.")],
    weights: Annotated[
        list[float] | None, typer.Option(help="One weight per model; equal if not given.")
    ] = None,
    to: Annotated[
        Format | None, typer.Option(help="The format to write; that of the first model if not given.")
    ] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    model_parallel: ModelParallel = 1,
    meta_rule: MetaRule = None,
) -> None:
    """Write the weighted mean of models, computed in a wider dtype, one tensor at a time.

    Example: arriero ckpt average site-a site-b -o merged --weights 0.3 0.7
    """
    from arriero.checkpoint.convert import average as mean_of
    from arriero.checkpoint.convert import open_model

    mean = mean_of([open_model(path) for path in models], weights or None)
    chosen: Format = to or mean.format  # pyrefly: ignore[bad-assignment]
    _write(mean, out, chosen, _writing(dtype, shard_size, model_parallel, meta_rule))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _writing(
    dtype: str | None, shard_size: str, model_parallel: int, meta_rule: Rule | None
) -> "WriteOptions":
    from arriero.checkpoint.formats.model_reader import DTYPES, WriteOptions

    size = read_size("--shard-size", shard_size)
    return WriteOptions(DTYPES[dtype] if dtype else None, size, model_parallel, meta_rule)


def _write(source: "ModelReader", target: Path, to: Format, writing: "WriteOptions") -> None:
    from arriero.checkpoint.convert import convert as write

    console = make_console()
    spec, total = source.spec, source.nbytes(writing.dtype)
    types = sorted({str(writing.dtype or t.dtype).removeprefix("torch.") for t in source.tensors.values()})
    console.print(
        f"[bold]from[/]  {escape(source.where)}: {source.format}, {spec.family} with "
        f"{human_count(spec.parameters)} parameters",
    )
    for remark in source.remarks:
        console.plain(remark, "yellow")
    with byte_progress(console, f"writing {to}", total) as advance:
        write(source, target, to, writing, advance)
    files = len([path for path in target.iterdir() if path.is_file()])
    size = sum(path.stat().st_size for path in target.iterdir())
    held = f"{to}, {' and '.join(types)}, {human_bytes(size)} in {counted(files, 'file')}"
    console.print(f"[bold]to[/]    {escape(str(target))}: {held}")
