import pytest
import torch
from torch import nn

from arriero.config.schema import OptimSection
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from arriero.train.optim.rules import orthogonalize


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_orthogonalization_brings_singular_values_near_one_and_keeps_directions(shape):
    torch.manual_seed(0)
    left, sizes, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    sizes = torch.linspace(1.0, 30.0, len(sizes))
    result = left.T @ orthogonalize(left @ sizes.diag() @ right) @ right.T
    assert ((result.diag() > 0.6) & (result.diag() < 1.3)).all()
    assert (result - result.diag().diag()).abs().max() < 1e-4


def step(names, weight_decay=0.0, lr=0.1):
    torch.manual_seed(0)
    held = {name: nn.Parameter(torch.randn(48, 32)) for name in names}
    before = {name: p.detach().clone() for name, p in held.items()}
    optimizer = Optimizer(ModelState(held), OptimSection(name="muon", weight_decay=weight_decay, clip=False))
    for parameter in held.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(lr)
    return optimizer, before, {name: p.detach() for name, p in held.items()}


def test_an_update_is_as_large_as_one_of_adamw():
    """So that AdamW's learning rate serves: 0.2 root mean square."""
    _, before, after = step(["blocks.0.ffn.up.weight"])
    moved = (after["blocks.0.ffn.up.weight"] - before["blocks.0.ffn.up.weight"]) / 0.1
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_embedding_and_head_are_updated_by_adamw():
    optimizer, before, after = step(["embedding.weight", "head.weight", "blocks.0.attention.q.weight"])
    kinds = {name: set(moments) for name, moments in optimizer.state().items()}
    assert kinds["blocks.0.attention.q.weight"] == {"momentum"}
    for name in ("embedding.weight", "head.weight"):
        assert kinds[name] == {"exp_avg", "exp_avg_sq"}
        torch.testing.assert_close((after[name] - before[name]).abs(), torch.full((48, 32), 0.1))


def test_weight_decay_is_decoupled():
    name = "blocks.0.ffn.up.weight"
    _, before, plain = step([name])
    _, _, decayed = step([name], weight_decay=0.5)
    torch.testing.assert_close(plain[name] - decayed[name], 0.05 * before[name], rtol=1e-4, atol=1e-6)
