"""The loss and perplexity of a stored model on text, with any layout."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from arriero.checkpoint.convert import find_model
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.data.order.order import EvalStream
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.order.streams import build_streams
from arriero.data.prepare.builtin import dataset_of
from arriero.data.store.manifest import MANIFEST
from arriero.data.store.store import TokenStore
from arriero.data.tokens.prompts import find_tokenizer
from arriero.data.tokens.tokenizer import tokenizer_of
from arriero.data.workers import ProgressCallback, no_progress
from arriero.errors import UserError
from arriero.interrupt import Interrupted, Requests
from arriero.model.adapters import keys_of
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import leader_first, process_group, world_from
from arriero.plan.resolve import resolve
from arriero.train.build import Arrangement, build_mesh, build_model_state, build_passes, check_vocabulary
from arriero.train.device import choose_device
from arriero.train.forward_backward import Evaluator, SourceLoss, overall
from arriero.train.resume import CheckpointLoader, compare_tokenizers

_TOKENS_AT_ONCE = 8192
_LONGEST = 4096
_ENOUGH = 2**60
# keys that do not change a loss
_SAME_RESULT = ("run.device=", "parallel.")
_STORED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp32"}


@dataclass(frozen=True)
class PerplexityRequest:
    """What to evaluate. `data` are prepared datasets or text; none means the held-out data of the run."""

    model: str
    data: Sequence[str] = ()
    seq_len: int | None = None
    packing: str | None = None
    column: str | None = None
    tokenizer: Path | None = None
    cache: str = "data"
    sets: Sequence[str] = ()

    def settings(self) -> dict[str, Any]:
        """Return what identifies the evaluation: all that can change its result."""
        given = {
            "column": self.column,
            "tokenizer": self.tokenizer and str(self.tokenizer),
            "sets": sorted(each for each in self.sets if not each.startswith(_SAME_RESULT)),
        }
        identity = {"data": list(self.data), "seq_len": self.seq_len, "packing": self.packing}
        return identity | {key: value for key, value in given.items() if value}


@dataclass(frozen=True)
class Perplexity:
    """The summed losses by source, and how they were computed."""

    by_source: Mapping[str, SourceLoss]
    facts: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        rows = [{"source": name, **_numbers(loss)} for name, loss in self.by_source.items()]
        return {**self.facts, "sources": rows, **_numbers(overall(self.by_source.values()))}

    def main(self) -> dict[str, float]:
        """Return the perplexity of each source by name."""
        return {f"perplexity {name}": _numbers(loss)["perplexity"] for name, loss in self.by_source.items()}


def _numbers(loss: SourceLoss) -> dict[str, Any]:
    exact = math.exp(loss.mean) if loss.mean < 700 else None
    return {"tokens": loss.labels, "loss": loss.mean, "perplexity": exact}


def measure_perplexity(
    request: PerplexityRequest, nproc: int | None = None, progress: ProgressCallback = no_progress
) -> Perplexity:
    """Evaluate a model in this process, or in `nproc` forked ranks."""
    source = find_model(request.model)
    config, ranks = _config(request, source), nproc or world_from().size

    def work() -> Perplexity:
        with Requests(prints=False, final=nproc is not None) as requests:
            return _measure(request, source, _with_batch(config, ranks), requests, progress)

    return work() if nproc is None else run_ranks(work, nproc)


def _config(request: PerplexityRequest, source: ModelReader) -> RunConfig:
    """Return the run file of the evaluation: of the checkpoint's run, as far as it has one."""
    stored = _stored_run(source)
    settings: dict[str, Any] = {"run.name": "evaluation", "checkpoint.start_from": source.where}
    settings |= {"precision.compile": False, "eval.every": False}
    if source.unmerged is not None:
        settings |= keys_of(source.unmerged.settings)
    if stored:
        kept = ("compute", "master")
        settings |= {
            f"precision.{key}": stored["precision"][key] for key in kept if key in stored["precision"]
        }
        settings |= {f"data.{key}": value for key, value in stored["data"].items()}
        settings["eval.heldout"] = stored.get("eval", {}).get("heldout", False)
    else:
        widest = max((each.dtype for each in source.tensors.values()), key=lambda dtype: dtype.itemsize)
        number = _STORED[widest]
        settings |= {"precision.compute": number, "precision.master": number}
    if request.data:
        offset = source.unmerged.settings.offset if source.unmerged is not None else 0
        longest = min(source.spec.max_seq_len - offset, _LONGEST)
        seq_len = request.seq_len or (stored["data"].get("seq_len", longest) if stored else longest)
        packing = request.packing or "bestfit"
        settings |= {"data.sources": list(request.data), "data.phases": [], "data.seq_len": seq_len}
        settings |= {"data.packing": packing, "data.long_docs": "split", "eval.heldout": False}
        settings |= {"data.document_mask": packing != "concat", "data.cache": request.cache}
    elif not stored or not settings["eval.heldout"]:
        why = "has no held-out data (eval.heldout)" if stored else "is not a checkpoint of a run"
        raise UserError(f"{source.where} {why}", "name the data: --data FILE_OR_DATASET")
    elif request.seq_len or request.packing:
        raise UserError("--seq-len and --packing need --data", "the held-out data is read as in the run")
    settings |= {"train.batch": f"{settings['data.seq_len']} tok", "train.horizon": "1 step"}
    sets = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    return load_run(None, [*sets, *request.sets], expand).config


