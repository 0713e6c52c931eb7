"""A batch through the model and back, however the model is laid out over ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from arriero.data.order.loader import IGNORED, Batch
from arriero.interrupt import STOPPING
from arriero.model.language_model import LanguageModel
from arriero.parallel.fsdp import release, synchronize_gradients
from arriero.parallel.mesh import Mesh
from arriero.parallel.pipeline import Pipeline


class Passes:
    """`cut` leaves of a batch the tokens that are this rank's; `pipeline` is for a model in stages;
    `renew` is done to each part before it computes with new weights."""

    def __init__(
        self,
        parts: Sequence[LanguageModel],
        mesh: Mesh,
        micro_batch: int,
        device: torch.device,
        cut: Callable[[Batch], Batch] | None = None,
        pipeline: Pipeline | None = None,
        sync_each: bool = False,
        renew: Callable[[LanguageModel], None] = lambda _: None,
    ) -> None:
        self._parts = parts
        self._mesh = mesh
        self._micro_batch = micro_batch
        self._device = device
        self._cut = cut
        self._pipeline = pipeline
        self._sync_each = sync_each
        self._renew = renew

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """Accumulate a batch's gradients, times `scale`; returns the mean loss over all ranks' tokens."""
        batch = self._mine(batch)
        self._renew_parts()
        label_count = self._label_count(batch).clamp(min=1.0)
        if self._pipeline is not None:
            given = (batch.tokens_BT, batch.labels_BT)
            mean = self._pipeline.gradients(*given, label_count, scale, **_extra(batch))
        else:
            mean = self._accumulate(batch, label_count, scale)
        return self._mesh.total(mean, "loss", "pp")

    def _accumulate(self, batch: Batch, label_count: Tensor, scale: float) -> Tensor:
        mean = torch.zeros((), device=self._device)
        micros = list(batch.split(self._micro_batch))
        for number, micro in enumerate(micros, 1):
            synchronize_gradients(self._parts[0], number == len(micros), self._sync_each)
            loss = self._loss(micro) / label_count
            (loss * scale).backward()
            mean += loss.detach()
        return mean

    @torch.no_grad()
    def held_out(self, batch: Batch, stop: int = 0) -> tuple[float, int, int]:
        """Summed loss and number of labels over all ranks, and the signal by which any rank is to stop."""
        batch = self._mine(batch)
        self._renew_parts()
        if self._pipeline is not None:
            rows = self._micro_batch
            total = self._pipeline.summed_loss(batch.tokens_BT, batch.labels_BT, rows, **_extra(batch))
        else:
            total = self._loss(batch)
        for part in self._parts:
            release(part)
        first_tp, first_pp = self._mesh.coordinate("tp") == 0, self._mesh.coordinate("pp") == 0
        labels = (batch.labels_BT != IGNORED).sum()
        asked = [torch.tensor(float(stop == each), device=self._device) for each in STOPPING]
        # ranks along tp hold the same loss and labels, those along pp the same labels
        mine = torch.stack([total.double() * first_tp, labels.double() * (first_tp and first_pp), *asked])
        summed, count, *stops = self._mesh.total_of_run(mine).tolist()
        return summed, int(count), next((each for each, n in zip(STOPPING, stops, strict=True) if n), 0)

    def _renew_parts(self) -> None:
        for part in self._parts:
            self._renew(part)

    def _mine(self, batch: Batch) -> Batch:
        batch = batch if self._cut is None else self._cut(batch)
        return batch.to(self._device)

    def _label_count(self, batch: Batch) -> Tensor:
        count = (batch.labels_BT != IGNORED).sum().double()
        return self._mesh.total(count, "loss")

    def _loss(self, batch: Batch) -> Tensor:
        return self._parts[0](batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)


def _extra(batch: Batch) -> dict[str, Tensor]:
    """Every stage is told its positions: states alone do not say how long the sequence is."""
    rows, width = batch.tokens_BT.shape
    positions = batch.positions_BT
    if positions is None:
        positions = torch.arange(width, device=batch.tokens_BT.device).expand(rows, width)
    extra = {"positions_BT": positions, "documents_BT": batch.documents_BT}
    return {name: tensor for name, tensor in extra.items() if tensor is not None}
