"""The rounds of a federation as files at the coordinator; each transition is one atomic file or rename.

    FOLDER/rounds/0003/global/           the model before round 3, with the outer state
                       assigned/SITE.json  what the site was asked to train, from this model
                       inbox/SITE/       a published member, not verified yet
                       members/SITE/     verified; SITE.json beside it has the norm and the time of arrival
                       refused/SITE-1/   refused; SITE-1.json beside it says why
                       closed.json       which members the next model is made of, with their weights

The next model is a pure function of `global`, the members and `closed.json`. A coordinator that was killed
continues with what the files say; nothing else is remembered.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from arriero.errors import UserError
from arriero.events import EVENTS, EventLog
from arriero.federate.aggregation import Contribution, aggregate
from arriero.federate.members import (
    Damaged,
    GlobalManifest,
    MemberManifest,
    Record,
    Refused,
    check_member,
    open_global,
    read_manifest,
    verify_files,
    write_json,
)
from arriero.federate.outer import OuterOptimizer
from arriero.federate.schema import Codec, FederationSection
from arriero.files import sync
from arriero.units import counted, human_time

_CLOSED = "closed.json"
_LEAST_SHARE, _LARGEST_SHARE = 1 / 8, 8
# with so many members on time, at least and as a share of those that are expected, the next one is overdue
# after six times their mean distance, and 2 % of the round
_ENOUGH_TO_JUDGE, _MOST, _OVERDUE, _LEAST_PAUSE = 4, 0.75, 6.0, 0.02


class Assignment(Record):
    """What a site was asked to train, from the global model of a round. No steps: to evaluate that model.

    `horizon` is the end of the site's learning-rate schedule, unless its run file gives one.
    """

    site: str
    round: int
    steps: int
    tokens: int
    horizon: int
    codec: Codec
    inner: Literal["continue", "reset"]
    at: float


class Accepted(Record):
    """A member's part in the next model; `weight` includes the factor for staleness."""

    site: str
    round: int
    weight: float
    tokens: int
    first_step: int
    step: int
    norm: float


class Discarded(Record):
    site: str
    round: int
    tokens: int


class Closed(Record):
    """How a round ended. `total` is the weight of a full round; `absent` sites have no member in it."""

    round: int
    at: float
    total: float
    accepted: tuple[Accepted, ...]
    discarded: tuple[Discarded, ...] = ()
    absent: tuple[str, ...] = ()


class Refusal(Record):
    """`final`: the site has no other attempt in this round. `member`: the file name of what was refused."""

    site: str
    round: int
    reason: str
    final: bool
    at: float
    member: str | None = None


@dataclass(frozen=True)
class Member:
    """A verified member. `at` is when it arrived."""

    directory: Path
    manifest: MemberManifest
    norm: float
    at: float

    @property
    def key(self) -> tuple[str, int]:
        return self.manifest.site, self.manifest.round


