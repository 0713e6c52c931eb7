"""A model state without an optimizer, frozen parameters, parameter groups, and new weights for a run."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from arriero.checkpoint.convert import open_model
from arriero.checkpoint.formats.hf_directory import load_hf
from arriero.config.schema import GroupSection, LoadSection, OptimSection
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.interrupt import Requests
from arriero.model.family import build_model
from arriero.model.spec import ModelSpec
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.train.build import (
    arrange,
    build_evaluator,
    build_mesh,
    build_model_state,
    build_passes,
    open_data,
)
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from arriero.train.resume import CheckpointLoader
from checkpoint.running import Runs

LAYOUTS = {
    "alone": (1, []),
    "dp_shard 2": (2, ["parallel.dp_shard=2"]),
    "tp 2": (2, ["parallel.dp_shard=1", "parallel.tp=2"]),
    "pp 2": (2, ["parallel.dp_shard=1", "parallel.pp=2"]),
}
BF16 = ["precision.compute=bf16"]
BF16_MASTERS = [*BF16, "precision.master=bf16"]


@pytest.fixture
def runs(tmp_path, corpus_cache):
    return Runs(tmp_path, corpus_cache)


def checkpoint(runs, name, step):
    return runs.folder / name / "checkpoints" / f"step-{step:08}"


def weights(directory):
    source = open_model(directory)
    return {name: source.load(name) for name in source.tensors}


def initial_weights(config):
    model = build_model(ModelSpec.from_dict(config.model.model_dump(exclude={"preset"})))
    model.init_weights(config.run.seed)
    return dict(model.named_parameters())


def heldout_loss(config, path, ranks):
    """Load the weights at a path into a model without an optimizer and return its validation loss."""

    def work():
        torch.set_num_threads(1)
        world = world_from()
        plan = arrange(config, world)
        with process_group(world, plan.device.torch_device):
            streams = open_data(plan, no_progress)
            mesh, plan = build_mesh(plan)
            model, _ = build_model_state(plan, mesh)
            CheckpointLoader(model, mesh, LoadSection()).load_weights(str(path))
            passes = build_passes(plan, model, mesh, plan.resolved.shares[0], config.data.seq_len)
            evaluator = build_evaluator(plan, mesh, streams)
            assert evaluator is not None
            return evaluator.loss(passes, Requests())

    return run_ranks(work, ranks, leader_prints=False)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_model_without_an_optimizer_has_the_held_out_loss_of_the_run(runs, compute):
    sets = ["eval.heldout=2k tok", "train.horizon=2 steps", "checkpoint.export=false"]
    sets += [f"precision.compute={compute}"]
    trained = runs.train("run", *sets, *LAYOUTS["dp_shard 2"][1], ranks=2)
    same = heldout_loss(runs.config("run", *sets), runs.folder / "run", ranks=2)
    assert same == trained["last_eval_loss"]
    tolerance = 1e-5 if compute == "fp32" else 1e-2
    for ranks, layout in (LAYOUTS["alone"], LAYOUTS["tp 2"], LAYOUTS["pp 2"]):
        loss = heldout_loss(runs.config("run", *sets, *layout), runs.folder / "run", ranks)
        assert loss == pytest.approx(trained["last_eval_loss"], rel=tolerance)


FREEZE = "optim.freeze=['embedding.*', 'blocks.1.*']"


@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        ("alone", []),
        ("alone", BF16),
        ("alone", ["model.tied=true"]),
        ("dp_shard 2", BF16_MASTERS),
        ("tp 2", BF16),
        ("pp 2", ["model.tied=true"]),
        ("pp 2", ["parallel.schedule=zero-bubble", "model.layers=4", *BF16]),
    ],
)
def test_frozen_parameters_are_saved_exported_resumed_and_unchanged(runs, layout, sets):
    ranks, parallel = LAYOUTS[layout]
    sets = ["model.layers=2", *sets, *parallel, FREEZE]
    runs.train("run", *sets, "train.horizon=2 steps", ranks=ranks)
    runs.train("run", *sets, "train.horizon=4 steps", ranks=ranks)
    initial = initial_weights(runs.config("run", *sets))
    saved, (exported, _) = weights(checkpoint(runs, "run", 4)), load_hf(runs.folder / "run" / "model")
    assert saved.keys() == initial.keys()
    for name, tensor in saved.items():
        frozen = name.startswith(("embedding.", "blocks.1."))
        before = initial[name].detach().to(tensor.dtype)
        assert torch.equal(tensor, before) == frozen, name
        assert torch.equal(exported[name], tensor)


def test_every_layout_trains_around_frozen_parameters_as_one_process_does(runs):
    sets = [FREEZE, "model.layers=2", "model.tied=true", "train.horizon=3 steps", "checkpoint.export=false"]
    for layout, (ranks, parallel) in LAYOUTS.items():
        runs.train(name := layout.replace(" ", "-"), *sets, *parallel, ranks=ranks)
        assert runs.losses(name) == pytest.approx(runs.losses("alone"), rel=1e-5), layout


def test_a_pipeline_stage_may_be_frozen_completely(runs):
    sets = ["optim.freeze=['embedding.*', 'blocks.0.*']", "model.layers=2", "train.horizon=2 steps"]
    runs.train("alone", *sets)
    runs.train("layout", *sets, *LAYOUTS["pp 2"][1], ranks=2)
    assert runs.losses("layout") == pytest.approx(runs.losses("alone"), rel=1e-5)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            "optim.freeze=['embeding.*']",
            r"optim\.freeze: 'embeding\.\*' matches no parameter.*embedding\.weight",
        ),
        ("optim.freeze=['*']", "optim.freeze leaves no parameter to train"),
        (
            "optim.groups=[{match='*.nrom.*'}]",
            r"optim\.groups\[0\]\.match: '\*\.nrom\.\*' matches no parameter",
        ),
        ("optim.groups=[{match='*'}, {match='norm.*'}]", r"groups\[1\].*matches only parameters that are"),
    ],
)
def test_patterns_that_match_nothing_are_rejected(runs, sets, words):
    with pytest.raises(UserError, match=words):
        runs.train("run", sets, "train.horizon=1 step")


GROUPS = (
    "optim.groups=[{match='*norm.weight', lr_factor=0.5, weight_decay=0.2}, {match='blocks.0.*', "
    "lr_factor=3.0}, {match='embedding.*', weight_decay=0.0}]"
)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_every_layout_applies_parameter_groups_as_one_process_does(runs, optimizer):
    sets = [GROUPS, f"optim.name={optimizer}", "optim.lr=0.01", "train.horizon=4 steps"]
    sets += ["checkpoint.export=false"]
    outcomes = {}
    for layout, (ranks, parallel) in LAYOUTS.items():
        outcomes[layout] = runs.train(name := layout.replace(" ", "-"), *sets, *parallel, ranks=ranks)
        assert runs.losses(name) == pytest.approx(runs.losses("alone"), rel=2e-5), layout
    one = outcomes["alone"]
    assert ("group blocks.0.*", "learning rate x 3") in one["decisions"]
    without = runs.train("without", *sets[1:])
    assert abs(without["last_loss"] - one["last_loss"]) > 1e-4


def test_groups_do_not_change_what_a_checkpoint_holds(runs):
    runs.train("run", "train.horizon=2 steps", "checkpoint.export=false")
    source = f"checkpoint.resume_from='{runs.folder / 'run'}'"
    fork = runs.train("fork", source, GROUPS, "train.horizon=4 steps", "checkpoint.export=false")
    assert fork["steps"] == 4


@pytest.mark.parametrize("kind", [{}, {"state": "int8"}, {"name": "muon"}, {"name": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("masters", [None, torch.bfloat16, torch.float16])
def test_a_group_has_its_own_learning_rate_and_weight_decay(kind, masters):
    """A group with lr_factor 2 and decay 0.3 is updated as by an optimizer with that rate and decay."""

    def updated(lr, **config):
        generator = torch.Generator().manual_seed(1)
        names = ("blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight", "norm.weight")
        shapes = ((32, 16), (32, 16), (16,))
        held = {
            n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in zip(names, shapes, strict=True)
        }
        model = ModelState(held, compute_dtype=masters)
        optimizer = Optimizer(model, OptimSection(**kind, clip=False, **config))
        for _ in range(3):
            for parameter in held.values():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step(lr)
        return dict(model.tensors())

    groups = (
        GroupSection(match="blocks.0.*", lr_factor=2.0, weight_decay=0.3),
        GroupSection(match="blocks.*", lr_factor=7.0),
        GroupSection(match="norm.*", weight_decay=0.5),
    )
    grouped = updated(0.01, weight_decay=0.1, groups=groups)
    torch.testing.assert_close(
        grouped["blocks.0.ffn.up.weight"], updated(0.02, weight_decay=0.3)["blocks.0.ffn.up.weight"]
    )
    torch.testing.assert_close(
        grouped["blocks.1.ffn.up.weight"], updated(0.07, weight_decay=0.1)["blocks.1.ffn.up.weight"]
    )
    plain = updated(0.01, weight_decay=0.1)["norm.weight"]
    assert not torch.equal(grouped["norm.weight"], plain)


@pytest.mark.parametrize("sets", [[], BF16, BF16_MASTERS], ids=["fp32", "bf16", "bf16-masters"])
@pytest.mark.parametrize("layout", ["alone", "dp_shard 2"])
def test_new_weights_with_the_optimizer_state_and_data_position_of_a_checkpoint(runs, layout, sets):
    """Weights of `other`; moments, step and data position of `run`."""
    ranks, parallel = LAYOUTS[layout]
    sets = [*sets, *parallel]
    runs.train("run", *sets, "train.horizon=2 steps", ranks=ranks)
    runs.train("other", *sets, "train.horizon=3 steps", "run.seed=5", ranks=ranks)
    keys = [
        f"checkpoint.resume_from='{checkpoint(runs, 'run', 2)}'",
        f"checkpoint.start_from='{runs.folder / 'other' / 'model'}'",
    ]
    # a learning rate so small that a step changes no weight shows what was loaded
    still = ["optim.lr=1e-30", "optim.weight_decay=0", "train.horizon=3 steps"]
    fork = runs.train("fork", *sets, *keys, *still, ranks=ranks)
    expected, found = weights(checkpoint(runs, "other", 3)), weights(checkpoint(runs, "fork", 3))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert fork["steps"] == 3 and runs.lines("fork", "metrics.jsonl")[0]["step"] == 3
    # v = 0.95 v + 0.05 g^2 starts from the moments of `run`
    before, after = (second_moments(checkpoint(runs, *each)) for each in (("run", 2), ("fork", 3)))
    for name, moment in before.items():
        assert (after[name] >= 0.95 * moment * (1 - 1e-5)).all()


def second_moments(directory):
    path = directory.parent / "plain.pt"
    dcp_to_torch_save(directory, path)
    state = torch.load(path)
    return {name: tensor for name, tensor in state.items() if name.endswith(".exp_avg_sq")}


def test_new_weights_for_the_newest_checkpoint_of_the_run_itself(runs):
    """As a round of federated training does. Once the run has saved again, a restart takes no new weights."""
    runs.train("run", "train.horizon=2 steps")
    runs.train("other", "train.horizon=3 steps", "run.seed=5")
    start = f"checkpoint.start_from='{runs.folder / 'other' / 'model'}'"
    with pytest.raises(UserError, match=r"names this run .*every restart would load them again"):
        runs.train("run", start, f"checkpoint.resume_from='{runs.folder / 'run'}'", "train.horizon=4 steps")
    keys = [start, f"checkpoint.resume_from='{checkpoint(runs, 'run', 2)}'"]
    keys += ["schedule.horizon=6 steps", "checkpoint.every=1 step"]
    runs.train("run", *keys, "train.horizon=4 steps")
    first = runs.losses("run")
    assert first[3] != pytest.approx(runs.losses("other")[3], rel=1e-6)
    resumed = runs.train("run", *keys, "train.horizon=6 steps")
    assert dict(resumed["decisions"])["resume"].startswith("step 4 ")
    runs.train("straight", "train.horizon=2 steps")
    straight = [start, f"checkpoint.resume_from='{checkpoint(runs, 'straight', 2)}'"]
    runs.train("straight", *straight, "train.horizon=6 steps")
    assert runs.losses("straight") == runs.losses("run")
