"""Pipeline parallelism: stages of the model on different ranks, driven by torch's schedules."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from arriero.model.language_model import LanguageModel
from arriero.parallel.dtensor import local_part
from arriero.parallel.mesh import Mesh
from arriero.plan.layout import SCHEDULES, stages_of


class _SplitBackwardStage(PipelineStage):
    """Stage that keeps the graph of a micro-batch until its weight gradients are computed.

    Torch 2.11 only keeps the Python objects of nodes where both backward passes meet. Such an object does not
    own a node that is defined in Python, as the loss and float8 layers are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graphs: dict[int, GradientEdge] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if output.requires_grad:
            self._graphs[fwd_chunk_id] = get_gradient_edge(output)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._graphs.pop(bwd_chunk_id, None)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)


class Pipeline:
    """One rank's stages and their schedule; `rows` and `tokens` are the shape of a micro-batch."""

    def __init__(
        self,
        name: str,
        parts: Sequence[LanguageModel],
        mesh: Mesh,
        micro_batches: int,
        rows: int,
        tokens: int,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._ranks, self._rank = mesh.layout.pp, mesh.coordinate("pp")
        self._name, self._group = name, mesh.group("pp")
        # stages exchange the hidden states of the rank's own tokens
        self._between = (tokens // mesh.layout.tp, parts[0].spec.dim)
        self._compute, self._device = compute, device
        numbers = stages_of(name, self._rank, self._ranks, len(parts))
        self._parts = dict(zip(numbers, parts, strict=True))
        self._divisor = torch.ones((), device=device)
        self._kept: dict[int, Tensor] = {}
        stages = [self._stage(number, part, rows, tokens) for number, part in self._parts.items()]
        self._schedule = get_schedule_class(SCHEDULES[name].torch_name)(
            stages if SCHEDULES[name].stages_per_rank > 1 else stages[0],
            micro_batches,
            loss_fn=lambda loss, _: loss / self._divisor,
            scale_grads=False,
        )

    def _stage(self, number: int, part: LanguageModel, rows: int, tokens: int) -> PipelineStage:
        """Create a stage with known shapes, so that torch need not run it to find them."""
        states = torch.empty((rows, *self._between), dtype=self._compute, device="meta", requires_grad=True)
        first = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        kind = _SplitBackwardStage if SCHEDULES[self._name].splits_backward else PipelineStage
        return kind(
            part,
            number,
            self._ranks * len(self._parts),
            self._device,
            input_args=states if number else first,
            output_args=states if part.head is None else loss,
            group=self._group,
        )

    def gradients(
        self, tokens: Tensor, labels: Tensor, label_count: Tensor, scale: float, **extra: Tensor
    ) -> Tensor:
        """Accumulate gradients and return this rank's part of the mean loss, zero without a head."""
        self._divisor = label_count / scale
        ends = any(part.head is not None for part in self._parts.values())
        losses: list[Tensor] | None = [] if ends else None
        self._schedule.step(
            *([tokens] if 0 in self._parts else []),
            target=labels if ends else None,
            losses=losses,
            return_outputs=False,
            labels_BT=labels,
            **extra,
        )
        return torch.stack(losses).sum().detach() / scale if losses else torch.zeros_like(label_count)

    @torch.no_grad()
    def summed_loss(self, tokens: Tensor, labels: Tensor, rows: int, **extra: Tensor) -> Tensor:
        """Run forward only, `rows` rows at a time; torch's V schedules cannot."""
        total = torch.zeros((), device=self._device)
        for begin in range(0, len(tokens), rows):
            part = slice(begin, begin + rows)
            more = {name: tensor[part] for name, tensor in extra.items()}
            for number, model in self._parts.items():
                out = model(self._received(number, tokens[part]), labels_BT=labels[part], **more)
                if model.head is None:
                    self._send(number, out)
                else:
                    total += out
        return total

    def _received(self, stage: int, tokens: Tensor) -> Tensor:
        if stage == 0:
            return tokens
        if stage in self._kept:
            return self._kept.pop(stage)
        states = torch.empty((len(tokens), *self._between), dtype=self._compute, device=self._device)
        dist.recv(states, group=self._group, group_src=self._rank_of(stage - 1))
        return states

    def _send(self, stage: int, states: Tensor) -> None:
        if self._rank_of(stage + 1) == self._rank:
            self._kept[stage + 1] = states
        else:
            dist.send(states.contiguous(), group=self._group, group_dst=self._rank_of(stage + 1))

    def _rank_of(self, stage: int) -> int:
        held = (stages_of(self._name, r, self._ranks, len(self._parts)) for r in range(self._ranks))
        return next(rank for rank, stages in enumerate(held) if stage in stages)


def sum_tied_gradients(gradients: dict[str, Tensor], ends: dist.ProcessGroup | None) -> None:
    """Sum the gradients of a tied embedding, which is on the first stage and, as head, on the last.

    `ends` are the ranks of these stages, None if one rank holds both.
    """
    copies = [gradients[name] for name in ("embedding.weight", "head.weight") if name in gradients]
    local = [local_part(g) for g in copies]
    if not local:
        return
    total = local[0] if len(local) == 1 else local[0] + local[1]
    if ends is not None:
        dist.all_reduce(total, group=ends)
    for copy in local:
        copy.copy_(total)
