"""A process group for several ranks on one GPU, for tests: collectives go through host memory and gloo.

NCCL refuses two ranks on one device. This group is as asynchronous as NCCL: inputs are read later, by a
thread on a stream of its own; outputs are overwritten with NaN when a collective is called and get their
values in `wait`, on the stream that waits. A missing wait, a buffer that is reused too early or a wrong
stream therefore changes the loss.

Tested with torch 2.11 and 2.13, which gave the single-tensor collectives new names. `ProcessGroup` and `Work`
are subclassed through the private module `torch._C._distributed_c10d`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# its type stubs describe neither subclasses nor gloo's own collectives
c10d: Any = import_module("torch._C._distributed_c10d")

BACKEND = "shared_gpu"
_DELAY_CYCLES = 200_000  # about 0.1 ms, so that a reader that does not wait comes first


def register_backend() -> None:
    """Make `init_process_group(BACKEND)` known to torch."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> "SharedGpuGroup":
    return SharedGpuGroup(store, rank, size, timeout)


class _Collective(c10d.Work):
    """A collective in progress. `result` gives the host tensors that `wait` copies to `outputs`."""

    def __init__(self, result: "Future[Sequence[Tensor]]", outputs: Sequence[Tensor], returned: Any) -> None:
        super().__init__()
        self._result, self._outputs, self._returned = result, outputs, returned
        self._delivered: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        del timeout  # gloo's own timeout ends a collective whose peers are gone
        values = self._result.result()
        if self._outputs:
            with torch.no_grad():
                for output, value in zip(self._outputs, values, strict=True):
                    output.detach().copy_(value)
            if self._outputs[0].is_cuda:
                self._delivered = torch.cuda.current_stream().record_event()
            self._outputs = ()
        elif self._delivered is not None:
            torch.cuda.current_stream().wait_event(self._delivered)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._result.done()

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._returned)
        return future


class SharedGpuGroup(c10d.ProcessGroup):
    """Gloo for tensors of any device; collectives, and messages to or from one peer, keep their order."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = c10d.ProcessGroupGloo(c10d.PrefixStore(BACKEND, store), rank, size, timeout)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        # gloo of torch 2.11 cannot send to its own rank, as a V-shaped pipeline does
        self._to_itself: dict[int, SimpleQueue[list[Tensor]]] = defaultdict(SimpleQueue)
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _start(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        communicate: Callable[[list[Tensor]], Sequence[Tensor]],
        returned: Any,
        queue: str = "collectives",
    ) -> _Collective:
        """Poison the outputs; then, in a thread, bring the inputs to the host and communicate."""
        storages = {output.untyped_storage().data_ptr() for output in outputs}
        with torch.no_grad():
            # an input that lies in an output (all-reduce, FSDP's all-gather) would be poisoned with it
            inputs = [t.clone() if t.untyped_storage().data_ptr() in storages else t for t in inputs]
            for output in outputs:
                poison_(output)
        cuda = next((t.device for t in chain(inputs, outputs) if t.is_cuda), None)
        called = torch.cuda.current_stream(cuda).record_event() if cuda else None

        def work() -> Sequence[Tensor]:
            with torch.no_grad():
                return communicate(self._to_host(inputs, called, queue))

        thread = self._threads.setdefault(queue, ThreadPoolExecutor(1, f"{BACKEND}-{queue}"))
        return _Collective(thread.submit(work), outputs, returned)

    def _to_host(self, inputs: Sequence[Tensor], called: Any, queue: str) -> list[Tensor]:
        if called is None or not inputs or not inputs[0].is_cuda:
            return [t.detach().contiguous() for t in inputs]
        device = inputs[0].device
        torch.cuda.set_device(device)
        stream = self._streams.setdefault(queue, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            stream.wait_event(called)
            torch.cuda._sleep(_DELAY_CYCLES)
            return [t.detach().to("cpu").contiguous() for t in inputs]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Collective:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._start(tensors, tensors, lambda host: [self._reduced(t, op) for t in host], tensors)

    allreduce_coalesced = allreduce

    def _reduced(self, host: Tensor, op: Any) -> Tensor:
        """The reduction over all ranks; low precision is added in fp32."""
        low = host.is_floating_point() and host.itemsize < 4
        value = host.float() if low else host.clone()
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._gloo.allreduce([value], options).wait()
        if op == dist.ReduceOp.AVG:
            value /= self.size()
        return value.to(host.dtype)

    def _gathered(self, host: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([_bytes(parts)], _bytes([host])).wait()
        return parts

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            return [part for t in host for part in self._gathered(t)]

        return self._start([t for each in outputs for t in each], inputs, communicate, outputs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            gathered = (torch.cat([part.reshape(-1) for part in self._gathered(t)]) for t in host)
            return [t.view(output.shape) for t, output in zip(gathered, outputs, strict=True)]

        return self._start(outputs, inputs, communicate, outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Collective:
        return self.allgather_into_tensor_coalesced([output], [input])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Collective:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def communicate(host: list[Tensor]) -> list[Tensor]:
            reduced = (self._reduced(t, op).reshape(self.size(), -1)[self.rank()] for t in host)
            return [t.view(output.shape) for t, output in zip(reduced, outputs, strict=True)]

        return self._start(outputs, inputs, communicate, outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Collective:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            received = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(
                received, host[0], output_sizes, input_sizes, c10d.AllToAllOptions()
            ).wait()
            return [received]

        return self._start([output], [input], communicate, output)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Collective:
        """The root may continue to read its tensor, which does not change."""

        def communicate(host: list[Tensor]) -> list[Tensor]:
            values = host or [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
            self._gloo.broadcast(values, opts).wait()
            return [] if host else values

        is_root = self.rank() == opts.rootRank
        return self._start([] if is_root else tensors, tensors if is_root else [], communicate, tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            values = [torch.empty(t.shape, dtype=t.dtype) for t in outputs]
            self._gloo.scatter(values, [host] if host else [], opts).wait()
            return values

        return self._start(outputs, [t for each in inputs for t in each], communicate, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            values = [[torch.empty(t.shape, dtype=t.dtype) for t in each] for each in outputs]
            self._gloo.gather(values, host, opts).wait()
            return [t for each in values for t in each]

        return self._start([t for each in outputs for t in each], inputs, communicate, outputs)

    def barrier(self, opts: Any = None) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            self._gloo.barrier().wait()
            return host

        return self._start([], [], communicate, [])

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> _Collective:
        def communicate(host: list[Tensor]) -> list[Tensor]:
            if destination == self.rank():
                self._to_itself[tag].put([t.clone() for t in host])
            else:
                self._gloo.send(host, destination, tag).wait()
            return []

        return self._start([], tensors, communicate, tensors, queue=f"send-{destination}")

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Collective:
        def communicate(_: list[Tensor]) -> list[Tensor]:
            if source == self.rank():
                return self._to_itself[tag].get()
            values = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
            self._gloo.recv(values, source, tag).wait()
            return values

        return self._start(tensors, [], communicate, tensors, queue=f"recv-{source}")

    # the names of torch 2.13
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def poison_(tensor: Tensor) -> None:
    """Set all bytes to 255: NaN in every floating-point type, -1 in signed integers."""
    if tensor.is_floating_point() and tensor.itemsize > 1:
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.detach().fill_(True)
    else:
        tensor.detach().view(torch.uint8).fill_(255)


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gloo moves bytes of types it does not know, such as float8."""
    return [t.reshape(-1).view(torch.uint8) for t in tensors]
