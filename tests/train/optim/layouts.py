"""A few parameters and gradients in the layouts of runs, over up to eight ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from arriero.parallel.dtensor import from_local, shard_of
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from

# rows that four ranks do not share evenly, or not at all
SHAPES = {
    "embedding.weight": (9, 4),
    "blocks.0.attention.q.weight": (10, 6),
    "blocks.0.ffn.down.weight": (6, 12),
    "blocks.0.ffn_norm.weight": (3,),
    "norm.weight": (6,),
}
LAYOUTS = ["alone", "shard", "replicate+shard", "tensor", "shard+tensor", "replicate+shard+tensor", "mixed"]
RANKS = {"alone": 1, "replicate+shard+tensor": 8}


def on_ranks(layout, work, ranks=None):
    """What rank 0 returns."""

    def rank():
        torch.set_num_threads(1)
        with process_group(world_from(), torch.device("cpu")):
            return work()

    return run_ranks(rank, ranks or RANKS.get(layout, 4), leader_prints=False)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(layout, dtype=torch.float32):
    return LAY[layout]({name: value.to(dtype) for name, value in values(0).items()})


def set_gradients(held, step, size=1.0):
    for name, whole in values(100 + step).items():
        piece = shard_of(whole.to(held[name].dtype) * size, held[name]).clone()
        held[name].grad = from_local(piece, held[name])


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _plain(full):
    return {name: nn.Parameter(value) for name, value in full.items()}


def _sharded(full, mesh):
    holder = nn.Module()
    for name, value in full.items():
        holder.register_parameter(name.replace(".", "_"), nn.Parameter(value))
    fully_shard(holder, mesh=mesh)
    return {name: getattr(holder, name.replace(".", "_")) for name in full}


def _split(full, mesh):
    def placement(name):
        return Replicate() if name.endswith("norm.weight") else Shard(1 if "down" in name else 0)

    return {name: nn.Parameter(distribute_tensor(v, mesh, [placement(name)])) for name, v in full.items()}


def _mesh(**dims):
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def _shard_and_tensor(full):
    mesh = _mesh(dp=2, tp=2)
    return _sharded(_split(full, mesh["tp"]), mesh["dp"])


def _all_three(full):
    mesh = _mesh(replicate=2, dp=2, tp=2)
    return _sharded(_split(full, mesh["tp"]), mesh["replicate", "dp"])


def _mixed(full):
    mesh = _mesh(dp=2, tp=2)
    parts = _sharded(full, _mesh(dp=4)) | _split(
        {n: full[n] for n in full if n.startswith("blocks")}, mesh["tp"]
    )
    return parts | _plain({n: full[n] for n in ("norm.weight",)})


LAY = {
    "alone": _plain,
    "shard": lambda full: _sharded(full, _mesh(dp=4)),
    "replicate+shard": lambda full: _sharded(full, _mesh(replicate=2, dp=2)),
    "tensor": lambda full: _split(full, _mesh(tp=4)),
    "shard+tensor": _shard_and_tensor,
    "replicate+shard+tensor": _all_three,
    "mixed": _mixed,
}
