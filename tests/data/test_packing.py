"""Packings seen through the loader: what a model would be fed, on any number of ranks."""

import hashlib
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.commands.datasets import pack
from arriero.data.order import packing_plan
from arriero.data.order.loader import IGNORED, Loader
from arriero.data.order.order import EvalStream, Stream
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.order.packing_plan import (
    SEGMENT,
    PackingPlan,
    PackingRequest,
    best_fit_decreasing,
    find_plan,
    make_plan,
    plan_problems,
)
from arriero.data.order.shuffle import split_heldout
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.ui import set_quiet

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.sampled_from([1, 60, 200])), min_size=1, max_size=25)


def numbered(lengths):
    """Documents in which every token of the dataset is a different one."""
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def pairs(batches):
    """How often each token predicts which."""
    seen = Counter()
    for batch in batches:
        kept = batch.labels_BT != IGNORED
        seen.update(zip(batch.tokens_BT[kept].tolist(), batch.labels_BT[kept].tolist(), strict=True))
    return seen


def kept_part(document, seq_len, long_docs):
    if len(document) > seq_len:
        return {"split": document, "truncate": document[:seq_len], "drop": []}[long_docs]
    return document


@QUICK
@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 40),
    kind=st.sampled_from(["bestfit", "none"]),
    long_docs=st.sampled_from(["split", "truncate", "drop"]),
    mask=st.booleans(),
    sequences=st.integers(1, 5),
)
def test_whole_documents_predict_each_token_from_the_one_before_once(
    make_store, tmp_path, lengths, seq_len, kind, long_docs, mask, sequences
):
    documents = numbered(lengths)
    kept = [kept_part(d, seq_len, long_docs) for d in documents]
    store = make_store([documents[::2], documents[1::2]], vocab_size=10_000)
    packing = Packing(kind, long_docs, tmp_path / "cache")
    if not any(kept):
        with pytest.raises(UserError, match="has no sample"):
            EvalStream([TokenSource(store)], seq_len, packing)
        return
    stream = EvalStream([TokenSource(store)], seq_len, packing)
    with Loader(stream, sequences, documents=mask) as loader:
        batches = list(loader)

    inside = Counter(pair for document in kept for pair in itertools.pairwise(document))
    crossing = pairs(batches) - inside
    assert not inside - pairs(batches)
    assert all(a in {d[-1] for d in kept if d} and b in {d[0] for d in kept if d} for a, b in crossing)
    assert not crossing or (kind == "bestfit" and not mask)
    assert sum(batch.real_tokens for batch in batches) == sum(map(len, kept)) == stream.cuts[0].tokens
    assert all(b.tokens_BT.shape[1] <= seq_len for b in batches)


@QUICK
@given(lengths=LENGTHS, seq_len=st.integers(2, 40), kind=st.sampled_from(["concat", "bestfit"]))
def test_positions_count_from_a_documents_first_token_in_the_row(
    make_store, tmp_path, lengths, seq_len, kind
):
    documents = numbered([*lengths, 50])
    store = make_store([documents], vocab_size=10_000)
    number = {t: i for i, document in enumerate(documents) for t in document}
    stream = EvalStream([TokenSource(store)], seq_len, Packing(kind, cache=tmp_path / "cache"))
    with Loader(stream, 1, documents=True) as loader:
        for batch in loader:
            row = batch.tokens_BT[0, : batch.real_tokens].tolist()
            positions, documents_T = range(len(row)), [0] * len(row)
            if batch.positions_BT is not None:  # left out where a batch has no boundary
                positions, documents_T = batch.positions_BT[0].tolist(), batch.documents_BT[0].tolist()
            columns = zip(row, positions, documents_T, strict=False)
            first, last, before = {}, None, -1
            for token, position, document in columns:
                assert position == token - first.setdefault(document, token)
                assert document == before + (number[token] != last)
                last, before = number[token], document


@QUICK
@given(lengths=LENGTHS, seq_len=st.integers(2, 40), mask=st.booleans())
def test_windows_predict_every_token_once_and_with_a_mask_no_first_one(make_store, lengths, seq_len, mask):
    documents = numbered([*lengths, 50])
    store = make_store([documents], vocab_size=10_000)
    stream = EvalStream([TokenSource(store)], seq_len)
    with Loader(stream, 3, documents=mask) as loader:
        seen = pairs(loader)
    predicted = range(1, store.tokens - stream.cuts[0].unused)
    firsts = {document[0] for document in documents if document} if mask else set()
    assert seen == Counter((t - 1, t) for t in predicted if t not in firsts)


