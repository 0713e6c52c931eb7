"""`arriero doctor` on one node: what it checks, how it fails, and that no check can hang it."""

import io
import json
import os
import resource
import select
import signal
import time
from pathlib import Path

import pytest

from arriero.files import quota_left
from arriero.launch.doctor.check import Check, Finding, run_checks, user_check
from arriero.launch.doctor.devices import check_devices, pci_gpus
from arriero.launch.doctor.fabric import ROUNDS, pairs
from arriero.launch.doctor.host import check_disk, check_limits, check_shm, contradictions
from arriero.launch.doctor.interfaces import Interface, interfaces, propose, selected


def good() -> Finding:
    return Finding("pass", "good")


def crash() -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    return good()


def raises() -> Finding:
    raise OSError("no such device")


def hang() -> Finding:
    time.sleep(600)
    return good()


def test_a_check_that_hangs_crashes_or_raises_fails_and_the_others_still_run():
    checks = [
        Check("first", good),
        Check("hang", hang, 0.3),
        Check("crash", crash),
        Check("raise", raises),
        Check("last", good),
    ]
    results = list(run_checks(checks))
    assert [(each.name, each.status) for each in results] == [
        ("first", "pass"),
        ("hang", "fail"),
        ("crash", "fail"),
        ("raise", "fail"),
        ("last", "pass"),
    ]
    found = [each.found for each in results]
    assert "within" in found[1]
    assert "SIGKILL" in found[2]
    assert "no such device" in found[3]


