"""Settings that are sound in themselves but not together, on this layout or this device."""

from collections.abc import Iterator

import torch

from arriero.config.schema import RunConfig
from arriero.kernels.float8 import MULTIPLE, own_float8
from arriero.model.spec import ModelSpec
from arriero.parallel.pipeline import untested
from arriero.plan.layout import Layout
from arriero.plan.schedules import SCHEDULES
from arriero.train.device import Device


def conflicts(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    compute: torch.dtype,
    compiled: bool,
    device: Device,
) -> Iterator[tuple[str, str]]:
    """Each with what to do about it."""
    if layout.pp > 1:
        yield from _pipeline_conflicts(config, compiled, device)
    if config.data.packing == "none" and layout.cp * layout.tp * layout.pp > 1:
        yield (
            "data.packing 'none' makes batches of varying width, which cp, tp and pp cannot divide",
            "set data.packing to 'bestfit', or give the ranks to dp_shard",
        )
    if config.memory.offload_state and layout.dp_replicate * layout.fsdp == 1:
        yield (
            f"memory.offload_state moves shards, and the layout {layout} has none",
            "remove it, or give ranks to dp_shard",
        )
    group = config.parallel.reshard
    if isinstance(group, int) and layout.fsdp % group:
        yield (
            f"parallel.reshard ({group}) does not divide the {layout.fsdp} ranks that share a copy",
            "take a divisor, like the GPUs of a node",
        )
    if config.parallel.async_tp and not (layout.tp > 1 and compiled and device.is_gpu):
        yield (
            "parallel.async_tp overlaps the communication of compiled, tensor-parallel layers on GPUs",
            "remove it, or set parallel.tp and precision.compile on a GPU",
        )
    if config.memory.ffn_tile and config.memory.remat.keeps_some:
        yield (
            "memory.ffn_tile computes tiles again by itself, and memory.remat "
            f"'{config.memory.remat}' chooses among what it computes",
            "set memory.remat to 'full' or 'none', or memory.ffn_tile to false",
        )
    yield from _float8_conflicts(config, spec, layout, compute, device)


def _pipeline_conflicts(config: RunConfig, compiled: bool, device: Device) -> Iterator[tuple[str, str]]:
    name = config.parallel.schedule
    splits = SCHEDULES[name].splits_backward
    if splits and config.memory.remat.keeps_some:
        yield (
            f"the schedule '{name}' goes backward twice, and what memory.remat '{config.memory.remat}' keeps "
            "is gone after the first time",
            "set memory.remat to 'full' or 'none', or parallel.schedule to 'interleaved-1f1b'",
        )
    if splits and compiled:
        yield (
            f"the schedule '{name}' splits the backward pass, and compiled blocks cannot",
            "set precision.compile = false, or parallel.schedule = 'interleaved-1f1b'",
        )
    if config.parallel.sync == "each":
        yield (
            "parallel.sync 'each' is not for pipelines, which reduce gradients after the last micro-batch",
            "set it to 'last'",
        )
    if problem := untested(name, device.torch_device):
        yield problem


def _float8_conflicts(
    config: RunConfig, spec: ModelSpec, layout: Layout, compute: torch.dtype, device: Device
) -> Iterator[tuple[str, str]]:
    if config.precision.float8 != "off" and compute != torch.bfloat16:
        name = str(compute).removeprefix("torch.")
        yield (
            f"precision.float8 goes with bf16, and this run computes in {name}",
            "set precision.compute = 'bf16', or precision.float8 = 'off'",
        )
    if config.precision.float8_head and spec.dim % MULTIPLE:
        yield (
            f"precision.float8_head multiplies in sixteens, and the model is {spec.dim} wide",
            f"turn it off, or take a width that is a multiple of {MULTIPLE}",
        )
    if config.precision.float8_head and device.is_gpu and not own_float8(device.torch_device):
        yield (
            f"precision.float8_head has no kernels for {device.name}, and would be slower than none",
            "turn it off",
        )
    kv_width = spec.kv_heads * spec.head_dim
    rows = [spec.dim, *(width // layout.tp for width in (spec.attention_width, kv_width, spec.ffn))]
    if config.precision.float8_all_gather and any(n % layout.fsdp for n in rows):
        yield (
            f"precision.float8_all_gather needs layers whose rows divide over {layout.fsdp} ranks",
            "turn it off, or take another parallel.dp_shard",
        )
