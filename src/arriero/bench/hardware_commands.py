"""`arriero bench ops | comm`: measure a device and a network for the planner."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from arriero.bench.commands import Documents, chosen
from arriero.config.options import AsJson, RunFile, Sets, check_writable, read_size
from arriero.errors import UserError
from arriero.events import warn
from arriero.files import sha256_of_json
from arriero.plan.measured import OPS, Collective, CollectiveTime, MeasuredFile, OpTime, cache_folder
from arriero.train.commands import Nproc
from arriero.ui import Console, columns, make_console, print_json
from arriero.units import human_bytes

if TYPE_CHECKING:
    from arriero.bench.comm import CommRequest
    from arriero.bench.ops import OpCase, OpsRequest
    from arriero.config.schema import RunConfig

_PRECISIONS = ("fp32", "bf16", "float8")
_WIDTHS = (18, 6, 25, 10, 10, 6)
_COMM_WIDTHS = (14, 16, 10, 11, 9, 6)
_ON_GPU, _ON_CPU = "2048,8192,32768", "128,512"

Out = Annotated[
    Path | None,
    typer.Option(help="Also write the result there; default: only the user's cache.", show_default=False),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what the cache has already.")]


def ops(
    run_file: RunFile = None,
    sets: Sets = [],
    models: Annotated[
        str, typer.Option(help="Model presets, separated by commas; default: the run's model.")
    ] = "",
    precisions: Annotated[
        str, typer.Option(help="fp32, bf16, float8, separated by commas; default: those of the device.")
    ] = "",
    tokens: Annotated[
        str, typer.Option(help=f"Tokens per micro-batch; default: {_ON_GPU} on a GPU, {_ON_CPU} on a CPU.")
    ] = "",
    seq_lens: Annotated[str, typer.Option(help="Sequence lengths of attention; default: data.seq_len.")] = "",
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees whose slices are measured.")] = "1",
    documents: Documents = None,
    only: Annotated[str, typer.Option(help=f"Operations; default: all of {', '.join(OPS)}.")] = "",
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds to spend per operation.")] = 0.2,
    out: Out = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Measure the operations of a model on one device, forward and backward, for `arriero plan`.

    Linear layers, attention, norm, RoPE, activation, loss, optimizer and a whole block are run with the
    shapes and kernels of training. Results are kept in ~/.cache/arriero by device, shape and versions; what
    the cache has is not measured again. For float8 only linear layers and blocks are measured.

    Example: arriero bench ops --models llama3.1-8b --precisions bf16,float8 --seq-lens 8192 --out ops.json
    """
    check_writable("--out", out)
    wanted = chosen("--only", only, list(OPS))
    configs = _configs(run_file, sets, models)
    lengths = _numbers("--seq-lens", seq_lens) or [configs[0].data.seq_len]
    from arriero.bench.machine import check_commit_variable
    from arriero.bench.ops import OpsRequest
    from arriero.bench.step import DocumentLengths
    from arriero.train.device import choose_device

    check_commit_variable()
    device = choose_device(configs[0].run.device)
    machine = device.machine()
    default = ["bf16", *(["float8"] if machine.float8 else [])] if machine.is_gpu else ["fp32"]
    request = OpsRequest(
        tokens=_numbers("--tokens", tokens or (_ON_GPU if machine.is_gpu else _ON_CPU)),
        seq_lens=lengths,
        precisions=chosen("--precisions", precisions, _PRECISIONS) if precisions else default,  # pyrefly: ignore
        tp=_numbers("--tp", tp),
        only=wanted,
        documents=DocumentLengths.parse(documents) if documents is not None else None,
        seconds=seconds,
    )
    console = make_console(as_json)
    empty = _described(device)
    cache = Cache(empty)
    done = _measure_all(console, configs, request, cache, fresh)
    _publish(console, empty.model_copy(update={"ops": done}), out, as_json, cache.path)


def _configs(run_file: Path | None, sets: list[str], models: str) -> "list[RunConfig]":
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    names = [name.strip() for name in models.split(",") if name.strip()]
    each = [[*sets, f"model.preset={name}"] for name in names] or [list(sets)]
    return [load_run(run_file, one, expand).config for one in each]


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        what = f"{option} {text} is not a list of positive numbers"
        raise UserError(what, f"write it like {option} 2,8")
    return sorted(set(found))


def _measure_all(
    console: Console, configs: "list[RunConfig]", request: "OpsRequest", cache: "Cache", fresh: bool
) -> list[OpTime]:
    """Measure every case once and print a line for each; the cache is written after each model."""
    from arriero.bench.ops import build_one_layer, measure_op, op_cases

    known = {} if fresh else {row.key: row for row in cache.file.ops}
    done: dict[Any, OpTime] = {}
    console.print(columns(_WIDTHS, "operation", "in", "shape", "forward ms", "backward", ""), style="bold")
    with console.status("") as status:
        for config in configs:
            for precision in request.precisions:
                layer = build_one_layer(config, request.seq_lens[0], precision)
                for case in op_cases(layer, precision, request):
                    if case.key in done:
                        continue
                    status.update(f"{config.model.preset or config.model.family}: {case}")
                    row = known.get(case.key)
                    remark = "cached" if row else ""
                    if row is None:
                        row = measure_op(case, layer.device, request.seconds)
                    if row is None:
                        console.plain(f"{case}: does not fit into the memory of the device")
                        continue
                    done[case.key] = row
                    console.print(_op_line(case, row, remark))
                cache.keep(ops=list(done.values()))
    return list(done.values())


