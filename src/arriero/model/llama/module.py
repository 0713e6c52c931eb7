"""The Llama module: RMSNorm, RoPE, grouped-query attention, SwiGLU.

With the options of attention in ModelSpec it is also the module of Mistral and Qwen."""

from torch import Tensor, nn

from arriero.model.language_model import InitRule, LanguageModel
from arriero.model.layers import Attention, Block, Rope, Rotation, SwiGLU
from arriero.model.spec import ModelSpec


class Llama(LanguageModel):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(
            spec, [_block(spec, i) for i in range(spec.layers)], nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        )
        assert spec.rope_theta is not None
        self.rope = Rope(spec.head_dim, spec.rope_theta, spec.rope_scaling)

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.embedding(tokens_BT)

    def rotation(self, positions: Tensor) -> Rotation:
        return self.rope(positions)

    def init_rule(self, name: str) -> InitRule:
        parts = name.split(".")
        if parts[-1] == "bias":
            return InitRule()
        if "norm" in parts[-2]:
            return InitRule(constant=1.0)
        if parts[-2] in ("o", "up", "down"):
            return InitRule(std=0.02 / (2 * (int(parts[1]) + 1)) ** 0.5)
        return InitRule(std=self.spec.dim**-0.5 if parts[0] == "head" else 0.02)


def _block(spec: ModelSpec, layer: int) -> Block:
    heads = spec.heads, spec.kv_heads, spec.head_dim
    eps = spec.norm_eps if spec.qk_norm else None
    return Block(
        nn.RMSNorm(spec.dim, eps=spec.norm_eps),
        Attention(spec.dim, *heads, spec.qkv_bias, o_bias=False, norm_eps=eps, window=spec.window(layer)),
        nn.RMSNorm(spec.dim, eps=spec.norm_eps),
        SwiGLU(spec.dim, spec.ffn),
    )
