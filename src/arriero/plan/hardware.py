"""Devices, machines and clusters as data: memory, number formats, peaks, links and prices."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arriero.errors import UserError, nearest

GIB = 2**30
# what the driver takes of a device's memory for a process
_CONTEXT = 600 * 2**20
_CLUSTERS = Path(__file__).with_name("clusters")
_Kind = TypeVar("_Kind", bound=BaseModel)


def _installed_torch() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Machine:
    """One device of a run, and how many of them a node has. All ranks have the same device.

    `memory_free` and `memory_total` are bytes per device. `bf16` and `float8` say whether the hardware
    multiplies these formats; `bf16_peak_flops` is the dense peak, None where it is not known.
    """

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    memory_free: int
    memory_total: int
    devices_per_node: int = 1
    bf16: bool = True
    float8: bool = False
    bf16_peak_flops: float | None = None
    torch: tuple[int, int] = field(default_factory=_installed_torch)

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


@dataclass(frozen=True)
class Peak:
    """Dense peak FLOP/s of one device as torch sees it: one MI250X is two devices."""

    bf16: float
    fp8: float | None = None


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


Share = Annotated[float, Field(gt=0.01, le=1, strict=False)]


class Rates(_Data):
    """Shares of the data sheet that training reaches; see devices.toml."""

    matmul: Share
    memory: Share
    attention: Share
    attention_backward: Share
    flash2: Share
    matmul_fp8: Share | None = None


class Device(_Data):
    """A device type. bf16, fp8 and fp32 in TFLOP/s, bandwidth in TB/s, memory in GiB, power in watts."""

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    rates: Rates
    bandwidth: float = Field(ge=0.005, le=100, strict=False)
    power: float = Field(ge=1, le=5000, strict=False)
    memory: float | None = Field(None, ge=1, le=4096, strict=False)
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    units: Annotated[int, Field(ge=1, le=4096)] = 1
    bf16: float | None = Field(None, ge=0.01, le=50_000, strict=False)
    fp8: float | None = Field(None, ge=0.01, le=100_000, strict=False)
    fp32: float | None = Field(None, ge=0.001, le=10_000, strict=False)
    nominal_power: float | None = None
    match: str | None = None
    key: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def clock(self) -> float:
        """The share of the nominal clock under a lowered power limit: power grows with its cube."""
        return min(1.0, (self.power / (self.nominal_power or self.power)) ** (1 / 3))

    def machine(self, ranks: int = 1) -> Machine:
        """Return the machine that `resolve` takes; a CPU's memory is divided between `ranks` processes."""
        total = available_ram() // ranks if self.memory is None else int(self.memory * GIB)
        return Machine(
            name=self.name,
            kind=self.kind,
            memory_free=total - (_CONTEXT if self.kind != "cpu" else 0),
            memory_total=total,
            devices_per_node=ranks if self.kind == "cpu" else self.devices_per_node,
            float8=self.fp8 is not None,
            bf16_peak_flops=self.bf16 * 1e12 if self.bf16 else None,
        )


def _validated(kind: type[_Kind], table: Mapping[str, Any], where: str) -> _Kind:
    try:
        return kind.model_validate(_tuples(table))
    except ValidationError as error:
        problems = [_problem(each) for each in error.errors()]
        raise UserError(f"{where}: {'; '.join(problems)}", "correct these keys") from None


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


_EXPECTED = {"model_type": "a table", "tuple_type": "a list of tables"}


def _problem(error: Any) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "extra_forbidden":
        return f"{key} is not a key of a cluster file"
    if (kind := error["type"]) in _EXPECTED:
        return f"{key} must be {'a name or ' if key == 'device' else ''}{_EXPECTED[kind]}"
    shown = repr(error["input"])
    return f"{key} is {shown if len(shown) < 40 else 'of a wrong type'}: {error['msg'].lower()}"


@cache
def devices() -> Mapping[str, Device]:
    """Return the device types by name."""
    file = Path(__file__).with_name("devices.toml")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        name: _validated(Device, {"key": name, **entry}, f"{file}: {name}") for name, entry in table.items()
    }


# in the order of the table, the CPU first
MACHINES = ("cpu", *(name for name in devices() if name != "cpu"))


def device_named(name: str) -> Device:
    """Return a device type by its name; 'h100-80g' and 'H100-80GB' are names of 'h100'."""
    wanted = re.sub(r"(?<=\d)gb?$", "", name.lower())
    for known, device in devices().items():
        if wanted in (known, *device.aliases):
            return device
    near = nearest(wanted, MACHINES)
    hint = f"did you mean '{near}'? " if near else ""
    raise UserError(f"there is no device '{name}'", f"{hint}known devices: {', '.join(MACHINES)}")


def device_like(reported: str) -> Device | None:
    """Return the type of a device by the name that torch reports, or None if it is not in the table."""
    for device in devices().values():
        if device.match and re.search(rf"(?<![A-Za-z0-9]){device.match}(?![A-Za-z0-9])", reported):
            return device
    return None


def peak_of(reported: str) -> Peak | None:
    """Return the peak of a device, or None if it is not in the table: a guess would give a wrong MFU."""
    device = device_like(reported)
    if device is None or device.bf16 is None:
        return None
    return Peak(device.bf16 * 1e12, device.fp8 * 1e12 if device.fp8 else None)


def machine_named(name: str, ranks: int = 1) -> Machine:
    """Return a machine of the table; 'cpu' has this host's memory, divided between `ranks` processes."""
    return device_named(name).machine(ranks)


