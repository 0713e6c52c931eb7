"""From a spec to the module."""

from arriero.model.gpt2.module import GPT2
from arriero.model.language_model import LanguageModel
from arriero.model.llama.module import Llama
from arriero.model.spec import ModelSpec


def build_model(spec: ModelSpec) -> LanguageModel:
    return Llama(spec) if spec.family == "llama" else GPT2(spec)
