"""Rounds as files: what closes a round, what is counted, and that a coordinator may die between any two."""

import json
import shutil

import pytest

from arriero.errors import UserError
from arriero.federate.members import (
    GlobalManifest,
    MemberManifest,
    open_global,
    read_manifest,
    write_manifest,
)
from arriero.federate.round_files import Discarded
from arriero.federate.rounds import Rounds, balanced_tokens, remaining_tokens
from arriero.federate.schema import FederationSection
from arriero.files import sha256_of_json
from federate.models import DILOCO, first_model, member, moved, weights

STATE = weights(0)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Federation:
    """A coordinator with sites that answer when the test says so; every call makes a new `Rounds`."""

    def __init__(self, folder, sites="abc", **section):
        self.folder, self.sites, self.clock = folder, list(sites), Clock()
        self.section = FederationSection(**{"grace": 0.5, "deadline": "1h", **section})
        folder.mkdir(parents=True, exist_ok=True)
        if not self.rounds.model(0).is_dir():
            made = first_model(folder, optimizer=DILOCO)
            self.rounds.at(0).mkdir(parents=True)
            made.rename(self.rounds.model(0))
        self.steps = dict.fromkeys(self.sites, 0)

    @property
    def rounds(self):
        return Rounds(self.folder, self.section, DILOCO, clock=self.clock)

    def assign(self, *sites):
        return {s: self.ask(s) for s in sites or self.sites}

    def ask(self, site, tokens=1000, codec="bf16"):
        return self.rounds.assign(site, 10, tokens, horizon=100, codec=codec, inner="continue")

    def answer(self, site, number=None, tokens=1000, size=1e-2, state=None, codec="bf16"):
        number = self.rounds.number if number is None else number
        local = moved(STATE, 100 * number + ord(site), size) if state is None else state
        path = self.rounds.inbox(site, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        member(self.rounds.model(number), local, path, site, codec, tokens, number)
        return path

    def try_to_close(self):
        made = self.rounds.try_to_close(self.sites)
        return made if isinstance(made, GlobalManifest) else None


@pytest.fixture
def federation(tmp_path):
    return lambda sites="abc", **section: Federation(tmp_path / "fed", sites, **section)


def accepted(federation, number):
    return [(each.site, each.round) for each in federation.rounds.closed(number).accepted]


def test_a_synchronous_round_waits_for_every_site(federation):
    fed = federation(mode="synchronous")
    fed.assign()
    for site in "ab":
        fed.answer(site)
        assert fed.try_to_close() is None
    fed.answer("c")
    assert fed.try_to_close().round == 1
    assert accepted(fed, 0) == [("a", 0), ("b", 0), ("c", 0)]


def test_a_quorum_closes_after_a_grace_window_that_follows_the_length_of_the_round(federation):
    fed = federation(quorum=2)
    fed.assign()
    fed.clock.now += 100
    fed.answer("a")
    assert fed.try_to_close() is None
    fed.clock.now += 100
    fed.answer("b")
    fed.rounds.receive()
    assert fed.rounds.seconds_to_close(fed.sites) == pytest.approx(100)
    fed.clock.now += 101
    assert fed.try_to_close().round == 1
    assert fed.rounds.closed(0).absent == ("c",)


def test_sites_do_not_wait_for_a_straggler_when_the_others_came_together(federation):
    fed = federation("abcdef", quorum=3)
    fed.assign()
    fed.clock.now += 100
    for site in "abcde":
        fed.answer(site)
        fed.rounds.receive()
        fed.clock.now += 2
    # the last came 2 s ago, and a member is overdue after six times the distance of 2 s
    assert fed.rounds.seconds_to_close(fed.sites) == pytest.approx(10)
    fed.clock.now += 11
    assert fed.try_to_close().round == 1
    assert fed.rounds.closed(0).absent == ("f",)


def test_half_of_the_sites_do_not_end_the_grace_window_of_the_others(federation):
    fed = federation("abcdefgh", quorum=0.5)
    fed.assign()
    fed.clock.now += 1000
    for site in "abcd":
        fed.answer(site)
    fed.rounds.receive()
    assert fed.rounds.seconds_to_close(fed.sites) == pytest.approx(500), "four arrived, four still train"
    for site in "gh":
        fed.rounds.give_up(site, f"{site} failed")
    fed.clock.now += 30
    fed.answer("e")
    fed.rounds.receive()
    # five of the six that are still expected; 6 x their mean distance of 7.5 s
    assert fed.rounds.seconds_to_close(fed.sites) == pytest.approx(45)


def test_late_members_close_a_round_at_the_deadline(federation):
    fed = federation("abc", quorum=1, grace=0, deadline="1h")
    fed.assign()
    fed.answer("a")
    fed.try_to_close()
    fed.assign("a")
    fed.answer("b", number=0), fed.answer("c", number=0)
    fed.clock.now += 3500
    assert fed.try_to_close() is None
    fed.clock.now += 200
    assert fed.try_to_close().round == 2
    assert accepted(fed, 1) == [("b", 0), ("c", 0)] and fed.rounds.closed(1).absent == ("a",)


def test_late_members_do_not_close_a_round_before_the_first_that_was_trained_in_it(federation):
    fed = federation("abc", quorum=1, grace=0)
    fed.assign()
    fed.answer("a")
    fed.try_to_close()
    fed.assign("a")
    fed.clock.now += 50
    fed.answer("b", number=0), fed.answer("c", number=0)
    assert fed.try_to_close() is None, "a has just begun"
    fed.answer("a")
    assert fed.try_to_close().round == 2
    assert accepted(fed, 1) == [("a", 1), ("b", 0), ("c", 0)]


def test_a_site_that_was_late_trains_less_and_ends_with_the_others(federation):
    fed = federation("abc")
    fed.assign("a", "b")
    rounds, measured = fed.rounds, ({"a": 10.0, "b": 10.0}, {"a": 0.0, "b": 0.0})
    fed.clock.now += 60
    left = rounds.seconds_left(*measured)
    assert left == pytest.approx(40)
    assert fed.rounds.seconds_left(*measured) == pytest.approx(100), "nothing ran before a restart"
    assert remaining_tokens(1000, 1000, 10.0, left) == 400
    assert remaining_tokens(1000, 1000, 10.0, -5.0) == 125, "an eighth at least"
    assert remaining_tokens(1000, 1000, 10.0, 500.0) == 1000
    assert fed.rounds.seconds_left({}, {}) is None


def test_a_quorum_round_closes_at_once_when_all_sites_have_answered(federation):
    fed = federation(quorum=1)
    fed.assign()
    for site in "abc":
        fed.answer(site)
    assert fed.try_to_close().round == 1


def test_a_late_member_is_merged_with_less_weight(federation):
    fed = federation(quorum=2, staleness=0.5)
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.rounds.receive()
    fed.clock.now += 1000
    fed.try_to_close()
    fed.assign("a", "b")
    assert fed.rounds.pending("c").round == 0, "a site that works on an older round keeps working"
    fed.answer("c", number=0)
    fed.answer("a"), fed.answer("b")
    fed.try_to_close()
    assert accepted(fed, 1) == [("a", 1), ("b", 1), ("c", 0)]
    late = fed.rounds.closed(1).accepted[2]
    assert (late.weight, late.tokens, fed.rounds.closed(1).total) == (500, 1000, 3000)


def test_a_late_member_is_discarded_by_policy_and_its_tokens_are_recorded(federation):
    fed = federation(quorum=2, late="discard")
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.rounds.receive()
    fed.clock.now += 1000
    fed.try_to_close()
    assert fed.rounds.pending("c") is None, "the site may start the new round at once"
    fed.answer("c", number=0)
    fed.assign()
    for site in "abc":
        fed.answer(site)
    fed.try_to_close()
    assert accepted(fed, 1) == [("a", 1), ("b", 1), ("c", 1)]
    assert fed.rounds.closed(1).discarded == (Discarded(site="c", round=0, tokens=1000),)


def test_a_member_that_is_too_late_is_refused(federation):
    fed = federation("ab", quorum=1, max_staleness=1, grace=0)
    fed.assign()
    for _ in range(3):
        fed.answer("a")
        fed.try_to_close()
        fed.assign("a")
    fed.answer("b", number=0)
    fed.answer("a")
    fed.try_to_close()
    assert "too late" in fed.rounds.refusals(0)[0].reason
    assert all(site == "a" for number in range(4) for site, _ in accepted(fed, number))


def test_asynchronous_updates_count_a_member_by_its_share_of_a_round(federation):
    fed = federation(mode="asynchronous")
    fed.assign()
    fed.answer("b")
    fed.try_to_close()
    closed = fed.rounds.closed(0)
    assert accepted(fed, 0) == [("b", 0)] and closed.total == 3000
    fed.assign("b")
    fed.answer("a", number=0)
    fed.try_to_close()
    assert accepted(fed, 1) == [("a", 0)]


@pytest.mark.parametrize(("weighting", "weights"), [("tokens", [100, 300]), ("uniform", [1, 1])])
def test_weights_of_members(federation, weighting, weights):
    fed = federation("ab", mode="synchronous", weighting=weighting)
    fed.ask("a", tokens=100), fed.ask("b", tokens=300)
    fed.answer("a", tokens=100), fed.answer("b", tokens=300)
    fed.try_to_close()
    assert [each.weight for each in fed.rounds.closed(0).accepted] == weights


def test_a_poisoned_member_is_refused_and_the_quorum_goes_on(federation):
    fed = federation(quorum=2)
    fed.assign()
    bad = moved(STATE, 1)
    bad["norm.weight"][0] = float("nan")
    fed.answer("a"), fed.answer("b", state=bad), fed.answer("c")
    fed.try_to_close()
    assert accepted(fed, 0) == [("a", 0), ("c", 0)]
    assert "NaN or infinity" in fed.rounds.refusals(0)[0].reason


def test_an_outlier_is_refused_with_a_sentence(federation):
    fed = federation(quorum=2)
    fed.assign()
    fed.answer("a"), fed.answer("b", size=3.0), fed.answer("c")
    fed.try_to_close()
    assert accepted(fed, 0) == [("a", 0), ("c", 0)]
    assert "outlier" in fed.rounds.refusals(0)[0].reason


def test_a_synchronous_round_with_a_refused_member_stops_with_the_reason(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a"), fed.answer("b", size=100.0)
    assert fed.try_to_close() is None
    with pytest.raises(UserError, match=r"missing: b.*outlier"):
        fed.try_to_close()
    assert not fed.rounds.model(1).exists()


def test_a_damaged_member_may_be_sent_again(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a")
    path = fed.answer("b")
    delta = next(path.glob("delta*"))
    delta.write_bytes(delta.read_bytes()[:-1])
    assert fed.try_to_close() is None
    assert fed.rounds.pending("b") is not None
    fed.answer("b")
    assert fed.try_to_close().round == 1


def test_a_member_that_is_damaged_after_it_was_verified_is_not_averaged(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.rounds.receive()
    delta = next((fed.rounds.at(0) / "members" / "b").glob("delta*"))
    delta.write_bytes(b"x" * delta.stat().st_size)
    assert fed.try_to_close() is None
    assert fed.rounds.pending("b") is not None


@pytest.mark.parametrize("name", ["b/member.json", "b.json"])
def test_damage_to_what_is_stored_about_a_member_refuses_it(federation, name):
    """One `Rounds` is used throughout, as by a running coordinator."""
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.rounds.receive()
    (fed.rounds.at(0) / "members" / name).write_text("{")
    assert set(fed.rounds.members(0)) == {"a"}, "`fed status` leaves it out"
    rounds = fed.rounds
    assert rounds.try_to_close(fed.sites) is None
    assert "is damaged" in rounds.refusals(0, "b")[0].reason and rounds.pending("b") is not None
    fed.answer("b")
    assert rounds.try_to_close(fed.sites).round == 1
    (rounds.at(0) / "members" / name).write_text("{")
    fed.rounds.receive()
    assert len(rounds.refusals(0)) == 1, "it is part of a global model already"


def test_a_member_that_is_sent_again_is_compared_with_its_own_manifest(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    rounds = fed.rounds
    fed.answer("a"), fed.answer("b")
    rounds.receive(), rounds.members(0)
    delta = next((rounds.at(0) / "members" / "b").glob("delta*"))
    delta.write_bytes(b"x" * delta.stat().st_size)
    assert rounds.try_to_close(fed.sites) is None
    fed.answer("b", state=moved(STATE, 7))
    assert rounds.try_to_close(fed.sites).round == 1


def test_the_same_steps_are_never_counted_twice(federation):
    fed = federation("ab", mode="synchronous")
    for _ in range(2):
        fed.assign()
        fed.answer("a"), fed.answer("b")
        fed.try_to_close()
    fed.ask("a")
    path = fed.rounds.inbox("a", 2)
    path.parent.mkdir(parents=True)
    member(fed.rounds.model(2), moved(STATE, 5), path, "a", "bf16", number=1)
    # the member claims round 2 with the steps of round 1
    write_manifest(path, read_manifest(path, MemberManifest).model_copy(update={"round": 2}))
    fed.rounds.receive()
    assert "were counted in round 1" in fed.rounds.refusals(2)[0].reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec", "zip"),
        ("tokens", "5"),
        ("tokens", -5),
        ("tokens", 1e3),
        ("round", "x"),
        ("round", -1),
        ("step", None),
        ("seconds", "long"),
        ("files", ["delta.safetensors"]),
        ("train_loss", "NaN"),
        ("format", "1"),
        ("surprise", 1),
    ],
)
def test_a_signed_manifest_with_bad_values_is_the_refusal_of_that_member(federation, field, value):
    """Whatever a site signs, the coordinator goes on and every later start does."""
    fed = federation(quorum=2)
    fed.assign()
    path = fed.answer("b")
    content = json.loads((path / "member.json").read_text()) | {field: value}
    del content["sha256"]
    (path / "member.json").write_text(json.dumps(content | {"sha256": sha256_of_json(content)}))
    fed.answer("a"), fed.answer("c")
    assert fed.try_to_close().round == 1
    assert accepted(fed, 0) == [("a", 0), ("c", 0)]
    assert field in fed.rounds.refusals(0)[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 9000}, "claims 9,000 tokens in 10 steps, not 10 steps of 1,000 tokens"),
        ({"tokens": 9000, "step": 90}, "claims 9,000 tokens in 90 steps"),
        ({"base": "0" * 64}, "another model"),
    ],
)
def test_a_member_that_differs_from_its_assignment_is_refused(federation, change, reason):
    """More tokens than were asked for would raise its weight and hide an outlier."""
    fed = federation(quorum=2)
    fed.assign()
    path = fed.answer("b")
    write_manifest(path, read_manifest(path, MemberManifest).model_copy(update=change))
    fed.answer("a"), fed.answer("c")
    fed.try_to_close()
    assert accepted(fed, 0) == [("a", 0), ("c", 0)]
    assert reason in fed.rounds.refusals(0)[0].reason