@QUICK
@given(
    kind=st.sampled_from(["concat", "bestfit", "none"]),
    weights=st.lists(st.floats(0.2, 5), min_size=1, max_size=3),
    start=st.integers(0, 500),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), min_size=1, max_size=5),
    mask=st.booleans(),
)
def test_any_ranks_and_restarts_read_the_same_samples(
    three_stores, tmp_path, kind, weights, start, worlds, mask
):
    def stream():
        sources = [TokenSource(store, None, w) for store, w in zip(three_stores, weights, strict=False)]
        return Stream(sources, 16, 5, Packing(kind, cache=tmp_path / "cache"))

    with Loader(stream(), 24, start_sample=start, documents=mask) as loader:
        whole = [next(loader) for _ in worlds]
    sums, sample = [], start
    for step, world in enumerate(worlds):
        parts = []
        for rank in range(world):
            with Loader(stream(), 24, sample, rank=rank, ranks=world, documents=mask) as loader:
                parts.append(next(loader))
                state = loader.state()
        sums.append(sum(part.checksum for part in parts) % 2**64)
        rows = [row[row_labels != IGNORED].tolist() for p in parts for row, row_labels in
                zip(p.tokens_BT, p.labels_BT, strict=True)]  # fmt: skip
        expected = whole[step]
        assert rows == [
            t[labels != IGNORED].tolist()
            for t, labels in zip(expected.tokens_BT, expected.labels_BT, strict=True)
        ]
        sample = state["sample"]
    assert sums == [batch.checksum for batch in whole]
    assert sample == start + 24 * len(worlds)


@pytest.mark.parametrize("kind", ["concat", "bestfit", "none"])
def test_each_sample_comes_once_per_epoch(three_stores, tmp_path, kind):
    stream = Stream([TokenSource(three_stores[0])], 16, 1, Packing(kind, cache=tmp_path))
    n = stream.samples_per_epoch
    located = stream.locate(np.arange(3 * n))
    for epoch in range(3):
        part = slice(epoch * n, (epoch + 1) * n)
        assert sorted(located.index[part].tolist()) == list(range(n))
        assert set(located.epoch[part].tolist()) == {epoch}


def test_weights_are_shares_of_tokens_however_long_the_samples_are(make_store, tmp_path):
    short = make_store([[range(5)] * 400], vocab_size=1000)
    long = make_store([[range(500, 540)] * 400], vocab_size=1000)
    stream = Stream(
        [TokenSource(short, None, 3), TokenSource(long, None, 1)], 64, 1, Packing("none", cache=tmp_path)
    )
    located = stream.locate(np.arange(8192))
    tokens = np.bincount(located.source) * [5, 40]
    assert tokens[0] / tokens.sum() == pytest.approx(0.75, abs=0.001)


def test_best_fit_packs_as_well_as_one_document_at_a_time():
    generator = np.random.default_rng(1)
    lengths = np.minimum(generator.lognormal(4, 1.2, 3000).astype(int) + 1, 512)
    room = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [r for r in room if r >= length]
        if fitting:
            room.remove(min(fitting))
            room.append(min(fitting) - length)
        else:
            rows += 1
            room.append(512 - length)
    row = best_fit_decreasing(lengths, 512)
    assert np.bincount(row, lengths).max() <= 512
    assert row.max() + 1 == rows


def test_a_plan_is_built_once_and_a_damaged_one_again(make_store, tmp_path):
    store = make_store([[range(5)] * 30])
    stages = []
    packing = Packing("bestfit", cache=tmp_path / "c", progress=lambda *call: stages.append(call))
    first = EvalStream([TokenSource(store)], 16, packing)
    assert stages[-1] == ("packing", 1, 1)
    built = len(stages)
    (plan,) = (tmp_path / "c" / "plans").iterdir()
    content = plan.read_bytes()
    EvalStream([TokenSource(store)], 16, packing)
    assert len(stages) == built
    for times, damaged in enumerate((content[:-20], content[:5], b""), 2):
        plan.write_bytes(damaged)
        again = EvalStream([TokenSource(store)], 16, packing)
        assert len(stages) == times * built
        assert plan.read_bytes() == content
    assert again.fingerprint == first.fingerprint
    assert EvalStream([TokenSource(store)], 17, packing).fingerprint != first.fingerprint
    assert len(list((tmp_path / "c" / "plans").iterdir())) == 2


