"""Rounds of LoRA adapters: sites train them beside a frozen base model, and only adapters are shipped."""

from dataclasses import replace

import pytest
import torch

from arriero.checkpoint.convert import find_model, open_adapter, open_model
from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import MemberManifest, open_global, read_manifest
from arriero.federate.site import run_turn
from arriero.federate.streamflow import deliver, write_turn
from arriero.model.presets import expand, load_preset
from arriero.train.run import run
from federate.models import DILOCO, first_model, outer_update, play_round

SPEC = replace(load_preset("llama-test"), vocab_size=4096)
LORA = "\n[lora]\nrank = 4\ntargets = ['blocks.*.attention.q', 'blocks.*.ffn.down']\n"


@pytest.fixture
def adapters(federate, tmp_path):
    """Write a federation of LoRA runs; each site names its own copy of the base model."""

    def write(sites, outer, bases=None):
        path = federate(sites, federation="balance = false", outer=outer)
        for site in sites:
            base = first_model(tmp_path / f"base-{site}", (bases or {}).get(site, 0), spec=SPEC)
            text = (tmp_path / f"{site}.toml").read_text()
            start = f"[checkpoint]\nstart_from = '{base}'"
            (tmp_path / f"{site}.toml").write_text(text.replace("[checkpoint]", start) + LORA)
        coordinator = Coordinator.of(path)
        coordinator.prepare()
        return coordinator

    return write


def tensors_of(path):
    adapter = open_adapter(path, SPEC)
    return {name: adapter.load(name) for name in adapter.tensors}


def checkpoint(coordinator, site, step):
    return coordinator.folder / "sites" / site / "run" / "checkpoints" / f"step-{step:08d}"


def test_one_site_with_fedavg_is_ordinary_lora_training_to_the_bit(adapters, tmp_path, command):
    coordinator = adapters("a", "optimizer = 'fedavg'\ncodec = 'fp32'")
    for _ in range(2):
        play_round(coordinator)
    result = coordinator.rounds.model(2)
    sets = ["train.horizon='8 steps'", f"run.dir='{tmp_path / 'plain'}'"]
    done = run(load_run(tmp_path / "a.toml", sets, expand).config)
    federated, ordinary = tensors_of(result), tensors_of(done.run_dir / "checkpoints" / "step-00000008")
    assert federated.keys() == ordinary.keys() and len(federated) == 4 * SPEC.layers
    assert all(torch.equal(federated[name], ordinary[name]) for name in ordinary)
    assert any(tensor.any() for name, tensor in federated.items() if name.endswith("lora_b"))

    merged = command("ckpt", "convert", result, "merged", "--to", "hf")
    assert merged.returncode == 0, merged.stderr
    plain, whole = open_model(tmp_path / "merged"), open_model(done.run_dir / "checkpoints" / "step-00000008")
    assert all(torch.equal(plain.load(name), whole.load(name)) for name in whole.tensors)
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base-a" / "global-0")
    loaded = peft.PeftModel.from_pretrained(base, result)
    found = [t for name, t in loaded.state_dict().items() if "lora_B" in name]
    assert len(found) == 2 * SPEC.layers and all(t.any() for t in found)


def test_two_sites_make_the_adapter_of_the_pure_function(adapters, tmp_path):
    coordinator = adapters("ab", "lr = 0.7\nmomentum = 0.9\ncodec = 'fp32'")
    state = {}
    for number in range(2):
        base = tensors_of(coordinator.rounds.model(number))
        assert play_round(coordinator).round == number + 1
        local = [tensors_of(checkpoint(coordinator, site, 4 * number + 4)) for site in "ab"]
        expected, state = outer_update(base, [(1024.0, each) for each in local], state, DILOCO)
        found = tensors_of(coordinator.rounds.model(number + 1))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not torch.equal(local[0][next(iter(found))], local[1][next(iter(found))])
    assert coordinator.replay(tmp_path) == [(1, True), (2, True)]
    assert open_global(coordinator.rounds.model(2)).tokens == 4 * 1024
    size = read_manifest(coordinator.rounds.at(0) / "members" / "a", MemberManifest).bytes
    assert size < 4 * 1.2 * sum(t.numel() for t in found.values()), "only the adapter is shipped"


