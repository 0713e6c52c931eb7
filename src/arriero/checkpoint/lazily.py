"""Values that are made when they are asked for, and not kept."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value")


class OneByOne(Mapping[str, Value]):
    """For tensors that are computed from others and would not fit beside them all at once."""

    def __init__(self, makers: Mapping[str, Callable[[], Value]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Value:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