def test_large_sources_are_packed_group_by_group(make_store, tmp_path, monkeypatch):
    monkeypatch.setattr("arriero.data.order.packing_plan.GROUP", 7)
    documents = numbered([3, 9, 1, 30, 2, 2, 5] * 9)
    store = make_store([documents[:20], documents[20:25], documents[25:]])
    stream = EvalStream([TokenSource(store)], 16, Packing("bestfit", cache=tmp_path))
    with Loader(stream, 4, documents=True) as loader:
        seen = pairs(loader)
    assert seen == Counter(pair for document in documents for pair in itertools.pairwise(document))


@pytest.mark.parametrize(
    ("long_docs", "words"),
    [("split", "split"), ("truncate", "truncated, 24 tokens not"), ("drop", "dropped, 40 tokens not")],
)
def test_what_happens_to_long_documents_is_counted(make_store, tmp_path, long_docs, words):
    store = make_store([[range(5), range(40), range(16)]])
    stream = EvalStream([TokenSource(store)], 16, Packing("bestfit", long_docs, tmp_path))
    assert stream.cuts[0].remarks == [f"1 of 3 documents are longer than a row: {words}" + (
        " trained on" if long_docs != "split" else "")]  # fmt: skip


def test_rows_without_packing_are_as_wide_as_their_longest_document(make_store, tmp_path):
    store = make_store([[range(3), range(9), range(4), range(2)]])
    stream = EvalStream([TokenSource(store)], 16, Packing("none", cache=tmp_path))
    with Loader(stream, 2) as loader:
        shapes = [(batch.tokens_BT.shape, batch.real_tokens) for batch in loader]
    assert shapes == [((2, 9), 12), ((2, 4), 6)]


def test_a_prompt_is_put_before_each_document_and_excluded_from_the_loss(make_store, tmp_path):
    store = make_store([[[11, 12, 0], [21, 0], list(range(30, 40))]])
    for kind in ("bestfit", "none"):
        stream = EvalStream([TokenSource(store, prompt=(7, 8))], 8, Packing(kind, cache=tmp_path))
        with Loader(stream, 1, documents=True) as loader:
            rows = [(b.tokens_BT[0].tolist(), b.labels_BT[0].tolist()) for b in loader]
        together = {
            (token, label)
            for tokens, labels in rows
            for token, label in zip(tokens, labels, strict=True)
            if label != IGNORED
        }
        assert together == {(8, 11), (11, 12), (12, 0), (8, 21), (21, 0), (8, 30)} | {
            (t, t + 1) for t in range(30, 39)
        }
        assert ([7, 8, 30, 31, 32, 33, 34, 35], [IGNORED, 30, 31, 32, 33, 34, 35, 36]) in rows


def test_a_prompt_needs_whole_documents_and_room(make_store, tmp_path):
    store = make_store([[range(50)]])
    with pytest.raises(UserError, match="packing 'concat' cuts documents"):
        Stream([TokenSource(store, prompt=(1,))], 8, 1)
    with pytest.raises(UserError, match="has 8 tokens, a sequence only 8"):
        Stream([TokenSource(store, prompt=(1,) * 8)], 8, 1, Packing("none", cache=tmp_path))


def test_an_empty_source_is_rejected_by_name(make_store, tmp_path):
    empty = make_store([[[], []]])
    with pytest.raises(UserError, match=f"{empty.directory} has 0 tokens"):
        Stream([TokenSource(empty)], 8, 1)
    with pytest.raises(UserError, match=f"{empty.directory} has no sample"):
        Stream([TokenSource(empty)], 8, 1, Packing("bestfit", cache=tmp_path))


