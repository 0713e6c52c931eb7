"""Checks of the host: versions, environment, limits, memory, clock, disk and network. No GPU is used."""

import ctypes
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import arriero
from arriero.files import free_bytes, nearest_directory, quota_left, sync
from arriero.launch.doctor.check import Finding, verdict
from arriero.launch.doctor.interfaces import fabric_devices, interfaces, selected
from arriero.plan.hardware import available_ram
from arriero.units import counted, human_bytes

MIB, GIB = 2**20, 2**30
SHM = Path("/dev/shm")
_TIME_ERROR = 5
_STALE = ("nccl-", "rccl-", "torch_", "cuda.shm.")


def check_versions() -> Finding:
    """Import torch, the longest part of a start, and report the versions that must agree between nodes."""
    start = time.monotonic()
    import torch

    seconds = time.monotonic() - start
    from arriero.bench.machine import source_digest

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    found = {
        "arriero": arriero.__version__,
        "source": source_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": driver_version(),
    }
    shown = ", ".join(f"{name} {value}" for name, value in found.items() if value and name != "source")
    tested = (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 13)
    warns = [] if tested else [f"torch {torch.__version__} is not one of the tested versions 2.11 to 2.13"]
    if seconds > 30:
        warns.append(f"importing torch took {seconds:.0f} s: the file system of the environment is slow")
    shadow = _user_site_package("torch")
    if shadow:
        warns.append(f"torch comes from {shadow}, which hides the environment's own")
    todo = "set PYTHONNOUSERSITE=1" if shadow else "put the environment on a local disk or in a container"
    return verdict(shown, [], warns, todo, versions=found, import_s=round(seconds, 2))


def driver_version() -> str | None:
    for file in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        if Path(file).exists():
            return Path(file).read_text().strip()
    return None


def _user_site_package(name: str) -> str | None:
    """Return where a package in ~/.local is imported from; such copies differ from node to node or user."""
    import site

    file = getattr(sys.modules.get(name), "__file__", None) or ""
    home = site.getusersitepackages()
    return home if site.ENABLE_USER_SITE and file.startswith(home) else None


def check_container() -> Finding:
    """Report the container this process runs in; passes also without one."""
    image = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER")
    if image is None and (Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()):
        image = "Docker or Podman"
    gpus = driver_version() is not None and not any(Path("/dev").glob("nvidia[0-9]*"))
    if image and gpus and not Path("/dev/kfd").exists():
        todo = "start the container with --nv (NVIDIA) or --rocm (AMD)"
        return Finding("warn", f"{image}: the host has a GPU driver, the container has no GPU device", todo)
    return Finding("pass", image or "none", facts={"container": image})


def check_environment() -> Finding:
    """Find variables that contradict each other, name what does not exist, or make training slow."""
    problems = list(contradictions(dict(os.environ)))
    fails = [what for status, what, _ in problems if status == "fail"]
    warns = [what for status, what, _ in problems if status == "warn"]
    todo = "; ".join(dict.fromkeys(todo for _, _, todo in problems))
    names = sorted(name for name in os.environ if name.startswith(_SHOWN))
    found = f"no contradiction among {counted(len(names), 'variable')} of NCCL, gloo, torch and devices"
    return verdict(found, fails, warns, todo, variables={name: os.environ[name] for name in names})


_SHOWN = (
    "NCCL_", "RCCL_", "GLOO_", "TORCH_", "FI_", "CUDA_", "HIP_", "ROCR_", "OMP_NUM", "MASTER_", "PYTORCH_",
)  # fmt: skip
_TRUE = ("1", "true", "yes", "on")


