"""From a spec to the module."""

from arriero.model.base import LanguageModel
from arriero.model.gpt2 import GPT2
from arriero.model.llama import Llama
from arriero.model.spec import ModelSpec


def build_model(spec: ModelSpec) -> LanguageModel:
    return Llama(spec) if spec.family == "llama" else GPT2(spec)
