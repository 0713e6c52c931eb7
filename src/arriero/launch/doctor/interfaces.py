"""Network interfaces and fabric devices of this node, and the interface variables to set for them."""

import ctypes
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from arriero.parallel.rendezvous import address_of_interface

_INFINIBAND = 32
# never the way to another node: loopback, bridges and tunnels of containers and virtual machines
_LOCAL = re.compile(r"lo|docker|br-|veth|virbr|cni|flannel|tun|tap|ifb|dummy|podman|lxc|usb|idrac|bmc")
_PLUGINS = ("libnccl-net-ofi.so", "librccl-net-ofi.so", "libnccl-net.so", "librccl-net.so")


@dataclass(frozen=True)
class Interface:
    """A network interface; `speed` is in Mbit/s, 0 where the driver does not report it."""

    name: str
    kind: str
    up: bool
    address: str | None
    speed: int

    @property
    def leaves_node(self) -> bool:
        return not _LOCAL.match(self.name)

    @property
    def is_usable(self) -> bool:
        return self.up and self.address is not None and self.leaves_node


def interfaces() -> list[Interface]:
    """Return the interfaces of this node, sorted by name."""
    return [_interface(path) for path in sorted(Path("/sys/class/net").iterdir()) if (path / "type").exists()]


def _interface(path: Path) -> Interface:
    def read(name: str) -> str:
        try:
            return (path / name).read_text().strip()
        except OSError:  # the speed of an interface that is down
            return ""

    name, speed = path.name, read("speed")
    if name.startswith("hsn"):
        kind = "Slingshot"
    else:
        kind = "InfiniBand" if read("type") == str(_INFINIBAND) else "Ethernet"
    up = read("operstate") in ("up", "unknown")
    return Interface(name, kind, up, _address(name), int(speed) if speed.isdigit() else 0)


def _address(name: str) -> str | None:
    """Return the IPv4 address of an interface, or its global IPv6 address."""
    if (address := address_of_interface(name)) is not None:
        return address
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, owner = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if owner == name and not address.is_link_local:
            return str(address)
    return None


def default_interface() -> str | None:
    """Return the interface of the default route."""
    table = Path("/proc/net/route")
    lines = table.read_text().splitlines()[1:] if table.exists() else []
    return next((line.split()[0] for line in lines if line.split()[1] == "00000000"), None)


def fabric_devices() -> list[str]:
    """Return the RDMA devices: InfiniBand and RoCE (verbs) and Slingshot (cxi)."""
    kinds = ("infiniband", "cxi", "cxi_user")
    return [path.name for kind in kinds for path in sorted(Path("/sys/class").glob(f"{kind}/*"))]


def fabric_plugin() -> str | None:
    """Return the first libfabric plugin of NCCL or RCCL that the dynamic linker finds."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for name in _PLUGINS:
        for path in (Path(folder, name) for folder in folders if folder):
            if path.exists():
                return str(path)
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def selected(value: str, names: Iterable[str], variable: str = "NCCL_SOCKET_IFNAME") -> list[str]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects.

    NCCL takes prefixes, '=name' for an exact name and '^name' to exclude; gloo takes exact names.
    """
    excludes, exact = value.startswith("^"), variable.startswith("GLOO") or value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]

    def matches(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in names if matches(name) != excludes]


@dataclass(frozen=True)
class Proposal:
    """An environment variable for this kind of node, and why."""

    variable: str
    value: str
    reason: str


def propose(found: list[Interface], devices: list[str], default: str | None) -> list[Proposal]:
    """Return the interface variables for NCCL or RCCL and gloo: the fastest network between the nodes.

    Slingshot before InfiniBand before the fastest Ethernet; the default route decides between equals.
    """
    usable = [each for each in found if each.is_usable]
    if not usable:
        return []
    rank = {"Slingshot": 2, "InfiniBand": 1, "Ethernet": 0}

    def order(each: Interface) -> tuple[int, int, bool]:
        return rank[each.kind], each.speed, each.name == default

    best = max(usable, key=order)
    group = [each.name for each in usable if (each.kind, each.speed) == (best.kind, best.speed)]
    names = group if best.kind == "Slingshot" else [best.name]
    speed = f", {best.speed / 1000:g} Gbit/s" if best.speed else ""
    why = f"{best.kind}{speed}, address {best.address}"
    proposals = [
        Proposal("NCCL_SOCKET_IFNAME", ",".join(names), f"bootstrap of NCCL and RCCL over {why}"),
        Proposal("GLOO_SOCKET_IFNAME", names[0], f"gloo over {why}; without it gloo uses the host name"),
    ]
    cxi = [each for each in devices if each.startswith("cxi")]
    if cxi and fabric_plugin() is None:
        reason = f"{', '.join(cxi)} without the libfabric plugin: NCCL and RCCL would use sockets"
        proposals.append(Proposal("LD_LIBRARY_PATH", "DIRECTORY_OF/libnccl-net.so", reason))
    return proposals
