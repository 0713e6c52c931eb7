"""Lists of hosts, as Slurm writes them."""

import random

import pytest

from arriero.errors import UserError
from arriero.slurm import first_host, hosts


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n3,n7", ["n3", "n7"]),
        ("n[03-05]", ["n03", "n04", "n05"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("gpu[7,9-10],cpu1", ["gpu7", "gpu9", "gpu10", "cpu1"]),
        ("c[1-2]n[1-2]", ["c1n1", "c1n2", "c2n1", "c2n2"]),
        ("gpu[01-02]-ib", ["gpu01-ib", "gpu02-ib"]),
        ("a1,b[2-3]", ["a1", "b2", "b3"]),
    ],
)
def test_lists_of_hosts_are_expanded(nodes, names):
    assert list(hosts(nodes)) == names
    assert first_host(nodes) == names[0]


@pytest.mark.parametrize("nodes", ["n[1-2", "n[3-1]", "n[1-2]]", "n[a]", "n[]"])
def test_malformed_lists_are_errors(nodes):
    with pytest.raises(UserError, match="list of hosts"):
        list(hosts(nodes))


def random_list(rng):
    def ranges():
        chosen = []
        for _ in range(rng.randint(1, 3)):
            first = rng.randrange(10 ** rng.randint(1, 4))
            text = f"{first:0{rng.randint(1, 4)}d}"
            last = f"{first + rng.randint(0, 12):0{len(text)}d}"
            chosen.append(rng.choice([text, f"{text}-{last}"]))
        return f"[{','.join(chosen)}]"

    def item():
        name = "".join(rng.choice("abcxyz") for _ in range(rng.randint(1, 4)))
        parts = rng.randint(0, 3)
        return name + ("-n".join(ranges() for _ in range(parts)) if parts else str(rng.randrange(100)))

    return ",".join(item() for _ in range(rng.randint(1, 3)))


def test_random_lists_are_expanded_as_slurm_expands_them(slurm):
    rng = random.Random(7)
    for _ in range(50):
        nodes = random_list(rng)
        assert list(hosts(nodes)) == slurm.run("scontrol", "show", "hostnames", nodes).stdout.split(), nodes
