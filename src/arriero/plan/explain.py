"""Explain a plan: why the best candidate is the best, what another loses, and what the whole run costs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from arriero.config.timeline import Timeline, total_steps
from arriero.plan.candidates import Candidate, Plan
from arriero.plan.rates import Rates
from arriero.plan.timeline import simulate
from arriero.plan.timing import StepTime, step_time
from arriero.units import counted, human_bytes, human_count

_NAMES = {
    "fsdp": "gathering and reducing sharded weights",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "sending between stages",
    "offload": "offloading",
}
# so many fit on a page
_MOST_SLOTS = 192


def explanation(plan: Plan) -> list[str]:
    """Return five sentences about the best candidate."""
    best, time = plan.best, plan.best.time
    mfu = f", {time.mfu:.1%} MFU" if time.mfu is not None else ""
    parts = sorted(time.compute.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{seconds / time.seconds:.0%} {name}" for name, seconds in parts)
    first = "The only candidate" if plan.considered == 1 else f"The best of {plan.considered:,} candidates"
    return [
        f"{first} is {best.choice}: {time.tokens_per_s:,.0f} tok/s per device{mfu}, "
        f"{_seconds(time.seconds)} per step.",
        f"A step is {shares}; {_waiting(best)}.",
        _memory_sentence(plan),
        _next_sentence(plan),
        _source_sentence(plan),
    ]


def _waiting(candidate: Candidate) -> str:
    time = candidate.time
    exposed = {name: seconds for name, seconds in time.exposed.items() if seconds > 0.002 * time.seconds}
    parts = [
        f"{seconds / time.seconds:.1%} waits for {_NAMES.get(name, name)}"
        for name, seconds in exposed.items()
    ]
    parts += [f"{time.bubble / time.seconds:.1%} is the pipeline bubble"] if time.bubble else []
    if time.host > 0.05 * time.seconds:
        parts.append(f"{time.host / time.seconds:.0%} waits for the host to start kernels")
    return ", ".join(parts) or "communication is hidden by computation"


def _memory_sentence(plan: Plan) -> str:
    best, kind = plan.best, plan.best.choice.checkpointing
    why = "without activation checkpointing"
    if kind.kind != "none":
        why = f"with activation checkpointing '{kind}'"
        if plan.config.memory.activation_checkpointing.kind == "auto":
            why += ", because less recomputation does not fit or is slower"
    used = f"{human_bytes(best.memory)} of {human_bytes(best.free)}"
    return f"It needs {used} per device ({best.margin:.0%} unused), {why}."


def _next_sentence(plan: Plan) -> str:
    """Compare with the best candidate that divides the model in another way."""

    def kind(candidate: Candidate) -> tuple[int, ...]:
        layout = candidate.choice.layout
        return layout.tp, layout.cp, layout.pp

    other = next((each for each in plan.candidates if kind(each) != kind(plan.best)), None)
    if other is None:
        return "No other division of the model is allowed by the settings and fits."
    return f"The next best division, {other.choice.layout}, takes {_difference(plan.best, other)}."


def _difference(best: Candidate, other: Candidate) -> str:
    """Say how much longer a candidate's step takes, and which parts cause it."""
    change = other.time.seconds / best.time.seconds - 1
    rows = {name: b - a for name, (a, b) in compared(best, other).items() if name != "total"}
    causes = [name for name, delta in sorted(rows.items(), key=lambda item: -item[1]) if delta > 0][:2]
    if change <= 0.001:
        return f"about as long ({change:+.1%})"
    return f"{change:.1%} longer, mostly for {' and '.join(causes)}" if causes else f"{change:.1%} longer"


def compared(first: Candidate, second: Candidate) -> dict[str, tuple[float, float]]:
    """Return the seconds of the parts of a step of two candidates, by name."""

    def parts(candidate: Candidate) -> dict[str, float]:
        time = candidate.time
        recompute = time.compute.get("recompute", 0.0)
        return {
            "computation": sum(time.compute.values()) - recompute,
            "recomputation": recompute,
            "exposed communication": time.exposed_seconds,
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "host": time.host,
            "total": time.seconds,
        }

    return {name: (parts(first)[name], parts(second)[name]) for name in parts(first)}


def _source_sentence(plan: Plan) -> str:
    measured = sorted(plan.used.get("measured", ()))
    analytic = sorted(set(plan.used.get("analytic", ())) - set(measured))
    if measured:
        rest = f"; {', '.join(analytic)} from data sheets" if analytic else ""
        return f"Times of {', '.join(measured)} are measured{rest}."
    how = "`arriero bench ops` and `arriero bench comm` on the target replace them by measurements"
    from_where = "from the data sheets in the cluster file (see docs/planner-accuracy.md)"
    return f"All times are analytic, {from_where}; {how}."


