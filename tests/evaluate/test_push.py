"""`arriero ckpt push` sends a model and its card to a hub, and nothing else."""

import base64
import hashlib
import json
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arriero.checkpoint.scores import attach_evaluation


class _Hub(BaseHTTPRequestHandler):
    """The endpoints of the hub that huggingface_hub calls to make a repository and a commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        raw, hub = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.server.hub
        hub["calls"].append(self.path.split("?")[0])
        hub["tokens"].add(self.headers.get("Authorization"))
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            hub["repository"] = json.loads(raw)
            return self.answer({"url": f"{hub['url']}/me/tiny", "id": "me/tiny"})
        if self.path.startswith("/api/models/me/tiny/preupload/"):
            files = json.loads(raw)["files"]
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"  # noqa: E731
            listed = [
                {"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files
            ]
            return self.answer({"files": listed})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub['url']}/lfs/{each['oid']}"}}}
                for each in json.loads(raw)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if self.path.startswith("/api/models/me/tiny/commit/"):
            for line in raw.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub["files"][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub["files"][value["path"]] = hub["objects"][value["oid"]]
            return self.answer(
                {"commitUrl": f"{hub['url']}/me/tiny/commit/1", "commitOid": "1", "success": True}
            )
        return self.answer({})

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        self.server.hub["objects"][self.path.rpartition("/")[2]] = content
        self.answer({})

    def do_GET(self):
        self.answer({"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    server.hub = {"url": url, "calls": [], "tokens": set(), "files": {}, "objects": {}}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(monkeypatch):
    with hub_server() as found:
        monkeypatch.setenv("HF_ENDPOINT", found["url"])
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.setenv(name, "0")
        yield found


@pytest.fixture
def run(trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "secret-folder" / "tiny")
    score = {"perplexity /secret-folder/heldout": 12.5, "hellaswag acc": 0.25}
    attach_evaluation(run / "checkpoints" / "step-00000012", "perplexity", score, {}, {})
    return run


def test_a_run_is_pushed_with_its_card_and_loads_in_transformers(forked_arriero, run, hub, tmp_path):
    # huggingface_hub reads its environment when it is imported
    result = forked_arriero(
        "ckpt", "push", run, "hf://me/tiny", "--private", "--license", "mit", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert f"{hub['url']}/me/tiny/commit/1" in result.stdout
    made = hub["repository"]
    assert made["name"] == "tiny"
    assert made.get("private") or made.get("visibility") == "private"
    model = run / "model"
    expected = {path.name for path in model.iterdir()} - {"training.json"} | {"README.md"}
    assert hub["files"].keys() == expected
    for name, content in hub["files"].items():
        assert name == "README.md" or content == (model / name).read_bytes()
        assert b"secret-folder" not in content
    card = hub["files"]["README.md"].decode()
    for text in (
        'license: "mit"',
        "12,288",
        "| validation loss |",
        "stdlib",
        "| 100.0% |",
        "| 12.5 |",
        "hellaswag acc",
    ):
        assert text in card
    for name, content in hub["files"].items():
        (tmp_path / "back").mkdir(exist_ok=True)
        (tmp_path / "back" / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert loaded.num_parameters() > 100_000


def test_a_checkpoint_is_converted_and_its_optimizer_state_stays(forked_arriero, run, hub, tmp_path):
    checkpoint = run / "checkpoints" / "step-00000006"
    result = forked_arriero(
        "ckpt", "push", checkpoint, "hf://me/tiny", "--dtype", "bf16", "--json", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["files"].keys() == hub["files"].keys()
    weights = (run / "model" / "model.safetensors").stat().st_size
    assert 0.45 * weights < len(hub["files"]["model.safetensors"]) < 0.55 * weights
    assert "| optimizer steps | 6 |" in found["card"]


@pytest.mark.parametrize(
    ("base", "shown"),
    [("hf://me/base", 'base_model: "me/base"'), ("/secret-folder/tiny/model", "| initial weights | tiny |")],
)
def test_the_card_of_a_fine_tuned_model_names_the_initial_weights(command, run, base, shown):
    about = json.loads((run / "model" / "training.json").read_text())
    about["config"] = about["config"].replace("[checkpoint]", f'[checkpoint]\nstart_from = "{base}"')
    (run / "model" / "training.json").write_text(json.dumps(about))
    result = command("ckpt", "push", run, "hf://me/tiny", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout and "secret-folder" not in result.stdout


def test_a_dry_run_sends_nothing(command, run, hub):
    result = command("ckpt", "push", run, "hf://me/tiny", "--dry-run")
    assert result.returncode == 0
    for text in ("model.safetensors", "# tiny", "nothing was sent"):
        assert text in result.stdout
    assert hub["calls"] == []


def test_weights_that_are_not_safetensors_are_converted(command, run):
    model = run / "model"
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    result = command("ckpt", "push", model, "hf://me/tiny", "--dry-run", "--json")
    files = json.loads(result.stdout)["files"]
    assert "model.safetensors" in files and "tokenizer.json" in files


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model/training.json", "{"),
        ("model/training.json", "{}"),
        ("model/training.json", '{"config": "", "data": {"names": [], "fingerprint": ""}, "step": "x"}'),
        ("checkpoints/step-00000012/state.json", "[]"),
        ("checkpoints/step-00000012/ledger.json", '{"sources": [1]}'),
    ],
)
def test_a_damaged_record_of_the_training_is_explained(command, run, tmp_path, file, content):
    (run / file).write_text(content)
    push = ["ckpt", "push", (run / file).parent, "hf://me/tiny", "--dry-run"]
    result = command(*push)
    assert result.returncode == 2
    assert "damaged" in result.stderr and "Traceback" not in result.stderr
    if "model" in file:
        (tmp_path / "card.md").write_text("my card")
        assert "my card" in command(*push, "--card", tmp_path / "card.md").stdout
        (tmp_path / "card.md").write_bytes(b"\xff")
        assert "give a text file in UTF-8" in command(*push, "--card", tmp_path / "card.md").stderr


def test_a_refusal_of_the_hub_and_a_wrong_name_are_explained(
    forked_arriero, command, run, hub, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    result = forked_arriero("ckpt", "push", run, "hf://me/tiny", cwd=tmp_path)
    assert result.returncode == 2
    assert "hf auth login" in result.stderr
    assert hub["files"] == {}
    for name in ("me/tiny", "hf://tiny", "hf://a/b/c"):
        assert "write it like hf://OWNER/NAME" in command("ckpt", "push", run, name).stderr