def test_a_command_that_exceeds_its_time_leaves_no_process_behind(tmp_path):
    """The pipe is closed when the last process that writes to it has ended."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    command = user_check(f"(echo started; sleep 600) > '{tmp_path}/pipe'; true")
    results = list(run_checks([command], time.monotonic() + 2))
    assert [each.status for each in results] == ["fail"]
    assert os.read(reader, 100) == b"started\n"
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    assert waiting.poll(60_000) == [(reader, select.POLLHUP)]


def test_the_bound_of_the_node_ends_all_checks():
    results = list(run_checks([Check(f"hang {i}", hang, 60) for i in range(3)], time.monotonic() + 0.3))
    assert [each.status for each in results] == ["fail"] * 3


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("exit 3", "fail", "exit code 3"),
        ("echo the scratch is not mounted; false", "fail", "the scratch is not mounted"),
        ("echo fine", "pass", "fine"),
        ("no-such-program", "fail", "not found"),
    ],
)
def test_a_command_of_the_site_fails_the_node_by_its_exit_code(command, status, words):
    (result,) = run_checks([user_check(command)])
    assert result.status == status
    assert words in result.found


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({"NCCL_SOCKET_IFNAME": "nothing9"}, "fail", "no such interface"),
        ({"GLOO_SOCKET_IFNAME": "nothing9"}, "fail", "GLOO_SOCKET_IFNAME"),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, "fail", "CUDA_VISIBLE_DEVICES is empty"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, "warn", "counts within"),
        ({"MASTER_ADDR": "localhost", "SLURM_JOB_NUM_NODES": "2"}, "fail", "2 nodes"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warn", "slower"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", "slower"),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "host memory"),
        ({"NCCL_DEBUG": "INFO"}, "warn", "every rank"),
        ({"http_proxy": "http://proxy:3128"}, "warn", "no_proxy"),
        ({"OMP_NUM_THREADS": "4096"}, "warn", "4096"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_contradicting_variable_is_named_with_what_to_do(environment, status, words):
    ((found, what, todo),) = contradictions(environment)
    assert found == status
    assert words in what
    assert todo


def test_a_usual_environment_has_no_contradiction():
    name = interfaces()[0].name
    usual = {"NCCL_SOCKET_IFNAME": name[:2], "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
    assert list(contradictions(usual | {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0,1"})) == []


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("hsn", ["hsn0", "hsn1"]),
        ("=hsn0", ["hsn0"]),
        ("^lo,hsn", ["eth0"]),
        ("^=lo,hsn", ["eth0", "hsn0", "hsn1"]),
        ("ib", []),
        ("hsn1,eth", ["eth0", "hsn1"]),
    ],
)
def test_interfaces_are_selected_as_nccl_does(variable, expected):
    assert selected(variable, ["eth0", "hsn0", "hsn1", "lo"]) == expected


def test_gloo_takes_exact_names_only():
    names = [each.name for each in interfaces()]
    found = list(contradictions({"GLOO_SOCKET_IFNAME": names[0][:-1]}))
    assert [status for status, what, _ in found if "GLOO" in what] == ["fail"]
    assert not list(contradictions({"GLOO_SOCKET_IFNAME": names[0]}))


def nic(name, kind="Ethernet", speed=0, address="10.0.0.1", up=True):
    return Interface(name, kind, up, address, speed)


@pytest.mark.parametrize(
    ("found", "nccl", "gloo"),
    [
        ([nic("lo"), nic("eno1"), nic("ib0", "InfiniBand", 100_000)], "ib0", "ib0"),
        (
            [nic("nmn0"), nic("hsn0", "Slingshot", 200_000), nic("hsn1", "Slingshot", 200_000)],
            "hsn0,hsn1",
            "hsn0",
        ),
        ([nic("eth0", speed=1000), nic("eth1", speed=25_000), nic("docker0", speed=100_000)], "eth1", "eth1"),
        ([nic("ib0", "InfiniBand", address=None), nic("eth0"), nic("eth1")], "eth1", "eth1"),
        ([nic("eth0"), nic("ib0", "InfiniBand", up=False)], "eth0", "eth0"),
    ],
    ids=["InfiniBand", "Slingshot", "fastest Ethernet", "default route", "down"],
)
def test_the_fastest_network_between_nodes_is_proposed(found, nccl, gloo):
    values = {each.variable: each.value for each in propose(found, [], "eth1")}
    assert values == {"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": gloo}


def test_no_interface_is_proposed_where_none_leaves_the_node():
    assert propose([nic("lo"), nic("docker0"), nic("eth0", address=None)], [], None) == []


def test_a_full_disk_and_one_that_cannot_be_written_fail(small_disk, tmp_path):
    full = check_disk(small_disk)
    assert full.status == "fail"
    assert "free" in full.found
    absent = check_disk(tmp_path / "not" / "yet", size=2**20)
    assert absent.status in ("pass", "warn")
    assert absent.facts["same"] is True
    assert absent.facts["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [small_disk], "the measurement leaves nothing behind"
    assert check_disk(Path("/sys/class/net")).status == "fail"


def test_short_reads_of_a_file_system_are_no_corruption(tmp_path, monkeypatch):
    class ShortReads(io.FileIO):
        def read(self, size=-1):
            return super().read(min(size, 1000))

        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[: 2**20 // 3])

    usual = Path.open

    def opened(path, mode="r", **options):
        return ShortReads(path, "r") if mode == "rb" else usual(path, mode, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert check_disk(tmp_path, size=2**21).facts["same"] is True


def test_small_shared_memory_fails_and_leftovers_are_named(small_disk, tmp_path):
    assert check_shm(small_disk).status == "fail"
    assert check_shm(tmp_path / "absent").status == "fail"
    (tmp_path / "nccl-abc").write_text("left")
    os.utime(tmp_path / "nccl-abc", (0, 0))
    left = check_shm(tmp_path)
    assert left.status == "warn"
    assert "nccl-abc" in left.found


def test_a_limit_on_open_files_below_the_job_warns(monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setenv("SLURM_NTASKS", str(hard))
    assert "open files" in check_limits().found


def test_missing_gpus_are_a_failure_and_their_absence_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_devices(0).status == "pass"
    assert check_devices(8).status in ("warn", "fail")
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x1002", "0x038000"), ("0x8086", "0x020000")]
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "class").write_text(f"{kind}\n")
    assert pci_gpus(tmp_path) == ["NVIDIA", "AMD"]


@pytest.mark.parametrize(
    ("program", "output", "left"),
    [
        ("lfs", "/scratch  900* 500 1000 - 12 0 0 -", 100 * 1024),
        ("lfs", "/scratch  900 0 0 - 12 0 0 -", None),
        (
            "quota",
            "Disk quotas for user me:\n Filesystem blocks quota limit\n nfs:/home 50 100 0 - 1 0 0 -",
            50 * 1024,
        ),
        ("quota", "/dev/sda1 200* 100 150 123 1 0 0 0", 0),
        ("quota", "Disk quotas for user me: none", None),
    ],
)
def test_the_quota_of_the_user_is_read(tmp_path, monkeypatch, program, output, left):
    (tmp_path / program).write_text(f"#!/bin/bash\ncat <<'X'\n{output}\nX\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert quota_left(tmp_path) == left


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 640])
def test_each_node_has_one_partner_per_round_and_another_one_in_the_next(nodes):
    met = set()
    for number in range(ROUNDS):
        members = [node for pair in pairs(nodes, number) for node in pair]
        assert len(members) == len(set(members))
        assert set(members) <= set(range(nodes))
        new = {frozenset(pair) for pair in pairs(nodes, number)}
        assert not new & met
        met |= new
    partners = {node: sum(node in pair for pair in met) for node in range(nodes)}
    assert min(partners.values()) >= min(nodes - 1, ROUNDS - nodes % 2)


def test_the_verb_prints_a_table_or_json_and_its_exit_code_is_the_worst_status(arriero):
    done = arriero("doctor", "--json", "--check", "true")
    facts = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    names = {each["name"]: each for each in facts["checks"]}
    assert {"limits", "disk", "clock", "versions", "matmul", "bandwidth", "command true"} <= set(names)
    assert names["matmul"]["facts"]["tflops"][0] > 0
    assert names["versions"]["facts"]["versions"]["torch"]
    bad = arriero("doctor", "--check", "echo broken; exit 1", "--timeout", "5")
    assert bad.returncode == 1
    assert "broken" in bad.stdout


def test_detect_lists_interfaces_or_says_that_none_leads_to_other_nodes(command):
    done = command("doctor", "--detect", "--json")
    facts = json.loads(done.stdout)
    assert {each["name"] for each in facts["interfaces"]} == {each.name for each in interfaces()}
    shown = command("doctor", "--detect")
    assert shown.returncode == (0 if facts["env"] else 2)


def test_an_allocation_is_examined_in_a_slurm_job_only(command, monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    outside = command("doctor", "--allocation", "--out", tmp_path)
    assert outside.returncode == 2
    assert "not a Slurm job" in outside.stderr
    assert command("doctor", "--allocation").returncode == 2
    assert command("doctor", "--out", tmp_path).returncode == 2
