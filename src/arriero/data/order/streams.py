"""Build the sample streams of a run file and forecast how often each source will be read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arriero.config.schema import RunConfig, SourceSection
from arriero.config.timeline import Timeline
from arriero.data.order.order import ORDER_VERSION, Change, EvalStream, Stream
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.order.shuffle import BLOCK, move_heldout_last, split_heldout
from arriero.data.prepare.builtin import dataset_of
from arriero.data.store.store import FILES, TokenStore
from arriero.data.tokens.tokenizer import separators_of, tokenizer_of
from arriero.data.workers import ProgressCallback
from arriero.errors import UserError

# a larger model.vocab_size is rounding only up to this factor
_MOST_UNUSED = 2


@dataclass(frozen=True)
class Streams:
    train: Stream
    heldout: Mapping[str, EvalStream]
    stores: Sequence[TokenStore]
    timeline: Timeline

    @property
    def reader_threads(self) -> int:
        """The default of data.reader_threads."""
        return 4 if max(store.shards for store in self.stores) > 64 else 1


def build_streams(config: RunConfig, progress: ProgressCallback, version: int = ORDER_VERSION) -> Streams:
    """Open the datasets, prepare text that is not prepared yet, and make packing plans.

    `version` is the order version; a resumed run keeps its own.
    """
    data, timeline = config.data, Timeline.of(config)
    sections = [*data.sources, *(source for phase in data.phases for source in phase.sources or ())]
    FILES.limit(data.open_shards)
    heldout = config.eval.heldout.amount if config.eval.heldout else 0
    found = _open(sections, Path(data.cache), progress)
    opened = {path: move_heldout_last(store, heldout) for path, store in found.items()}
    spans = {path: split_heldout(store, heldout) for path, store in opened.items()}
    packing = Packing(data.packing, data.long_docs, Path(data.cache), progress)

    def source(section: SourceSection, part: int) -> TokenSource:
        store = opened[section.path]
        prompt = _prompt(section, store)
        return TokenSource(store, spans[section.path][part], section.weight, prompt, section.max_epochs)

    changes = [
        Change(
            phase.sample,
            [source(each, 0) for each in section.sources] if section.sources else None,
            section.seq_len if phase.seq_len != before.seq_len else None,
        )
        for section, (before, phase) in zip(data.phases, pairwise(timeline.phases), strict=True)
    ]
    train = [source(section, 0) for section in data.sources]
    stream = Stream(train, data.seq_len, config.run.seed, packing, changes, version)
    held = {section.path: source(section, 1) for section in reversed(sections)}
    evaluation = {
        path: EvalStream([held[path]], data.seq_len, packing) for path in (opened if heldout else ())
    }
    return Streams(stream, evaluation, list(opened.values()), timeline)


def max_steps_by_epochs(streams: Streams) -> int | None:
    """Return the steps that every source's max_epochs allows; None if none has one."""
    beyond = streams.train.first_beyond_cap(BLOCK * 2**32)
    return None if beyond is None else streams.timeline.steps_before(beyond[0])


def check_max_epochs(streams: Streams, steps: int | None) -> None:
    """Raise UserError if a step of the run (with a wall-time horizon, the first) exceeds a max_epochs."""
    beyond = streams.train.first_beyond_cap(streams.timeline.samples_after(steps or 1))
    if beyond is not None:
        sample, number = beyond
        source = streams.train.sources[number]
        raise UserError(
            f"{source.name} would be read more than {source.max_epochs:g} times, its max_epochs, from step "
            f"{streams.timeline.steps_before(sample) + 1}{f' of {steps}' if steps else ''} on",
            "raise its max_epochs, lower its weight, add a phase without it, or shorten train.horizon",
        )


@dataclass(frozen=True)
class SourceForecast:
    """How a source is used over a run. `epochs` is None if the end of the run is not known."""

    name: str
    share: float
    tokens_per_epoch: int
    utilisation: float
    epochs: float | None
    first_repeat: int | None
    remarks: Sequence[str]


def forecast(streams: Streams, steps: int | None, vocab_size: int = 0) -> list[SourceForecast]:
    """Forecast each source: its share of the first phase's tokens, its epochs and its first repetition.

    `vocab_size` is that of the model, if there is one.
    """
    stream, timeline = streams.train, streams.timeline
    ever = timeline.samples_after(steps) if steps else BLOCK * 2**32
    drawn = stream.drawn(ever)
    means = np.array([cut.tokens / cut.count for cut in stream.cuts])
    tokens = [phase.shares.per_sample * means for phase in stream.phases]
    shares = [each / each.sum() for each in tokens]
    later = [timeline.steps_before(phase.first_sample) + 1 for phase in stream.phases[1:]]
    outlooks = []
    for i, (source, cut) in enumerate(zip(stream.sources, stream.cuts, strict=True)):
        order = stream.source_orders[i]
        repeat = stream.sample_of_draw(i, order.first_repeat, ever)
        outlooks.append(
            SourceForecast(
                name=source.name,
                share=float(shares[0][i]),
                tokens_per_epoch=cut.tokens,
                utilisation=cut.tokens / cut.slots,
                epochs=order.epochs(int(drawn[i])) if steps else None,
                first_repeat=None if repeat is None else timeline.steps_before(repeat) + 1,
                remarks=[
                    *cut.remarks,
                    *(
                        f"{share[i]:.1%} from step {step:,} on"
                        for step, share in zip(later, shares[1:], strict=True)
                    ),
                    *_misfits(source.store, streams.stores[0], vocab_size),
                ],
            )
        )
    return outlooks


def _misfits(store: TokenStore, first: TokenStore, vocab_size: int) -> Iterator[str]:
    if vocab_size > _MOST_UNUSED * store.vocab_size:
        yield (
            f"its tokenizer has {store.vocab_size:,} ids, and model.vocab_size is {vocab_size:,}: the other "
            "rows of the embedding and the head are never trained"
        )
    own, others = separators_of(store), separators_of(first)
    if own != others:
        yield (
            f"its documents have {own}, those of {first.directory} have {others}; the exported tokenizer "
            "uses the latter"
        )


def _open(
    sections: Sequence[SourceSection], cache: Path, progress: ProgressCallback
) -> dict[str, TokenStore]:
    """Open datasets by path. A source that is named again need not repeat its tokenizer and column."""
    how: dict[str, dict[str, Any]] = {}
    for section in sections:
        keys = ("tokenizer", "column", "template", "chat")
        given = {key: getattr(section, key) or None for key in keys}
        known = how.setdefault(section.path, {})
        for key, value in given.items():
            if value is not None and known.setdefault(key, value) != value:
                raise UserError(
                    f"{section.path} has {key} '{known[key]}' and '{value}'", "name a source with one of them"
                )
    stores = {
        path: TokenStore.open(dataset_of(path, cache=cache, progress=progress, **known))
        for path, known in how.items()
    }
    for store in stores.values():
        store.check_tokenizer()
    return stores


def _prompt(section: SourceSection, store: TokenStore) -> tuple[int, ...]:
    if section.prompt is None:
        return ()
    ids = tokenizer_of(store).encode(section.prompt)
    if not ids:
        raise UserError(f"the prompt of {section.path} is empty", "give it a text, or remove it")
    return tuple(ids)
