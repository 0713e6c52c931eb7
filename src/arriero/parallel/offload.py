"""What a module keeps for its backward pass waits in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# the luggage that left last. Backward goes the other way round; where a pipeline does not, a block is fetched
# early that need not be
_last: "dict[torch.device, ref[_Luggage]]" = {}


class Offloaded(ActivationWrapper):
    """Weights stay where they are, and so do all arguments but the first: others hold on to them anyway."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # what is inside is compiled; hooks are for running code
        self._checkpoint_wrapped_module.compile(*args, **kwargs)

    def forward(self, x: Tensor, *others: Any) -> Any:
        staying = (*self.parameters(), *tree_leaves(others))
        luggage = _Luggage(
            {_storage(part) for tensor in staying for part in _parts(tensor)}, _last.get(x.device)
        )
        _last[x.device] = ref(luggage)
        try:
            with saved_tensors_hooks(luggage.pack, _unpack):
                return self._checkpoint_wrapped_module(x, *others)
        finally:
            luggage.close()


class _Away:
    """A tensor in host memory; it comes back for the first of those that keep it and leaves with the last."""

    def __init__(self, tensor: Tensor, luggage: "_Luggage") -> None:
        self.keepers = 0
        self._luggage = luggage
        self._returned: Any = None
        self._asked = 0
        self._back: Tensor | None = None
        self._device = tensor.device
        self._copied: Any = None
        if tensor.device.type == "cpu":
            self._home = tensor.detach().clone()
            return
        self._home = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        beside = _stream_beside(tensor.device)
        beside.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(beside):
            self._home.copy_(tensor.detach(), non_blocking=True)
            self._copied = beside.record_event()
        tensor.record_stream(beside)

    def send_back(self) -> None:
        if self._back is not None:
            return
        if self._copied is None:
            self._back = self._home.to(self._device)
            return
        beside = _stream_beside(self._device)
        with torch.cuda.stream(beside):
            self._back = self._home.to(self._device, non_blocking=True)
            self._returned = beside.record_event()

    def fetch(self) -> Tensor:
        self._luggage.send_back()
        self.send_back()
        back = self._back
        assert back is not None
        if self._returned is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(self._returned)
            back.record_stream(now)
        self._asked += 1
        if self._asked % self.keepers == 0:
            self._back = None
        return back


@dataclass(frozen=True)
class _Wrapped:
    """A tensor made of tensors, like a DTensor: its parts travel, and it is put together again."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class _Luggage:
    """Of one forward pass of a module. A tensor that several operations keep travels once. What is asked for
    comes with all that left with it, and what left `before` follows: backward will ask for that next."""

    def __init__(self, staying: set[int], before: "ref[_Luggage] | None") -> None:
        self._staying = staying
        self._before = before
        self._away: list[ref[_Away]] = []
        self._sent: dict[tuple[Any, ...], tuple[Tensor, _Away]] = {}

    def pack(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            # a DTensor of some releases counts its mesh among its parts
            return tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self.pack(getattr(tensor, name)) for name in names}
            return _Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())
        if _storage(tensor) in self._staying:
            return tensor
        view = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*view, tensor._version)
        if key not in self._sent:
            # held until the pass is over, lest another tensor take its place in memory and pass for it
            self._sent[key] = (tensor, _Away(tensor, self))
            self._away.append(ref(self._sent[key][1]))
        away = self._sent[key][1]
        away.keepers += 1
        return away

    def send_back(self) -> None:
        """Once."""
        before, self._before = self._before, None
        for luggage in (self, before() if before else None):
            if luggage is not None:
                luggage._send_back_all()

    def _send_back_all(self) -> None:
        for away in self._away:
            if (there := away()) is not None:
                there.send_back()
        self._away.clear()

    def close(self) -> None:
        """The graph may hold on to the hooks, and they must not hold on to the tensors."""
        self._sent.clear()


def _unpack(packed: Any) -> Any:
    if isinstance(packed, _Away):
        return packed.fetch()
    if not isinstance(packed, _Wrapped):
        return packed
    parts = {name: _unpack(part) for name, part in packed.parts.items()}
    return packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)


def _parts(value: Any) -> Iterator[Tensor]:
    """The plain tensors a value is made of; none if it is no tensor."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@cache
def _stream_beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
