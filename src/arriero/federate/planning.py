"""What `arriero fed plan` knows about a federation: its model, its steps and the speed of its sites."""

from dataclasses import dataclass
from pathlib import Path

from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.model.presets import expand
from arriero.model.spec import ModelSpec


@dataclass(frozen=True)
class PlannedRound:
    """A round of the slowest site; `source` says where its speed comes from."""

    parameters: int
    sites: int
    steps: int
    step_s: float
    codec: str
    source: str


def planned_round(path: Path, tokens_per_s: float | None) -> PlannedRound:
    coordinator = Coordinator.of(path)
    model = coordinator.config.federation.model
    sets = [f"checkpoint.start_from='{model}'"] if model else []
    configs = [
        load_run(Path(site.run_file), [*site.set, *sets], expand).config for site in coordinator.config.sites
    ]
    spec = ModelSpec.from_dict(configs[0].model.model_dump(exclude={"preset"}))
    batch = max(config.train.batch.amount for config in configs)
    source = "--tokens-per-s"
    if tokens_per_s is None:
        speeds = coordinator.measured_speeds() if coordinator.rounds.model(0).is_dir() else {}
        if not speeds:
            raise UserError(
                "the speed of the sites is not known yet",
                "give --tokens-per-s of the slowest one (`arriero plan` predicts it), or run a round first",
            )
        slowest = min(speeds, key=speeds.__getitem__)
        tokens_per_s, source = speeds[slowest], f"measured at {slowest}"
    steps = max(1, round(coordinator.config.federation.tokens.in_tokens(batch) / batch))
    codec = coordinator.config.outer.codec
    return PlannedRound(
        spec.parameters,
        len(configs),
        steps,
        batch / tokens_per_s,
        codec,
        f"{tokens_per_s:,.0f} tokens/s, {source}",
    )
