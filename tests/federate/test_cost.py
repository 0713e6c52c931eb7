"""`arriero fed plan`: arithmetic that can be checked by hand, and the table of the documentation."""

import json
from pathlib import Path

import pytest

from arriero.federate.cost import RoundCost, parse_rate
from benchmarks.federation_costs import documented
from federate.test_file import SITES

RUN = """
[model]
preset = "llama-test"
[data]
seq_len = 32
sources = ["builtin:stdlib"]
[train]
batch = "1024 tok"
"""


def test_a_round_of_an_8b_model_over_one_gigabit():
    cost = RoundCost(8_000_000_000, 2, 1e9, "bf16", step_s=10.0, steps=100)
    assert cost.bytes == 2 * 8e9 * (2 + 4)
    assert cost.transfer_s == 768
    assert cost.share == 768 / (768 + 1000)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("codec", ["bf16", "int8", "fp32"])
def test_the_smallest_h_is_the_first_that_stays_under_five_percent(codec, overlaps):
    def cost(steps):
        return RoundCost(70_000_000_000, 8, 1e10, codec, 7.0, steps, overlaps)

    least = cost(1).least_steps
    assert cost(least).share <= 0.05 < cost(least - 1).share


def test_the_documented_table_is_current():
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    assert "\n".join(documented()) in page


def test_fed_plan_computes_a_file(tmp_path, command):
    (tmp_path / "a.toml").write_text(RUN)
    (tmp_path / "fed.toml").write_text("[federation]\ntokens = '50 steps'\n" + SITES)
    done = command("fed", "plan", "fed.toml", "--tokens-per-s", "1024", "--bandwidth", "8 Mbit/s", "--json")
    facts = json.loads(done.stdout)
    assert facts["steps"] == 50 and facts["step_s"] == 1.0
    bf16 = facts["costs"]["bf16"]
    assert bf16["transfer_s"] == pytest.approx(facts["parameters"] * 6 / 1e6)
    shown = command("fed", "plan", "fed.toml", "--tokens-per-s", "1024")
    assert shown.returncode == 0 and "smallest H" in shown.stdout
    with (tmp_path / "fed.toml").open("a") as file:
        file.write("bandwidth = '4 Mbit/s'\n[[sites]]\nname = 'b'\nrun_file = 'a.toml'\n")
    words = ("fed", "plan", "fed.toml", "--tokens-per-s", "1024", "--json")
    assert json.loads(command(*words).stdout)["bits_per_s"] == 8e6, "site a is the slowest link"
    assert json.loads(command(*words, "--bandwidth", "2 Mbit/s").stdout)["bits_per_s"] == 2e6
    unknown = command("fed", "plan", "fed.toml")
    assert unknown.returncode == 2 and "--tokens-per-s" in unknown.stderr


def test_a_bandwidth_without_a_unit_is_an_error():
    assert parse_rate("10 Gbit/s") == 1e10
    with pytest.raises(Exception, match="not a bandwidth"):
        parse_rate("10")
