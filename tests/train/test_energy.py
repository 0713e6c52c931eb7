"""Energy of a run: the meters of the devices, added up over laps, ranks and restarts."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import arriero
from arriero.train import energy
from arriero.train.energy import Counter, EnergyCounter, rapl_counters
from arriero.train.hooks import Hook
from launch.spoiled import BAD, SpoilBatch
from train.test_lora import SMALL

PCI = {"pci_domain_id": 0, "pci_bus_id": 3, "pci_device_id": 0}
AMDSMI = """
import os
def amdsmi_init():
    pass
def amdsmi_get_processor_handles():
    return [{}["handles"]] if os.environ["FAILS"] == "handles" else [1]
def amdsmi_get_gpu_device_bdf(handle):
    return "0000:03:00.0"
def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": 5}
"""


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


@pytest.mark.parametrize("fails", ["import", "properties", "handles", "count"])
def test_a_meter_of_amd_that_fails_gives_no_number(fails, tmp_path, monkeypatch):
    """The library may be missing, of another version, or without its driver."""
    (tmp_path / "amdsmi.py").write_text("raise OSError('libamd_smi.so')" if fails == "import" else AMDSMI)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setenv("FAILS", fails)
    about = SimpleNamespace() if fails == "properties" else SimpleNamespace(**PCI)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: about)
    monkeypatch.setattr("torch.version.hip", "7.0")
    device = SimpleNamespace(is_gpu=True, torch_device=torch.device("cuda"))
    meter = energy.energy_counter(device, SimpleNamespace(local_rank=0))
    assert meter.since_last() is None
    sys.modules.pop("amdsmi", None)


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


def test_energy_of_steps_that_are_rolled_back_or_lost_stays_counted(package, corpus_cache, tmp_path):
    own = {"run.dir": str(tmp_path), "run.name": "metered", "data.cache": str(corpus_cache)}
    own |= {"checkpoint.export": False, "checkpoint.every": "4 steps", "guard.nonfinite": "rollback"}
    config = arriero.load_config(None, SMALL | own | {"train.horizon": f"{BAD + 1} steps"})
    package.write_text("5000000")
    arriero.run(config, hooks=[Load(package), SpoilBatch()])
    # the bad step and those after the checkpoint before it were taken twice
    taken = BAD + 1 + BAD % 4

    def energy_of_last():
        lines = (tmp_path / "metered" / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["energy_kwh"]

    assert energy_of_last() == pytest.approx(taken * 0.0005)
    # lost with the newest checkpoint
    shutil.rmtree(max((tmp_path / "metered" / "checkpoints").iterdir()))
    package.write_text("5000000")
    arriero.run(config, hooks=[Load(package)])
    repeated = (BAD + 1) % 4 or 4
    assert energy_of_last() == pytest.approx((taken + repeated) * 0.0005)
