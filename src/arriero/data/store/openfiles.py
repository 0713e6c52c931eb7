"""What a process keeps open of all datasets together: file descriptors, and small indexes in memory."""

import errno
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

MOST_FILES = 2**14
INDEX_BYTES = 2**28


class Cache:
    """The items used last, up to a total weight; safe for threads.

    An item is closed when its last user lets go of it, so dropping one that is in use does no harm.
    """

    def __init__(self, capacity: Callable[[], int], weigh: Callable[[Any], int] = lambda _: 1) -> None:
        self._items: OrderedDict[tuple[int, Hashable], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._make_capacity, self._weigh = capacity, weigh
        self._capacity: int | None = None
        self._held = 0
        self._gone: deque[int] = deque()

    def limit(self, capacity: int | None) -> None:
        """None derives it again."""
        with self._lock:
            self._capacity = capacity
            self._shrink()

    def get(self, owner: int, key: Hashable, make: Callable[[], Any]) -> Any:
        """The item of an owner, made now if it is not held. Where the system has no more files to give, fewer
        are kept open from then on."""
        with self._lock:
            while self._gone:
                self._drop(self._gone.popleft())
            if (owner, key) in self._items:
                self._items.move_to_end((owner, key))
                return self._items[owner, key]
        while True:
            try:
                item = make()
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not FILES.halve():
                    raise
        with self._lock:
            if (owner, key) not in self._items:
                self._items[owner, key] = item
                self._held += self._weigh(item)
                self._shrink()
        return item

    def halve(self) -> bool:
        """Hold half as many items from now on; false where there was none to drop."""
        with self._lock:
            if not self._items:
                return False
            self._capacity = len(self._items) // 2
            self._shrink()
            return True

    def forget(self, owner: int) -> None:
        with self._lock:
            self._drop(owner)

    def forget_later(self, owner: int) -> None:
        """For finalizers, which may run at any moment, also while this thread holds the lock."""
        self._gone.append(owner)

    def _drop(self, owner: int) -> None:
        for key in [key for key in self._items if key[0] == owner]:
            self._held -= self._weigh(self._items.pop(key))

    def _shrink(self) -> None:
        if self._capacity is None:
            self._capacity = self._make_capacity()
        while self._items and self._held > self._capacity:
            self._held -= self._weigh(self._items.popitem(last=False)[1])


def _files_allowed() -> int:
    """Half of what the process may open, after raising the soft limit as far as it is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = 2 * MOST_FILES if hard == unlimited else min(hard, 2 * MOST_FILES)
    if soft not in (unlimited, wanted) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_FILES if soft == unlimited else max(1, min(soft // 2, MOST_FILES))


FILES = Cache(_files_allowed)
INDEXES = Cache(lambda: INDEX_BYTES, len)
