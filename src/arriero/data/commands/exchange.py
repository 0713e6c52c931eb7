"""The verbs of `arriero data` about datasets that exist: import, export, inspect, verify."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arriero.ui import Console, byte_progress, escape, make_console
from arriero.units import counted, human_count

if TYPE_CHECKING:
    from arriero.data.exchange.convert import Imported

Format = Literal["megatron", "datatrove", "olmo", "fms-arrow", "hf-parquet"]
Linking = Literal["auto", "hard", "symbolic", "copy"]
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared dataset.")]

_LINK_HELP = (
    "How files of raw tokens are placed: auto is a hard link, or a symbolic one on another filesystem."
)
_SAMPLE_TOKENS = 120


def import_tokens(
    format: Annotated[Format, typer.Argument(help="Whose files they are.")],
    sources: Annotated[list[Path], typer.Argument(metavar="SRC", help="Token files, or their directories.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The dataset to make.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="The tokenizer the tokens were made with: a file, a directory, or hf://OWNER/MODEL."
        ),
    ],
    eos: Annotated[
        str | None, typer.Option(help="The token that ends a document; else the usual names.")
    ] = None,
    separator: Annotated[
        Literal["add", "keep"],
        typer.Option(
            help="fms-arrow and hf-parquet: add the end-of-document token where it is absent, or not."
        ),
    ] = "add",
    column: Annotated[str | None, typer.Option(help="The column of token ids, in Arrow and Parquet.")] = None,
    dtype: Annotated[
        Literal["uint16", "int32"] | None,
        typer.Option(help="Bytes of a token where no index tells; int32 reads uint32 too."),
    ] = None,
    link: Annotated[Linking, typer.Option(help=_LINK_HELP)] = "auto",
) -> None:
    """Make a dataset of token files another system wrote; raw tokens are linked, not copied.

    Every byte is read once, for its checksum and to refuse ids beyond the vocabulary.

    Example: arriero data import datatrove tokens/ -o data/web --tokenizer tokenizer.json
    """
    from arriero.data.exchange.convert import Import
    from arriero.data.text.hub import local_model
    from arriero.data.tokens.tokenizer import load_tokenizer

    console = make_console()
    job = Import(
        format,
        sources,
        load_tokenizer(local_model(tokenizer), eos),
        dtype=dtype,
        column=column,
        separator=separator,
        link=link,
    )
    with byte_progress(console, f"importing {len(job.files)} files", job.total_bytes) as advance:
        made = job.into(out, advance)
    _show_import(console, out, made)


def export_tokens(
    directory: Dataset,
    format: Annotated[Format, typer.Argument(help="For whom.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    column: Annotated[str, typer.Option(help="The column of token ids, in Parquet.")] = "input_ids",
    link: Annotated[Linking, typer.Option(help=_LINK_HELP)] = "auto",
) -> None:
    """Write a dataset in another system's layout; where that is raw tokens too, as links.

    Example: arriero data export data/web megatron exported/web
    """
    from arriero.data.exchange.convert import export_dataset
    from arriero.data.store.store import TokenStore

    console = make_console()
    store = TokenStore.open(directory)
    store.check_tokenizer()
    total = store.tokens * store.dtype.itemsize
    with byte_progress(console, f"exporting {store.shards} shards", total) as advance:
        made = export_dataset(store, format, target, column=column, link=link, advance=advance)
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items()) or "rewritten"
    held = f"{human_count(store.tokens)} tokens in {counted(store.documents, 'document')}"
    console.print(
        f"{held} -> {escape(str(target))}: {counted(made.files, f'{format} file')} ({how})",
    )
    if format == "fms-arrow":
        console.print("end-of-document tokens left out: fms-fsdp's loader adds its own")
    if made.kept_eos:
        console.print(
            f"[yellow]but kept in {made.kept_eos} files[/], where some documents lack one; "
            "let fms-fsdp strip it, or it sees the separator twice",
        )
    if made.empty and format in ("datatrove", "olmo"):
        console.print(
            f"[yellow]{counted(made.empty, 'document')} without a token[/]: datatrove then counts "
            "positions wrong, OLMo-core refuses one at the end of a file",
        )
    console.print(f"the tokenizer stays at {escape(str(store.tokenizer_path))}")


def _show_import(console: Console, out: Path, made: "Imported") -> None:
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items())
    console.print(
        f"{human_count(made.tokens)} tokens in {counted(made.documents, 'document')} -> {escape(str(out))}: "
        f"{counted(len(made.shards), 'shard')}, {how}",
    )
    if made.placed["hard link"] or made.placed["symbolic link"]:
        console.print("the original files are part of the dataset now: do not change them in place")
    if made.placed["symbolic link"]:
        console.print("symbolic links break when the originals move; --link copy makes it stand alone")
    if made.eos_added:
        added = counted(made.eos_added, "document")
        console.print(f"an end-of-document token was added to {added}")
    if made.empty:
        are = "is" if made.empty == 1 else "are"
        console.print(f"{counted(made.empty, 'document')} {are} empty")
    if made.without_eos:
        do = "does" if made.without_eos == 1 else "do"
        console.print(
            f"[yellow]{counted(made.without_eos, 'document')} {do} not end with the end-of-document token",
        )
    for remark in made.remarks[:10]:
        console.print(escape(remark))
    if len(made.remarks) > 10:
        console.print(f"and {len(made.remarks) - 10} remarks of the same kind")