def contradictions(environment: dict[str, str]):
    """Yield (status, what is wrong, what to do) for each problem of an environment."""
    get = environment.get
    names = [each.name for each in interfaces()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = get(variable)
        if value and not selected(value, names, variable):
            yield "fail", f"{variable}={value}: no such interface here", "see `arriero doctor --detect`"
    devices = int(get("SLURM_GPUS_ON_NODE") or 0) if (get("SLURM_GPUS_ON_NODE") or "0").isdigit() else 0
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if devices and get(variable, "0").strip() == "":
            todo = "remove --gpu-bind=none, or ask for --gpus-per-node instead of --gpus-per-task"
            yield "fail", f"{variable} is empty although the job has {devices} GPUs on this node", todo
    if get("ROCR_VISIBLE_DEVICES") and get("HIP_VISIBLE_DEVICES"):
        what = "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set: the second counts within the first"
        yield "warn", what, "unset HIP_VISIBLE_DEVICES"
    fabric = fabric_devices()
    if fabric and get("NCCL_IB_DISABLE", "").lower() in _TRUE:
        what = f"NCCL_IB_DISABLE=1 although the node has {', '.join(fabric[:4])}"
        yield "warn", what, "unset NCCL_IB_DISABLE"
    if get("NCCL_P2P_DISABLE", "").lower() in _TRUE:
        yield "warn", "NCCL_P2P_DISABLE=1: GPUs of a node exchange data through host memory", "unset it"
    for variable, slow in (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("CUDA_LAUNCH_BLOCKING", "1")):
        if get(variable) == slow:
            yield "warn", f"{variable}={slow} makes every step slower", f"unset {variable}"
    if get("NCCL_DEBUG") in ("INFO", "TRACE") and not get("NCCL_DEBUG_FILE"):
        yield "warn", f"NCCL_DEBUG={get('NCCL_DEBUG')} writes to the log of every rank", "unset NCCL_DEBUG"
    if int(get("SLURM_JOB_NUM_NODES") or 1) > 1 and get("MASTER_ADDR", "") in ("localhost", "127.0.0.1"):
        what = f"MASTER_ADDR={get('MASTER_ADDR')} in a job of {get('SLURM_JOB_NUM_NODES')} nodes"
        yield "fail", what, "unset MASTER_ADDR: Arriero takes the first node of the step"
    proxy = next(
        (name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if get(name)), ""
    )
    if proxy and not (get("no_proxy") or get("NO_PROXY")):
        yield "warn", f"{proxy} is set without no_proxy", "set no_proxy to the names of the nodes"
    tasks, threads = get("SLURM_NTASKS_PER_NODE", "1"), get("OMP_NUM_THREADS", "1")
    cores = len(os.sched_getaffinity(0))
    if tasks.isdigit() and threads.isdigit() and int(threads) > cores:
        what = f"OMP_NUM_THREADS={threads} on {cores} cores"
        yield "warn", what, f"set OMP_NUM_THREADS={max(1, cores // int(tasks))}"


def check_limits() -> Finding:
    """Compare the limits of a process with what many ranks and RDMA need."""
    fails, warns, facts = [], [], {}
    for name, key in (("nofile", "NOFILE"), ("memlock", "MEMLOCK"), ("stack", "STACK"), ("nproc", "NPROC")):
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{key}"))
        facts[name] = [None if value == resource.RLIM_INFINITY else value for value in (soft, hard)]
    files, locked, stack = facts["nofile"][1], facts["memlock"][0], facts["stack"][0]
    ranks = os.environ.get("SLURM_NTASKS", "")
    needed = 512 + 4 * int(ranks) if ranks.isdigit() else 4096
    if files is not None and files < 1024:
        fails.append(f"at most {files} open files (ulimit -Hn)")
    elif files is not None and files < needed:
        warns.append(f"at most {files} open files (ulimit -Hn); {needed} are safe for this job")
    if locked is not None and locked < GIB and fabric_devices():
        warns.append(f"locked memory is limited to {human_bytes(locked)} (ulimit -l); RDMA needs more")
    if stack is not None and stack < 8 * MIB:
        warns.append(f"stack of {human_bytes(stack)} (ulimit -s), less than 8 MiB")
    processes = facts["nproc"][0]
    if processes is not None and processes < 1024:
        warns.append(f"at most {processes} processes and threads (ulimit -u)")
    shown = ", ".join(f"{name} {_limit(values[0])}" for name, values in facts.items())
    todo = "raise the limit in the job script, or ask the site for a higher hard limit"
    return verdict(shown, fails, warns, todo, limits=facts)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def check_shm(folder: Path = SHM) -> Finding:
    """Check the shared memory that NCCL and data workers use, and look for what an earlier job left."""
    if not folder.is_dir():
        return Finding("fail", f"there is no {folder}", "mount a tmpfs there, or bind it into the container")
    usage = os.statvfs(folder)
    free, total = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    fails, warns = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="arriero-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, min(free, 16 * MIB) or 1)
    except OSError as error:
        fails.append(f"{folder} cannot be written ({error.strerror})")
    if free < 64 * MIB:
        fails.append(f"{folder} has {human_bytes(free)} free of {human_bytes(total)}")
    elif free < GIB:
        warns.append(f"{folder} has {human_bytes(free)} free of {human_bytes(total)}")
    stale = [path for path in folder.iterdir() if path.name.startswith(_STALE) and _owned_and_old(path)]
    if stale:
        warns.append(f"{len(stale)} files of earlier jobs, such as {stale[0].name}")
    todo = "delete what earlier jobs left there, or start the container with a larger --shm-size"
    return verdict(f"{human_bytes(free)} free of {human_bytes(total)}", fails, warns, todo, free=free)


def _owned_and_old(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > 3600


def check_memory() -> Finding:
    """Report the free memory of the host and of the job's cgroup."""
    free = available_ram()
    warns = [f"{human_bytes(free)} of memory available"] if free < 2 * GIB else []
    todo = "end other processes on the node, or ask Slurm for more memory (--mem=0)"
    return verdict(f"{human_bytes(free)} available", [], warns, todo, available=free)


def check_clock() -> Finding:
    """Ask the kernel whether its clock is synchronised."""
    buffer = (ctypes.c_long * 32)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer)) if sys.platform == "linux" else 0
    if state == _TIME_ERROR:
        return Finding("warn", "the clock is not synchronised (adjtimex)", "start chrony or ntpd on the node")
    return Finding("pass", "synchronised" if state >= 0 else "unknown")


