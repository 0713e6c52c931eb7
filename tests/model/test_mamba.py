"""Mamba-2 and its hybrids: the scan equals the recurrence, documents stay apart, planners see both kinds."""

import json

import pytest
import torch
from torch.nn.functional import silu

import arriero
from arriero.errors import UserError
from arriero.model.costs import Mode, block_costs, block_memory
from arriero.model.family import build_model
from arriero.model.mamba.scan import ScanInputs, causal_conv, chunked_scan, scan_step
from arriero.model.presets import load_preset, resolve
from arriero.model.spec import flops_per_token
from arriero.plan.hardware import Machine
from arriero.plan.layout import cut_stages
from arriero.plan.resolve import resolve as resolve_run
from model.test_hf_names import lively, spec_of

CPU = Machine("CPU", "cpu", 2**36, 2**36, torch=(2, 13))
HYBRID = {"family": "bamba", "vocab_size": 97, "dim": 32, "heads": 4, "ffn": 48, "max_seq_len": 600}


def scan_inputs(rows, tokens, heads, width, groups, state):
    numbers = torch.Generator().manual_seed(tokens + heads)

    def random(*shape):
        return torch.randn(*shape, generator=numbers)

    x, b, c = random(rows, tokens, heads, width), *random(2, rows, tokens, groups, state)
    dt, rate = random(rows, tokens, heads).abs() / 2, -3 * random(heads).abs()
    return [each.requires_grad_() for each in (x, dt, rate, b, c)]


def recurrence(x, dt, rate, b, c, documents):
    state, found = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        now = slice(t, t + 1)
        y, state = scan_step(state, ScanInputs(x[:, now], dt[:, now], rate, b[:, now], c[:, now]))
        found.append(y)
    return torch.cat(found, 1), state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((2, 20, 6, 8, 3, 10), 16),
        ((1, 1, 2, 3, 1, 4), 8),
        ((2, 330, 4, 5, 2, 3), 8),
        ((2, 67, 3, 4, 1, 5), 67),
    ],
)
def test_the_chunked_scan_and_its_gradients_equal_the_recurrence(shape, chunk, packed):
    """With 330 tokens in chunks of 8, states are passed on by two levels of blocks."""
    inputs, numbers = scan_inputs(*shape), torch.Generator().manual_seed(1)
    documents = (torch.rand(shape[:2], generator=numbers) < 0.15).long().cumsum(1) if packed else None
    found, expected = chunked_scan(ScanInputs(*inputs, documents), chunk), recurrence(*inputs, documents)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(found, expected, strict=True))
    weights = torch.randn(found[0].shape, generator=numbers)
    gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y, _ in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_of_packed_documents_is_that_of_each_document(taps):
    x, weight = torch.randn(1, 23, 6), torch.randn(6, taps)
    documents = torch.tensor([[0] * 2 + [1] * 13 + [2] + [3] * 7])
    packed = causal_conv(x, weight, None, documents, None)
    apart = [causal_conv(x[:, documents[0] == n], weight, None, None, None) for n in range(4)]
    assert torch.allclose(packed, torch.cat(apart, dim=1), atol=1e-6)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
    plain = torch.nn.functional.conv1d(padded, weight[:, None], groups=6).transpose(1, 2)
    assert torch.allclose(silu(causal_conv(x, weight, None, None, None)), silu(plain), atol=1e-6)


