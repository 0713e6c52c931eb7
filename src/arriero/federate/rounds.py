"""Which members a round of a federation accepts, when it closes, and the model that it makes."""

import math
import shutil
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arriero.errors import UserError
from arriero.federate.aggregation import Contribution, aggregate
from arriero.federate.members import (
    Damaged,
    GlobalManifest,
    MemberManifest,
    Refused,
    check_member,
    open_global,
    read_manifest,
    verify_files,
    write_json,
)
from arriero.federate.outer import OuterOptimizer
from arriero.federate.round_files import CLOSED, Accepted, Closed, Discarded, Member, RoundFiles
from arriero.files import sync
from arriero.units import counted, human_time

_LEAST_SHARE, _LARGEST_SHARE = 1 / 8, 8
# with so many members on time, at least and as a share of those that are expected, the next one is overdue
# after six times their mean distance, and 2 % of the round
_ENOUGH_TO_JUDGE, _MOST, _OVERDUE, _LEAST_PAUSE = 4, 0.75, 6.0, 0.02


@dataclass
class Rounds(RoundFiles):
    """The rounds of one federation; `weights` of the sites are used if the weighting is `given`."""

    optimizer: OuterOptimizer
    weights: Mapping[str, float] = field(default_factory=dict)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def receive(self) -> list[Member]:
        """Verify published members and move them out of the inbox; return those that are accepted."""
        received, newest = [], self.number
        used = self.used()
        for number in range(max(0, newest - self.section.max_staleness), newest + 1):
            for directory in self.verified(number):
                try:
                    self.member(directory)
                except Refused as error:
                    if (directory.name, number) not in used:
                        final = not isinstance(error, Damaged)
                        self.record_refusal(directory.name, number, str(error), final, directory)
            folder = self.at(number) / "inbox"
            paths = sorted(folder.iterdir()) if folder.is_dir() else []
            for path in paths:
                if path.is_dir() and not path.name.startswith("."):
                    try:
                        if not self._is_repeated(path, number):
                            received.append(self._verify(path, number))
                    except Refused as error:
                        final = not isinstance(error, Damaged)
                        self.record_refusal(path.name, number, str(error), final, path)
        return received

    def _is_repeated(self, path: Path, number: int) -> bool:
        """Delete a member that was received already, as after a restart of the coordinator."""
        known = self.members(number).get(path.name)
        if known is None or read_manifest(path, MemberManifest).files != known.manifest.files:
            return False
        shutil.rmtree(path)
        return True

    def _verify(self, path: Path, number: int) -> Member:
        site = path.name
        member, norm = check_member(path, open_global(self.model(number), verify=False), self.model(number))
        if (member.site, member.round) != (site, number):
            raise Refused(f"{path} says that it is of {member.site} for round {member.round}")
        target = self.at(number) / "members" / site
        if target.exists():
            raise Refused(f"{site} has sent a member for round {number} already")
        self._check_order(member)
        self._check_same(member)
        at = self.clock()
        write_json(target.with_suffix(".json"), {"norm": norm, "at": at})
        path.rename(target)
        sync(target.parent)
        self.events.write("member", site=site, round=number, tokens=member.tokens, norm=norm)
        return Member(target, member, norm, at)

    def _check_order(self, member: MemberManifest) -> None:
        """Refuse a member that differs from what its site was asked to train, or repeats steps."""
        site, number, steps = member.site, member.round, member.step - member.first_step
        who = f"the member of {site} for round {number}"
        order = self.assignment(site, number)
        if order is None:
            raise Refused(f"{who} was not asked for")
        if steps > order.steps or member.tokens * order.steps != steps * order.tokens:
            asked = f"{counted(order.steps, 'step')} of {order.tokens:,} tokens"
            raise Refused(f"{who} claims {member.tokens:,} tokens in {counted(steps, 'step')}, not {asked}")
        if member.codec != order.codec:
            raise Refused(f"{who} has the codec {member.codec}, not {order.codec}")
        for earlier in range(self.number + 1):
            known = self.members(earlier).get(site)
            if known and known.manifest.first_step < member.step and member.first_step < known.manifest.step:
                raise Refused(
                    f"{who} holds steps {member.first_step} to {member.step}, some of which were counted in "
                    f"round {earlier}"
                )

    def _check_same(self, member: MemberManifest) -> None:
        """Refuse a member with another tokenizer, or another base model of an adapter, than the first one."""
        others = [each.manifest for n in range(self.number + 1) for each in self.members(n).values()]
        for key, what in (
            ("tokenizer", "the tokenizer of the data"),
            ("frozen", "the base model of the adapter"),
        ):
            known = next((other for other in others if getattr(other, key) is not None), None)
            if known and getattr(member, key) not in (None, getattr(known, key)):
                raise Refused(f"{member.site} and {known.site} differ in {what}")

    def quorum(self, sites: int) -> int:
        """Return the number of members that close a round."""
        wanted = self.section.quorum
        if self.section.mode == "asynchronous":
            return 1
        if self.section.mode == "synchronous":
            return sites
        return max(1, min(sites, math.ceil(wanted * sites) if isinstance(wanted, float) else wanted))

    def seconds_to_close(self, sites: Collection[str]) -> float | None:
        """Return when the open round may close, in seconds from now; None while members are missing.

        Raises UserError if it can never close, or if the deadline has passed.
        """
        on_time, late, _ = self.candidates()
        number, now = self.number, self.clock()
        present = {member.manifest.site: member.at for member in [*on_time, *late]}
        present = {site: at for site, at in present.items() if site in sites}
        needed = self.quorum(len(sites))
        if len(present) >= needed:
            outstanding = self._outstanding(sites)
            if self.section.mode != "quorum" or not outstanding:
                return 0.0
            if arrived := sorted(member.at for member in on_time if member.manifest.site in sites):
                reached = max(sorted(present.values())[needed - 1], arrived[0])
                return max(0.0, self._closing_time(reached, arrived, outstanding) - now)
            # late members wait for one that was trained in this round, but not for ever
            return 0.0 if now - self.opened(number) > self.section.deadline.amount else None
        missing = sorted(set(sites) - present.keys())
        reasons = [each.reason for each in self.refusals(number) if each.final]
        if not any(self.pending(site) for site in sites) and self.assignments(number):
            raise UserError(
                f"round {number} has {counted(len(present), 'member')} and needs {needed}; missing: "
                f"{', '.join(missing)}" + "".join(f"; {reason}" for reason in reasons),
                "correct the sites, or lower federation.quorum with mode 'quorum', and run it again",
            )
        if now - self.opened(number) > self.section.deadline.amount:
            raise UserError(
                f"round {number} has {counted(len(present), 'member')} after "
                f"{human_time(now - self.opened(number))} and needs {needed}; missing: {', '.join(missing)}",
                "correct the sites, raise federation.deadline or lower federation.quorum, and run it again",
            )
        return None

    def _closing_time(self, reached: float, arrived: Sequence[float], outstanding: int) -> float:
        """Return when the grace window ends after a quorum; `arrived` are the members on time.

        Once most have come, it ends early when the next one is overdue by their usual distance.
        """
        took = max(0.0, reached - self.opened(self.number))
        end = reached + self.section.grace * took
        if len(arrived) < max(_ENOUGH_TO_JUDGE, _MOST * (len(arrived) + outstanding)):
            return end
        usual = (arrived[-1] - arrived[0]) / (len(arrived) - 1)
        return min(end, max(reached, arrived[-1]) + max(_LEAST_PAUSE * took, _OVERDUE * usual))

    def seconds_left(self, speeds: Mapping[str, float], waits: Mapping[str, float]) -> float | None:
        """Return when the sites of the open round will probably end, in seconds from now; None if unknown.

        Sites may have stood still while no coordinator ran, so the time before this one began does not count.
        """
        if self.section.mode == "asynchronous":
            return None
        orders = [each for each in self.assignments(self.number).values() if each.site in speeds]
        ends = [
            max(each.at, self._since) + waits[each.site] + each.tokens / speeds[each.site] for each in orders
        ]
        return statistics.median_low(ends) - self.clock() if ends else None

    def _outstanding(self, sites: Collection[str]) -> int:
        """Return how many sites work on this round; one that works on an older round is not waited for."""
        found = [self.pending(site) for site in sites]
        return sum(each is not None and each.round == self.number for each in found)

    def close(self, sites: Collection[str]) -> Closed | None:
        """Decide which members make the next model; None if refusals leave too few of them."""
        number = self.number
        if (known := self.closed(number)) is not None:
            return known
        self._refuse_too_late()
        on_time, late, dropped = self.candidates()
        fit = self._refuse_unfit([*on_time, *late])
        if len({member.manifest.site for member in fit} & set(sites)) < self.quorum(len(sites)):
            return None
        accepted, total = [], 0.0
        for member in sorted(fit, key=lambda each: each.key):
            about, full = member.manifest, self._weight(member.manifest)
            same = about.model_dump(include={"site", "round", "tokens", "first_step", "step"})
            factor = self.section.staleness ** (number - about.round)
            accepted.append(Accepted(**same, weight=full * factor, norm=member.norm))
            total += full
        if self.section.mode == "asynchronous":
            total = max(total, self._full_weight(sites))
        lost = (Discarded(site=m.key[0], round=m.key[1], tokens=m.manifest.tokens) for m in dropped)
        closed = Closed(
            round=number,
            at=self.clock(),
            total=total,
            accepted=tuple(accepted),
            discarded=tuple(lost),
            absent=tuple(sorted(set(sites) - {each.site for each in accepted})),
        )
        closed.write(self.at(number) / CLOSED)
        self.events.write(
            "close", round=number, accepted=[each.site for each in accepted], absent=closed.absent
        )
        return closed

    def try_to_close(self, sites: Collection[str]) -> GlobalManifest | float | None:
        """Publish the next model if the round may close; else return the seconds until then, if known."""
        self.receive()
        closed = self.closed(self.number)
        if closed is None:
            wait = self.seconds_to_close(sites)
            if wait is None or wait > 0:
                return wait
            closed = self.close(sites)
        return None if closed is None else self.advance(closed)

    def _refuse_too_late(self) -> None:
        for number in range(self.number - self.section.max_staleness):
            folder = self.at(number) / "inbox"
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.is_dir() and not path.name.startswith("."):
                    late = counted(self.number - number, "round")
                    self.record_refusal(path.name, number, f"it came {late} too late", True, path)

    def _weight(self, member: MemberManifest) -> float:
        if self.section.weighting == "tokens":
            return float(member.tokens)
        return self.weights.get(member.site, 1.0) if self.section.weighting == "given" else 1.0

    def _full_weight(self, sites: Collection[str]) -> float:
        """Return the weight that all sites have together in an asynchronous round."""
        if self.section.weighting != "tokens":
            return sum(self.weights.get(site, 1.0) if self.weights else 1.0 for site in sites)
        newest = {
            site: each.tokens for n in range(self.number + 1) for site, each in self.assignments(n).items()
        }
        return float(sum(newest.get(site, 0) for site in sites))

    def _refuse_unfit(self, members: Sequence[Member]) -> list[Member]:
        """Verify the files once more and compare norms; return the members that may be used."""
        fit = []
        for member in members:
            try:
                verify_files(member.directory, member.manifest.files)
                self._check_norm(member, members)
                fit.append(member)
            except Refused as error:
                final = not isinstance(error, Damaged)
                self.record_refusal(*member.key, str(error), final, member.directory)
        return fit

    def _check_norm(self, member: Member, members: Sequence[Member]) -> None:
        """Refuse a delta that is much longer than the others of this and the last three rounds.

        Norms grow with training, so they are compared per square root of the tokens.
        """
        if not self.section.outlier:
            return
        others = [_relative(m.norm, m.manifest.tokens) for m in members if m is not member]
        for closed in self.history()[-3:]:
            others += [_relative(each.norm, each.tokens) for each in closed.accepted]
        usual = statistics.median_low(others) if others else 0.0
        own = _relative(member.norm, member.manifest.tokens)
        if usual and own > self.section.outlier * usual:
            raise Refused(
                f"the delta of {member.manifest.site} for round {member.manifest.round} is an outlier: its "
                f"norm, {member.norm:.3g}, is {own / usual:.0f} times the usual one"
            )

    def advance(self, closed: Closed) -> GlobalManifest:
        """Publish the next global model from what `close` decided."""
        target = self.model(closed.round + 1)
        if target.is_dir():
            return open_global(target, verify=False)
        started = time.monotonic()
        made = self.replayed(closed, target)
        seconds = time.monotonic() - started
        self.events.write("aggregate", round=closed.round, model=made.model, seconds=round(seconds, 3))
        return made

    def replayed(self, closed: Closed, target: Path, base: Path | None = None) -> GlobalManifest:
        """Aggregate the members that a closed round accepted; a pure function of the files."""
        parts = []
        for each in closed.accepted:
            directory = self.at(each.round) / "members" / each.site
            try:
                codec = read_manifest(directory, MemberManifest).codec
            except Refused as error:
                raise UserError(
                    f"{error}, and round {closed.round} uses it", "restore it from a copy"
                ) from None
            own = self.model(each.round) if each.round != closed.round or base is None else base
            parts.append(Contribution(directory, each.site, each.round, codec, each.weight, each.tokens, own))
        return aggregate(base or self.model(closed.round), parts, self.optimizer, target, closed.total)


