"""Held-out loss: the mean over all held-out tokens, each counted once."""

import torch

from arriero.data.order.loader import IGNORED, Loader
from arriero.data.order.order import EvalStream
from arriero.train.device import Device


class Evaluator:
    def __init__(self, stream: EvalStream, sequences: int, device: Device, documents: bool) -> None:
        self._stream = stream
        self._sequences = min(sequences, stream.samples)
        self._device = device.torch_device
        self._documents = documents

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        total, count = torch.zeros((), dtype=torch.float64), 0
        with Loader(self._stream, self._sequences, documents=self._documents) as batches:
            for batch in batches:
                count += int((batch.labels_BT != IGNORED).sum())
                batch = batch.to(self._device)
                summed = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)
                total += summed.double().cpu()
        return float(total) / max(count, 1)
