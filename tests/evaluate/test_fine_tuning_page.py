"""The commands of docs/fine-tuning.md run from top to bottom."""

import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
BLOCKS = re.findall(r"(?:([^\n]*)\n)?```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page_run(command, trained, tmp_path):
    """Files are written where the sentence before a block names them; the model is a tiny one."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(trained.run)
    commands = 0
    for before, kind, text in BLOCKS:
        if kind != "bash":
            (tmp_path / re.findall(r"`([\w.]+)`", before)[-1]).write_text(text)
            continue
        for line in text.strip().splitlines():
            arguments = shlex.split(line)[1:]
            if arguments[0] == "train":
                arguments += ["--nproc", "1", "--set", "run.device=cpu", "--set", "observe.tensorboard=false"]
            if arguments[:2] == ["eval", "perplexity"]:
                arguments += ["--nproc", "1", "--set", "run.device=cpu"]
            result = command(*arguments)
            assert result.returncode == 0, f"{line}\n{result.stderr}"
            commands += 1
    assert commands > 5
