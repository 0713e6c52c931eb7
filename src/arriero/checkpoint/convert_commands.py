"""The verbs of `arriero ckpt` that make models out of models: convert, average."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperCommand

from arriero.config.options import read_size
from arriero.ui import byte_progress, escape, make_console
from arriero.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    from arriero.checkpoint.formats.source import Source, Writing

Format = Literal["hf", "meta", "dcp", "torch"]
Rule = Literal["llama2", "llama3"]
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None, typer.Option(help="Type of the weights; else as they are.")
]
ShardSize = Annotated[str, typer.Option(help="hf: the largest safetensors file.")]
ModelParallel = Annotated[int, typer.Option(min=1, help="meta: how many consolidated.NN.pth.")]
MetaRule = Annotated[
    Rule | None,
    typer.Option(help="meta: whose code will read the shards; llama2 cuts the embedding by columns."),
]


class ManyNumbers(TyperCommand):
    """Lets `--weights 0.3 0.7` stand for `--weights 0.3 --weights 0.7`."""

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
            metavar="SRC", help="A model or checkpoint in any format, or hf://OWNER/MODEL[@REVISION]."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    model_parallel: ModelParallel = 1,
    meta_rule: MetaRule = None,
) -> None:
    """Turn a model into another format, a tensor at a time; what SRC is, is seen from its files.

    Tokenizer files and the generation config travel along. DST must not exist, and appears only when whole.

    Example: arriero ckpt convert runs/demo/checkpoints/step-00001000 exported --to hf --dtype bf16
    """
    from arriero.checkpoint.convert import open_source
    from arriero.data.text.hub import local_model

    found = open_source(local_model(source))
    _write(found, target, to, _writing(dtype, shard_size, model_parallel, meta_rule))


def average(
    models: Annotated[list[Path], typer.Argument(metavar="A B ...", help="Models of one shape, any format.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DST", help="The directory to make.")],
    weights: Annotated[
        list[float] | None, typer.Option(help="One number per model, in proportion; else all alike.")
    ] = None,
    to: Annotated[Format | None, typer.Option(help="The format to write; else the first model's.")] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    model_parallel: ModelParallel = 1,
    meta_rule: MetaRule = None,
) -> None:
    """Write the weighted mean of models, summed in a wider type, a tensor at a time.

    Example: arriero ckpt average site-a site-b -o merged --weights 0.3 0.7
    """
    from arriero.checkpoint.convert import average as mean_of
    from arriero.checkpoint.convert import open_source

    mean = mean_of([open_source(path) for path in models], weights or None)
    chosen: Format = to or mean.format  # pyrefly: ignore[bad-assignment]
    _write(mean, out, chosen, _writing(dtype, shard_size, model_parallel, meta_rule))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _writing(dtype: str | None, shard_size: str, model_parallel: int, meta_rule: Rule | None) -> "Writing":
    from arriero.checkpoint.formats.source import DTYPES, Writing

    size = read_size("--shard-size", shard_size)
    return Writing(DTYPES[dtype] if dtype else None, size, model_parallel, meta_rule)


def _write(source: "Source", target: Path, to: Format, writing: "Writing") -> None:
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
