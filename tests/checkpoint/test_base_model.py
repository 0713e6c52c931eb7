"""The record of a speculator's base model: found on each node, compared without reading it again."""

import json
import os

import pytest

from arriero.checkpoint import base_model
from arriero.checkpoint.base_model import describe_base, find_base
from arriero.errors import UserError


@pytest.fixture
def stored(tmp_path):
    """A model in a cache, and the checkpoint of a speculator for it; return both directories."""
    model, saved = tmp_path / "cache" / "model", tmp_path / "run" / "checkpoints" / "step-00000001"
    for folder in (model, saved):
        folder.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (saved / "base.json").write_text(json.dumps(describe_base(model, "hf://owner/model")))
    return model, saved


def test_unchanged_files_are_not_read_again_and_changed_times_are_no_change(stored, tmp_path, monkeypatch):
    model, saved = stored
    with monkeypatch.context() as unread:
        unread.setattr(base_model, "sha256_of_file", lambda _: pytest.fail("the model was read"))
        assert find_base(saved)["path"] == str(model)
    os.utime(model / "model.safetensors", (1, 1))
    assert find_base(saved)["path"] == str(model)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(UserError, match="is not the one"):
        find_base(saved)
    model.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"does not exist .*cannot load hf://owner/model"):
        find_base(saved)


def test_a_node_with_its_own_cache_resolves_the_configured_name(stored, tmp_path, monkeypatch):
    model, saved = stored
    own = tmp_path / "other" / "snapshot"
    own.parent.mkdir()
    model.rename(own)
    monkeypatch.setattr(base_model, "local_model", {"hf://owner/model": own}.__getitem__)
    assert find_base(saved)["path"] == find_base(saved, checked=False)["path"] == str(own)
    (own / "model.safetensors").write_bytes(b"another revision")
    with pytest.raises(UserError, match=r"does not exist .*snapshot holds another model"):
        find_base(saved)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"path": 1, "sha256": "a"}', '{"path": "/x"}'])
def test_a_damaged_record_is_an_error_of_the_user(stored, content):
    (stored[1] / "base.json").write_text(content)
    with pytest.raises(UserError, match=r"base\.json"):
        find_base(stored[1])