def test_a_turn_carries_the_adapter_and_not_the_base_model(adapters, tmp_path):
    """What StreamFlow sends to a site and brings back."""
    coordinator = adapters("a", "")
    order = coordinator.assign_idle()["a"]
    write_turn(coordinator, order, tmp_path / "turn")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "turn" / "model").iterdir()}
    assert "adapter_model.safetensors" in sizes and sum(sizes.values()) < 200_000
    run_turn(tmp_path / "turn", "a", tmp_path / "work", tmp_path / "answer")
    deliver(coordinator, "a", tmp_path / "answer")
    assert coordinator.rounds.try_to_close(["a"]).round == 1


def test_sites_with_another_base_model_are_refused(adapters):
    coordinator = adapters("ab", "", bases={"b": 1})
    play_round(coordinator)
    assert [each.site for each in coordinator.rounds.closed(0).accepted] == ["a"]
    assert "b and a differ in the base model" in coordinator.rounds.refusals(0)[0].reason


def test_the_fingerprint_of_a_base_model_is_read_again_only_when_its_files_change(
    adapters, tmp_path, monkeypatch
):
    coordinator, read = adapters("a", ""), []

    def watched(path):
        source = find_model(path)
        return replace(source, load_slice=lambda name, cut: read.append(name) or source.read_slice(name, cut))

    monkeypatch.setattr("arriero.federate.site.find_model", watched)
    play_round(coordinator)
    first = len(read)
    play_round(coordinator)
    assert first > 0 and len(read) == first
    (tmp_path / "base-a" / "global-0" / "model.safetensors").touch()
    play_round(coordinator)
    assert len(read) == 2 * first
    members = [coordinator.rounds.members(number)["a"].manifest for number in range(3)]
    assert members[0].frozen and len({member.frozen for member in members}) == 1


def test_sites_with_other_adapters_are_rejected(adapters, tmp_path):
    coordinator = adapters("ab", "")
    path = tmp_path / "b.toml"
    path.write_text(path.read_text().replace("rank = 4", "rank = 2"))
    with pytest.raises(UserError, match="different adapters"):
        coordinator.prepare()


@pytest.mark.parametrize(
    "change", ["lora.alpha=99", "lora.rank=8", "lora.targets=['blocks.*.attention.k']", ""]
)
def test_a_federation_starts_only_from_the_adapter_that_its_run_files_have(adapters, tmp_path, change):
    given = adapters("a", "").rounds.model(0)
    path = tmp_path / "fed.toml"
    sets = [f"checkpoint.adapter_from='{given}'", *filter(None, [change])]
    path.write_text(path.read_text().replace("'fed'", "'next'") + f"\nset = {sets}\n")
    coordinator = Coordinator.of(path)
    if change:
        with pytest.raises(UserError, match=r"adapter_from: .* has LoRA \(rank 4, alpha 16\), and the run"):
            coordinator.prepare()
        assert not coordinator.rounds.model(0).exists()
        return
    coordinator.prepare()
    first, found = tensors_of(given), tensors_of(coordinator.rounds.model(0))
    assert first.keys() == found.keys() and all(torch.equal(first[name], found[name]) for name in first)


def test_an_adapter_of_another_scale_is_rejected(adapters, tmp_path):
    model = adapters("a", "").rounds.model(0)
    sets = [f"checkpoint.adapter_from='{model}'", "lora.alpha=99", "train.horizon='1 steps'"]
    config = load_run(tmp_path / "a.toml", [*sets, f"run.dir='{tmp_path / 'plain'}'"], expand).config
    with pytest.raises(UserError, match=r"rank 4, alpha 16.*, and the run has another"):
        run(config)
