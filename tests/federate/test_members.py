"""Members and global models as files: what is accepted, and that files aggregate like state dicts."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from arriero.checkpoint.convert import open_model
from arriero.checkpoint.formats.tensor_files import SafetensorsReader
from arriero.federate.aggregation import Contribution, aggregate
from arriero.federate.members import (
    GlobalManifest,
    MemberManifest,
    Refused,
    check_member,
    open_global,
    read_manifest,
    write_manifest,
)
from arriero.federate.outer import CHUNK, OuterOptimizer
from federate.models import DILOCO, FEDAVG, SPEC, first_model, member, moved, outer_update, weights


def contribution(path, base, weight=None):
    about = read_manifest(path, MemberManifest)
    return Contribution(
        path, about.site, about.round, about.codec, weight or about.tokens, about.tokens, base
    )


def loaded(path):
    source = open_model(path)
    return {name: source.load(name) for name in source.tensors}


@pytest.fixture
def base(tmp_path):
    return first_model(tmp_path, optimizer=DILOCO)


@pytest.mark.parametrize("optimizer", [FEDAVG, DILOCO, OuterOptimizer("fedadam", lr=0.01)])
def test_files_aggregate_like_state_dicts_to_the_bit(tmp_path, base, optimizer):
    state, where, kept = weights(0), base, {}
    for number in range(3):
        locals_ = {site: moved(state, 10 * number + i) for i, site in enumerate("abc")}
        tokens = {"a": 100, "b": 2000, "c": 33}
        made = [
            member(where, local, tmp_path / f"{site}{number}", site, tokens=tokens[site], number=number)
            for site, local in locals_.items()
        ]
        target = tmp_path / f"global-{number + 1}"
        done = aggregate(where, [contribution(each, where) for each in made], optimizer, target)
        state, kept = outer_update(
            state, [(tokens[site], local) for site, local in locals_.items()], kept, optimizer
        )
        assert all(torch.equal(found, state[name]) for name, found in loaded(target).items())
        where = target
        assert done.round == number + 1
    assert done.tokens == 3 * 2133
    assert open_global(where).parent == open_global(tmp_path / "global-2").model


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_the_order_of_sites_does_not_change_a_bit(tmp_path, base, codec):
    made = [
        member(base, moved(weights(0), i), tmp_path / site, site, codec, tokens=7**i)
        for i, site in enumerate(("b", "c", "a"), 1)
    ]
    found = set()
    for number, order in enumerate(permutations(made)):
        parts = [contribution(each, base) for each in order]
        found.add(json.dumps(aggregate(base, parts, DILOCO, tmp_path / f"o{number}").files))
    assert len(found) == 1


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1), ("bf16", 0.5), ("int8", 0.26)])
def test_codecs_ship_fewer_bytes_and_nearly_the_same_model(tmp_path, base, codec, share):
    local = moved(weights(0), 1)
    path = member(base, local, tmp_path / "site", "site", codec)
    manifest, norm = check_member(path, open_global(base), base)
    assert manifest.bytes < share * 4 * SPEC.parameters + 5000
    aggregate(base, [contribution(path, base)], FEDAVG, tmp_path / "new")
    error = sum((t - local[n]).square().sum() for n, t in loaded(tmp_path / "new").items()) ** 0.5
    assert error < {"fp32": 1e-9, "bf16": 2**-8, "int8": 0.01}[codec] * norm


def test_a_global_model_is_an_ordinary_model_directory(base):
    source = open_model(base)
    assert source.format == "hf" and source.spec == replace(SPEC, nominal_params=source.spec.nominal_params)
    assert all(tensor.dtype == torch.float32 for tensor in source.tensors.values())


def test_norms_and_cosines_show_a_site_that_pulls_the_other_way(tmp_path, base):
    state = weights(0)
    ahead = moved(state, 1)
    back = {name: 2 * state[name] - ahead[name] for name in state}
    made = [member(base, ahead, tmp_path / "a", "a"), member(base, back, tmp_path / "b", "b")]
    done = aggregate(base, [contribution(each, base) for each in made], FEDAVG, tmp_path / "new")
    assert done.cosines[0][1] == pytest.approx(-1, abs=1e-3)
    assert done.members[0].norm == pytest.approx(done.members[1].norm, rel=1e-3)


def damage(path, how):
    delta = next(path.glob("delta*"))
    if how == "flipped bit":
        content = bytearray(delta.read_bytes())
        content[-3] ^= 1
        delta.write_bytes(content)
    elif how == "cut short":
        delta.write_bytes(delta.read_bytes()[:-100])
    elif how == "missing file":
        delta.unlink()
    elif how == "missing manifest":
        (path / "member.json").unlink()
    elif how == "edited manifest":
        text = (path / "member.json").read_text().replace('"tokens": 1000', '"tokens": 9000')
        (path / "member.json").write_text(text)
    elif how == "half a manifest":
        (path / "member.json").write_bytes((path / "member.json").read_bytes()[:100])
    elif how == "file outside":
        about = read_manifest(path, MemberManifest)
        write_manifest(path, about.model_copy(update={"files": {"../../etc/passwd": "0" * 64}}))


@pytest.mark.parametrize(
    "how",
    (
        "flipped bit",
        "cut short",
        "missing file",
        "missing manifest",
        "edited manifest",
        "half a manifest",
        "file outside",
    ),
)
def test_a_damaged_member_is_refused_with_a_sentence(tmp_path, base, how):
    path = member(base, moved(weights(0), 1), tmp_path / "site", "site")
    damage(path, how)
    with pytest.raises(Refused, match=r"\w+ \w+ \w+"):
        check_member(path, open_global(base), base)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_member_that_is_not_finite_is_refused(tmp_path, base, codec, bad):
    local = moved(weights(0), 1)
    local["blocks.1.ffn.down.weight"][3, 4] = bad
    path = member(base, local, tmp_path / "site", "site", codec)
    with pytest.raises(Refused, match=r"NaN or infinity in model\.layers\.1"):
        check_member(path, open_global(base), base)


def test_a_member_of_another_model_is_refused(tmp_path, base):
    other = first_model(tmp_path / "other", seed=5)
    path = member(other, moved(weights(5), 1), tmp_path / "site", "site")
    with pytest.raises(Refused, match="another model"):
        check_member(path, open_global(base), base)


def test_a_global_model_names_every_file_with_its_checksum(base):
    about = read_manifest(base, GlobalManifest)
    assert {p.name for p in base.iterdir()} == set(about.files) | {"federation.json"}


def test_the_aggregation_reads_large_tensors_in_small_parts(tmp_path, monkeypatch):
    """Tensors of 32 MiB pass through in parts of 1 MiB."""
    spec = replace(SPEC, vocab_size=32768, dim=256, head_dim=8)
    base = first_model(tmp_path, optimizer=DILOCO, spec=spec)
    state = weights(0, spec)
    sites = {site: moved(state, i) for i, site in enumerate("abc")}
    made = [member(base, local, tmp_path / site, site, "bf16", spec=spec) for site, local in sites.items()]
    read, read_flat = [], SafetensorsReader.read_flat

    def watched(self, name, start, stop):
        read.append(stop - start)
        return read_flat(self, name, start, stop)

    monkeypatch.setattr(SafetensorsReader, "read_flat", watched)
    monkeypatch.setattr(SafetensorsReader, "read", None)
    aggregate(base, [contribution(each, base) for each in made], DILOCO, tmp_path / "new")
    assert max(read) == CHUNK and sum(read) >= 4 * spec.parameters