def _stored_run(source: ModelReader) -> dict[str, Any]:
    path = Path(source.where) / "run.toml"
    if source.format != "dcp" or not path.is_file():
        return {}
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _with_batch(config: RunConfig, ranks: int) -> RunConfig:
    """Set a batch that every layout divides: evaluation has no optimizer step."""
    rows = max(1, _TOKENS_AT_ONCE // config.data.seq_len)
    size = replace(config.train.batch, amount=ranks * rows * 4 * config.data.seq_len)
    train = config.train.model_copy(update={"batch": size, "micro_batch": rows})
    return config.model_copy(update={"train": train})


def _measure(
    request: PerplexityRequest,
    source: ModelReader,
    config: RunConfig,
    requests: Requests,
    progress: ProgressCallback,
) -> Perplexity:
    world = world_from()
    device = choose_device(config.run.device, world.local_rank, world.local_size, config.run.share_gpu)
    # the estimate is that of training; without gradients and optimizer state, far less is needed
    machine = replace(device.machine(world.local_size), memory_free=_ENOUGH)
    plan = Arrangement(resolve(config, machine, world.size), world, device)
    with process_group(world, device.torch_device, share_gpu=config.run.share_gpu):
        with leader_first(world):
            streams = _streams(request, source, config, progress)
        stores = [stream.sources[0].store for stream in streams.values()]
        check_vocabulary(plan.resolved.spec, stores)
        for store in stores:
            compare_tokenizers(Path(source.where), tokenizer_of(store), False, "--data")
        mesh, plan = build_mesh(plan)
        model, _ = build_model_state(plan, mesh)
        CheckpointLoader(model, mesh, config.checkpoint.load).load_weights(source.where, "CKPT")
        passes = build_passes(plan, model, mesh, plan.resolved.shares[0], config.data.seq_len)
        advance = _counter(progress, sum(stream.samples for stream in streams.values()))
        rows = plan.resolved.micro_batch
        evaluator = Evaluator(streams, rows, mesh, config.data.document_mask, advance)
        if evaluator.loss(passes, requests) is None:
            raise Interrupted(requests.agreed)
        data = config.data
        facts = {
            "model": source.where,
            "seq_len": data.seq_len,
            "packing": data.packing,
            "compute": plan.resolved.compute,
            "layout": str(mesh.layout),
        }
        return Perplexity(evaluator.by_source, facts)


def _streams(
    request: PerplexityRequest, source: ModelReader, config: RunConfig, progress: ProgressCallback
) -> Mapping[str, EvalStream]:
    """Open the data of each source; text is prepared with the model's tokenizer, once, into the cache."""
    if not request.data:
        return build_streams(config, progress).heldout
    packing = Packing(config.data.packing, config.data.long_docs, Path(config.data.cache), progress)
    streams = {}
    for path in request.data:
        is_prepared = (Path(path) / MANIFEST).is_file()
        tokenizer = None
        if not is_prepared or request.tokenizer:
            tokenizer = str(find_tokenizer(source.extra_files, request.tokenizer, source.where))
        directory = dataset_of(path, tokenizer, request.column, Path(config.data.cache), progress)
        source_tokens = TokenSource(TokenStore.open(directory))
        streams[path] = EvalStream([source_tokens], config.data.seq_len, packing)
    return streams


def _counter(progress: ProgressCallback, total: int) -> Callable[[int], None]:
    done = 0

    def advance(sequences: int) -> None:
        nonlocal done
        done = min(total, done + sequences)
        progress("evaluating", done, total)

    return advance
