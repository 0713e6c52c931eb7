"""Run batches forward and backward in any layout: gradient accumulation, validation (held-out) loss."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from arriero.data.order.loader import IGNORED, Batch, Loader
from arriero.data.order.order import EvalStream
from arriero.interrupt import HEARD, Requests
from arriero.model.language_model import LanguageModel
from arriero.parallel.fsdp import reshard_weights, synchronize_gradients
from arriero.parallel.mesh import Mesh
from arriero.parallel.pipeline import Pipeline


class ForwardBackward:
    """`cut` reduces a batch to this rank's tokens (context parallel), `pipeline` runs a model in stages,
    `refresh_scales` is applied to each part before it computes with new weights (float8)."""

    def __init__(
        self,
        parts: Sequence[LanguageModel],
        mesh: Mesh,
        micro_batch: int,
        device: torch.device,
        cut: Callable[[Batch], Batch] | None = None,
        pipeline: Pipeline | None = None,
        sync_each: bool = False,
        keeps_gathered: bool = False,
        refresh_scales: Callable[[LanguageModel], None] = lambda _: None,
        dropout_seed: tuple[int, int] | None = None,
    ) -> None:
        """`dropout_seed` is given if the model has dropout: with it, a batch always has the same dropout."""
        self._dropout_seed = dropout_seed
        self._parts = parts
        self._mesh = mesh
        self._micro_batch = micro_batch
        self._device = device
        self._cut = cut
        self._pipeline = pipeline
        self._reduction = (sync_each, keeps_gathered)
        self._refresh_scales = refresh_scales

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """Accumulate the gradients of a batch, times `scale`; return the mean loss over all ranks' tokens."""
        if self._dropout_seed is not None:
            torch.manual_seed(hash((*self._dropout_seed, batch.first_sample)) % 2**63)
        batch = self._prepare(batch)
        label_count = self._label_count(batch).clamp(min=1.0)
        if self._pipeline is not None:
            given = (batch.tokens_BT, batch.labels_BT)
            mean = self._pipeline.gradients(*given, label_count, scale, **_stage_inputs(batch))
        else:
            mean = self._accumulate(batch, label_count, scale)
        return self._mesh.sum_over(mean, "loss", "pp")

    def _accumulate(self, batch: Batch, label_count: Tensor, scale: float) -> Tensor:
        """Gradient accumulation over micro-batches."""
        mean = torch.zeros((), device=self._device)
        micro_batches = list(batch.split(self._micro_batch))
        for number, micro_batch in enumerate(micro_batches, 1):
            synchronize_gradients(self._parts[0], number == len(micro_batches), *self._reduction)
            loss = self._loss(micro_batch) / label_count
            (loss * scale).backward()
            mean += loss.detach()
        return mean

    @torch.no_grad()
    def summed_loss(self, batch: Batch, stop: int = 0) -> tuple[float, int, int]:
        """Return the summed loss and number of labels over all ranks, and a signal that any rank received."""
        batch = self._prepare(batch)
        self._use_dropout(False)
        if self._pipeline is not None:
            rows = self._micro_batch
            total = self._pipeline.summed_loss(batch.tokens_BT, batch.labels_BT, rows, **_stage_inputs(batch))
        else:
            total = self._loss(batch)
        self._use_dropout(True)
        for part in self._parts:
            reshard_weights(part)
        first_tp, first_pp = self._mesh.coordinate("tp") == 0, self._mesh.coordinate("pp") == 0
        labels = (batch.labels_BT != IGNORED).sum()
        asked = [torch.tensor(float(stop == each), device=self._device) for each in HEARD]
        # tp ranks hold the same loss and labels, pp ranks the same labels
        mine = torch.stack([total.double() * first_tp, labels.double() * (first_tp and first_pp), *asked])
        summed, count, *stops = self._mesh.sum_over_all(mine).tolist()
        return summed, int(count), next((each for each, n in zip(HEARD, stops, strict=True) if n), 0)

    def _use_dropout(self, used: bool) -> None:
        for part in self._parts if self._dropout_seed is not None else ():
            part.train(used)

    def _prepare(self, batch: Batch) -> Batch:
        """Return this rank's part of the batch on the device."""
        for part in self._parts:
            self._refresh_scales(part)
        batch = batch if self._cut is None else self._cut(batch)
        return batch.to(self._device)

    def _label_count(self, batch: Batch) -> Tensor:
        count = (batch.labels_BT != IGNORED).sum().double()
        return self._mesh.sum_over(count, "loss")

    def _loss(self, batch: Batch) -> Tensor:
        return self._parts[0](batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)


def _stage_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return what every stage needs in addition to the hidden states, which lack the sequence length."""
    rows, width = batch.tokens_BT.shape
    positions = batch.positions_BT
    if positions is None:
        positions = torch.arange(width, device=batch.tokens_BT.device).expand(rows, width)
    extra = {"positions_BT": positions, "documents_BT": batch.documents_BT}
    return {name: tensor for name, tensor in extra.items() if tensor is not None}


class SourceLoss(NamedTuple):
    """The loss of a source, summed over `labels` tokens."""

    total: float
    labels: int

    @property
    def mean(self) -> float:
        return self.total / max(self.labels, 1)


def overall(losses: Iterable[SourceLoss]) -> SourceLoss:
    """Return the loss of several sources together: each token counts the same."""
    each = list(losses)
    return SourceLoss(sum(loss.total for loss in each), sum(loss.labels for loss in each))


class Evaluator:
    """Computes the mean loss over all held-out tokens of some sources, each token counted once.

    `sequences` is the batch of each rank that reads different sequences. `by_source` has the losses of the
    last evaluation; `advance` is called with the number of sequences of each batch.
    """

    def __init__(
        self,
        streams: Mapping[str, EvalStream],
        sequences: int,
        mesh: Mesh,
        documents: bool,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._streams, self._sequences = streams, sequences
        self._rank, self._ranks = mesh.batch_rank, mesh.layout.batch
        self._documents, self._advance = documents, advance
        self.by_source: dict[str, SourceLoss] = {}

    def loss(self, passes: ForwardBackward, requests: Requests) -> float | None:
        """Return None if any rank was asked to stop; `requests.agreed` is then set on all of them."""
        found = {}
        for name, stream in self._streams.items():
            loss = self._source_loss(stream, passes, requests)
            if loss is None:
                return None
            found[name] = loss
        self.by_source = found
        return overall(found.values()).mean

    @property
    def several(self) -> dict[str, float]:
        """Return the losses of the sources, where there are several."""
        several = {name: loss.mean for name, loss in self.by_source.items()}
        return several if len(several) > 1 else {}

    def _source_loss(
        self, stream: EvalStream, passes: ForwardBackward, requests: Requests
    ) -> SourceLoss | None:
        total, count = 0.0, 0
        rows = self._ranks * min(self._sequences, -(-stream.samples // self._ranks))
        with Loader(stream, rows, rank=self._rank, ranks=self._ranks, documents=self._documents) as batches:
            for batch in batches:
                summed, labels, requests.agreed = passes.summed_loss(batch, requests.stop)
                if requests.agreed:
                    return None
                total, count = total + summed, count + labels
                self._advance(rows)
        return SourceLoss(total, count)
