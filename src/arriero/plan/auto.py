"""Plan degrees that are "auto" when a run is resolved, and predict the time and memory of a resolved run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arriero.config.keys import ConfigError, Problem
from arriero.config.schema import RunConfig
from arriero.plan.arithmetic import explained, handicap, host_problem, open_keys, variants
from arriero.plan.explain import time_facts
from arriero.plan.hardware import Machine, cluster_for
from arriero.plan.layout import AXES
from arriero.plan.measured import cached_measurements
from arriero.plan.rates import Rates, ranking_rates
from arriero.plan.resolve import AS_STARTED, Decision, Resolved, resolve
from arriero.plan.search import plan_run
from arriero.plan.timing import step_time
from arriero.units import counted


def resolve_planned(config: RunConfig, machine: Machine, ranks: int) -> Resolved:
    """Return the run with the best degrees for those that are "auto"; raise ConfigError if nothing fits.

    A pure function of its arguments and of the cluster file: all ranks come to the same plan.
    """
    cluster = cluster_for(config.run.cluster, machine, ranks)
    if cluster is None:
        # without data of its links: as if the degrees were not set
        defaults = type(config.parallel)()
        degrees = [axis for axis in AXES if getattr(config.parallel, axis) == "auto"]
        default = config.with_values({f"parallel.{axis}": getattr(defaults, axis) for axis in degrees})
        return resolve(default, machine, ranks)
    found = plan_run(config, cluster, ranks, machine=machine, keep=1)
    if not found.candidates:
        reasons = "; ".join(f"{each.reason} ({each.example})" for each in found.rejections[:3])
        todo = f"see `arriero plan --cluster {cluster.name} --gpus {ranks}`"
        raise ConfigError(
            [Problem("parallel", f"no layout of {counted(ranks, 'rank')} fits: {reasons}", todo)]
        )
    resolved, time = found.resolved(), found.best.time
    reason = f"planned: best of {found.considered:,}, {time.tokens_per_s:,.0f} tok/s per device predicted"
    decisions = [
        replace(each, reason=reason) if each.name == "layout" else each for each in resolved.decisions
    ]
    if not any(each.name == "layout" for each in decisions):
        decisions.append(Decision("layout", str(resolved.layout), reason))
    return replace(resolved, decisions=tuple(decisions))


def resolve_arithmetic(config: RunConfig, machine: Machine, ranks: int, kept: Mapping[str, Any]) -> Resolved:
    """Return the run with the best values of the keys that change its arithmetic and that are "auto".

    A resumed run keeps those it was started with.
    """
    keys, rates = open_keys(config), ranking_rates(config, machine, ranks)
    if all(key in kept for key in keys):
        chosen = {key: kept[key] for key in keys}
        run = resolve(config.with_values(chosen), machine, ranks, kept)
        rows = [Decision(*explained(key, chosen, {})[:2], AS_STARTED) for key in keys]
        return replace(run, decisions=(*run.decisions, *rows), arithmetic=chosen, kept={**run.kept, **chosen})
    runs, errors = [], []
    for values in variants(config, machine):
        try:
            run = resolve(config.with_values(values), machine, ranks, kept)
            if problem := host_problem(keys, run.host_bytes, machine):
                raise ConfigError([problem])
        except ConfigError as error:
            errors.append(error)
            continue
        runs.append((step_time(run.work(), rates).seconds, values, run))
    if not runs:
        raise errors[0]
    # times are predicted for GPUs only
    by_time = machine.is_gpu
    _, chosen, run = min(runs, key=lambda each: each[0] * handicap(each[1].items())) if by_time else runs[0]
    seconds = {tuple(values.values()): taken for taken, values, _ in runs if by_time}
    rows = [Decision(*explained(key, chosen, seconds)) for key in keys]
    return replace(run, decisions=(*run.decisions, *rows), arithmetic=chosen)


def prediction(resolved: Resolved) -> dict[str, Any] | None:
    """Return the predicted time and memory of a step as plain data; None for a device without data."""
    cluster = cluster_for(resolved.config.run.cluster, resolved.machine, resolved.layout.ranks)
    if cluster is None:
        return None
    rates = Rates(cluster, cached_measurements(cluster.device.name))
    time = step_time(resolved.work(), rates)
    return {
        "cluster": cluster.name,
        **time_facts(time),
        "memory_bytes": resolved.predicted_bytes,
        "measured_inputs": sorted(rates.used["measured"]),
        "analytic_inputs": sorted(rates.used["analytic"] - rates.used["measured"]),
    }