def test_a_member_with_fewer_steps_than_asked_counts_its_own_tokens(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    path = fed.answer("a")
    short = read_manifest(path, MemberManifest).model_copy(update={"step": 5, "tokens": 500})
    write_manifest(path, short)
    fed.answer("b")
    fed.try_to_close()
    assert [each.weight for each in fed.rounds.closed(0).accepted] == [500, 1000]


def test_a_member_that_nobody_asked_for_is_refused(federation):
    fed = federation(quorum=1)
    fed.assign("a")
    fed.answer("a"), fed.answer("b")
    fed.try_to_close()
    assert accepted(fed, 0) == [("a", 0)] and "was not asked for" in fed.rounds.refusals(0)[0].reason


def test_every_refusal_of_a_site_is_kept(federation):
    """One without a member, as of a site that failed, has a name of its own too."""
    fed = federation("ab", mode="synchronous")
    fed.assign()
    for _ in range(2):
        next(fed.answer("b").glob("delta*")).write_bytes(b"cut")
        fed.rounds.receive()
    fed.rounds.give_up("b", "b failed 4 times")
    reasons = [each.reason for each in fed.rounds.refusals(0, "b")]
    assert len(reasons) == 3 and reasons[-1] == "b failed 4 times"


def test_a_member_that_is_damaged_every_time_is_not_asked_for_for_ever(federation):
    fed = federation("ab", mode="synchronous", retries=2)
    fed.assign()
    fed.answer("a")
    for _ in range(3):
        assert fed.rounds.pending("b") is not None
        next(fed.answer("b").glob("delta*")).write_bytes(b"cut")
        fed.rounds.receive()
    with pytest.raises(UserError, match="missing: b"):
        fed.try_to_close()


def test_a_member_that_arrives_twice_is_received_once(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    for _ in range(2):
        fed.answer("a")
        fed.rounds.receive()
    fed.answer("b")
    assert fed.try_to_close().round == 1
    assert fed.rounds.refusals(0) == [] and open_global(fed.rounds.model(1)).tokens == 2000


def test_a_deadline_stops_the_federation_and_names_who_is_missing(federation):
    fed = federation(mode="synchronous", deadline="1h")
    fed.assign()
    fed.answer("a")
    fed.try_to_close()
    fed.clock.now += 3601
    with pytest.raises(UserError, match="missing: b, c"):
        fed.try_to_close()


def test_a_site_that_was_given_up_is_not_waited_for(federation):
    fed = federation(quorum=2)
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.rounds.give_up("c", "c failed 4 times")
    assert fed.try_to_close().round == 1


def test_sites_join_and_leave_between_rounds(federation):
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a"), fed.answer("b")
    fed.try_to_close()
    fed.sites = ["b", "c"]
    fed.assign()
    fed.answer("b"), fed.answer("c")
    assert fed.try_to_close().round == 2
    assert accepted(fed, 1) == [("b", 1), ("c", 1)]


def test_a_coordinator_killed_between_any_two_writes_reaches_the_same_model(federation, tmp_path):
    """A kill leaves a prefix of the atomic writes; a new coordinator continues each of them."""
    fed = federation("ab", mode="synchronous")
    fed.assign()
    fed.answer("a"), fed.answer("b")
    before = tmp_path / "before"
    shutil.copytree(fed.folder, before)
    expected = fed.try_to_close().model

    def killed_after(*work):
        shutil.rmtree(fed.folder)
        shutil.copytree(before, fed.folder)
        for each in work:
            each()
        return fed.try_to_close().model

    def receive_one():
        member_file = fed.rounds.at(0) / "members" / "a.json"
        member_file.parent.mkdir(parents=True, exist_ok=True)
        member_file.write_text('{"norm": 1.0, "at": 0.0}')

    assert killed_after(receive_one) == expected
    assert killed_after(fed.rounds.receive) == expected
    closed = [fed.rounds.receive, lambda: fed.rounds.close(fed.sites)]
    assert killed_after(*closed) == expected
    half = fed.rounds.at(1) / ".global.killed.making"
    assert killed_after(*closed, lambda: half.mkdir(parents=True)) == expected


def test_a_replay_of_the_accepted_members_gives_the_same_bits(federation, tmp_path):
    fed = federation(quorum=2)
    fed.assign()
    for number in range(3):
        for site in "abc"[: 2 + number % 2]:
            if fed.rounds.pending(site) and fed.rounds.pending(site).round == number:
                fed.answer(site)
        if number == 1:
            fed.answer("c", number=0)
        fed.rounds.receive()
        fed.clock.now += 10_000
        assert fed.try_to_close()
        for site in "abc":
            if fed.rounds.pending(site) is None:
                fed.assign(site)
    base = fed.rounds.model(0)
    for closed in fed.rounds.history():
        target = tmp_path / f"replayed-{closed.round}"
        made = fed.rounds.replayed(closed, target, base)
        assert made.model == open_global(fed.rounds.model(closed.round + 1)).model
        base = target
    assert len(fed.rounds.history()) == 3


def test_tokens_follow_speed_and_queue_time():
    nominal = {"fast": 1000, "slow": 1000, "new": 1000}
    found = balanced_tokens(nominal, {"fast": 30.0, "slow": 10.0}, {})
    assert found == {"fast": 1500, "slow": 500, "new": 1000}
    queued = balanced_tokens(nominal, {"fast": 10.0, "slow": 10.0}, {"fast": 0.0, "slow": 100.0})
    assert queued["fast"] / 10 == pytest.approx(100 + queued["slow"] / 10)
    assert sum(queued[site] for site in ("fast", "slow")) == 2000


def test_no_site_gets_less_than_an_eighth_or_more_than_eight_times_its_tokens():
    found = balanced_tokens({"a": 800, "b": 800}, {"a": 1.0, "b": 1e6}, {})
    assert found == {"a": 100, "b": 1600}
