import json
from pathlib import Path

import pytest

from arriero.errors import UserError
from benchmarks.data.preparing import bare_encode_speed, bare_file_encode_speed, prepare_speed


def test_prepare_and_the_bare_encoder_are_measured_on_the_same_text(
    tmp_path, tokenizer_file, real_texts, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in real_texts))
    speeds = [
        measure([path], tokenizer_file, "body")
        for measure in (bare_encode_speed, bare_file_encode_speed, prepare_speed)
    ]
    assert {speed.mb for speed in speeds} == {path.stat().st_size / 1e6}
    assert all(speed.cpu_s > 0 for speed in speeds)
    bare, files, prepared = (speed.tokens for speed in speeds)
    assert bare == files == prepared - len(real_texts)
    with pytest.raises(UserError, match="no column 'text'"):
        prepare_speed([path], tokenizer_file)
