"""`arriero launch supervise`: decisions, and faults of real jobs on a real Slurm."""

import json
from pathlib import Path

import pytest

from arriero.config.load import load_run
from arriero.errors import NodeError, UserError
from arriero.launch.allocation import Local, StepResult
from arriero.launch.failures import Failure, Failures, Nodes
from arriero.launch.supervisor import Size, Supervisor, smaller_size
from arriero.model.presets import expand
from arriero.parallel.world import World
from arriero.report.goodput import goodput
from arriero.train.hang import describe_hang
from arriero.train.rank_process import report_failure
from launch.faults import STEPS, Faults


@pytest.fixture(scope="module")
def faults(slurm, corpus_cache, tmp_path_factory):
    return Faults(slurm, tmp_path_factory.mktemp("runs"), corpus_cache)


@pytest.fixture(scope="module")
def survivor(faults):
    """A job that has a rank killed, another hung, is signalled and requeued, and ends; with what was said."""
    job = faults.job("survivor", "guard.hang_min_s=6", "checkpoint.on_usr1=stop", restarts=4)
    job.wait_for_step(5)
    # another node than that of the hang: two failures of one would leave it out
    killed = job.kill(0)
    job.wait_for_step(15)
    node = job.rank(1)[1]
    hang = job.stop(1)
    job.wait_for_step(25)
    saved = job.signal()
    job.finish()
    return job, {"killed": killed, "hang": hang, "node": node, "saved": saved}


def test_a_killed_rank_is_named_and_restarted_on_slurm(survivor):
    job, said = survivor
    assert "rank 0" in said["killed"]
    assert job.decisions().count("restart") >= 2


def test_a_stopped_rank_is_named_with_the_stacks_of_the_others_and_the_run_restarts(survivor):
    job, said = survivor
    assert (said["hang"]["ranks"], said["hang"]["nodes"]) == ([1], [said["node"]])
    assert "stacks of all threads" in (job.run_dir / "logs" / "rank-00000.log").read_text()


def test_a_signal_to_the_job_saves_and_requeues_it(survivor):
    job, said = survivor
    assert 25 <= said["saved"] < STEPS
    assert job.slurm.job(job.id)["Restarts"] == "1"


def test_a_job_that_was_killed_hung_and_requeued_has_the_losses_of_an_undisturbed_run(faults, survivor):
    faults.compare(survivor[0])


def test_a_node_is_left_out_after_two_failures_of_its_ranks_or_at_once_if_it_died():
    nodes = Nodes(["n1", "n2", "n3"], wanted=2)
    assert nodes.charge(Failure("killed", "n2")) is None
    assert nodes.charge(Failure("killed", None)) is None
    assert nodes.charge(Failure("killed", "n2")) == "n2"
    assert nodes.charge(Failure("node failed", "n1", is_dead=True)) == "n1"
    assert nodes.usable == ["n3"]


def test_a_node_that_is_surely_the_cause_is_left_out_at_once_if_there_is_a_spare():
    spare, none = Nodes(["n1", "n2", "n3"], wanted=2), Nodes(["n1", "n2"], wanted=2)
    broken = Failure("no GPU", "n2", is_of_node=True)
    assert (spare.charge(broken), none.charge(broken)) == ("n2", None)
    assert none.charge(broken) == "n2"


@pytest.fixture
def failures(tmp_path):
    """Let ranks report errors of their nodes, as their processes do; return what the supervisor concludes."""
    found = Failures(tmp_path)

    def report(*nodes, error=None, code=75):
        error = error or NodeError("there is no GPU", "look for one")
        found.clear()
        for rank, node in enumerate(nodes):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SLURMD_NODENAME", node)
                report_failure(tmp_path, World(rank, 4), error)
        return found.of(StepResult(code, []), 0.0)

    return report


def test_an_error_of_one_node_is_charged_to_it_and_the_run_restarted(failures):
    failure = failures("n2")
    assert (failure.node, failure.can_restart, failure.is_of_node) == ("n2", True, True)
    assert "there is no GPU" in failure.reason


def test_an_error_that_two_nodes_report_before_training_is_not_the_fault_of_one(failures, tmp_path):
    assert not failures("n1", "n2").can_restart
    assert failures("n1").can_restart is False
    write(tmp_path / "events.jsonl", [{"event": "start", "time": 1.0}])
    assert failures("n3").can_restart


def test_an_error_of_the_run_itself_ends_the_job(failures):
    assert not failures("n1", error=UserError("a wrong key", "correct it"), code=2).can_restart


def test_half_a_failure_file_is_ignored(failures, tmp_path):
    failures("n2")
    (tmp_path / "logs" / "failed-00001.json").write_text('{"time": 1.0, "ra')
    assert Failures(tmp_path).of(StepResult(75, []), 0.0).node == "n2"


