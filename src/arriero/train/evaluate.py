"""Held-out loss: the mean over all held-out tokens, each counted once."""

from arriero.data.order.loader import Loader
from arriero.data.order.order import EvalStream
from arriero.interrupt import Requests
from arriero.parallel.mesh import Mesh
from arriero.train.passes import Passes


class Evaluator:
    """Each of the ranks that read different sequences takes so many of a batch."""

    def __init__(self, stream: EvalStream, sequences: int, mesh: Mesh, documents: bool) -> None:
        self._stream = stream
        ranks = mesh.layout.batch
        self._sequences = ranks * min(sequences, -(-stream.samples // ranks))
        self._rank, self._ranks = mesh.batch_rank, ranks
        self._documents = documents

    def loss(self, passes: Passes, requests: Requests) -> float | None:
        """None where a rank was told to stop: all ranks end together, and know by `requests.agreed`."""
        total, count = 0.0, 0
        with Loader(
            self._stream, self._sequences, rank=self._rank, ranks=self._ranks, documents=self._documents
        ) as batches:
            for batch in batches:
                summed, labels, requests.agreed = passes.held_out(batch, requests.stop)
                if requests.agreed:
                    return None
                total, count = total + summed, count + labels
        return total / max(count, 1)
