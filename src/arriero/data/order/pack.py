"""How a source is cut into samples. Each packing numbers the samples of one epoch from 0.

`concat`: windows over the token stream. A source of N tokens gives (N - 1) // seq_len windows. Window w takes
seq_len tokens from w * seq_len on, and its labels are the same tokens one further, so neighbours share one
token: the last label of one is the first input of the next. In one epoch every token of the source is
predicted exactly once, except its first and the `unused` ones at its end that do not fill a window.

`bestfit`: rows of whole documents, filled by best fit. `none`: one document a row, padded to the longest of
its batch. In both a document longer than a row is split, truncated or dropped; what that costs is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.order.bestfit import Plan, Request, open_plan, refuse_long_planning
from arriero.data.order.permutation import joined
from arriero.data.progress import Progress, silent
from arriero.data.store.store import TokenStore
from arriero.errors import UserError


@dataclass(frozen=True)
class Source:
    """Tokens [span.start, span.stop) of a prepared dataset; the whole of it unless a span is given."""

    store: TokenStore
    span: range | None = None
    weight: float = 1.0
    prompt: tuple[int, ...] = ()
    max_epochs: float | None = None

    @property
    def tokens(self) -> range:
        return range(self.store.tokens) if self.span is None else self.span

    @property
    def name(self) -> str:
        return str(self.store.directory)

    @property
    def identity(self) -> dict[str, Any]:
        identity = {"dataset": self.store.fingerprint, "start": self.tokens.start, "stop": self.tokens.stop}
        return {**identity, "prompt": list(self.prompt)} if self.prompt else identity


class Windows:
    """Windows over `runs` of the source, intervals (first, end) of positions of inputs; all of it by default.

    The label of an input is the token after it in the source, also where a run ends.
    """

    def __init__(self, source: Source, seq_len: int, runs: np.ndarray | None = None) -> None:
        span = source.tokens
        if source.prompt:
            raise UserError(
                f"{source.name} has a prompt, but packing 'concat' cuts documents anywhere",
                "set data.packing to 'bestfit' or 'none'",
            )
        if len(span) < seq_len + 1:
            raise UserError(
                f"{source.name} gives {len(span)} tokens, one sequence of {seq_len} needs {seq_len + 1}",
                "use a shorter sequence or more text; of held-out text, hold out more",
            )
        self._source, self._seq_len = source, seq_len
        self._runs = np.array([[span.start, span.stop - 1]]) if runs is None else runs
        self._ends = np.cumsum(self._runs[:, 1] - self._runs[:, 0])
        self.inputs = int(self._ends[-1]) if len(self._ends) else 0
        self.count = self.inputs // seq_len
        self.tokens = self.slots = self.count * seq_len
        self.unused = self.inputs - self.tokens

    def start(self, sample: int) -> int:
        return int(self.positions(np.array([sample * self._seq_len]))[0])

    def positions(self, inputs: np.ndarray) -> np.ndarray:
        """Where in the source the inputs with these numbers are."""
        run = self._ends.searchsorted(inputs, side="right")
        return inputs - self._ends[run] + self._runs[run, 1]

    def parts(self, sample: int) -> list[tuple[int, int]]:
        """(position, tokens) of the stretches of text that make up a sample; one, unless runs are short."""
        begin, end = sample * self._seq_len, (sample + 1) * self._seq_len
        if len(self._runs) == 1:
            return [(int(self._runs[0, 0]) + begin, self._seq_len)]
        parts = []
        run = int(self._ends.searchsorted(begin, side="right"))
        while begin < end:
            stop = min(end, int(self._ends[run]))
            parts.append((int(self._runs[run, 1] - self._ends[run]) + begin, stop - begin))
            begin, run = stop, run + 1
        return parts

    def without(self, unread: np.ndarray, seq_len: int) -> "Windows":
        """The inputs of the `unread` samples, intervals (first, end), and the unused ones at the end, in
        windows of another length."""
        tail = np.array([[self.tokens, self.inputs]])
        left = joined(np.concatenate((unread * self._seq_len, tail)))
        edges = np.unique(np.concatenate((left.ravel(), self._ends)))
        begins, ends = edges[:-1], edges[1:]
        inside = left[:, 0].searchsorted(begins, side="right") - 1
        kept = (inside >= 0) & (begins < left[inside, 1])
        first = self.positions(begins[kept])
        runs = joined(np.stack((first, first + ends[kept] - begins[kept]), axis=1))
        return Windows(self._source, seq_len, runs)

    @property
    def remarks(self) -> list[str]:
        return []


class PlannedRows:
    """Rows that a plan file lists piece by piece."""

    def __init__(self, source: Source, seq_len: int, plan: Plan, packing: "Packing") -> None:
        if plan.rows == 0:
            raise UserError(
                f"{source.name} gives no sample of at most {seq_len} tokens",
                "use a longer sequence, set data.long_docs = 'split', or remove the source",
            )
        self._plan, self._packing = plan, packing
        self.count = plan.rows
        self.tokens: int = plan.counts["tokens"]
        self.slots = plan.rows * seq_len

    def pieces(self, sample: int) -> np.ndarray:
        begin, end = self._plan.offsets[sample : sample + 2].tolist()
        return self._plan.pieces[begin:end]

    @property
    def remarks(self) -> list[str]:
        counts = self._plan.counts
        long, lost = counts.get("long_documents", 0), counts.get("lost_tokens", 0)
        if not long:
            return []
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}[self._packing.long_docs]
        cost = f", {lost:,} tokens not trained on" if lost else ""
        return [f"{long:,} of {counts['documents']:,} documents are longer than a row: {done}{cost}"]


@dataclass(frozen=True)
class Packing:
    """How to cut every source of a stream. `cache` is where plans are kept."""

    kind: str = "concat"
    long_docs: str = "split"
    cache: Path = Path("data")
    progress: Progress = field(default=silent, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """Nothing for `concat`, whose fingerprints are older than the other packings."""
        return {} if self.kind == "concat" else {"packing": self.kind, "long_docs": self.long_docs}

    def cut(self, source: Source, seq_len: int) -> Windows | PlannedRows:
        if self.kind == "concat":
            return Windows(source, seq_len)
        plan = open_plan(self.cache, self.request(source, seq_len), self.progress)
        return PlannedRows(source, seq_len, plan, self)

    def refuse_long_planning(self, sources: Sequence[Source], seq_len: int) -> None:
        if self.kind != "concat":
            refuse_long_planning(self.cache, [self.request(source, seq_len) for source in sources])

    def request(self, source: Source, seq_len: int) -> Request:
        """What a plan of this packing is asked for."""
        prompt = len(source.prompt)
        if prompt >= seq_len:
            raise UserError(
                f"the prompt of {source.name} has {prompt} tokens, a sequence only {seq_len}",
                "shorten the prompt or lengthen data.seq_len",
            )
        return Request(source.store, source.tokens, self.kind, self.long_docs, seq_len, prompt)


CONCAT = Packing()