def test_one_gigantic_document_is_read_part_by_part(make_store, tmp_path):
    store = make_store([[np.arange(5001)]], vocab_size=6000)
    stream = EvalStream([TokenSource(store)], 64, Packing("bestfit", cache=tmp_path))
    with Loader(stream, 8) as loader:
        assert pairs(loader) == Counter((t, t + 1) for t in range(5000))


def test_padding_carries_no_label_and_does_not_change_a_tensor_shape(make_store, tmp_path):
    store = make_store([[range(1, 6)] * 3])
    stream = EvalStream([TokenSource(store)], 16, Packing("bestfit", cache=tmp_path))
    with Loader(stream, 1, documents=True) as loader:
        (batch,) = loader
    assert torch.equal(batch.labels_BT[0, 14:], torch.full((2,), IGNORED))
    assert batch.tokens_BT[0, 15].item() == store.eos_id
    assert batch.documents_BT[0].tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3]


@pytest.fixture
def small_groups(monkeypatch):
    for name, size in (("GROUP", 64), ("GROUPS_AT_ONCE", 3), ("UNIT", 16), ("UNITS_AT_ONCE", 2)):
        monkeypatch.setattr(f"arriero.data.order.packing_plan.{name}", size)


def long_tailed(make_store):
    lengths = (1 + np.random.default_rng(5).pareto(1.2, (4, 500)) * 8).astype(int).clip(0, 400)
    lengths[0, :40] = 0
    return make_store([[range(n) for n in row] for row in lengths.tolist()])


def content(plan):
    """Hash the segments and the row offsets: what plans of earlier versions hold too."""
    size = SEGMENT.itemsize * plan.counts["pieces"] + 8 * (plan.rows + 1)
    return hashlib.sha256(plan.path.read_bytes()[:size]).hexdigest()


OLD_PLANS = {
    ("split", True): "f99b36af243203d4",
    ("split", False): "e9089bd9d66b2d2b",
    ("truncate", True): "f74f1662c279d8fd",
    ("truncate", False): "5a62e6385c927b77",
    ("drop", True): "8482af1e5ec07a04",
    ("drop", False): "2dc823bb84d67798",
}


@pytest.mark.parametrize("long_docs", ["split", "truncate", "drop"])
@pytest.mark.parametrize("span", [None, range(7, 9000)])
@pytest.mark.usefixtures("small_groups")
def test_a_plan_is_the_one_that_earlier_runs_used(make_store, tmp_path, long_docs, span):
    """A change here gives other rows to every run that packs documents: it needs a new ORDER_VERSION."""
    store = long_tailed(make_store)
    request = PackingRequest(store, span or range(store.tokens), "bestfit", long_docs, 64, 3)
    plan = make_plan(tmp_path / "plans", request, 1, no_progress)
    assert content(plan)[:16] == OLD_PLANS[long_docs, span is None]
    assert plan.counts["documents"] == (1960 if span is None else plan.counts["documents"])


