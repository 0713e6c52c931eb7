"""Private torch APIs: each is used by one file, exists in this torch, and has the arguments that are passed.

When torch changes, the failing entry names what moved and the file to correct.
It was written for torch 2.11 and 2.13.
"""

import ast
import inspect
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src" / "arriero"

# what is used -> the one file that uses it
PRIVATE = {
    "torch._C._accelerator_setAllocatorSettings": "train/device.py",
    "torch._C._distributed_c10d": "parallel/shared_gpu.py",
    "torch._C._distributed_c10d._dump_fr_trace": "train/hang.py",
    "torch._foreach_mul_": "train/optim/rules.py",
    "torch._foreach_norm": "train/optim/optimizer.py",
    "torch._functorch.aot_autograd.aot_function": "model/trace.py",
    "torch._functorch.aot_autograd.make_boxed_func": "model/trace.py",
    "torch._functorch.config": "model/trace.py",
    "torch._functorch.config.activation_memory_budget": "parallel/activation_checkpointing.py",
    "torch._fused_adamw_": "train/optim/rules.py",
    "torch._functorch.partitioners.min_cut_rematerialization_partition": "model/trace.py",
    "torch._inductor.decomposition.select_decomp_table": "model/trace.py",
    "torch._inductor.config._micro_pipeline_tp": "parallel/tensor.py",
    "torch._scaled_mm": "kernels/float8.py",
    "torch._subclasses.FakeTensorMode": "parallel/simulate.py",
    "torch._subclasses.fake_tensor.FakeTensorMode": "checkpoint/formats/tensor_files.py",
    "torch.cuda._sleep": "parallel/shared_gpu.py",
    "torch.cuda.memory._dump_snapshot": "train/profiler.py",
    "torch.cuda.memory._record_memory_history": "train/profiler.py",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "parallel/activation_checkpointing.py",
    "torch.distributed._functional_collectives.all_reduce": "parallel/tensor.py",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "parallel/tensor.py",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "parallel/activation_checkpointing.py"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": (
        "parallel/activation_checkpointing.py"
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": "checkpoint/save_plan.py",
    "torch.distributed.distributed_c10d._set_pg_timeout": "parallel/mesh.py",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "parallel/dtensor.py",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "parallel/dtensor.py",
    "torch.distributed.tensor.placement_types._StridedShard": "parallel/dtensor.py",
    "torch.ops._c10d_functional": "parallel/activation_checkpointing.py",
    "torch.distributed.distributed_c10d._resolve_process_group": "parallel/simulate.py",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "parallel/simulate.py",
    "torch.utils._python_dispatch": "parallel/simulate.py",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "parallel/activation_checkpointing.py",
    "torch.utils._python_dispatch.TorchDispatchMode": "model/trace.py",
    "torch.utils._pytree.tree_leaves": "parallel/activation_checkpointing.py",
}
# methods that are overridden or called, with their parameters
METHODS = {
    "torch.nn.Module._apply": ["self", "fn", "recurse"],
    "torch.distributed.tensor.parallel.ParallelStyle._apply": ["self", "module", "device_mesh"],
    "torch.distributed.tensor.parallel.PrepareModuleInput._prepare_input_fn": [
        "self",
        "inputs",
        "device_mesh",
    ],
}
_COMMON = ["grad_out", "query", "key", "value"]
# attention operators of parallel/ring.py, with the arguments that are passed by position
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": ["query", "key", "value", "dropout_p", "is_causal"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        *_COMMON, "out", "logsumexp", "dropout_p", "is_causal",
    ],
    "_scaled_dot_product_flash_attention": ["query", "key", "value", "dropout_p", "is_causal"],
    "_scaled_dot_product_flash_attention_backward": [
        *_COMMON, "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "philox_seed", "philox_offset",
    ],
    "_scaled_dot_product_efficient_attention": [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal",
    ],
    "_scaled_dot_product_efficient_attention_backward": [
        "grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp", "philox_seed",
        "philox_offset", "dropout_p", "grad_input_mask", "is_causal",
    ],
}  # fmt: skip


def found_at(path):
    """Resolve a dotted path of modules and attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return reduce(getattr, parts[length:], module)
    raise ImportError(path)


@pytest.mark.parametrize("path", PRIVATE)
def test_each_private_api_exists(path):
    try:
        found_at(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} has no {path}, which {PRIVATE[path]} uses: {error}")


@pytest.mark.parametrize("path", METHODS)
def test_methods_have_the_parameters_that_are_used(path):
    assert list(inspect.signature(found_at(path)).parameters) == METHODS[path]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_the_arguments_that_are_passed(name):
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert names[: len(OPERATORS[name])] == OPERATORS[name]


def test_tensors_and_modules_have_the_attributes_that_are_read():
    tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
    assert isinstance(tensor._version, int)
    assert isinstance(tensor.untyped_storage()._cdata, int)
    assert {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"} <= vars(
        module
    ).keys()


def is_private(path):
    return path.startswith("torch") and any(
        p.startswith("_") and not p.startswith("__") for p in path.split(".")
    )


def dotted(node):
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def private_uses(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (p for a in node.names if is_private(p := f"{node.module}.{a.name}"))
        elif isinstance(node, ast.Attribute) and (path := dotted(node)) and is_private(path):
            yield path


def test_every_private_api_is_listed_with_its_one_file():
    unlisted = []
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        for used in private_uses(ast.parse(file.read_text())):
            known = [where for path, where in PRIVATE.items() if f"{path}.".startswith(f"{used}.")]
            known += [where for path, where in PRIVATE.items() if used.startswith(f"{path}.")]
            if name not in known:
                unlisted.append(f"{name}: {used}")
    assert unlisted == []
