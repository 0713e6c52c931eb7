import pytest
import torch

from arriero.config.schema import OptimSection
from arriero.train.optim import Optimizer


def test_a_step_is_adamw_as_the_paper_writes_it():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    config = OptimSection(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, clip=False)
    optimizer = Optimizer(model, config, torch.float32)
    expected = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in expected.items()}
    second = {name: torch.zeros_like(w) for name, w in expected.items()}
    for t in (1, 2, 3):
        loss = model(torch.full((4, 3), float(t))).square().sum()
        loss.backward()
        gradients = {name: p.grad.clone().double() for name, p in model.named_parameters()}
        optimizer.step(lr=0.1 / t)
        for name, g in gradients.items():
            decay = 0.3 if expected[name].ndim > 1 else 0.0
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            update = (first[name] / (1 - 0.8**t)) / ((second[name] / (1 - 0.95**t)).sqrt() + 1e-6)
            expected[name] -= 0.1 / t * (update + decay * expected[name])
    for name, p in model.named_parameters():
        assert p.detach().double() == pytest.approx(expected[name], abs=1e-5)
        assert p.grad is None
