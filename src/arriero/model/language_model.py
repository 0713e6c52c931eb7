"""What Llama and GPT-2 have in common: tokens to hidden states, hidden states to logits."""

import torch
from torch import Tensor, nn

from arriero.model.attention import document_mask
from arriero.model.init import Pieces, Rule, fill, plain_name, whole
from arriero.model.layers import Block, Head, MaskOf, Rope, Rotation
from arriero.model.spec import ModelSpec


class LanguageModel(nn.Module):
    """Build it on any device, `meta` too; after `to_empty`, `init_weights` fills whatever has storage.

    Blocks keep their number in their name, so a part of the model calls its parameters as the whole does.
    """

    embedding: nn.Embedding | None
    norm: nn.Module | None
    head: Head | None

    def __init__(self, spec: ModelSpec, blocks: list[Block], norm: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = norm
        self.head = Head(spec.dim, spec.vocab_size)
        self.mask_of: MaskOf = document_mask
        self.tie()

    def keep(self, blocks: range) -> None:
        """Become a part of the model: these blocks, the embedding with the first, the head with the last."""
        for name in list(self.blocks):
            if int(name) not in blocks:
                del self.blocks[name]
        if blocks.start > 0:
            self.embedding = None
        if blocks.stop < self.spec.layers:
            self.norm = self.head = None

    def tie(self) -> None:
        if self.spec.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse=True):
        # moving off meta makes a new parameter for each name: join them again
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(
        self,
        x: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits, or given labels their summed loss; from a part without a head, its last states."""
        x_BTD = self.hidden(x, positions_BT, documents_BT)
        return x_BTD if self.head is None else self.head(x_BTD, labels_BT)

    def hidden(
        self, x: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """The states the head reads. `x` is tokens; for a part without embedding, the states before it."""
        positions = positions_BT
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = None if documents_BT is None else self.mask_of(documents_BT, x.device)
        rotation = self.rotation(positions)
        x_BTD = x if self.embedding is None else self.embed(x, positions)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, rotation, mask)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def rotation(self, positions: Tensor) -> Rotation | None:
        raise NotImplementedError

    def rule(self, name: str) -> Rule:
        raise NotImplementedError

    def init_weights(self, seed: int, pieces: Pieces = whole) -> None:
        """Overwrites every parameter and buffer; `pieces` tells which part of a parameter is held here."""
        self.tie()
        for wrapped, parameter in self.named_parameters():
            name = plain_name(wrapped)
            if self.spec.tied and name == "head.weight":
                name = "embedding.weight"
            fill(parameter, name, self.rule(name), seed, pieces)
        for module in self.modules():
            if isinstance(module, Rope):
                module.reset()
