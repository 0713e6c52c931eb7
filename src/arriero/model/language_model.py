"""The base class of model families: tokens to hidden states, hidden states to logits or loss."""

import torch
from torch import Tensor, nn

from arriero.model.attention import AttentionCore, Mask
from arriero.model.init import InitRule, LocalShard, fill, plain_name, whole
from arriero.model.layers import Block, Head, Rope, Rotation
from arriero.model.spec import ModelSpec


class LanguageModel(nn.Module):
    """A decoder-only transformer. A family implements `embed`, `rotation` and `init_rule`.

    Build it on any device, `meta` included; after `to_empty`, `init_weights` fills what has storage. A
    pipeline stage keeps the parameter names of the whole model, because blocks are named by their number.
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
        self.tie()

    def keep(self, blocks: range) -> None:
        """Become a pipeline stage: these blocks, the embedding with the first, the head with the last."""
        for name in list(self.blocks):
            if int(name) not in blocks:
                del self.blocks[name]
        if blocks.start > 0:
            self.embedding = None
        if blocks.stop < self.spec.layers:
            self.norm = self.head = None

    def tie(self) -> None:
        """Make a tied head share the embedding's parameter."""
        if self.spec.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse=True):
        # moving from meta creates a parameter for each name
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
        """Return logits, or the summed loss of labels; a stage without head returns its hidden states."""
        x_BTD = self.hidden(x, positions_BT, documents_BT)
        return x_BTD if self.head is None else self.head(x_BTD, labels_BT)

    def hidden(
        self, x: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the head. `x` is tokens, or hidden states in a later stage."""
        positions = positions_BT
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = None if documents_BT is None else self.attention_mask(documents_BT, x.device)
        rotation = self.rotation(positions)
        x_BTD = x if self.embedding is None else self.embed(x, positions)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, rotation, mask)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def attention_mask(self, documents_BT: Tensor, device: torch.device) -> Mask:
        """Return the mask of packed documents in the form that the attention of the blocks takes."""
        core = next((m for m in self.modules() if isinstance(m, AttentionCore)), None)
        if core is None:
            raise ValueError(f"the family {self.spec.family} has no AttentionCore, which masks documents")
        return core.mask(documents_BT, device)

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states before the first block."""
        raise NotImplementedError

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Return the rotary embedding of positions, or None where the family has none."""
        raise NotImplementedError

    def init_rule(self, name: str) -> InitRule:
        """Return how the parameter of that name is initialised."""
        raise NotImplementedError

    def init_weights(self, seed: int, local_shard: LocalShard = whole) -> None:
        """Initialise every parameter and buffer. `local_shard` returns the local part of a parameter and its
        offset."""
        self.tie()
        for wrapped, parameter in self.named_parameters():
            name = plain_name(wrapped)
            if self.spec.tied and name == "head.weight":
                name = "embedding.weight"
            fill(parameter, name, self.init_rule(name), seed, local_shard)
        for module in self.modules():
            if isinstance(module, Rope):
                module.reset()
