import pytest
import torch
from torch._dynamo.testing import CompileCounter

from arriero.config.schema import OptimSection
from arriero.train.model_state import ModelState
from arriero.train.optim import rules
from arriero.train.optim.optimizer import Optimizer

SHAPES = [(64, 48), (100, 77), (7,), (256,), (512,), (30, 30), (31, 9), (12, 12), (2000,), (300,), (64, 64)]
STATES = ["fp32", "bf16", "int8", "float8"]


def test_a_step_matches_the_formula_of_the_adamw_paper():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    config = OptimSection(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, clip=False)
    optimizer = Optimizer(ModelState.of([model]), config)
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


def test_fp32_is_bit_identical_to_torchs_adamw():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    theirs.load_state_dict(ours.state_dict())
    config = OptimSection(weight_decay=0.3, clip=False)
    optimizer = Optimizer(ModelState.of([ours]), config)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.3},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
    for t in range(1, 6):
        x = torch.randn(8, 40)
        for model in (ours, theirs):
            model(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), float("inf"))
        for group in torchs.param_groups:
            group["lr"] = 0.1 / t
        torchs.step()
        torchs.zero_grad()
        torch.testing.assert_close(optimizer.step(0.1 / t), norm, rtol=1e-6, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def regression(state, betas=(0.9, 0.95), master=torch.float32, steps=200):
    """A small network learns another's outputs; gradients of its inputs differ in size a thousandfold."""
    torch.manual_seed(0)
    sizes = torch.logspace(-1.5, 1.5, 64)
    teacher, student = (
        torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 24))
        for _ in range(2)
    )
    student.to(master)
    config = OptimSection(state=state, betas=betas, weight_decay=0.0)
    optimizer = Optimizer(ModelState.of([student]), config, seed=3)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 64) * sizes
        loss = (student(x.to(master)).float() - teacher(x).detach()).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step(3e-3 * (1 - step / steps))
    return sum(losses[-20:]) / 20, losses[0]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("state", STATES[1:])
def test_low_precision_optimizer_state_reaches_the_loss_of_fp32_within_5_percent(state, betas):
    reference, first = regression("fp32", betas)
    assert reference < first / 4
    assert regression(state, betas)[0] == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("state", STATES)
def test_bf16_weights_with_stochastic_rounding_reach_nearly_the_loss_of_fp32(state):
    reference, _ = regression("fp32")
    assert regression(state, master=torch.bfloat16)[0] == pytest.approx(reference, rel=0.1)


def stepped(state, weights):
    held = {f"{i}": torch.nn.Parameter(weight.clone()) for i, weight in enumerate(weights)}
    optimizer = Optimizer(ModelState(held), OptimSection(state=state), seed=1)
    for step in range(3):
        torch.manual_seed(step)
        for parameter in held.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(lr=0.1 / (step + 1))
    return held


@pytest.mark.parametrize("state", ["int8", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_shapes_and_steps_share_a_few_compilations(monkeypatch, dtype, state):
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES] + [torch.randn(40, 30).to(dtype).T]
    expected = stepped(state, weights)
    torch._dynamo.reset()
    compilations = CompileCounter()
    compiled = torch.compile(rules.adamw_reference_, backend=compilations)
    monkeypatch.setattr(rules, "adamw_reference_", compiled)
    held = stepped(state, weights)
    assert all(torch.equal(held[name], expected[name]) for name in held)
    # for the first shape; then for whole blocks or not, one block or more
    assert compilations.frame_count <= 5
