"""Readers of each format that share no code with ours, each giving logits: what a conversion is judged by."""

import json
import math
import tomllib

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arriero.model.family import build_model
from arriero.model.spec import ModelSpec


def logits_of(kind, directory, tokens, positions):
    with torch.no_grad():
        return JUDGES[kind](directory, tokens, positions)


def by_transformers(directory, tokens, positions):
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()(tokens, position_ids=positions).logits


def by_torch(directory, tokens, positions):
    model = described(directory)
    tied = ["head.weight"] if model.spec.tied else []
    missing, unexpected = model.load_state_dict(torch.load(directory / "model.pt"), strict=False)
    assert missing == tied and not unexpected
    return model(tokens, positions)


def by_dcp(directory, tokens, positions):
    model = described(directory)
    state = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return model(tokens, positions)


def described(directory):
    spec = ModelSpec.from_dict(tomllib.loads((directory / "model.toml").read_text())["model"])
    model = build_model(spec).eval()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    return model


def by_meta(directory, tokens, positions):
    """Llama as Meta's two code bases compute it, every shard by itself, over positions of one sequence."""
    params = json.loads((directory / "params.json").read_text())
    files = sorted(directory.glob("consolidated.*.pth"))
    shards = [torch.load(path, weights_only=True) for path in files]
    if (directory / "consolidated.safetensors").is_file():
        shards = [load_file(directory / "consolidated.safetensors")]
    heads, kv_heads = (params[name] // len(shards) for name in ("n_heads", "n_kv_heads"))
    head_dim = params.get("head_dim", params["dim"] // params["n_heads"])
    turn = turns(params, shards, head_dim, positions[0])
    x = embed(shards, params, tokens[0])
    for layer in range(params["n_layers"]):
        block = [{k.removeprefix(f"layers.{layer}."): v for k, v in s.items()} for s in shards]
        seen = rms(x, block[0]["attention_norm.weight"], params["norm_eps"])
        x = x + sum(attend(s, seen, heads, kv_heads, head_dim, turn) for s in block)
        seen = rms(x, block[0]["ffn_norm.weight"], params["norm_eps"])
        x = x + sum(feed(s, seen) for s in block)
    x = rms(x, shards[0]["norm.weight"], params["norm_eps"])
    return torch.cat([x @ s["output.weight"].T for s in shards], dim=-1)[None]


def embed(shards, params, tokens):
    """Llama 2: every shard looks up some columns of all tokens. Llama 3: all columns of some tokens."""
    if params["vocab_size"] <= 128 and "use_scaled_rope" not in params:
        return torch.cat([s["tok_embeddings.weight"][tokens] for s in shards], dim=-1)
    rows = params["vocab_size"] // len(shards)
    out = torch.zeros(len(tokens), params["dim"])
    for number, shard in enumerate(shards):
        mine = (tokens >= number * rows) & (tokens < (number + 1) * rows)
        out[mine] = shard["tok_embeddings.weight"][tokens[mine] - number * rows]
    return out


def turns(params, shards, head_dim, positions):
    frequencies = [params.get("rope_theta", 10000.0) ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if params.get("use_scaled_rope"):
        tied = all(torch.equal(s["tok_embeddings.weight"], s["output.weight"]) for s in shards)
        frequencies = [stretched(f, 32 if tied else 8) for f in frequencies]
    angles = positions[:, None].double() * torch.tensor(frequencies, dtype=torch.float64)
    return torch.polar(torch.ones_like(angles), angles)


def stretched(frequency, factor):
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / factor
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def attend(shard, x, heads, kv_heads, head_dim, turn):
    q, k, v = (x @ shard[f"attention.{w}.weight"].T for w in ("wq", "wk", "wv"))
    q, k, v = q.view(-1, heads, head_dim), k.view(-1, kv_heads, head_dim), v.view(-1, kv_heads, head_dim)
    q, k = (rotated(each, turn) for each in (q, k))
    outs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = (q[:, head] @ k[:, group].T / math.sqrt(head_dim)).masked_fill(
            torch.ones(len(x), len(x)).triu(1).bool(), -math.inf
        )
        outs.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(outs, dim=-1) @ shard["attention.wo.weight"].T


def rotated(x, turn):
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).float()


def feed(shard, x):
    gate, up, down = (shard[f"feed_forward.{w}.weight"] for w in ("w1", "w3", "w2"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rms(x, weight, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


JUDGES = {"hf": by_transformers, "meta": by_meta, "dcp": by_dcp, "torch": by_torch}
