"""Small models of each kind, with weights in which every mistake shows."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.model.family import build_model
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec

BASE = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 8, "ffn": 176, "max_seq_len": 4096}
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
LLAMA3 = {"kv_heads": 4, "rope_theta": 5e5, "max_seq_len": 131072, "norm_eps": 1e-6}
SPECS = {
    "llama2": {},
    "llama2, 2 kv heads": {"kv_heads": 2},
    "llama3": {**LLAMA3, "rope_scaling": {"factor": 8.0, **SCALED}},
    "llama3, tied": {**LLAMA3, "rope_scaling": {"factor": 32.0, **SCALED}, "tied": True},
    "gpt2": {"family": "gpt2", "max_seq_len": 8192},
}


def spec_of(name):
    return ModelSpec.from_dict({**BASE, **SPECS[name]})


def model_of(spec, seed=1):
    model = build_model(spec).eval()
    model.init_weights(seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return model


def in_memory(spec, seed=1, dtype=torch.float32, extra_files=()):
    state = model_of(spec, seed).to(dtype).state_dict()
    tensors = {name: t.to(dtype) for name, t in own_tensors(spec).items()}
    return ModelReader("memory", "a model in memory", spec, tensors, state.__getitem__, dict(extra_files))


def equal(a, b):
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.load(n), b.load(n)) for n in a.tensors)


def tokenizer_file(path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path))
    return path
