"""Evaluate a stored model on tasks of lm-evaluation-harness, through its Hugging Face form."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.checkpoint.convert import convert, find_model
from arriero.checkpoint.formats.model_reader import DTYPES, ModelReader, WriteOptions
from arriero.data.tokens.prompts import find_tokenizer
from arriero.errors import UserError, nearest
from arriero.train.device import choose_device


@dataclass(frozen=True)
class TasksRequest:
    """`include` is a folder of task files; `limit` is the number of examples per task."""

    model: str
    tasks: Sequence[str]
    include: Path | None = None
    fewshot: int | None = None
    limit: int | None = None
    batch: int = 8
    device: str = "auto"
    dtype: str | None = None
    workdir: Path | None = None

    def settings(self) -> dict[str, Any]:
        """Return what identifies the evaluation: all that can change its result."""
        given = {"include": self.include and str(self.include), "dtype": self.dtype}
        identity = {"tasks": list(self.tasks), "fewshot": self.fewshot, "limit": self.limit}
        return identity | {key: value for key, value in given.items() if value}


@dataclass(frozen=True)
class TaskScores:
    """Metrics by task and name. `examples` is the number of examples that each task has."""

    model: str
    metrics: Mapping[str, Mapping[str, float]]
    stderr: Mapping[str, Mapping[str, float]]
    examples: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "task": task,
                "examples": self.examples.get(task),
                "metrics": dict(found),
                "stderr": dict(self.stderr[task]),
            }
            for task, found in self.metrics.items()
        ]
        return {"model": self.model, "tasks": rows}

    def main(self) -> dict[str, float]:
        """Return the first metric of each task, by names like 'hellaswag acc'."""
        return {
            f"{task} {name}": value for task, found in self.metrics.items() for name, value in _first(found)
        }


def _first(found: Mapping[str, float]) -> list[tuple[str, float]]:
    return list(found.items())[:1]


def evaluate_tasks(request: TasksRequest) -> TaskScores:
    """Run the tasks; what the harness prints goes to standard error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import lm_eval
            from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"tasks need lm-eval ({error})", "pip install 'arriero[eval]'") from None
    source = find_model(request.model)
    find_tokenizer(source.extra_files, None, source.where)
    with contextlib.redirect_stdout(sys.stderr), _as_hf(source, request) as directory:
        manager = _manager(TaskManager, request)
        device = choose_device(request.device).torch_device
        try:
            found = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(directory), "dtype": "auto", "parallelize": False},
                tasks=list(request.tasks),
                num_fewshot=request.fewshot,
                batch_size=request.batch,
                device=str(device),
                limit=request.limit,
                task_manager=manager,
                log_samples=False,
            )
        except OSError as error:
            # the errors of data sets that are not there, on the disk or on the hub
            todo = "download the data of the task beforehand, or give task files with --include"
            raise UserError(
                f"the data of {', '.join(request.tasks)} cannot be read ({error})", todo
            ) from None
    assert found is not None
    return _scores(source.where, found)


def _manager(task_manager: Any, request: TasksRequest) -> Any:
    """Return the index of the tasks; the harness's own tasks are indexed if one of them is asked for."""
    include = str(request.include) if request.include else None
    if request.include is not None:
        if not request.include.is_dir():
            raise UserError(f"--include {include} is not a folder", "give a folder of task files (YAML)")
        own = task_manager(include_path=include, include_defaults=False)
        if set(request.tasks) <= set(own.all_tasks):
            return own
    manager = task_manager(include_path=include)
    for task in request.tasks:
        if not manager.match_tasks([task]):
            close = nearest(task, list(manager.all_tasks))
            raise UserError(
                f"there is no task '{task}'" + (f" (did you mean '{close}'?)" if close else ""),
                "see the tasks of lm-evaluation-harness, or give a folder of your own with --include",
            )
    return manager


@contextlib.contextmanager
def _as_hf(source: ModelReader, request: TasksRequest) -> Iterator[Path]:
    """Yield the model as a Hugging Face directory, converted into a temporary folder if necessary."""
    dtype = DTYPES[request.dtype] if request.dtype else None
    if source.format == "hf" and dtype is None and "tokenizer_config.json" in source.extra_files:
        yield Path(source.where)
        return
    with tempfile.TemporaryDirectory(prefix="arriero-eval-", dir=request.workdir) as folder:
        target = Path(folder) / "model"
        convert(source, target, "hf", WriteOptions(dtype))
        yield target


def _scores(where: str, found: Mapping[str, Any]) -> TaskScores:
    metrics: dict[str, dict[str, float]] = {}
    stderr: dict[str, dict[str, float]] = {}
    for task, values in found["results"].items():
        numbers = {
            key: value for key, value in values.items() if isinstance(value, float | int) and "," in key
        }
        named = {key.split(",")[0] if key.endswith(",none") else key: value for key, value in numbers.items()}
        metrics[task] = {k: float(v) for k, v in named.items() if "_stderr" not in k}
        stderr[task] = {k.replace("_stderr", ""): float(v) for k, v in named.items() if "_stderr" in k}
    counts = {task: each["effective"] for task, each in found.get("n-samples", {}).items()}
    return TaskScores(where, metrics, stderr, counts)
