"""`bench ops` and `bench comm` measure what the planner reads, with the shapes and kernels of training."""

import json

import pytest

from arriero.bench.comm import group_kinds
from arriero.bench.step import DocumentLengths
from arriero.errors import UserError
from arriero.plan.measured import OPS, MeasuredFile, cached_measurements, read_measured

SMALL = ("--seconds", "0.001", "--set", "model.preset=llama-test", "--set", "run.device=cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARRIERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rows_of(path, op):
    return [row for row in MeasuredFile.read(path).ops if row.op == op]


def test_every_operation_is_measured_forward_and_backward(command, tmp_path):
    out = tmp_path / "ops.json"
    ran = command(
        "bench", "ops", *SMALL, "--precisions", "fp32,bf16", "--tokens", "64,128", "--documents", "32",
        "--out", out,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert {row.op for row in MeasuredFile.read(out).ops} == set(OPS)
    alone = {"cross_entropy", "head_loss", "accumulation", "optimizer"}
    for row in MeasuredFile.read(out).ops:
        assert (row.backward is None) == (row.op in alone), row
        assert row.forward.low <= row.forward.median <= row.forward.high
    assert {row.precision for row in rows_of(out, "linear")} == {"fp32", "bf16"}
    assert [row.variant for row in rows_of(out, "optimizer")] == ["adamw fp32 fp32"] * 2


def test_a_damaged_cache_is_replaced(command, cache):
    def measure():
        return command("bench", "ops", *SMALL, "--only", "norm", "--tokens", "64")

    measure()
    (file,) = cache.rglob("*.json")
    file.write_bytes(file.read_bytes()[:40])
    ran = measure()
    assert ran.returncode == 0, ran.stderr
    assert MeasuredFile.read(file).ops


def test_linear_shapes_are_those_of_the_model_and_of_its_slices(command, tmp_path):
    out = tmp_path / "ops.json"
    command("bench", "ops", *SMALL, "--only", "linear", "--tokens", "64", "--tp", "1,2", "--out", out)
    widths = {(row.shape["inputs"], row.shape["outputs"]) for row in rows_of(out, "linear")}
    # llama-test: dim 64, ffn 192, 4 heads and 2 kv heads of 16, vocabulary 512
    whole = {(64, 64), (64, 32), (64, 192), (192, 64), (64, 512)}
    halves = {(64, 32), (64, 16), (32, 64), (64, 96), (96, 64), (64, 256)}
    assert widths == whole | halves


def test_float8_measures_joined_layers_and_no_attention(command, tmp_path):
    out = tmp_path / "ops.json"
    command("bench", "ops", *SMALL, "--precisions", "float8", "--tokens", "64", "--out", out)
    assert {row.op for row in MeasuredFile.read(out).ops} == {"linear", "block"}
    widths = {(row.shape["inputs"], row.shape["outputs"]) for row in rows_of(out, "linear")}
    assert (64, 128) in widths, "q, k and v are one float8 product"
    assert (64, 384) in widths, "gate and up are one float8 product"
    assert (64, 512) not in widths, "the head is not in float8"


def test_what_the_cache_has_is_not_measured_again(command, tmp_path, cache):
    out = tmp_path / "ops.json"
    arguments = ("bench", "ops", *SMALL, "--only", "norm,linear", "--tokens", "64", "--out", out)
    command(*arguments)
    first = MeasuredFile.read(out)
    again = command(*arguments)
    assert "cached" in again.stdout
    assert MeasuredFile.read(out).ops == first.ops
    wider = command(*arguments[:-3], "64,128", "--out", out)
    assert wider.returncode == 0
    assert len(MeasuredFile.read(out).ops) == 2 * len(first.ops)
    assert len(list(cache.rglob("*.json"))) == 1
    found = cached_measurements(first.device)
    assert found.op("norm", "fp32", tokens=128, width=64).distance == pytest.approx(0)


def test_json_is_the_file_alone(command):
    ran = command("bench", "ops", *SMALL, "--only", "norm", "--tokens", "64", "--json")
    assert json.loads(ran.stdout)["ops"][0]["op"] == "norm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "--tokens", "0"), "--tokens 0 is not a list of positive numbers"),
        (("ops", "--only", "gemm"), "there is no 'gemm'"),
        (("ops", "--models", "llama9"), "llama9"),
        (("comm",), "nobody to communicate with"),
        (("comm", "--nproc", "2", "--min-size", "1GiB"), "--min-size"),
        (("comm", "--nproc", "2", "--collectives", "gather"), "there is no 'gather'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(command, arguments, message):
    ran = command("bench", *arguments)
    assert ran.returncode == 2
    assert message in ran.stderr


def test_groups_are_inside_nodes_and_between_them():
    kinds = {(kind.ranks, kind.nodes): kind.members for kind in group_kinds(8, 4)}
    assert kinds[2, 1] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert kinds[4, 1] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kinds[2, 2] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds[8, 2] == [list(range(8))]
    assert len(kinds) == 4


def test_group_sizes_need_not_be_powers_of_two():
    assert [(kind.ranks, kind.nodes) for kind in group_kinds(6, 6)] == [(2, 1), (4, 1), (6, 1)]
    kinds = group_kinds(3, 1)
    assert [(kind.ranks, kind.nodes) for kind in kinds] == [(2, 2), (3, 3)]
    assert kinds[0].members == [[0, 1]]
    with pytest.raises(UserError, match="7 ranks do not fill nodes of 4"):
        group_kinds(7, 4)


def test_collectives_of_local_ranks_are_measured(arriero, tmp_path):
    out = tmp_path / "comm.json"
    ran = arriero(
        "bench", "comm", "--nproc", "2", "--device", "cpu", "--max-size", "1MiB", "--seconds", "0.001",
        "--out", out,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = MeasuredFile.read(out)
    sizes = {row.bytes for row in found.collectives}
    assert sizes == {2**18, 2**19, 2**20}
    assert {row.collective for row in found.collectives} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "p2p",
    }
    assert found.fabric.startswith("gloo, one node")
    assert read_measured([out]).collective("all_reduce", 2**18, 2) > 0


@pytest.mark.slow
def test_a_launcher_may_start_the_ranks_of_several_nodes(start_arriero, tmp_path):
    """Four ranks that their launcher places on two nodes; one of them writes the result."""
    ranks = []
    for rank in range(4):
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        environment = {name: str(value) for name, value in place.items()}
        environment |= {"ARRIERO_RENDEZVOUS": f"file://{tmp_path}/meeting"}
        command = ["bench", "comm", "--device", "cpu", "--max-size", "0.25MiB", "--seconds", "0.001"]
        command += ["--collectives", "all_reduce,p2p", "--out", tmp_path / f"{rank}.json"]
        ranks.append(start_arriero(*command, cwd=tmp_path, **environment))
    assert [rank.wait().returncode for rank in ranks] == [0, 0, 0, 0]
    assert sorted(path.name for path in tmp_path.glob("?.json")) == ["0.json"]
    found = MeasuredFile.read(tmp_path / "0.json").collectives
    groups = [(row.collective, row.ranks, row.nodes) for row in found]
    assert groups == [
        ("all_reduce", 2, 1),
        ("p2p", 2, 1),
        ("all_reduce", 2, 2),
        ("p2p", 2, 2),
        ("all_reduce", 4, 2),
    ]


def test_packed_documents_fill_rows_and_report_their_mean_length():
    numbers, attended = DocumentLengths(100, 0).pack(3, 450)
    assert numbers.shape == (3, 450)
    assert numbers[0, 0] == 0
    assert numbers[0, -1] == 4
    assert attended == pytest.approx((4 * 100**2 + 50**2) / 450)
