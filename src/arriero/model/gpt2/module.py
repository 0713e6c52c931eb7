"""The GPT-2 module: LayerNorm, learned position embeddings, biases, GELU."""

from torch import Tensor, nn

from arriero.model.language_model import InitRule, LanguageModel
from arriero.model.layers import MLP, Attention, Block
from arriero.model.spec import ModelSpec


class GPT2Model(LanguageModel):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(
            spec, [_block(spec) for _ in range(spec.layers)], nn.LayerNorm(spec.dim, eps=spec.norm_eps)
        )
        self.positions: nn.Embedding | None = nn.Embedding(spec.max_seq_len, spec.dim)

    def keep(self, blocks: range) -> None:
        super().keep(blocks)
        if self.embedding is None:
            self.positions = None

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        if tokens_BT.shape[1] > self.spec.max_seq_len:
            raise ValueError(
                f"{tokens_BT.shape[1]} tokens, but only {self.spec.max_seq_len} learned positions"
            )
        assert self.embedding is not None and self.positions is not None
        return self.embedding(tokens_BT) + self.positions(positions)

    def rotation(self, positions: Tensor) -> None:
        return None

    def init_rule(self, name: str) -> InitRule:
        parts = name.split(".")
        if parts[-1] == "bias":
            return InitRule()
        if "norm" in parts[-2]:
            return InitRule(constant=1.0)
        residual = (2 * self.spec.layers) ** -0.5 if parts[-2] in ("o", "down") else 1.0
        return InitRule(std=0.02 * residual, cut=5.0)


def _block(spec: ModelSpec) -> Block:
    return Block(
        nn.LayerNorm(spec.dim, eps=spec.norm_eps),
        Attention(spec.dim, spec.heads, spec.kv_heads, spec.head_dim, bias=True),
        nn.LayerNorm(spec.dim, eps=spec.norm_eps),
        MLP(spec.dim, spec.ffn),
    )
