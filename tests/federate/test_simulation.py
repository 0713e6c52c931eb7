"""64 sites with random failures, stragglers, joins and leaves: every token is accounted for, to the bit."""

import random

import pytest

from arriero.federate.members import open_global
from federate.models import member, moved
from federate.test_rounds import STATE, Federation

SITES = [f"s{i:02d}" for i in range(64)]


class Site:
    """A simulated site: it trains at its own speed, and each attempt may fail."""

    def __init__(self, name, dice):
        self.name, self.speed, self.step = name, dice.choice([1, 1, 1, 2, 8]), 0
        self.order, self.done_at = None, 0.0
        self.published = 0


@pytest.mark.parametrize("mode", ["quorum", "asynchronous"])
def test_every_token_of_64_unreliable_sites_is_accounted_for(tmp_path, mode):
    dice = random.Random(7)
    fed = Federation(tmp_path / "fed", SITES[:48], mode=mode, quorum=0.5, max_staleness=2, outlier=False)
    sites, waiting = {name: Site(name, dice) for name in fed.sites}, SITES[48:]
    published, models = {}, 6
    rounds = fed.rounds
    while rounds.number < models:
        fed.clock.now += 1.0
        for name in list(fed.sites):
            site = sites[name]
            pending = rounds.pending(name)
            if pending is None and name not in rounds.assignments(rounds.number):
                pending = fed.ask(name, dice.randrange(500, 1500), "int8")
            if pending is None or dice.random() < 0.05:
                continue
            if site.order != pending:
                site.order, site.done_at = pending, fed.clock.now + site.speed * dice.uniform(2, 4)
            elif fed.clock.now >= site.done_at and (name, pending.round) not in published:
                publish(rounds, site, pending, dice, published)
        if dice.random() < 0.3 and waiting:
            fed.sites.append(waiting.pop())
            sites[fed.sites[-1]] = Site(fed.sites[-1], dice)
        if dice.random() < 0.1 and len(fed.sites) > 32:
            fed.sites.remove(dice.choice(fed.sites))
        rounds.try_to_close(fed.sites)
    check_accounts(rounds, published)
    base = rounds.model(0)
    for closed in rounds.history():
        made = rounds.replayed(closed, tmp_path / f"replayed-{closed.round}", base)
        assert made.model == open_global(rounds.model(closed.round + 1)).model
        base = tmp_path / f"replayed-{closed.round}"


def publish(rounds, site, order, dice, published):
    tokens = order.tokens
    path = rounds.inbox(site.name, order.round)
    path.parent.mkdir(parents=True, exist_ok=True)
    member(
        rounds.model(order.round),
        moved(STATE, dice.randrange(10**6)),
        path,
        site.name,
        "int8",
        tokens,
        order.round,
    )
    if dice.random() < 0.05:
        next(path.glob("delta*")).write_bytes(b"cut")
        return
    published[site.name, order.round] = tokens


def check_accounts(rounds, published):
    """Accepted, discarded, waiting and refused members are disjoint, and together all that were published."""
    accepted = [(each.site, each.round, each.tokens) for c in rounds.history() for each in c.accepted]
    assert len({key[:2] for key in accepted}) == len(accepted), "a member was counted twice"
    assert all(published[site, number] == tokens for site, number, tokens in accepted)
    lost = [(each.site, each.round, each.tokens) for c in rounds.history() for each in c.discarded]
    on_time, late, dropped = rounds.candidates()
    waiting = [(*m.key, m.manifest.tokens) for m in [*on_time, *late, *dropped]]
    refused = {
        (each.site, each.round) for n in range(rounds.number + 1) for each in rounds.refusals(n) if each.final
    }
    unread = {
        (path.name, n) for n in range(rounds.number + 1) for path in (rounds.at(n) / "inbox").glob("s*")
    }
    known = {key[:2] for key in [*accepted, *lost, *waiting]} | (refused & published.keys()) | unread
    assert known >= published.keys()
    assert sum(tokens for *_, tokens in accepted) == open_global(rounds.model(rounds.number)).tokens
