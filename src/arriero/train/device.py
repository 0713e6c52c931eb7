"""The device a process computes on, as torch reports it, and what to do when its memory runs out.

Private torch API used here, tested with 2.11 and 2.13: `_C._accelerator_setAllocatorSettings`.
"""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from arriero.errors import NodeError, UserError
from arriero.kernels.float8 import computes_float8
from arriero.parallel.world import RENDEZVOUS, world_from
from arriero.plan.advice import next_setting
from arriero.plan.hardware import Machine, available_ram, peak_of, proc_bytes
from arriero.plan.resolve import Resolved
from arriero.units import counted, human_bytes

# torch reads the first of them that is set
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_DRIVER_BYTES = 2 * 2**30
MEMORY_HELD = "end the other processes on this GPU, or leave the node out"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """A torch device; NVIDIA and AMD GPUs are both 'cuda' to torch. `memory` is the free memory in bytes."""

    torch_device: torch.device
    name: str
    memory: int
    bf16_peak_flops: float | None

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def uuid(self) -> str | None:
        """The identifier that the driver's tools use."""
        return uuid_of(self.torch_device) if self.is_gpu else None

    def machine(self, local_size: int = 1) -> Machine:
        """Describe the device as data; a node has `local_size` of them."""
        total, kind, bf16 = self.memory, "cpu", True
        if self.is_gpu:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            kind = "cuda" if torch.version.hip is None else "rocm"
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        float8 = computes_float8(self.torch_device)
        return Machine(self.name, kind, self.memory, total, local_size, bf16, float8, self.bf16_peak_flops)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def peak_memory(self) -> int:
        """Return the largest number of bytes used so far: of the GPU, or of this process."""
        if self.is_gpu:
            return torch.cuda.max_memory_allocated(self.torch_device)
        # ru_maxrss on Linux is never below that of the parent process
        if peak := proc_bytes(Path("/proc/self/status"), "VmHWM"):
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def uuid_of(gpu: torch.device | int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"


def choose_device(wanted: str, local_rank: int = 0, local_size: int = 1, share_gpu: bool = False) -> Device:
    """Return the device of a local rank and make it torch's current one."""
    if wanted != "cpu" and not torch.cuda.is_available():
        _check_no_gpu_was_allocated()
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is 'cuda' but torch sees no GPU here", "set run.device = 'auto' or 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        name = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        return Device(torch.device("cpu"), name, available_ram() // local_size, None)
    visible = torch.cuda.device_count()
    # a launcher may show each process only its own GPU; that no other has it is checked when the ranks meet
    bound = visible == 1 and RENDEZVOUS not in os.environ and world_from().size > 1
    if local_rank >= visible and not bound and not share_gpu:
        allocated = os.environ.get("SLURM_GPUS_ON_NODE", "")
        kind = NodeError if allocated.isdigit() and int(allocated) > visible else UserError
        raise kind(
            f"process {local_rank} of this node has no GPU of its own: there are {visible}",
            "start one process per GPU, set run.device = 'cpu', or for tests run.share_gpu = true",
        )
    device = torch.device("cuda", 0 if bound else local_rank % visible)
    _set_up_allocator()
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    peak = peak_of(properties.name)
    free, _ = torch.cuda.mem_get_info(device)
    sharing = -(-local_size // visible) if share_gpu else 1
    return Device(device, properties.name, free // sharing, peak.bf16 if peak else None)


def _check_no_gpu_was_allocated() -> None:
    """Raise instead of training on the CPU for a day on a node whose GPUs were allocated to the job."""
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not gpus.isdigit() or gpus == "0":
        return
    hidden = [v for v in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if os.environ.get(v) == ""]
    why = f"{hidden[0]} is empty" if hidden else "torch sees none; is it a build for this GPU?"
    raise NodeError(
        f"Slurm allocated {counted(int(gpus), 'GPU')} on this node, but {why}",
        "request GPUs with --gpus-per-node and without --gpu-bind=none, or set run.device = 'cpu'",
    )


def _set_up_allocator() -> None:
    """Let the allocator grow its segments, unless the user has configured it.

    Reserved memory is then at most 3 % above allocated memory at the same speed, else up to 13 % (one H200).
    """
    if torch.version.hip is None and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def out_of_memory(error: BaseException, resolved: Resolved, device: Device) -> UserError | None:
    """Return the error of a run whose memory ran out: prediction, usage and the next setting to try.

    None if the error has another cause. A compiled step raises an error of the compiler with its cause.
    """
    seen: BaseException | None = error
    while seen is not None and not _says_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    predicted = human_bytes(resolved.predicted_bytes)
    what, held = f"the memory of {device.name} ran out; the predicted peak is {predicted}", False
    if device.is_gpu:
        place = device.torch_device
        free, total = torch.cuda.mem_get_info(place)
        own, reserved = torch.cuda.max_memory_allocated(place), torch.cuda.memory_reserved(place)
        others = total - free - reserved
        held = memory_is_held(others, total, resolved.predicted_bytes) and not resolved.config.run.share_gpu
        what += (
            f", this process allocated up to {human_bytes(own)} and reserved {human_bytes(reserved)} of "
            f"{human_bytes(total)}, {human_bytes(others)} are used by other processes and the driver"
        )
    else:
        what += f", this process used up to {human_bytes(device.peak_memory())}"
    if held:
        return NodeError(what, MEMORY_HELD)
    return UserError(what, f"set {next_setting(resolved)}; the run resumes from its newest checkpoint")


def memory_is_held(others: int, total: int, needed: int) -> bool:
    """Return whether a device would suffice without other processes; the driver itself uses up to 2 GiB."""
    return others > _DRIVER_BYTES and needed + _DRIVER_BYTES <= total


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _OUT_OF_MEMORY)


def make_deterministic() -> None:
    """Make torch use deterministic algorithms only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
