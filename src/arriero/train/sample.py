"""A continuation of some text by the model as it stands."""

import torch

from arriero.data.tokens.tokenizer import Separators, Tokenizer


@torch.no_grad()
def continue_text(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    separators: Separators,
    text: str,
    context: int,
    tokens: int = 96,
    seed: int = 0,
) -> str:
    """Sample from the 40 likeliest tokens at temperature 0.7, until the end of a document."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    prompt = separators.prompt(tokenizer.encode(text)) or [tokenizer.eos_id]
    ids = list(prompt)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        values, choices = model(window)[0, -1].float().cpu().topk(min(40, tokenizer.vocab_size))
        pick = torch.multinomial((values / 0.7).softmax(-1), 1, generator=generator)
        ids.append(int(choices[pick]))
        if separators.eos is not None and ids[-1] == separators.eos.id:
            break
    return tokenizer.decode(ids[len(prompt) :])
