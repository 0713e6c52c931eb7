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
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from arriero.errors import UserError
from arriero.events import EVENTS, EventLog
from arriero.federate.members import Damaged, MemberManifest, Record, Refused, read_manifest
from arriero.federate.schema import Codec, FederationSection
from arriero.files import sync

CLOSED = "closed.json"


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
class RoundFiles:
    """What the files say. Only one process may call methods that write; `clock` gives the time."""

    folder: Path
    section: FederationSection
    clock: Callable[[], float] = field(default=time.time, kw_only=True)
    _newest: int = field(default=-1, init=False)
    _read_closed: dict[int, Closed] = field(default_factory=dict, init=False)
    _read_members: dict[Path, Member] = field(default_factory=dict, init=False)

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
        for directory in self.verified(number):
            with suppress(Refused):
                found[directory.name] = self.member(directory)
        return found

    def verified(self, number: int) -> list[Path]:
        paths = sorted((self.at(number) / "members").glob("*.json"))
        return [path.with_suffix("") for path in paths if path.with_suffix("").is_dir()]

    def member(self, directory: Path) -> Member:
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
        path = self.at(number) / CLOSED
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
            self.record_refusal(site, pending.round, reason, final=True, damaged=None)

    def inbox(self, site: str, number: int) -> Path:
        """Return where a site publishes its member of a round, by a rename in this file system."""
        return self.at(number) / "inbox" / site

    def has_member(self, site: str, number: int) -> bool:
        """Return whether a site has published its member of a round, verified or not."""
        return any((self.at(number) / folder / site).is_dir() for folder in ("inbox", "members"))

    def record_refusal(self, site: str, number: int, reason: str, final: bool, damaged: Path | None) -> None:
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
        used = self.used()
        now, on_time, late, dropped = self.number, [], [], []
        for number in range(now + 1):
            for member in self.members(number).values():
                if member.key in used:
                    continue
                fresh = now - number <= self.section.max_staleness and self.section.late == "merge"
                (on_time if number == now else late if fresh else dropped).append(member)
        return on_time, late, dropped

    def used(self) -> set[tuple[str, int]]:
        """Return site and round of the members that closed rounds have accepted or discarded."""
        each_round = ((*closed.accepted, *closed.discarded) for closed in self.history())
        return {(each.site, each.round) for parts in each_round for each in parts}

    def opened(self, number: int) -> float:
        return min((each.at for each in self.assignments(number).values()), default=self.clock())