class Link(_Data):
    """A topology level: `devices` are connected by it, None for all devices of the cluster.

    `bandwidth` is what one device sends, in GB/s; `latency` is that of one message, in microseconds.
    """

    name: str
    bandwidth: float = Field(ge=0.01, le=10_000, strict=False)
    devices: Annotated[int, Field(ge=2, le=2**24)] | None = None
    latency: float | None = Field(None, ge=0.1, le=10_000, strict=False)


class Cluster(_Data):
    """A cluster: its device, nodes, links from the innermost outwards, price and power per device."""

    device: Device
    devices_per_node: Annotated[int, Field(ge=1, le=1024)]
    nodes: Annotated[int, Field(ge=1, le=1_000_000)]
    links: tuple[Link, ...] = ()
    name: str = "cluster"
    about: str = ""
    price: float | None = Field(None, ge=0, le=1000, strict=False)
    power: float | None = Field(None, ge=1, le=10_000, strict=False)

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def machine(self) -> Machine:
        """One device of the cluster, as `resolve` takes it."""
        return replace(self.device.machine(), devices_per_node=self.devices_per_node)

    def with_nodes(self, nodes: int) -> "Cluster":
        return self.model_copy(update={"nodes": nodes})


@cache
def cluster_names() -> tuple[str, ...]:
    """Return the names of the cluster files that are shipped."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob("*.toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a cluster by the name of a shipped file, or from a TOML file; raise for absurd numbers."""
    text = str(name_or_path)
    return _shipped(text.lower()) if text.lower() in cluster_names() else _read_cluster(Path(text), text)


@cache
def _shipped(name: str) -> Cluster:
    return _read_cluster(_CLUSTERS / f"{name}.toml", name)


def _read_cluster(path: Path, text: str) -> Cluster:
    if not path.is_file():
        near = nearest(text.lower(), cluster_names())
        hint = f"did you mean '{near}'? " if near else ""
        todo = f"{hint}give a TOML file, or one of {', '.join(cluster_names())}"
        raise UserError(f"there is no cluster '{text}'", todo)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a TOML file: {error}") from None
    return read_cluster(table, path)


def read_cluster(table: Mapping[str, Any], path: Path) -> Cluster:
    """Return the cluster that a table describes; `path` names it, also in errors."""
    table = {"name": path.stem, **table}
    given = table.get("device")
    if isinstance(given, str):
        table["device"] = device_named(given)
    elif isinstance(given, dict) and "type" in given:
        base = device_named(str(given["type"])).model_dump()
        table["device"] = {**base, "nominal_power": base["power"], **given}
        del table["device"]["type"]
    if isinstance(table.get("links"), list):
        table["links"] = tuple(table["links"])
    cluster = _validated(Cluster, table, str(path))
    if problems := _link_problems(cluster):
        raise UserError(f"{path}: {'; '.join(problems)}", "correct these keys")
    return cluster


def _link_problems(cluster: Cluster) -> list[str]:
    """Return what contradicts itself: levels out of order, or devices that nothing connects."""
    problems, inner = [], 1
    for i, link in enumerate(cluster.links):
        if link.devices is not None and link.devices <= inner:
            problems.append(f"links[{i}].devices is {link.devices}, but the level inside it has {inner}")
        if link.devices is None and i < len(cluster.links) - 1:
            problems.append(f"links[{i}].devices is missing; only the outermost level may leave it out")
        if link.bandwidth > 1000 * cluster.device.bandwidth:
            memory = f"{1000 * cluster.device.bandwidth:g} GB/s of the device's own memory"
            problems.append(f"links[{i}].bandwidth is {link.bandwidth:g}, more than the {memory}")
        inner = link.devices or cluster.size
    if inner < cluster.size:
        problems.append(f"links connect {inner} of the {cluster.size} devices; add a level")
    return problems


def cluster_of_device(name: str, count: int) -> Cluster:
    """Return a cluster of `count` devices of a type, connected as in the shipped file for that type."""
    device = device_named(name)
    generic = [c for c in map(load_cluster, cluster_names()) if c.device.name == device.name]
    found = max(generic, key=lambda c: (c.name.startswith("8x"), bool(c.links)), default=None)
    if found is None:
        todo = f"write a cluster file, or use --cluster with one of {', '.join(cluster_names())}"
        raise UserError(f"no shipped cluster has the device '{name}', so its links are unknown", todo)
    return found.with_nodes(-(-count // found.devices_per_node))


def cluster_for(name: str | None, machine: Machine, ranks: int) -> Cluster | None:
    """Return the cluster of a run: the named one, or the shipped one with its device, or None."""
    if name is not None:
        return load_cluster(name)
    if not machine.is_gpu:
        cluster = load_cluster("cpu")
        links = tuple(link.model_copy(update={"devices": None}) for link in cluster.links)
        return cluster.model_copy(update={"devices_per_node": max(ranks, 1), "links": links})
    device = device_like(machine.name)
    if device is None:
        return None
    try:
        cluster = cluster_of_device(device.key, ranks)
    except UserError:
        return None
    per_node = machine.devices_per_node
    return cluster.model_copy(update={"devices_per_node": per_node, "nodes": -(-ranks // per_node)})


def proc_bytes(file: Path, field: str) -> int | None:
    """Return a field of a file like /proc/meminfo in bytes, or None where it is missing."""
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None


def available_ram() -> int:
    """Return the bytes of memory this process may still take, from the host and from its cgroup."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = proc_bytes(Path("/proc/meminfo"), "MemAvailable") or pages
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(pages, int(text) - int(used.read_text()))
    return pages
