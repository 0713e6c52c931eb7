"""What the files of a federation say: rows per round and site, losses, and accounts of all tokens."""

import json
from typing import Any

from arriero.federate.coordinator import Coordinator
from arriero.federate.members import GlobalManifest, open_global
from arriero.units import counted

_NUMBERS = (
    "tokens",
    "train_loss",
    "eval_global",
    "eval_site",
    "bytes",
    "seconds",
    "weight",
    "norm",
    "cosine",
)


def final_losses(coordinator: Coordinator) -> dict[str, float]:
    """Return the held-out loss of the final model at each site."""
    folder = coordinator.rounds.at(coordinator.rounds.number) / "evaluation"
    found = {path.stem: json.loads(path.read_bytes())["eval_loss"] for path in sorted(folder.glob("*.json"))}
    return {site: loss for site, loss in found.items() if loss is not None}


def mean_final_loss(coordinator: Coordinator) -> float | None:
    losses = final_losses(coordinator)
    return sum(losses.values()) / len(losses) if losses else None


def round_rows(coordinator: Coordinator, number: int) -> list[dict[str, Any]]:
    """Return one row per site of a round."""
    rounds = coordinator.rounds
    closed, members = rounds.closed(number), rounds.members(number)
    later = rounds.model(number + 1)
    made = open_global(later, verify=False) if later.is_dir() else None
    rows = []
    parts = {(each.site, each.round): each for each in closed.accepted} if closed else {}
    late = {site: rounds.members(base)[site] for site, base in parts if base < number}
    for site, member in {**members, **late}.items():
        about, part = member.manifest, parts.get((site, member.manifest.round))
        state = "accepted" if part else "late" if closed else "arrived"
        if part and about.round < number:
            state = f"accepted, {counted(number - about.round, 'round')} late"
        rows.append(
            _row(number, site, state)
            | {
                "tokens": about.tokens,
                "train_loss": about.train_loss,
                "eval_global": about.eval_before,
                "eval_site": about.eval_after,
                "bytes": about.bytes,
                "seconds": about.seconds,
                "norm": member.norm,
                "weight": part.weight / closed.total if part and closed else None,
                "cosine": mean_cosine(made, site, about.round) if part and made else None,
            }
        )
    for each in rounds.refusals(number):
        rows.append(_row(number, each["site"], "refused") | {"reason": each["reason"]})
    shown = {row["site"] for row in rows}
    for site, order in rounds.assignments(number).items():
        if site not in shown:
            state = "absent" if closed else "training"
            rows.append(_row(number, site, state) | {"tokens": None if closed else order.tokens})
    return rows


def _row(number: int, site: str, state: str) -> dict[str, Any]:
    names = (
        "tokens",
        "train_loss",
        "eval_global",
        "eval_site",
        "bytes",
        "seconds",
        "weight",
        "norm",
        "cosine",
    )
    return {"round": number, "site": site, "state": state, **dict.fromkeys((*names, "reason"))}


def mean_cosine(made: GlobalManifest, site: str, base: int) -> float | None:
    """Return the mean cosine between a member's delta and the others of its round."""
    index = next(i for i, each in enumerate(made.members) if (each["site"], each["round"]) == (site, base))
    others = [value for i, value in enumerate(made.cosines[index]) if i != index]
    return sum(others) / len(others) if others else None


def accounts(coordinator: Coordinator) -> dict[str, int]:
    """Return the tokens of all members by what became of them."""
    rounds = coordinator.rounds
    history = rounds.history()
    accepted = sum(each.tokens for closed in history for each in closed.accepted)
    discarded = sum(each["tokens"] for closed in history for each in closed.discarded)
    on_time, late, dropped = rounds.candidates()
    waiting = sum(member.manifest.tokens for member in [*on_time, *late, *dropped])
    return {"accepted": accepted, "discarded": discarded, "waiting": waiting}