def _op_line(case: "OpCase", row: OpTime, remark: str) -> Any:
    backward = "" if row.backward is None else f"{row.backward.median * 1e3:,.3f}"
    spread = (row.forward.high - row.forward.low) / row.forward.median
    return columns(
        _WIDTHS, case.op, case.precision, case.size, f"{row.forward.median * 1e3:,.3f}", backward,
        remark or f"±{spread / 2:.0%}",
    )  # fmt: skip


def comm(
    nproc: Nproc = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="CPUs with gloo, or GPUs with NCCL or RCCL.")
    ] = "auto",
    collectives: Annotated[
        str, typer.Option(help=f"Collectives; default: {', '.join(get_args(Collective))}.")
    ] = "",
    min_size: Annotated[str, typer.Option(help="Smallest tensor.")] = "0.25MiB",
    max_size: Annotated[str, typer.Option(help="Largest tensor.")] = "512MiB",
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds to spend per size.")] = 0.3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives over groups of 2, 4, ... ranks, inside and between nodes, for `arriero plan`.

    Sizes are powers of two; a size is the whole tensor: the output of an all-gather, the input of the others.
    Groups between nodes have one rank of each node, like data-parallel replicas, or all ranks. All groups of
    a kind run at once. On several nodes: srun --nodes 4 --ntasks-per-node 8 arriero bench comm.

    Example: arriero bench comm --nproc 8 --out comm.json
    """
    check_writable("--out", out)
    wanted = chosen("--collectives", collectives, get_args(Collective))
    sizes = _doubled(read_size("--min-size", min_size), read_size("--max-size", max_size))
    from arriero.bench.comm import CommRequest
    from arriero.parallel.spawn import run_ranks
    from arriero.parallel.world import world_from

    request = CommRequest(wanted, sizes, seconds)  # pyrefly: ignore
    launched = world_from().size
    if launched == 1 and (nproc or 1) < 2:
        raise UserError(
            "one rank has nobody to communicate with", "give --nproc, or start it by srun or torchrun"
        )
    if launched > 1 and nproc:
        raise UserError("a launcher has started several ranks already", "omit --nproc")
    console = make_console(as_json)
    found = (
        _comm_rank(console, device, request)
        if launched > 1
        else run_ranks(lambda: _comm_rank(console, device, request), nproc or 1)
    )
    if found is None:
        return
    cache = Cache(found)
    cache.keep(collectives=found.collectives)
    _publish(console, found, out, as_json, cache.path)


def _doubled(least: int, most: int) -> list[int]:
    if not 0 < least <= most:
        raise UserError(
            "--min-size is above --max-size", "give them like --min-size 0.25MiB --max-size 512MiB"
        )
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes


def _comm_rank(console: Console, wanted: str, request: "CommRequest") -> MeasuredFile | None:
    """Measure as one rank; return the result on rank 0."""
    from arriero.bench.comm import fabric, measure_comm
    from arriero.parallel.world import process_group, world_from
    from arriero.train.device import choose_device

    world = world_from()
    device = choose_device(wanted, world.local_rank, world.local_size)

    def report(row: CollectiveTime) -> None:
        spread = (row.seconds.high - row.seconds.low) / row.seconds.median / 2
        where = "one node" if row.nodes == 1 else f"{row.nodes} nodes"
        console.print(
            columns(
                _COMM_WIDTHS, row.collective, f"{row.ranks} on {where}", human_bytes(row.bytes),
                f"{row.seconds.median * 1e3:,.3f}", f"{row.bandwidth / 1e9:,.2f}", f"±{spread:.0%}",
            )
        )  # fmt: skip

    with process_group(world, device.torch_device):
        if world.is_leader:
            console.print(
                columns(_COMM_WIDTHS, "collective", "ranks", "size", "ms", "GB/s", ""), style="bold"
            )
        rows = measure_comm(world, device, request, report)
    if not world.is_leader:
        return None
    return _described(device).model_copy(update={"fabric": fabric(device, world), "collectives": rows})


def _described(device: Any) -> MeasuredFile:
    """Return a file without times that describes this device and its software."""
    from arriero.bench.machine import describe_code, describe_device, device_key

    about, code = describe_device(device, 1), describe_code()
    hardware = {"cpu": about.cpu, "cores": about.cores, "memory_gib": about.memory_gib}
    return MeasuredFile(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device_key(device),
        hardware=hardware | {"driver": about.driver, "power_limit": about.power_limit},
        versions=code.versions,
    )


class Cache:
    """The file of the user's cache for one kind of device with one fabric and one set of versions."""

    def __init__(self, empty: MeasuredFile) -> None:
        digest = sha256_of_json([empty.device, empty.fabric, empty.versions])[:12]
        name = "".join(c if c.isalnum() else "-" for c in empty.device.lower())
        self.path, self.file = cache_folder() / f"{name}-{digest}.json", empty
        if self.path.exists():
            try:
                self.file = MeasuredFile.read(self.path)
            except UserError as error:
                warn(f"{error.what}; it is replaced")

    def keep(self, **rows: list[Any]) -> None:
        """Add rows, which replace those of the same shape."""
        changes: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        for name, new in rows.items():
            changes[name] = list({row.key: row for row in (*getattr(self.file, name), *new)}.values())
        self.file = self.file.model_copy(update=changes)
        self.file.write(self.path)


def _publish(console: Console, found: MeasuredFile, out: Path | None, as_json: bool, cache: Path) -> None:
    if out is not None:
        found.write(out)
    if as_json:
        print_json(found.model_dump(mode="json"))
    console.plain(f"kept in {cache}" + (f", written to {out}" if out else ""))
