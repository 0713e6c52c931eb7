"""Slurm's lists of host names, such as 'c[1-2]n[1-4],gpu[01-04,07]-ib'."""

import re
from collections.abc import Iterator
from itertools import product

from arriero.errors import UserError

_PIECE = re.compile(r"([^\[\], ]+)|\[([^\[\]]+)\]")
_ITEM = re.compile(r"(?:[^\[\], ]|\[[^\[\]]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(nodes: str) -> Iterator[str]:
    """Yield the names of a list in the order of `scontrol show hostnames`."""
    at = 0
    while at < len(nodes):
        if nodes[at] in ", ":
            at += 1
            continue
        item = _ITEM.match(nodes, at)
        if item is None or nodes[item.end() : item.end() + 1] not in ("", ","):
            raise UserError(f"'{nodes}' is not a list of hosts", "write it like 'n1,gpu[01-04,07]-ib'")
        yield from _expand(item[0], nodes)
        at = item.end()


def _expand(item: str, nodes: str) -> Iterator[str]:
    pieces = [[text] if text else _numbers(ranges, nodes) for text, ranges in _PIECE.findall(item)]
    brackets = [i for i, (text, _) in enumerate(_PIECE.findall(item)) if not text]
    # Slurm counts the last bracket fastest, then the first, the second, and so on
    slowest_first = [*reversed(brackets[:-1]), *brackets[-1:]]
    name = [piece[0] for piece in pieces]
    for numbers in product(*(pieces[i] for i in slowest_first)):
        for i, number in zip(slowest_first, numbers, strict=True):
            name[i] = number
        yield "".join(name)


def _numbers(ranges: str, nodes: str) -> list[str]:
    numbers = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"'{text}' in the list of hosts '{nodes}' is not a range", "write it like 01-04")
        width = len(found[1])
        numbers += [f"{i:0{width}d}" for i in range(int(found[1]), int(found[2] or found[1]) + 1)]
    return numbers


def first_host(nodes: str) -> str:
    """Return the first host of a list."""
    return next(hosts(nodes), "")