@pytest.mark.parametrize("shape", ["mamba2, groups", "bamba"])
def test_packed_documents_have_the_loss_of_documents_apart(shape):
    """Boundaries lie inside of chunks, and one document is a single token."""
    model, lengths = lively(spec_of(shape)), (5, 1, 30, 44)
    texts = [torch.randint(97, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    positions = torch.cat([torch.arange(n)[None] for n in lengths], 1)
    with torch.no_grad():
        packed = model(torch.cat(texts, 1), positions, documents)
        joined = model(torch.cat(texts, 1), positions)
        apart = torch.cat([model(text) for text in texts], 1)
    assert (packed - apart).abs().max() <= 1e-5
    assert (joined - apart).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("mamba2-130m", 128_989_632),
        ("mamba2-370m", 368_346_624),
        ("mamba2-780m", 780_161_280),
        ("mamba2-1.3b", 1_343_757_312),
        ("mamba2-2.7b", 2_702_599_680),
        ("bamba-9b", 9_780_235_392),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset, parameters):
    spec = load_preset(preset)
    assert spec.parameters == parameters
    with torch.device("meta"):
        model = build_model(spec)
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_flops_of_a_hybrid_are_those_of_its_blocks():
    """The attention of 3 of 32 blocks grows with the length; the scans of the others do not."""
    spec, scan = load_preset("bamba-9b"), 4 * 8192 * 128 + 256 * (8192 + 128)
    expected = 6 * spec.matmul_parameters + 6 * 3 * 4096 * 8192 + 3 * 29 * scan
    assert flops_per_token(spec, 8192) == expected
    pure = load_preset("mamba2-780m")
    assert flops_per_token(pure, 2048) == flops_per_token(pure, 1 << 17)


def test_initial_weights_do_not_depend_on_the_shard():
    spec = load_preset("mamba2-test")
    whole, part = build_model(spec), build_model(spec)
    whole.init_weights(3)
    part.init_weights(3, lambda p: (p[len(p) // 2 :], (len(p) // 2, *[0] * (p.ndim - 1))))
    for name, parameter in whole.named_parameters():
        half = len(parameter) // 2
        assert torch.equal(parameter[half:], part.get_parameter(name)[half:]), name
    decays = whole.get_parameter("blocks.0.mixer.scan.a_log").exp()
    assert 1 <= decays.min() < decays.max() <= 16


def test_the_planner_takes_the_mean_of_blocks_that_differ():
    spec = resolve(None, {**HYBRID, "layers": 4, "extra": {"ssm_head_dim": 16, "attention_layers": (2,)}})
    mamba, attention = spec.kinds[0], spec.kinds[2]
    costs = [block_costs(each, compiled=False) for each in (spec, mamba, attention)]
    mean, *kinds = [each.flops(4096, 4096) for each in costs]
    assert mean == pytest.approx(0.75 * kinds[0] + 0.25 * kinds[1])
    kept = [block_memory(each, Mode(False, 2)).kept.per_token for each in (spec, mamba, attention)]
    assert kept[0] == pytest.approx(0.75 * kept[1] + 0.25 * kept[2])
    assert spec.parameters == sum(p.numel() for p in build_model(spec).parameters())


def test_pipeline_stages_are_balanced_by_the_costs_of_their_blocks():
    """At 64K tokens a block with attention costs more than two without."""
    extra = {"ssm_head_dim": 16, "attention_layers": (0, 1, 2)}
    spec = resolve(None, {**HYBRID, "layers": 12, "max_seq_len": 65536, "extra": extra})
    cuts = cut_stages(spec, 65536, 4)
    assert [list(cut) for cut in cuts[:3]] == [[0], [1], [2]]
    assert [i for cut in cuts for i in cut] == list(range(12))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attention_layers": (4,)}, "attention_layers must be different numbers from 0 to 3"),
        ({"groups": 3}, "4 state-space heads do not divide over extra.groups 3"),
        ({"ssm_heads": 5}, "5 state-space heads of 16 are 80 wide, which is no multiple of dim 32"),
        ({"state": 0}, "extra.state must be positive"),
        ({"dt_limits": (0.2, 0.1)}, "dt_limits must be two growing numbers"),
        ({"dt_limits": ["a", "b"]}, "dt_limits must be two growing numbers"),
        ({"attention_layers": 3}, "extra.attention_layers must be of type list"),
        ({"attention_layers": [[1]]}, "attention_layers must be different numbers from 0 to 3"),
    ],
)
def test_contradictions_are_reported(fields, problem):
    with pytest.raises(UserError, match=problem):
        resolve(None, {**HYBRID, "layers": 4, "extra": {"ssm_head_dim": 16, **fields}})


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ({"cp": 16, "tp": 1}, "cp 16 does not divide the 8 state-space heads of a rank"),
        ({"cp": 2, "tp": 1, "context": "ring"}, "recurrent states cannot pass round a ring"),
        ({"cp": 1, "tp": 4}, "model.extra.groups .2. does not divide over tp 4"),
    ],
)
def test_layouts_that_divide_states_are_refused(layout, problem):
    config = arriero.load_config(
        None,
        {
            "model.preset": "bamba-test",
            "data.seq_len": 128,
            "train.batch": "2048 tok",
            "run.device": "cpu",
            **{f"parallel.{name}": value for name, value in layout.items()},
        },
    )
    with pytest.raises(UserError, match=problem):
        resolve_run(config, CPU, layout["cp"] * layout["tp"])


@pytest.mark.slow
def test_one_group_is_shared_by_tensor_and_context_parallel_ranks(corpus_cache, tmp_path):
    """With LoRA on a projection that each rank holds whole."""
    settings = {
        "model.preset": "bamba-test",
        "model.vocab_size": 4096,
        "model.extra": {"groups": 1},
        "data.seq_len": 64,
        "data.cache": str(corpus_cache),
        "train.batch": "512 tok",
        "train.horizon": "3 steps",
        "schedule.warmup": "1 step",
        "lora.rank": 2,
        "lora.targets": ["*.mixer.b", "*.mixer.o"],
        "eval.heldout": False,
        "eval.every": False,
        "observe.log_every": 1,
        "checkpoint.export": False,
        "run.device": "cpu",
        "run.dir": str(tmp_path),
    }
    losses = []
    for name, ranks, layout in (("one", 1, {}), ("tp", 2, {"tp": 2}), ("cp", 2, {"cp": 2})):
        degrees = {f"parallel.{axis}": degree for axis, degree in layout.items()}
        arriero.run(arriero.load_config(None, settings | degrees | {"run.name": name}), nproc=ranks)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
