"""Plan degrees that are "auto" when a run is resolved, and predict the time and memory of a resolved run."""

from dataclasses import replace
from typing import Any

from arriero.config.keys import ConfigError, Problem
from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.plan.blocks import work_of
from arriero.plan.explain import time_facts
from arriero.plan.hardware import Cluster, Machine, cluster_of_device, device_like, load_cluster
from arriero.plan.layout import AXES
from arriero.plan.measured import Measured, cached_measurements
from arriero.plan.rates import Rates
from arriero.plan.resolve import Decision, Resolved
from arriero.plan.search import plan_run
from arriero.plan.timing import step_time


def resolve_planned(config: RunConfig, machine: Machine, ranks: int) -> Resolved:
    """Return the run with the best degrees for those that are "auto"; raise ConfigError if nothing fits.

    A pure function of its arguments and of the cluster file: all ranks come to the same plan.
    """
    cluster = cluster_for(config, machine, ranks)
    if cluster is None:
        # without data of its links: as if the degrees were not set
        defaults = type(config.parallel)()
        degrees = {axis: getattr(defaults, axis) for axis in AXES if getattr(config.parallel, axis) == "auto"}
        from arriero.plan.resolve import resolve

        parallel = config.parallel.model_copy(update=degrees)
        return resolve(config.model_copy(update={"parallel": parallel}), machine, ranks)
    found = plan_run(config, cluster, ranks, machine=machine, keep=1)
    if not found.candidates:
        reasons = "; ".join(f"{each.reason} ({each.example})" for each in found.rejections[:3])
        todo = f"see `arriero plan --cluster {cluster.name} --gpus {ranks}`"
        raise ConfigError([Problem("parallel", f"no layout of {ranks} ranks fits: {reasons}", todo)])
    resolved, time = found.resolved(), found.best.time
    reason = f"planned: best of {found.considered:,}, {time.tokens_per_s:,.0f} tok/s per device predicted"
    decisions = [
        replace(each, reason=reason) if each.name == "layout" else each for each in resolved.decisions
    ]
    if not any(each.name == "layout" for each in decisions):
        decisions.append(Decision("layout", str(resolved.layout), reason))
    return replace(resolved, decisions=tuple(decisions))


def cluster_for(config: RunConfig, machine: Machine, ranks: int) -> Cluster | None:
    """Return the cluster of a run: `run.cluster`, or the shipped one with its device, or None."""
    if config.run.cluster is not None:
        return load_cluster(config.run.cluster)
    if not machine.is_gpu:
        cluster = load_cluster("cpu")
        links = tuple(link.model_copy(update={"devices": None}) for link in cluster.links)
        return cluster.model_copy(update={"devices_per_node": max(ranks, 1), "links": links})
    device = device_like(machine.name)
    if device is None:
        return None
    try:
        cluster = cluster_of_device(device.key, ranks)
    except UserError:
        return None
    per_node = machine.devices_per_node
    return cluster.model_copy(update={"devices_per_node": per_node, "nodes": -(-ranks // per_node)})


def prediction(resolved: Resolved) -> dict[str, Any] | None:
    """Return the predicted time and memory of a step as plain data; None for a device without data."""
    cluster = cluster_for(resolved.config, resolved.machine, resolved.layout.ranks)
    if cluster is None:
        return None
    rates = Rates(cluster, _stored(cluster))
    time = step_time(work_of(resolved), rates)
    return {
        "cluster": cluster.name,
        **time_facts(time),
        "memory_bytes": resolved.predicted_bytes,
        "measured_inputs": sorted(rates.used["measured"]),
        "analytic_inputs": sorted(rates.used["analytic"] - rates.used["measured"]),
    }


def _stored(cluster: Cluster) -> Measured | None:
    """Return stored times of operations; a damaged file must not stop a run."""
    try:
        return cached_measurements(cluster.device.name)
    except UserError:
        return None
