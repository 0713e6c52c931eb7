"""Next-token loss, summed: the caller divides by the tokens of the whole batch, so all weigh the same."""

import torch
import torch.nn.functional as F

from arriero.data.order.loader import IGNORED


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
