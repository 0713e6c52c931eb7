"""What Llama and GPT-2 have in common: tokens to hidden states, hidden states to logits."""

import torch
from torch import Tensor, nn

from arriero.model.init import Pieces, Rule, fill, plain_name, whole
from arriero.model.layers import Block, Rope, Rotation, same_document_mask
from arriero.model.spec import ModelSpec


class LanguageModel(nn.Module):
    """Build it on any device, `meta` too; after `to_empty`, `init_weights` fills whatever has storage."""

    def __init__(self, spec: ModelSpec, blocks: list[Block], norm: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        if self.spec.tied:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse=True):
        # moving off meta makes a new parameter for each name: join them again
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        return self.head(self.hidden(tokens_BT, positions_BT, documents_BT))

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """The states the head reads, for a loss that makes the logits piece by piece."""
        positions = positions_BT
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask = None if documents_BT is None else same_document_mask(documents_BT)
        rotation = self.rotation(positions)
        x_BTD = self.embed(tokens_BT, positions)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, mask)
        return self.norm(x_BTD)

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
            fill(parameter, name, self.rule(name), seed, pieces)
        for module in self.modules():
            if isinstance(module, Rope):
                module.reset()
