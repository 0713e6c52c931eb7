import json
import re
import sys

from arriero.data.prepare.planning import PrepareRequest, begin_or_resume
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.store.store import TokenStore

REPEATS = 8


def corpus_and_command(folder, tokenizer_file, real_texts):
    lines = [json.dumps({"text": f"{i} {text}"}) for i, text in enumerate(real_texts * REPEATS)]
    (folder / "corpus").mkdir()
    for i in range(2):
        (folder / "corpus" / f"{i}.jsonl").write_text("\n".join(lines[i::2]) + "\n")
    command = ["data", "prepare", "corpus/*.jsonl", "-o", "set", "--tokenizer", str(tokenizer_file)]
    return [*command, "--shard-size", "1MB", "--slurm", "--tasks", "3", "--time", "10"]


def test_an_array_of_jobs_prepares_the_same_bytes_as_one_process(tmp_path, tokenizer_file, real_texts, slurm):
    arguments = corpus_and_command(tmp_path, tokenizer_file, real_texts)
    done = slurm.run(
        sys.executable, "-m", "arriero", *arguments, "--site", "generic", "--partition", "debug", cwd=tmp_path
    )
    array, finish = re.findall(r"job (\d+)", done.stdout)
    state = slurm.wait(finish)
    logs = {path.name: path.read_text() for path in (tmp_path / "set").rglob("*.log")}
    assert state == "COMPLETED", logs
    assert slurm.wait(array) == "COMPLETED"
    asked = PrepareRequest(
        (str(tmp_path / "corpus/*.jsonl"),), tmp_path / "alone", tokenizer_file, shard_bytes=10**6
    )
    alone = prepare(asked, 1, PrepareWatcher())
    assert alone.shards >= 4
    assert not (tmp_path / "set" / ".prepare").exists()
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "set" / path.name).read_bytes(), path.name


def test_the_scripts_can_be_seen_before_anything_is_submitted(tmp_path, tokenizer_file, real_texts, arriero):
    arguments = corpus_and_command(tmp_path, tokenizer_file, real_texts)
    done = arriero(*arguments, "--dry-run", "--site", "lumi", "--account", "proj_1", "--workers", 4)
    assert done.returncode == 0, done.stderr
    for line in ("--array=0-2", "--account=proj_1", "--cpus-per-task=4", "--time=10", "--requeue"):
        assert f"#SBATCH {line}\n" in done.stdout
    assert '--part "$SLURM_ARRAY_TASK_ID/3"' in done.stdout
    assert str(tmp_path / "corpus/*.jsonl") in done.stdout
    assert not (tmp_path / "set").exists()


def test_parts_share_the_work_and_the_plain_command_finishes_it(
    tmp_path, tokenizer_file, real_texts, arriero
):
    arguments = corpus_and_command(tmp_path, tokenizer_file, real_texts)[:-5]
    asked = PrepareRequest(
        (str(tmp_path / "corpus/*.jsonl"),), tmp_path / "set", tokenizer_file, shard_bytes=10**6
    )
    early = arriero(*arguments, "--part", "0/2")
    assert early.returncode == 2
    assert "begin the prepare without --part first" in early.stderr
    wrong = arriero(*arguments, "--part", "2/2")
    assert wrong.returncode == 2
    assert "is not a part" in wrong.stderr
    planned = begin_or_resume(asked)
    assert arriero(*arguments, "--part", "1/2").returncode == 0
    assert planned.unfinished() == list(range(0, len(planned.shards), 2))
    assert arriero(*arguments).returncode == 0
    assert TokenStore.open(tmp_path / "set").documents == REPEATS * len(real_texts)
