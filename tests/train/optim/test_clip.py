import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, on_ranks, parameters, set_gradients, values, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from arriero.train.optim.optimizer import clip_factor, global_norm


def true_norm(step):
    return torch.cat([value.flatten().double() for value in values(100 + step).values()]).norm().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_gradient_norm_of_one_process(layout):
    def work():
        held = parameters(layout)
        set_gradients(held, 1)
        gradients = {name: p.grad for name, p in held.items()}
        norm = global_norm(gradients.values())
        return norm.item(), {name: whole(g) for name, g in gradients.items()}

    norm, gradients = on_ranks(layout, work)
    assert norm == pytest.approx(true_norm(1), rel=1e-6)
    for name, gradient in values(101).items():
        assert torch.equal(gradients[name], gradient)


def test_clipping_reduces_only_gradients_above_the_limit():
    norm = global_norm([torch.tensor([3.0, 4.0])])
    assert clip_factor(norm, 5.1) == 1.0
    assert (norm * clip_factor(norm, 0.5)).item() == pytest.approx(0.5, rel=1e-6)


def test_the_norm_needs_one_all_reduce_per_process_group():
    def work():
        counted, real = [], dist.all_reduce
        held = parameters("shard+tensor")
        set_gradients(held, 1)
        dist.all_reduce = lambda *args, **kwargs: (counted.append(1), real(*args, **kwargs))
        global_norm([p.grad for p in held.values()])
        return len(counted)

    assert on_ranks("shard+tensor", work) == 2


def test_the_norm_includes_all_pipeline_stages():
    """Ranks 0 and 1 shard the first stage, 2 and 3 the second; a stage may have nothing to count."""

    def work():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        gradient = torch.arange(5.0) + 10 * stage
        held = distribute_tensor(gradient, mesh["dp"], [Shard(0)], src_data_rank=None)
        both = global_norm([held], [mesh.get_group("pp")])
        one = global_norm([held] if stage else [torch.empty(0)], [mesh.get_group("pp")])
        return both.item(), one.item()

    both, one = on_ranks("shard", work)
    second = (torch.arange(5.0) + 10).norm().item()
    assert one == pytest.approx(second, rel=1e-6)
    assert both == pytest.approx((second**2 + 30.0) ** 0.5, rel=1e-6)


def test_the_norm_of_a_partial_sum_is_rejected():
    def work():
        mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match="partial sum"):
            global_norm([DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)])

    on_ranks("shard", work)
