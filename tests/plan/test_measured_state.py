"""Predicted bytes of weights, gradients and optimizer state equal those of real ranks (gloo)."""

import pytest
import torch
import torch.distributed as dist

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.parallel.dtensor import local_part
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import world_from
from arriero.train.build import arrange
from arriero.train.run import open_session

# dimensions that divide over 2 and 3 ranks, and rows that do not
ODD = {"dim": 60, "heads": 6, "kv_heads": 3, "head_dim": 10, "ffn": 78, "layers": 5, "vocab_size": 4097}
CASES = {
    "one process, frozen ends": (1, ["optim.freeze=['embedding.*', 'blocks.1.*']"]),
    "sharded over 3": (3, ["optim.state=int8"]),
    "tp 3": (3, ["parallel.tp=3", "parallel.dp_shard=1"]),
    "pp 2, frozen": (2, ["parallel.pp=2", "parallel.dp_shard=1", "optim.freeze=['blocks.0.*']"]),
    "tp 3, bf16 weights": (
        3,
        ["parallel.tp=3", "parallel.dp_shard=1", "precision.master=bf16", "optim.state=bf16"],
    ),
    "cp 2 x dp_replicate 2": (4, ["parallel.cp=2", "parallel.dp_replicate=2", "parallel.dp_shard=1"]),
    "muon, dp_shard 2 x pp 2": (4, ["parallel.pp=2", "parallel.dp_shard=2", "optim.name=muon"]),
}


def measured(config):
    """Return this rank's bytes after one backward pass, from the rank that has most."""
    with open_session(config) as session:
        session.passes.gradients(next(session.data.loader))
        model, optimizer = session.model, session.optimizer
        parts = [
            sum(weight.local.nbytes for weight in model.weights.values()),
            sum(
                local_part(p.grad).nbytes
                for part in model.parts
                for p in part.parameters()
                if p.grad is not None
            ),
            optimizer.state_bytes,
        ]
        if not dist.is_initialized():
            return parts
        every = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor(parts))
        return max((each.tolist() for each in every), key=sum)


@pytest.mark.parametrize("case", CASES)
def test_state_of_a_rank_is_predicted_to_the_byte(case, tmp_path, synthetic_cache):
    ranks, sets = CASES[case]
    keys = [
        *(f"model.{name}={value}" for name, value in ODD.items()),
        *("model.tied=false", "data.sources=[{path='builtin:synthetic'}]", f"data.cache={synthetic_cache}"),
        *(
            "data.seq_len=12",
            "train.batch=96 tok",
            "run.device=cpu",
            f"run.dir={tmp_path}",
            "eval.every=false",
        ),
        *("observe.tensorboard=false", "checkpoint.export=false", "precision.compile=false"),
    ]
    config = load_run(None, [*keys, *sets], expand).config

    def work():
        predicted = arrange(config, world_from()).resolved.estimates[0].state_parts
        return measured(config), [round(size) for size in predicted.values()]

    found, predicted = run_ranks(work, ranks, leader_prints=False) if ranks > 1 else work()
    assert found == predicted
