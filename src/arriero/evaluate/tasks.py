"""Evaluate a stored model on tasks of lm-evaluation-harness, in any format and with any adapter."""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.convert import find_model
from arriero.checkpoint.formats.hf_directory import check_tokenizer, write_tokenizer
from arriero.checkpoint.formats.model_reader import ModelReader, copy_extra_files
from arriero.data.tokens.prompts import find_tokenizer
from arriero.errors import UserError, nearest
from arriero.evaluate.generate import load
from arriero.model.generation import Sampling, generate
from arriero.model.language_model import LanguageModel
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
        first = {task: next(iter(found.items())) for task, found in self.metrics.items() if found}
        return {f"{task} {name}": value for task, (name, value) in first.items()}


def evaluate_tasks(request: TasksRequest) -> TaskScores:
    """Run the tasks; what the harness prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError(f"tasks need lm-eval ({error})", "pip install 'arriero[eval]'") from None
        # a model that is not of transformers is no reason for a warning
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        source = find_model(request.model)
        manager = _manager(TaskManager, request)
        model = harness_model(source, request)
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(request.tasks),
                num_fewshot=request.fewshot,
                limit=request.limit,
                task_manager=manager,
                log_samples=False,
            )
        except AssertionError as error:
            if "max tokens to generate" not in str(error):
                raise
            raise UserError(f"the context of the model is too short: {error}", "choose other tasks") from None
        except OSError as error:
            # the errors of data sets that are not there, on the disk or on the hub
            todo = "download the data of the task beforehand, or give task files with --include"
            raise UserError(
                f"the data of {', '.join(request.tasks)} cannot be read ({error})", todo
            ) from None
    assert found is not None
    return _scores(source.where, found)


def harness_model(source: ModelReader, request: TasksRequest) -> Any:
    """Load a stored model as a model of the harness, with the tokenizer that transformers makes of its files.

    The harness encodes, sorts and batches as for a model of transformers; the logits are ours.
    """
    from lm_eval.models.huggingface import HFLM

    tokenizer = _tokenizer(source)
    device = choose_device(request.device).torch_device
    model = load(source, device, request.dtype)

    class Harness(HFLM):
        drawn = 0

        def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
            with torch.no_grad():
                return model(inps)

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **given: Any) -> Tensor:
            # each row of an evaluation has its own seed: a task may ask for several samples of a prompt
            seed, self.drawn = self.drawn, self.drawn + len(context)
            return _generated(model, self.tokenizer, context, max_length, stop, given, seed)

    length = model.spec.max_seq_len - model.offset
    described = SimpleNamespace(device=device, config=SimpleNamespace(model_type=model.spec.family))
    return Harness(
        described, backend="causal", tokenizer=tokenizer, max_length=length, batch_size=request.batch
    )


def _tokenizer(source: ModelReader) -> Any:
    """Return the tokenizer as transformers reads it from the exported model."""
    import transformers

    find_tokenizer(source.extra_files, None, source.where)
    if source.format == "hf" and "tokenizer_config.json" in source.extra_files:
        return transformers.AutoTokenizer.from_pretrained(source.where)
    check_tokenizer(source.extra_files, source.tokens)
    with tempfile.TemporaryDirectory(prefix="arriero-tokenizer-") as folder:
        copy_extra_files(source, Path(folder))
        write_tokenizer(Path(folder), source.spec, source.tokens)
        return transformers.AutoTokenizer.from_pretrained(folder)


def _generated(
    model: LanguageModel,
    tokenizer: Any,
    context: Tensor,
    most: int,
    stop: Sequence[str],
    given: Mapping[str, Any],
    seed: int,
) -> Tensor:
    """Return prompts and continuations in rows of one length; a row ends after one of the texts of `stop`."""
    seen = given.get("attention_mask")
    visible = context.new_ones(context.shape) if seen is None else seen
    prompts = [row[mask.bool()].tolist() for row, mask in zip(context, visible, strict=True)]
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    is_greedy = given.get("do_sample") is False
    chosen = Sampling(0.0 if is_greedy else temperature, given.get("top_k"), given.get("top_p"), seed)
    made: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    # a token has at least one byte
    longest = max((len(text.encode()) for text in stop), default=1)
    for step in generate(model, prompts, most - context.shape[1], chosen, {tokenizer.eos_token_id} - {None}):
        for i, token in enumerate(step):
            made[i] += [] if token is None else [token]
            last = tokenizer.decode(made[i][-longest:])
            ended[i] = ended[i] or token is None or any(text in last for text in stop)
        if all(ended):
            break
    width = max(map(len, made))
    padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in made]
    return torch.cat((context, context.new_tensor(padded)), dim=1)


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