@pytest.mark.parametrize(
    ("layout", "usable", "expected"),
    [
        ({"dp_replicate": 4, "dp_shard": 2}, 3, (3, 6, 3)),
        ({"dp_replicate": 4, "dp_shard": 2}, 1, (1, 2, 1)),
        ({"dp_replicate": -1, "dp_shard": 2, "tp": 2}, 3, (2, 4, 1)),
        ({"dp_replicate": 1, "dp_shard": -1}, 3, None),
        ({"dp_replicate": 2, "dp_shard": -1}, 1, None),
        ({"dp_replicate": 2, "dp_shard": "auto"}, 1, None),
        ({"dp_replicate": "auto"}, 3, None),
    ],
)
def test_fewer_replicas_keep_the_global_batch(layout, usable, expected):
    sets = [f"parallel.{name}={degree}" for name, degree in layout.items()]
    config = load_run(None, [*sets, "data.seq_len=32", "train.batch=768 tok"], expand).config
    size = smaller_size(config, Size(4, 8), usable, tasks_per_node=2)
    found = size and (size.nodes, size.ranks, int(size.sets[0].rpartition("=")[2]))
    assert found == expected


def test_a_node_whose_ranks_fail_twice_ends_the_job_without_another_restart(tmp_path):
    said = []
    job = Supervisor(
        config=load_run(None, [], expand).config,
        run_dir=tmp_path,
        allocation=Local(1),
        command=["bash", "-c", "echo 'rank 0 was killed (SIGKILL)' >&2; exit 75"],
        wanted=Size(1, 1),
        tasks_per_node=1,
        restarts=3,
        on_time_limit="requeue",
        preflight=dict,
        say=lambda text: said.append(text.removeprefix("supervise: ").partition(" ")[0].rstrip(":")),
    )
    assert job.run() == 1
    assert said == [
        "job",
        "preflight",
        *("start", "failure", "restart"),
        "start",
        "failure",
        "exclude",
        "give",
        "end",
    ]


def test_the_output_of_srun_names_the_task_that_was_killed_first_and_the_node_that_failed():
    killed = ["srun: error: n2: task 3: Killed", "srun: error: n1: tasks 0-1: Exited with exit code 1"]
    assert StepResult(137, killed).killed_task == (3, "n2", "Killed")
    assert StepResult(1, killed[::-1]).killed_task is None
    assert StepResult(1, ["srun: error: Node failure on n7"]).dead_node == "n7"


def test_a_hang_is_blamed_on_silent_ranks_or_on_those_that_are_elsewhere():
    nodes = ["n1", "n1", "n2", "n2"]
    waiting = [{"rank": rank, "step": 7, "doing": "gradients"} for rank in (0, 1, 3)]
    assert describe_hang(waiting, nodes)[1] == [2]
    reading = {"rank": 2, "step": 7, "doing": "__next__ (data/order/loader.py:249)"}
    message, ranks = describe_hang([*waiting, reading], nodes)
    assert ranks == [2]
    assert "rank 2 on n2 is in __next__" in message


def write(path: Path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_goodput_accounts_for_every_allocated_second(tmp_path):
    """Two ranks: a job of 100 s with a restart that repeats steps 6 to 8, and 20 s in the queue."""
    nodes = {"nodes": ["n1", "n2"], "tasks_per_node": 1}
    write(
        tmp_path / "events.jsonl",
        [
            {
                "time": 1000,
                "event": "supervise",
                "decision": "job",
                "submitted": 980,
                "started": 1000,
                **nodes,
            },
            {"time": 1010, "event": "supervise", "decision": "preflight", "seconds": 10},
            {"time": 1015, "event": "start", "ranks": 2, "step": 0, "startup_s": 5},
            {"time": 1040, "event": "supervise", "decision": "failure"},
            {"time": 1047, "event": "start", "ranks": 2, "step": 5, "startup_s": 7},
            {"time": 1098, "event": "end"},
            {"time": 1100, "event": "supervise", "decision": "end of job"},
        ],
    )
    first = [{"time": 1016 + 2 * n, "step": n, "step_s": 4.0 if n == 1 else 2.0} for n in range(1, 9)]
    second = [{"time": 1047 + 2 * n, "step": n, "step_s": 2.0} for n in range(6, 21)]
    second[-1]["save_s"] = 3.0
    write(tmp_path / "metrics.jsonl", [*first, *second])
    report = goodput(tmp_path)
    lost = {"preflight": 20, "start-up": 24, "compile": 4, "repeated work": 12, "save": 6}
    assert report.allocated_s == 200
    assert report.kept_s == 2 * 20 * 2
    assert {cause: seconds for cause, seconds in report.lost_s.items() if seconds} == lost | {
        "idle": 200 - 80 - sum(lost.values())
    }
    assert (report.queue_s, report.starts) == (20, 2)
