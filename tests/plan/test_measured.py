"""Measured times are read as plain data and interpolated between shapes."""

import json
import subprocess
import sys

import pytest

from arriero.errors import UserError
from arriero.plan.measured import (
    CollectiveTime,
    Measured,
    MeasuredFile,
    OpTime,
    Spread,
    cached_measurements,
    read_measured,
)


def spread(seconds):
    return Spread(median=seconds, low=seconds * 0.9, high=seconds * 1.1, runs=5)


def linear(tokens, inputs, outputs, rate):
    seconds = 2 * tokens * inputs * outputs / rate
    shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
    return OpTime(
        op="linear", precision="bf16", shape=shape, forward=spread(seconds), backward=spread(2 * seconds)
    )


def collective(name, size, seconds, ranks=8, nodes=1):
    return CollectiveTime(collective=name, ranks=ranks, nodes=nodes, bytes=size, seconds=spread(seconds))


def test_a_measured_shape_is_returned_unchanged():
    measured = Measured("gpu", [linear(2048, 64, 128, 1e12), linear(8192, 64, 128, 4e12)])
    found = measured.op("linear", "bf16", tokens=8192, inputs=64, outputs=128)
    assert found.forward == pytest.approx(2 * 8192 * 64 * 128 / 4e12)
    assert found.backward == pytest.approx(2 * found.forward)
    assert found.distance == pytest.approx(0, abs=1e-6)


def test_the_rate_between_two_sizes_is_between_their_rates():
    measured = Measured("gpu", [linear(2048, 64, 128, 1e12), linear(8192, 64, 128, 4e12)])
    found = measured.op("linear", "bf16", tokens=4096, inputs=64, outputs=128)
    assert 2 * 4096 * 64 * 128 / found.forward == pytest.approx(2e12)
    assert found.distance > 0.5


@pytest.mark.parametrize("tokens", [512, 100_000])
def test_outside_the_measured_sizes_the_nearest_rate_holds(tokens):
    measured = Measured("gpu", [linear(2048, 64, 128, 1e12), linear(8192, 64, 128, 4e12)])
    found = measured.op("linear", "bf16", tokens=tokens, inputs=64, outputs=128)
    nearest = 1e12 if tokens == 512 else 4e12
    assert 2 * tokens * 64 * 128 / found.forward == pytest.approx(nearest)


def test_another_width_is_blended_from_its_neighbours():
    measured = Measured(
        "gpu", [linear(8192, 4096, width, rate) for width, rate in ((4096, 6e14), (16384, 7e14))]
    )
    found = measured.op("linear", "bf16", tokens=8192, inputs=4096, outputs=8192)
    assert 6e14 < 2 * 8192 * 4096 * 8192 / found.forward < 7e14


def test_what_was_not_measured_is_none():
    measured = Measured("gpu", [linear(2048, 64, 128, 1e12)])
    assert measured.op("linear", "fp32", tokens=2048, inputs=64, outputs=128) is None
    assert measured.op("norm", "bf16", tokens=2048, width=64) is None
    assert measured.collective("all_gather", 1e6, 8) is None


def test_attention_grows_with_the_square_of_the_sequence():
    shape = {"batch": 1, "seq_len": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
    row = OpTime(op="attention", precision="bf16", shape=shape, forward=spread(1e-3), backward=spread(3e-3))
    found = Measured("gpu", [row]).op("attention", "bf16", **{**shape, "seq_len": 32768})
    assert found.forward == pytest.approx(16e-3)
    assert found.backward == pytest.approx(48e-3)


def test_a_collective_has_a_latency_and_a_bandwidth():
    rows = [collective("all_gather", 1 << 20, 1e-4), collective("all_gather", 1 << 29, 2e-3)]
    measured = Measured("gpu", collectives=rows)
    assert measured.collective("all_gather", 1000, 8) == pytest.approx(1e-4)
    assert measured.collective("all_gather", 1 << 30, 8) == pytest.approx(4e-3)
    assert 1e-4 < measured.collective("all_gather", 1 << 25, 8) < 2e-3


def test_groups_inside_a_node_say_nothing_about_groups_over_nodes():
    measured = Measured("gpu", collectives=[collective("all_gather", 1 << 20, 1e-4)])
    assert measured.collective("all_gather", 1 << 20, 16, nodes=2) is None


def test_a_larger_group_takes_longer():
    rows = [collective(name, 1 << 24, 1e-3, ranks=16, nodes=2) for name in ("all_gather", "all_reduce")]
    measured = Measured("gpu", collectives=rows)
    for name in ("all_gather", "all_reduce"):
        times = [measured.collective(name, 1 << 24, 8 * nodes, nodes) for nodes in (2, 4, 16)]
        assert times == sorted(times)
        assert times[0] == pytest.approx(1e-3)


def written(path, device="gpu", **changes):
    MeasuredFile(time="2026-01-01T00:00", device=device, **changes).write(path)
    return path


def test_files_of_one_device_are_joined_and_later_ones_win(tmp_path):
    old = written(tmp_path / "a.json", ops=[linear(2048, 64, 128, 1e12), linear(4096, 64, 128, 1e12)])
    new = written(tmp_path / "b.json", ops=[linear(2048, 64, 128, 2e12)], collectives=[])
    measured = read_measured([old, new])
    assert len(measured.ops) == 2
    assert measured.op("linear", "bf16", tokens=2048, inputs=64, outputs=128).forward == pytest.approx(
        2 * 2048 * 64 * 128 / 2e12, rel=1e-3
    )


def test_files_of_different_devices_are_refused(tmp_path):
    files = [written(tmp_path / f"{name}.json", name) for name in ("H100", "H200")]
    with pytest.raises(UserError, match="H100, H200"):
        read_measured(files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.update(ops=[{"op": "linear"}]), r"ops\.0\.precision"),
        (lambda data: data["ops"][0].update(op="matmul"), r"ops\.0: unknown operation 'matmul'"),
        (lambda data: data["ops"][0]["shape"].pop("inputs"), r"ops\.0: shape needs"),
        (lambda data: data["ops"][0]["forward"].update(median=-1), r"ops\.0\.forward\.median"),
        (lambda data: data.update(surprise=1), "surprise"),
    ],
)
def test_a_damaged_file_is_refused_by_key(tmp_path, damage, message):
    path = written(tmp_path / "a.json", ops=[linear(2048, 64, 128, 1e12)])
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        read_measured([path])


def test_the_cache_returns_measurements_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setenv("ARRIERO_CACHE", str(tmp_path))
    assert cached_measurements("H200") is None
    written(tmp_path / "measured" / "x.json", "H200", ops=[linear(2048, 64, 128, 1e12)])
    written(tmp_path / "measured" / "y.json", "H100")
    assert len(cached_measurements("H200").ops) == 1


@pytest.mark.parametrize("content", ["{", '{"schema_version": 2, "time": "", "device": "H200"}'])
def test_unreadable_files_of_the_cache_are_skipped_with_a_warning(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setenv("ARRIERO_CACHE", str(tmp_path))
    written(tmp_path / "measured" / "x.json", "H200", ops=[linear(2048, 64, 128, 1e12)])
    (tmp_path / "measured" / "y.json").write_text(content)
    assert len(cached_measurements("H200").ops) == 1
    assert capsys.readouterr().err.count("warning: ") == 1


def test_measured_times_are_read_without_torch(tmp_path):
    path = written(tmp_path / "a.json", ops=[linear(2048, 64, 128, 1e12)])
    code = (
        "import sys; from pathlib import Path; from arriero.plan.measured import read_measured; "
        f"assert read_measured([Path({str(path)!r})]).ops; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
