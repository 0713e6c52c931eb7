"""Parts of a start and of a save at the size of large runs, simulated in a few processes."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.hardware import machine_named
from arriero.plan.resolve import resolve
from arriero.slurm import hosts

Rows = list[dict[str, Any]]
_NO_EVAL = ("eval.heldout=false", "eval.every=false")
_SERVER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
print(store.port, flush=True)
sys.stdin.read()
"""


def store(sizes: tuple[int, ...] = (64, 256, 1024, 4096, 10_000)) -> Rows:
    """Connect clients to one store and let each take the requests of a rendezvous, one after the other."""
    import torch.distributed as dist

    # as the rendezvous does: see docs/scaling.md
    os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:1")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: Rows = []
    with _server() as port:
        clients: list[Any] = []
        connected = 0.0
        for size in (each for each in sizes if each < hard - 200):
            start = time.perf_counter()
            while len(clients) < size:
                wait = timedelta(seconds=600)
                clients.append(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait))
            connected += time.perf_counter() - start
            start = time.perf_counter()
            for rank, client in enumerate(clients):
                client.set(f"here/{size}/{rank}", f"node{rank // 8}")
                client.add(f"arrived/{size}", 1)
                client.check([f"here/{size}/0"])
            arrived = time.perf_counter() - start
            start = time.perf_counter()
            clients[0].multi_get([f"here/{size}/{rank}" for rank in range(size)])
            listed = time.perf_counter() - start
            row = {"ranks": size, "sockets of rank 0": size, "connect all, s": connected}
            rows.append(row | {"requests of all, s": arrived, "names of all, s": listed})
    return rows


class _server:
    """A store in its own process."""

    def __enter__(self) -> int:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def checkpoint(sizes: tuple[int, ...] = (64, 512, 2048, 10_000)) -> Rows:
    """Plan the save of Llama-3.1-8B on so many ranks, with the tables that they would send."""
    from arriero.model.name_maps import own_tensors
    from arriero.model.presets import load_preset
    from benchmarks.checkpoint_plan import ours

    tensors = own_tensors(load_preset("llama3.1-8b"))
    rows = []
    for size in sizes:
        # more than 2,048 shards of an 8B model are not useful: replicas beyond
        found = dict(ours(tensors, size, max(1, size // 2000)))
        rows.append({"ranks": size} | {name: value for name, value in found.items() if name != "items"})
    return rows


def settings(sizes: tuple[int, ...] = (128, 1024, 16_384)) -> Rows:
    """Resolve a run of Llama-3.1-405B and expand a list of as many nodes."""
    rows = []
    machine = machine_named("h200")
    for size in sizes:
        sets = ["model.preset=llama3.1-405b", "data.seq_len=8192", f"train.batch={8192 * 128 * size} tok"]
        sets += ["schedule.warmup=1 step", "parallel.pp=16", "parallel.tp=8"]
        config, text = load_run(None, sets, expand).config, f"x[10000-{10000 + size - 1}]"
        rows.append(
            {
                "ranks": size,
                "resolve, ms": 1e3 * _best(lambda c=config, n=size: resolve(c, machine, n)),
                "list of as many nodes, ms": 1e3 * _best(lambda t=text: sum(1 for _ in hosts(t))),
            }
        )
    return rows


def _best(work: Callable[[], Any], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def data(folder: Path, sizes: tuple[int, ...] = (1, 64, 1024, 10_000)) -> Rows:
    """Read the first batches of one rank among many; count files that it opens."""
    from arriero.data.order.loader import Loader
    from arriero.data.order.streams import build_streams
    from arriero.data.workers import no_progress

    rows = []
    # the first reading also imports modules
    for size in (sizes[0], *sizes):
        sets = [
            "model.preset=llama-test",
            "model.vocab_size=4096",
            "data.seq_len=32",
            f"data.cache='{folder}'",
        ]
        sets += [f"train.batch={32 * size} tok", "train.horizon=20 steps", *_NO_EVAL]
        config = load_run(None, sets, expand).config
        opened: set[str] = set()
        with _opened_files(opened):
            start = time.perf_counter()
            streams = build_streams(config, no_progress)
            loader = Loader(streams.train, lambda _, n=size: n, start_sample=0, rank=size // 2, ranks=size)
            for _ in range(3):
                next(loader)
            seconds = time.perf_counter() - start
            loader.close()
        rows.append({"ranks": size, "files opened": len(opened), "open and three batches, s": seconds})
    return rows[1:]


class _opened_files:
    """Collect the names of files that Python opens in the block."""

    _active: set[str] | None = None
    _hooked = False

    def __init__(self, found: set[str]) -> None:
        self._found = found

    def __enter__(self) -> None:
        if not _opened_files._hooked:
            sys.addaudithook(_opened_files._hear)
            _opened_files._hooked = True
        _opened_files._active = self._found

    def __exit__(self, *_: object) -> None:
        _opened_files._active = None

    @staticmethod
    def _hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _opened_files._active is not None and isinstance(arguments[0], str):
            _opened_files._active.add(arguments[0])


_COUNT_IMPORTS = """
import atexit, importlib.util, json, os, sys
def report():
    files = {getattr(m, "__file__", None) or "" for m in list(sys.modules.values())}
    files = {f for f in files if f.endswith(".py")}
    cached = [importlib.util.cache_from_source(f) for f in files]
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
    size = lambda paths: sum(os.path.getsize(p) for p in paths if os.path.exists(p))
    found = {"Python files": len(files), "Python, MB": size(cached) / 1e6}
    found |= {"libraries": len(libraries), "libraries, MB": size(libraries) / 1e6}
    json.dump(found, open(os.environ["IMPORTS"], "w"))
atexit.register(report)
sys.argv = ["arriero", *sys.argv[1:]]
from arriero.__main__ import main
main()
"""


def imports(folder: Path) -> Rows:
    """Count what `import torch`, `arriero --help` and the ranks of a run read from the environment."""
    sets = ["model.preset=llama-test", "model.vocab_size=4096", "data.seq_len=32", "train.batch=256 tok"]
    sets += [
        "train.horizon=1 step",
        *_NO_EVAL,
        f"data.cache='{folder}'",
        f"run.dir='{folder}/runs'",
    ]
    sets += ["parallel.dp_shard=2", "checkpoint.export=false", "checkpoint.at_end=false"]
    train = ["train", "--quiet", *(word for each in sets for word in ("--set", each))]
    launched = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29771",
    }
    ranks = [
        _counting(folder, f"rank {rank}", train, launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    program = _COUNT_IMPORTS.replace("from arriero.__main__ import main\nmain()", "import torch")
    alone = [
        _counting(folder, "import torch", [], {}, program),
        _counting(folder, "arriero --help", ["--help"], {}),
    ]
    return [found for start in (*alone, *ranks) for found in _counted(*start)]


def _counting(
    folder: Path, name: str, words: list[str], variables: dict[str, str], program: str = _COUNT_IMPORTS
) -> tuple[str, Path, subprocess.Popen]:
    target = folder / f"imports-{name.replace(' ', '-')}.json"
    environment = {**os.environ, **variables, "IMPORTS": str(target), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *words]
    return name, target, subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _counted(name: str, target: Path, process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    if process.wait() != 0:
        raise RuntimeError(f"{name} ended with {process.returncode}")
    yield {"process": name} | json.loads(target.read_text())