def _relative(norm: float, tokens: int) -> float:
    return norm / math.sqrt(max(1, tokens))


def balanced_tokens(
    nominal: Mapping[str, int], speeds: Mapping[str, float], waits: Mapping[str, float]
) -> dict[str, int]:
    """Divide the tokens of a round so that sites of different speed and queue time finish together.

    A site that was not measured yet gets its nominal tokens. No site gets less than an eighth or more than
    eight times of them.
    """
    known = {site: speed for site, speed in speeds.items() if site in nominal and speed > 0}
    if not known:
        return dict(nominal)
    waited = {site: waits.get(site, 0.0) for site in known}
    work = sum(nominal[site] for site in known)
    end = (work + sum(speed * waited[site] for site, speed in known.items())) / sum(known.values())
    shares = {site: speed * (end - waited[site]) / nominal[site] for site, speed in known.items()}
    return {
        site: round(tokens * min(_LARGEST_SHARE, max(_LEAST_SHARE, shares.get(site, 1.0))))
        for site, tokens in nominal.items()
    }


def remaining_tokens(nominal: int, tokens: int, speed: float, seconds: float) -> int:
    """Return what a site that was late trains in the seconds that are left, so that it ends with the others.

    At least an eighth of its nominal tokens; a site that has time for more than `tokens` trains these.
    """
    return min(tokens, max(round(_LEAST_SHARE * nominal), round(speed * seconds)))