@dataclass
class Rounds:
    """The rounds of one federation. Only one process may call methods that write; `clock` gives the time."""

    folder: Path
    section: FederationSection
    optimizer: OuterOptimizer
    weights: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _since: float = field(init=False)
    _newest: int = -1
    _read_closed: dict[int, Closed] = field(default_factory=dict)
    _read_members: dict[Path, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @cached_property
    def events(self) -> EventLog:
        return EventLog(self.folder / EVENTS)

    def at(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    def model(self, number: int) -> Path:
        return self.at(number) / "global"

    @property
    def number(self) -> int:
        """The round that is open: that of the newest global model."""
        if self._newest < 0:
            found = [int(path.parent.name) for path in self.folder.glob("rounds/*/global") if path.is_dir()]
            if not found:
                raise UserError(f"{self.folder} has no global model", "`arriero fed run` makes the first one")
            self._newest = max(found)
        while self.model(self._newest + 1).is_dir():
            self._newest += 1
        return self._newest

    def assignments(self, number: int) -> dict[str, Assignment]:
        paths = sorted((self.at(number) / "assigned").glob("*.json"))
        return {path.stem: Assignment.read(path) for path in paths}

    def assignment(self, site: str, number: int) -> Assignment | None:
        path = self.at(number) / "assigned" / f"{site}.json"
        return Assignment.read(path) if path.is_file() else None

    def members(self, number: int) -> dict[str, Member]:
        """Return the verified members that started from the model of a round, except damaged ones."""
        found = {}
        for directory in self._verified(number):
            with suppress(Refused):
                found[directory.name] = self._member(directory)
        return found

    def _verified(self, number: int) -> list[Path]:
        paths = sorted((self.at(number) / "members").glob("*.json"))
        return [path.with_suffix("") for path in paths if path.with_suffix("").is_dir()]

    def _member(self, directory: Path) -> Member:
        """Return a verified member; raise Refused if what is stored about it was damaged since."""
        if directory not in self._read_members:
            manifest, path = read_manifest(directory, MemberManifest), directory.with_suffix(".json")
            try:
                about = json.loads(path.read_bytes())
                made = Member(directory, manifest, float(about["norm"]), float(about["at"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise Damaged(f"{path} is damaged ({type(error).__name__})") from None
            self._read_members[directory] = made
        return self._read_members[directory]

    def closed(self, number: int) -> Closed | None:
        path = self.at(number) / _CLOSED
        if number not in self._read_closed and path.is_file():
            self._read_closed[number] = Closed.read(path)
        return self._read_closed.get(number)

    def history(self) -> list[Closed]:
        return [closed for number in range(self.number + 1) if (closed := self.closed(number))]

    def refusals(self, number: int, site: str | None = None) -> list[Refusal]:
        """Return the refusals of a round, the oldest first."""
        paths = (self.at(number) / "refused").glob(f"{site or '*'}-*.json")
        ordered = sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]))
        return [each for path in ordered if (each := Refusal.read(path)).site == (site or each.site)]

    def pending(self, site: str) -> Assignment | None:
        """Return the newest assignment of a site that has neither a member nor a final refusal."""
        for number in range(self.number, -1, -1):
            assigned = self.assignment(site, number)
            if assigned is not None:
                done = (self.at(number) / "members" / site).is_dir()
                final = any(each.final for each in self.refusals(number, site))
                dropped = self.section.late == "discard" and number < self.number
                too_late = self.number - number > self.section.max_staleness
                return None if done or final or dropped or too_late else assigned
        return None

    def assign(self, site: str, steps: int, tokens: int, **about: Any) -> Assignment:
        """Ask a site to train from the newest global model; `about` are the other fields of Assignment."""
        number = self.number
        made = Assignment(site=site, round=number, steps=steps, tokens=tokens, at=self.clock(), **about)
        made.write(self.at(number) / "assigned" / f"{site}.json")
        self.events.write("assign", site=site, round=number, steps=steps, tokens=tokens)
        return made

    def give_up(self, site: str, reason: str) -> None:
        """Record that a site has failed in its round; the others need not wait for it."""
        pending = self.pending(site)
        if pending is not None:
            self._record_refusal(site, pending.round, reason, final=True, damaged=None)

    def inbox(self, site: str, number: int) -> Path:
        """Return where a site publishes its member of a round, by a rename in this file system."""
        return self.at(number) / "inbox" / site

    def receive(self) -> list[Member]:
        """Verify published members and move them out of the inbox; return those that are accepted."""
        received, newest = [], self.number
        used = self._used()
        for number in range(max(0, newest - self.section.max_staleness), newest + 1):
            for directory in self._verified(number):
                try:
                    self._member(directory)
                except Refused as error:
                    if (directory.name, number) not in used:
                        final = not isinstance(error, Damaged)
                        self._record_refusal(directory.name, number, str(error), final, directory)
            folder = self.at(number) / "inbox"
            paths = sorted(folder.iterdir()) if folder.is_dir() else []
            for path in paths:
                if path.is_dir() and not path.name.startswith("."):
                    try:
                        if not self._is_repeated(path, number):
                            received.append(self._verify(path, number))
                    except Refused as error:
                        final = not isinstance(error, Damaged)
                        self._record_refusal(path.name, number, str(error), final, path)
        return received

    def has_member(self, site: str, number: int) -> bool:
        """Return whether a site has published its member of a round, verified or not."""
        return any((self.at(number) / folder / site).is_dir() for folder in ("inbox", "members"))

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

    def _record_refusal(self, site: str, number: int, reason: str, final: bool, damaged: Path | None) -> None:
        """Write the reason, then move the member aside; it is never used and never deleted.

        A member that was damaged more often than the site may fail is not asked for again.
        """
        folder = self.at(number) / "refused"
        folder.mkdir(parents=True, exist_ok=True)
        final = final or len(self.refusals(number, site)) >= self.section.retries
        names = (f"{site}-{i}" for i in range(1, 10**6))
        taken = {path.name.removesuffix(".json") for path in folder.iterdir()}
        name = next(name for name in names if name not in taken)
        kept = name if damaged is not None else None
        record = Refusal(site=site, round=number, reason=reason, final=final, at=self.clock(), member=kept)
        record.write(folder / f"{name}.json")
        if damaged is not None:
            damaged.rename(folder / name)
            self._read_members.pop(damaged, None)
            sync(folder)
        self.events.write("refuse", **record.model_dump())

    def candidates(self) -> tuple[list[Member], list[Member], list[Member]]:
        """Return the unused members: of this round, late ones to merge, and late ones to discard."""
        used = self._used()
        now, on_time, late, dropped = self.number, [], [], []
        for number in range(now + 1):
            for member in self.members(number).values():
                if member.key in used:
                    continue
                fresh = now - number <= self.section.max_staleness and self.section.late == "merge"
                (on_time if number == now else late if fresh else dropped).append(member)
        return on_time, late, dropped

    def _used(self) -> set[tuple[str, int]]:
        """Return site and round of the members that closed rounds have accepted or discarded."""
        each_round = ((*closed.accepted, *closed.discarded) for closed in self.history())
        return {(each.site, each.round) for parts in each_round for each in parts}

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
            return 0.0 if now - self._opened(number) > self.section.deadline.amount else None
        missing = sorted(set(sites) - present.keys())
        reasons = [each.reason for each in self.refusals(number) if each.final]
        if not any(self.pending(site) for site in sites) and self.assignments(number):
            raise UserError(
                f"round {number} has {counted(len(present), 'member')} and needs {needed}; missing: "
                f"{', '.join(missing)}" + "".join(f"; {reason}" for reason in reasons),
                "correct the sites, or lower federation.quorum with mode 'quorum', and run it again",
            )
        if now - self._opened(number) > self.section.deadline.amount:
            raise UserError(
                f"round {number} has {counted(len(present), 'member')} after "
                f"{human_time(now - self._opened(number))} and needs {needed}; missing: {', '.join(missing)}",
                "correct the sites, raise federation.deadline or lower federation.quorum, and run it again",
            )
        return None

    def _closing_time(self, reached: float, arrived: Sequence[float], outstanding: int) -> float:
        """Return when the grace window ends after a quorum; `arrived` are the members on time.

        Once most have come, it ends early when the next one is overdue by their usual distance.
        """
        took = max(0.0, reached - self._opened(self.number))
        end = reached + self.section.grace * took
        if len(arrived) < max(_ENOUGH_TO_JUDGE, _MOST * (len(arrived) + outstanding)):
            return end
        usual = (arrived[-1] - arrived[0]) / (len(arrived) - 1)
        return min(end, max(reached, arrived[-1]) + max(_LEAST_PAUSE * took, _OVERDUE * usual))

    def _opened(self, number: int) -> float:
        return min((each.at for each in self.assignments(number).values()), default=self.clock())

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
        closed.write(self.at(number) / _CLOSED)
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
                    self._record_refusal(path.name, number, f"it came {late} too late", True, path)

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
                self._record_refusal(*member.key, str(error), final, member.directory)
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
