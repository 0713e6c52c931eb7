"""Energy of a run: the meters of the devices, added up over laps, ranks and restarts."""

import json

import pytest

import arriero
from arriero.train import energy
from arriero.train.energy import Counter, EnergyCounter, rapl_counters
from arriero.train.hooks import Hook
from train.test_lora import SMALL


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The meter of one CPU package, as Linux shows it, with a part that must not be counted twice."""
    folder = tmp_path / "powercap"
    for name in ("intel-rapl:0", "intel-rapl:0:0"):
        (folder / name).mkdir(parents=True)
        (folder / name / "energy_uj").write_text("5000000")
        (folder / name / "max_energy_range_uj").write_text("9000000")
    monkeypatch.setattr(energy, "RAPL", folder)
    return folder / "intel-rapl:0" / "energy_uj"


def test_a_meter_that_starts_again_from_zero_is_unwrapped(package):
    (counter,) = rapl_counters()
    meter = EnergyCounter([counter])
    package.write_text("8000000")
    assert meter.since_last() == pytest.approx(3)
    package.write_text("1000000")
    assert meter.since_last() == pytest.approx(2)
    assert meter.since_last() == 0


def test_a_missing_meter_gives_no_number(package):
    package.chmod(0)
    package.unlink()
    assert rapl_counters() == []
    assert EnergyCounter(None).since_last() is None
    assert EnergyCounter([Counter(lambda: None)]).since_last() is None
    assert EnergyCounter([]).since_last() == 0


class Load(Hook):
    """Uses 1,800 joules per step."""

    def __init__(self, file):
        self.file, self.joules = file, 5

    def on_step(self, session, step, tokens):
        self.joules += 1800
        self.file.write_text(str(self.joules * 10**6))


def test_a_run_reports_its_energy_and_a_resumed_one_adds_up(package, corpus_cache, tmp_path):
    def train(horizon):
        own = {"run.dir": str(tmp_path), "run.name": "metered", "data.cache": str(corpus_cache)}
        config = arriero.load_config(
            None, SMALL | own | {"train.horizon": horizon, "checkpoint.export": False}
        )
        package.write_text("5000000")
        arriero.run(config, hooks=[Load(package)])
        return [
            json.loads(line) for line in (tmp_path / "metered" / "metrics.jsonl").read_text().splitlines()
        ]

    lines = train("2 steps")
    assert [line["energy_kwh"] for line in lines] == pytest.approx([0.0005, 0.001])
    assert [line["joules_per_token"] for line in lines] == pytest.approx([1800 / 512] * 2)
    assert [line["energy_kwh"] for line in train("4 steps")[2:]] == pytest.approx([0.0015, 0.002])
