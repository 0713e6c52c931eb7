"""Measure torchtitan's own trainer on one GPU with synthetic tokens, as `bench step` measures Arriero.

Only the tokens and the clock are ours: trainer, model, loss and optimizer are torchtitan's, from its wheel.
"""

import importlib
import json
import os
import sys
import tempfile
import types
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from arriero.bench.machine import Meter
from arriero.bench.step import DocumentLengths
from arriero.train.device import uuid_of

_VOCABULARY, _END = 128256, 0


class _Tokenizer:
    """What torchtitan's document mask asks of a tokenizer."""

    eos_id = _END


class _Tokens:
    """Endless batches of random tokens; documents end with the end-of-text token."""

    def __init__(self, rows: int, seq_len: int, documents: DocumentLengths | None) -> None:
        self._rows, self._seq_len, self._documents = rows, seq_len, documents

    def __iter__(self) -> Any:
        generator, seed = torch.Generator().manual_seed(0), 0
        while True:
            x = torch.randint(1, _VOCABULARY, (self._rows, self._seq_len + 1), generator=generator)
            if self._documents is not None:
                numbers, _ = self._documents.pack(self._rows, self._seq_len + 1, seed)
                ends = torch.from_numpy(numbers[:, 1:] != numbers[:, :-1])
                x[:, :-1][ends] = _END
                seed += 1
            yield {"input": x[:, :-1].contiguous()}, x[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


def _without_datasets() -> None:
    """Let torchtitan be imported without Hugging Face's datasets, which synthetic tokens do not need."""
    if find_spec("datasets") is not None:
        return
    for name, members in {
        "datasets": ("Dataset", "load_dataset"),
        "datasets.distributed": ("split_dataset_by_node",),
    }.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {}))
        sys.modules[name] = module


def main(
    out: Path,
    steps: int = 20,
    warmup: int = 6,
    flavor: str = "8B",
    rows: int = 1,
    seq_len: int = 8192,
    documents: str | None = None,
    attention: Annotated[str, typer.Option(help="With documents: flex or varlen.")] = "varlen",
    float8: bool = False,
) -> None:
    """Train some steps and write times, memory and energy as JSON."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29511")
    _without_datasets()
    titan, manager = importlib.import_module("torchtitan.train"), importlib.import_module("torchtitan.config")
    specs = importlib.import_module("torchtitan.protocols.train_spec")
    llama = importlib.import_module("torchtitan.models.llama3")
    lengths = DocumentLengths.parse(documents) if documents else None
    spec = replace(
        llama.get_train_spec(),
        build_tokenizer_fn=lambda _: _Tokenizer(),
        build_dataloader_fn=lambda **_: _Tokens(rows, seq_len, lengths),
        state_dict_adapter=None,
    )
    specs.register_train_spec("llama3_synthetic", spec)
    arguments = {
        "model.name": "llama3_synthetic",
        "model.flavor": f"{flavor}_{attention}" if lengths else flavor,
        "training.seq_len": seq_len,
        "training.local_batch_size": rows,
        "training.steps": warmup + steps,
        "training.dtype": "bfloat16",
        "metrics.log_freq": 10,
        "activation_checkpoint.mode": "none",
        "job.dump_folder": tempfile.mkdtemp(prefix="titan-"),
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"]
    if float8:
        words += [
            "--model.converters",
            "quantize.linear.float8",
            "--quantize.linear.float8.filter_fqns",
            "output",
        ]
    trainer = _timed(titan.Trainer, warmup, steps)(manager.ConfigManager().parse_args(words))
    trainer.train()
    out.write_text(json.dumps(trainer.result() | {"version": version("torchtitan")}))
    torch.distributed.destroy_process_group()


def _timed(trainer: Any, warmup: int, steps: int) -> Any:
    """Return torchtitan's trainer with a clock: an event in the stream at the end of each step."""

    class Timed(trainer):
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            if self.step == warmup:
                torch.cuda.synchronize()
                self.meter, self.marks = Meter([uuid_of(self.device)]), []
                self.before = self.meter.joules()
            if self.step >= warmup:
                mark = torch.cuda.Event(enable_timing=True)
                mark.record()
                self.marks.append(mark)
            if self.step == warmup + steps:
                self.mhz = self.meter.sm_mhz()
                torch.cuda.synchronize()
                self.after = self.meter.joules()

        def result(self) -> dict[str, Any]:
            pairs = zip(self.marks, self.marks[1:], strict=False)
            joules = None if self.before is None else (self.after - self.before) / steps
            return {
                "step_ms": [a.elapsed_time(b) for a, b in pairs],
                "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
                "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
                "joules_per_step": joules,
                "sm_mhz": self.mhz,
            }

    return Timed


if __name__ == "__main__":
    typer.run(main)