@pytest.mark.usefixtures("small_groups")
def test_a_plan_that_was_interrupted_is_resumed(make_store, tmp_path, monkeypatch):
    store = long_tailed(make_store)
    request = PackingRequest(store, range(store.tokens), "bestfit", "split", 64, 0)
    whole = content(make_plan(tmp_path / "whole", request, 1, no_progress))
    parts = []
    original = packing_plan.pack_part

    def interrupted(*arguments):
        if len(parts) == 4:
            raise KeyboardInterrupt
        parts.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(packing_plan, "pack_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_plan(tmp_path / "plans", request, 1, no_progress)
    assert not (tmp_path / "plans" / request.name).exists()
    done, parts[:] = list(parts), []
    monkeypatch.setattr(packing_plan, "pack_part", lambda *a: parts.append(a[-1]) or original(*a))
    assert content(make_plan(tmp_path / "plans", request, 1, no_progress)) == whole
    assert parts and not set(parts) & set(done)
    assert [path.name for path in (tmp_path / "plans").iterdir()] == [request.name]


def test_a_plan_that_is_gone_is_made_from_its_documents_and_not_from_old_records(
    make_store, tmp_path, monkeypatch
):
    store = long_tailed(make_store)
    request = PackingRequest(store, range(store.tokens), "bestfit", "split", 64, 0)
    with monkeypatch.context() as patch:
        patch.setattr(packing_plan.shutil, "rmtree", lambda *_, **__: None)  # as if killed after publishing
        whole = content(make_plan(tmp_path, request, 1, no_progress))
    (tmp_path / request.name).unlink()
    assert content(make_plan(tmp_path, request, 1, no_progress)) == whole


KILLED = """
import os, signal
from arriero.data.workers import worker_pool
if __name__ == "__main__":
    with worker_pool(1) as pool:
        pool.submit(os.getpid).result()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(packing_plan.__file__).parents[3])}
    # returns when the last worker has closed its output
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL


def test_a_dataset_of_many_documents_is_packed_ahead(make_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packing_plan, "UNITS_AT_ONCE", 1)
    store = long_tailed(make_store)
    packing = Packing("bestfit", cache=tmp_path / "cache")
    train, heldout = split_heldout(store, 300)
    monkeypatch.setattr(packing_plan, "MOST_PLANNED", 1000)
    command = re.escape(f"arriero data pack {store.directory} --seq-len 64 --heldout '{len(heldout)} tok'")
    with pytest.raises(UserError, match=f"documents of .* are not packed yet.*{command}"):
        Stream([TokenSource(store, train)], 64, 1, packing)
    pack(store.directory, 64, heldout=f"{len(heldout)} tok", workers=2)
    printed = capsys.readouterr().out
    assert "training: 1" in printed and "held-out: " in printed and "filled" in printed
    pack(store.directory, 64, heldout=f"{len(heldout)} tok")
    assert "made before" in capsys.readouterr().out
    stream = Stream([TokenSource(store, train)], 64, 1, packing)
    request = packing.request(stream.sources[0], 64)
    assert content(PackingPlan(store.directory / "plans" / request.name)) == content(
        make_plan(tmp_path / "again", request, 1, no_progress)
    )
    assert not (tmp_path / "cache").exists()
    set_quiet(True)
    try:
        pack(store.directory, 64, heldout=f"{len(heldout)} tok")
    finally:
        set_quiet(False)
    assert capsys.readouterr().out == ""


@pytest.fixture
def stored_plan(make_store, tmp_path, monkeypatch):
    monkeypatch.setattr("arriero.data.order.packing_plan.BLOCK_BYTES", 512)
    request = Packing("bestfit").request(TokenSource(long_tailed(make_store)), 32)
    return request, make_plan(tmp_path / "plans", request, 1, no_progress)


def test_any_flipped_bit_of_a_plan_is_found_before_it_is_used(stored_plan):
    request, plan = stored_plan
    content = plan.path.read_bytes()
    whole = [plan.segments(row).tolist() for row in range(plan.rows)]
    rng = np.random.default_rng(1)
    tail = range(len(content) - 200, len(content))
    for at in [0, *tail, *rng.integers(len(content), size=60).tolist()]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        plan.path.write_bytes(damaged)
        assert list(plan_problems(plan.path.parent)), at
        opened = find_plan(plan.path.parent, request)
        if opened is not None:
            with pytest.raises(UserError, match="is damaged"):
                assert [opened.segments(row).tolist() for row in range(opened.rows)] == whole
    plan.path.write_bytes(content)
    assert not list(plan_problems(plan.path.parent))


def test_a_damaged_plan_is_made_again(stored_plan):
    request, plan = stored_plan
    content = plan.path.read_bytes()
    plan.path.write_bytes(content[:100] + b"?" + content[101:])
    again = make_plan(plan.path.parent, request, 1, no_progress)
    assert again.path.read_bytes() == content


def test_a_plan_of_an_earlier_version_has_no_checksums_and_is_read(stored_plan):
    request, plan = stored_plan
    whole = [plan.segments(row).tolist() for row in range(plan.rows)]
    size = SEGMENT.itemsize * plan.counts["pieces"] + 8 * (plan.rows + 1)
    counts = {name: number for name, number in plan.counts.items() if "crc32" not in name}
    footer = json.dumps(counts).encode()
    old = plan.path.read_bytes()[:size] + footer + struct.pack("<Q8s", len(footer), b"arrpack1")
    plan.path.write_bytes(old)
    found = find_plan(plan.path.parent, request)
    assert [found.segments(row).tolist() for row in range(plan.rows)] == whole
    assert not list(plan_problems(plan.path.parent))