def check_names() -> Finding:
    """Resolve the name of this node and look at the interfaces that lead to other nodes."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    usable = [each for each in interfaces() if each.is_usable]
    shown = ", ".join(f"{each.name} {each.address}" for each in usable)
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        address = None
        warns = [f"the name of this node does not resolve ({error.strerror or error})"]
    else:
        warns = []
    several = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) > 1
    if str(address).startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME") and several:
        warns.append(f"{name} resolves to {address}, which other nodes cannot reach")
    fails = [] if usable else ["no interface with an address leads to other nodes"]
    if not several:
        fails, warns = [], warns + fails
    todo = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: see `arriero doctor --detect`"
    found = f"{name} is {address}; {shown}"
    return verdict(found, fails, warns, todo, interfaces=[each.name for each in usable], address=address)


def check_disk(directory: Path, size: int = 64 * MIB) -> Finding:
    """Write, sync and read back a file where the run will write, and look at the space that is left."""
    place = nearest_directory(directory)
    free = free_bytes(place)
    quota = quota_left(place)
    left = free if quota is None else min(free, quota)
    facts: dict[str, Any] = {"path": str(place), "free": free, "quota_left": quota}
    if left < 4 * size:
        what = f"{place} has {human_bytes(left)} free" + (" in your quota" if left != free else "")
        return Finding("fail", what, "free some space, or choose another run.dir", facts)
    try:
        facts |= _measured_disk(place, size)
    except OSError as error:
        what = f"{place} cannot be written ({error.strerror})"
        return Finding("fail", what, "choose another run.dir, or ask for access", facts)
    rates = ", ".join(f"{name} {facts[name]:.0f} MB/s" for name in ("write", "read"))
    shown = f"{place}: {rates}, fsync of a small file {facts['fsync_ms']:.1f} ms, {human_bytes(left)} free"
    fails = [] if facts["same"] else [f"{place}: what was read differs from what was written"]
    warns = []
    if facts["write"] < 50:
        warns.append(f"{place} takes {facts['write']:.0f} MB/s: checkpoints will be slow")
    if facts["fsync_ms"] > 500:
        warns.append(f"{place}: fsync of a small file takes {facts['fsync_ms']:.0f} ms")
    if left < 10 * GIB:
        warns.append(f"{place} has {human_bytes(left)} free")
    return verdict(shown, fails, warns, "use the parallel file system of the site for run.dir", **facts)


def _measured_disk(place: Path, size: int) -> dict[str, Any]:
    """Return MB/s of a synced write and of a read past the cache, and the time to sync a small file."""
    block, buffer, seconds, same = os.urandom(MIB), bytearray(MIB), 0.0, True
    with tempfile.TemporaryDirectory(prefix=".arriero-doctor-", dir=place) as name:
        path, small = Path(name, "data"), Path(name, "small")
        pieces = [number.to_bytes(8, "little") + block[8:] for number in range(size // MIB)]
        start = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
            os.fsync(file.fileno())
        written = time.monotonic() - start
        sync(path, drop_cache=True)
        with path.open("rb", buffering=0) as file:
            for piece in pieces:
                start = time.monotonic()
                count = 0
                # a network file system may return fewer bytes than asked for
                while count < MIB and (more := file.readinto(memoryview(buffer)[count:])):
                    count += more
                seconds += time.monotonic() - start
                same = same and buffer[:count] == piece
            same = same and not file.read(1)
        start = time.monotonic()
        small.write_bytes(b"x")
        sync(small)
        synced = time.monotonic() - start
    return {
        "write": size / 1e6 / written,
        "read": size / 1e6 / max(seconds, 1e-9),
        "fsync_ms": 1e3 * synced,
        "same": same,
    }
