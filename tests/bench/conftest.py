import sys
import time

import pytest

from arriero import cli
from arriero.bench.measure import StepCounts
from arriero.bench.result import StepResult
from arriero.bench.step import benchmark
from arriero.config.load import load_run
from arriero.model.presets import expand

TINY = {
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "data.seq_len": 64,
    "train.batch": "512 tok",
    "run.device": "cpu",
}


@pytest.fixture
def bench(synthetic_cache, tmp_path, monkeypatch, capsys):
    """`arriero bench step` of a tiny model, in this process: what is patched here is patched in it."""

    def run(*arguments, nproc=1, **sets):
        keys = TINY | {"data.cache": str(synthetic_cache)} | sets
        written = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        options = ["--steps", "4", "--warmup", "2", "--nproc", str(nproc), "--json", "result.json"]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("sys.argv", ["arriero", "bench", "step", *written, *options, *arguments])
        code = cli.app(sys.argv[1:], standalone_mode=False)
        return code or 0, capsys.readouterr().out, tmp_path / "result.json"

    return run


@pytest.fixture(scope="session")
def measured(tmp_path_factory, synthetic_cache):
    """The result of one real benchmark, as it was written."""
    path = tmp_path_factory.mktemp("measured") / "tiny.json"
    keys = TINY | {"data.cache": str(synthetic_cache), "data.sources": "[{path='builtin:synthetic'}]"}
    config = load_run(None, [f"{key}={value}" for key, value in keys.items()], expand).config
    found = benchmark(config, "tiny", StepCounts(1, 4, 3, time.time()), 1, True, None, lambda _: None)
    assert isinstance(found, StepResult)
    found.write(path)
    return path
