"""Pipeline parallelism: the model's stages on different ranks, micro-batches passing through them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from arriero.errors import UserError
from arriero.model.base import LanguageModel
from arriero.parallel.mesh import Mesh
from arriero.plan.schedules import SCHEDULES, stages_of


class Pipeline:
    """One rank's stages and the order in which they work. Shapes are those of one micro-batch."""

    def __init__(
        self,
        name: str,
        parts: Sequence[LanguageModel],
        mesh: Mesh,
        micro_batches: int,
        shape: tuple[int, int],
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        refuse_untested(name, device)
        ranks, rank = mesh.layout.pp, mesh.coordinate("pp")
        stages = [
            PipelineStage(
                part,
                index,
                ranks * len(parts),
                device,
                input_args=_states(part, shape, compute, mesh) if index else _tokens(shape),
                output_args=_loss() if part.head is not None else _states(part, shape, compute, mesh),
                group=mesh.group("pp"),
            )
            for index, part in zip(stages_of(name, rank, ranks, len(parts)), parts, strict=True)
        ]
        self._begins = parts[0].embedding is not None
        self._ends = any(part.head is not None for part in parts)
        schedule = get_schedule_class(SCHEDULES[name].torch_name)
        self._schedule = schedule(
            stages if SCHEDULES[name].stages_per_rank > 1 else stages[0],
            micro_batches,
            loss_fn=self._share,
            scale_grads=False,
        )
        self._labels = torch.ones((), device=device)

    def gradients(self, tokens: Tensor, labels: Tensor, count: Tensor, scale: float, **extra: Tensor) -> Tensor:
        """Accumulate gradients; returns this rank's share of the mean loss, zero where no stage has a head."""
        self._labels = count / scale
        return self._run(self._schedule.step, tokens, labels, extra, return_outputs=False) / scale

    @torch.no_grad()
    def summed_loss(self, tokens: Tensor, labels: Tensor, **extra: Tensor) -> Tensor:
        self._labels = torch.ones_like(self._labels)
        return self._run(self._schedule.eval, tokens, labels, extra)

    def _run(self, run, tokens: Tensor, labels: Tensor, extra: dict[str, Tensor], **options) -> Tensor:
        losses: list[Tensor] = []
        run(
            *([tokens] if self._begins else []),
            target=labels if self._ends else None,
            losses=losses if self._ends else None,
            labels_BT=labels,
            **extra,
            **options,
        )
        return torch.stack(losses).sum().detach() if losses else torch.zeros_like(self._labels)

    def _share(self, output: Tensor, _: Tensor) -> Tensor:
        return output.squeeze() / self._labels


def refuse_untested(name: str, device: torch.device) -> None:
    """Before torch 2.13 gloo cannot send to itself, which a V does at its tip."""
    old = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13)
    if SCHEDULES[name].v_shaped and old and device.type == "cpu":
        raise UserError(
            f"the schedule '{name}' needs torch 2.13 on a CPU, and this is {torch.__version__}",
            "set parallel.schedule to 'zero-bubble' or 'interleaved-1f1b'",
        )


def _tokens(shape: tuple[int, int]) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _loss() -> Tensor:
    return torch.empty((), dtype=torch.float32, device="meta")


def _states(part: LanguageModel, shape: tuple[int, int], compute: torch.dtype, mesh: Mesh) -> Tensor:
    """Between stages travel the states of a rank's own tokens."""
    rows, tokens = shape
    return torch.empty((rows, tokens // mesh.layout.tp, part.spec.dim), dtype=compute, device="meta")