def whole_run(plan: Plan, candidate: Candidate, rates: Rates) -> dict[str, Any]:
    """Return steps, hours, device-hours, energy and cost of the whole run with a candidate."""
    resolved, timeline = plan.resolved(candidate), Timeline.of(plan.config)
    steps = total_steps(plan.config)
    seconds = [step_time(resolved.work(i), rates).seconds for i in range(len(timeline.phases))]
    if steps is None:
        wall = float(plan.config.train.horizon.amount)
        steps = int(wall / seconds[0])
    else:
        ends = [*(phase.step for phase in timeline.phases[1:]), steps]
        counts = [
            max(0, min(end, steps) - phase.step) for phase, end in zip(timeline.phases, ends, strict=True)
        ]
        wall = sum(count * each for count, each in zip(counts, seconds, strict=True))
    device_hours = wall / 3600 * plan.devices
    power = plan.cluster.power or plan.cluster.device.power
    return {
        "steps": steps,
        "tokens": timeline.tokens_after(steps),
        "hours": wall / 3600,
        "device_hours": device_hours,
        "energy_mwh": device_hours * power / 1e6,
        "cost_usd": None if plan.cluster.price is None else device_hours * plan.cluster.price,
    }


_DURATIONS = ((1 / 24, "days", 2), (1, "hours", 1), (60, "minutes", 1), (3600, "seconds", 0))


def whole_run_text(run: Mapping[str, Any]) -> str:
    """Return what the whole run costs in one line."""
    hours = run["hours"]
    parts = [
        f"{human_count(run['tokens'])} tokens in {counted(run['steps'], 'step')}",
        next(f"{hours * n:,.1f} {unit}" for n, unit, least in _DURATIONS if hours * n >= least),
        f"{human_count(run['device_hours'])} device-hours",
        f"{run['energy_mwh']:.3g} MWh",
    ]
    if (cost := run["cost_usd"]) is not None:
        parts.append(f"${human_count(cost)}" if cost >= 0.01 else "less than $0.01")
    return ", ".join(parts)


def candidate_facts(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as plain data."""
    choice = candidate.choice
    return {
        "text": str(choice),
        "layout": asdict(choice.layout),
        "schedule": choice.schedule if choice.layout.pp > 1 else None,
        "stages_per_rank": choice.stages_per_rank,
        "reshard": choice.keys.get("parallel.reshard", "auto"),
        "sync": choice.choices.sync,
        "activation_checkpointing": str(choice.checkpointing),
        "arithmetic": dict(choice.arithmetic),
        "micro_batch": choice.micro_batch,
        "gradient_accumulation": candidate.work.micro_batches,
        "memory_bytes": candidate.memory,
        "memory_parts": {name: round(size) for name, size in candidate.parts.items()},
        "memory_free_bytes": candidate.free,
        "memory_margin": candidate.margin,
        **time_facts(candidate.time),
    }


def time_facts(time: StepTime) -> dict[str, Any]:
    """Return the time of a step and its parts as plain data."""
    return {
        "tokens_per_s_per_device": time.tokens_per_s,
        "mfu": time.mfu,
        "step_s": time.seconds,
        "bubble_s": time.bubble,
        "optimizer_s": time.optimizer,
        "host_s": time.host,
        "compute_s": time.compute,
        "exposed_s": time.exposed,
    }


def plan_facts(plan: Plan, rates: Rates, top: int | None = None) -> dict[str, Any]:
    """Return the plan as plain data, for --json, for plan.json and for the HTML page."""
    shown = plan.best_per_layout()[:top]
    facts: dict[str, Any] = {
        "schema_version": 1,
        "run": plan.config.run.name,
        "model": plan.config.model.preset,
        "seq_len": plan.config.data.seq_len,
        "batch_tokens": plan.config.train.batch.amount,
        "cluster": plan.cluster.name,
        "device": plan.cluster.device.name,
        "devices": plan.devices,
        "devices_per_node": plan.cluster.devices_per_node,
        "considered": plan.considered,
        "candidates": [candidate_facts(each) for each in shown],
        "rejected": [each._asdict() for each in plan.rejections],
        "measured": sorted(plan.used.get("measured", ())),
        "analytic": sorted(plan.used.get("analytic", ())),
    }
    if plan.candidates:
        facts["explanation"] = explanation(plan)
        facts["whole_run"] = whole_run(plan, plan.best, rates)
        slots, count = pipeline_slots(plan.best)
        facts["timeline"] = [asdict(slot) for slot in slots]
        facts["timeline_micro_batches"] = count
    return facts


def pipeline_slots(candidate: Candidate) -> tuple[list[Any], int]:
    """Return the timeline of a candidate's pipeline, and the number of its micro-batches.

    It is empty without a pipeline. A long one is played with fewer micro-batches, a multiple of the stages.
    """
    choice, time, pp = candidate.choice, candidate.time, candidate.choice.layout.pp
    count = candidate.work.micro_batches
    if pp == 1:
        return [], 0
    count = min(count, max(2, _MOST_SLOTS // (2 * len(time.stages) * pp)) * pp)
    return simulate(choice.schedule, time.stages, pp, choice.stages_per_rank, count), count


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
