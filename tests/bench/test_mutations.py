"""The proof can fail: each rule of placement, scaling or order, broken on purpose, is noticed by the matrix.

Ranks are forked, so that what is patched here is patched in them. A case's reference is trained before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

import arriero.parallel.apply
import arriero.parallel.context
import arriero.parallel.loss
import arriero.parallel.pipeline
import arriero.parallel.ring
import arriero.parallel.tensor
import arriero.plan.resolve
import arriero.train.build
import arriero.train.forward_backward
import arriero.train.optim.optimizer
import arriero.train.optim.rules
from arriero.bench.cases import MODELS, Case, cases
from arriero.bench.parity import Parity
from arriero.parallel.dtensor import from_local, local_part
from arriero.parallel.mesh import Mesh
from arriero.train.forward_backward import ForwardBackward

SHORT = {
    "model.layers": 2,
    "train.horizon": "3 steps",
    "schedule.kind": "constant",
    "schedule.warmup": "1 step",
}
parallel, train = arriero.parallel, arriero.train


@dataclass(frozen=True)
class Mutation:
    """`noticed_by` is a case of the matrix. `loud`: the run ends in an error instead of other numbers."""

    name: str
    model: str
    noticed_by: str
    apply: Callable[[pytest.MonkeyPatch], None]
    loud: bool = False


MUTATIONS: list[Mutation] = []


def mutation(noticed_by: str, model: str = "llama", loud: bool = False):
    def register(apply):
        MUTATIONS.append(Mutation(apply.__name__, model, noticed_by, apply, loud))
        return apply

    return register


@mutation("one axis: dp_shard 2")
def gradients_are_averaged_over_shards(patch):
    original = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, _: original(self, 2.0))


@mutation("one axis: dp_shard 2")
def first_weights_are_keyed_by_their_place_in_the_shard(patch):
    original = parallel.apply.local_shard

    def from_zero(parameter):
        local, _ = original(parameter)
        return local, (0,) * local.ndim

    patch.setattr(parallel.apply, "local_shard", from_zero)


@mutation("one axis: dp_replicate 2")
def copies_read_the_same_sequences(patch):
    patch.setattr(Mesh, "batch_rank", property(lambda mesh: mesh.coordinate("dp_shard")))


@mutation("one axis: dp_shard 2")
def a_rank_divides_by_its_own_labels(patch):
    patch.setattr(ForwardBackward, "_label_count", lambda _, batch: (batch.labels_BT != -100).sum().double())


@mutation("document masks: dp_shard 2")
def the_mean_is_one_of_the_ranks_means(patch):
    def own_labels_for_all(self, batch):
        return (batch.labels_BT != -100).sum().double() * self._mesh.layout.batch

    patch.setattr(ForwardBackward, "_label_count", own_labels_for_all)


@mutation("one axis: dp_shard 2")
def the_reported_loss_is_the_first_ranks(patch):
    total = Mesh.sum_over
    patch.setattr(Mesh, "sum_over", lambda mesh, value, *views: total(mesh, value, *views[: 2 - len(views)]))


@mutation("gradient accumulation: 2 micro-batches, dp_shard 2")
def the_last_micro_batch_is_not_reduced(patch):
    original = train.forward_backward.synchronize_gradients
    patch.setattr(
        train.forward_backward, "synchronize_gradients", lambda m, last, *how: original(m, not last, *how)
    )


@mutation("one axis: tp 2")
def gradients_of_norms_stay_partial_sums(patch):
    patch.setattr(train.optim.optimizer, "redistribute_like", lambda g, like: from_local(local_part(g), like))


@mutation("one axis: tp 2")
def the_heads_partial_gradient_is_taken_for_whole(patch):
    patch.setattr(parallel.tensor, "Partial", Replicate)


@mutation("one axis: tp 2")
def every_slice_of_the_vocabulary_begins_at_zero(patch):
    original = parallel.loss._local_rows

    def from_zero(weight):
        rows, held = original(weight)
        return rows, held._replace(start=0)

    patch.setattr(parallel.loss, "_local_rows", from_zero)


@mutation("one axis: tp 2")
def replicated_tensors_count_once_a_rank_in_the_norm(patch):
    patch.setattr(train.optim.optimizer, "sharded_dims", lambda tensor: tuple(range(tensor.device_mesh.ndim)))


@mutation("one axis: cp 2")
def positions_begin_at_zero_on_every_rank(patch):
    original = train.build.shard_batch

    def from_zero(batch, held_t):
        cut = original(batch, held_t)
        return replace(cut, positions_BT=torch.arange(len(held_t)).expand_as(cut.tokens_BT))

    patch.setattr(train.build, "shard_batch", from_zero)


@mutation("one axis: cp 2")
def heads_come_back_in_another_order(patch):
    original = parallel.context._heads_for_tokens
    patch.setattr(parallel.context, "_heads_for_tokens", lambda x, group: original(x, group).roll(1, dims=2))


@mutation("one axis: cp 4")
def key_heads_are_dealt_to_the_wrong_queries(patch):
    """With more ranks than key/value heads each of them goes to several ranks, next to each other."""

    def dealt_round(tensor, copies, dim):
        return torch.cat([tensor] * copies, dim)

    patch.setattr(torch.Tensor, "repeat_interleave", dealt_round)


@mutation("one axis: cp 2, ring")
def a_ring_holds_consecutive_chunks(patch):
    def consecutive(seq_len, rank, _, ring):
        return torch.arange(seq_len).chunk(ring)[rank]

    patch.setattr(train.build, "local_positions", consecutive)


@mutation("one axis: cp 2, ring")
def blocks_of_a_ring_merge_evenly(patch):
    merge = parallel.ring.merge

    def evenly(out, lse, more, more_lse):
        return (out + more) / 2, merge(out, lse, more, more_lse)[1]

    patch.setattr(parallel.ring, "merge", evenly)


@mutation("document masks: cp 2, ring")
def a_ring_attends_across_documents(patch):
    original = parallel.ring.attention_tiles
    patch.setattr(parallel.ring, "attention_tiles", lambda *given: original(*given[:-1], None))


@mutation("one axis: pp 2")
def a_pipeline_takes_the_mean_over_micro_batches(patch):
    original = parallel.pipeline.get_schedule_class

    def scaling(name):
        made = original(name)
        return lambda *args, **more: made(*args, **more | {"scale_grads": True})

    patch.setattr(parallel.pipeline, "get_schedule_class", scaling)


@mutation("one axis: pp 2")
def a_stage_knows_only_its_own_norm(patch):
    original = train.build.Optimizer
    patch.setattr(
        train.build, "Optimizer", lambda *args, **more: original(*args, **more | {"stage_groups": []})
    )


@mutation("one axis: pp 2", "gpt2")
def gradients_of_a_tied_table_are_not_joined(patch):
    patch.setattr(train.build, "sum_tied_gradients", lambda _, ends: ends)


@mutation("one axis: pp 2", "gpt2")
def a_tied_table_counts_twice_in_the_norm(patch):
    original = train.build.Optimizer

    def counting(*args, **more):
        optimizer = original(*args, **more)
        optimizer.model.tied = {}
        return optimizer

    patch.setattr(train.build, "Optimizer", counting)


@mutation("optimizers: muon, dp_shard 2 x tp 2")
def muon_makes_each_shard_orthogonal(patch):
    """As if a rank's piece were the matrix."""
    original = train.optim.rules.shard_of
    rule = train.optim.rules

    def of_the_piece(whole, like):
        return rule.orthogonalize(original(whole, like))

    patch.setattr(rule, "shard_of", of_the_piece)


@mutation("schedules: zbv, pp 2", loud=True)
def the_arms_of_a_v_change_places(patch):
    original = arriero.plan.resolve.stages_of
    patch.setattr(arriero.plan.resolve, "stages_of", lambda *args: original(*args)[::-1])


@pytest.fixture(scope="module")
def proofs(synthetic_cache):
    return {model: Parity(model, synthetic_cache, SHORT) for model in MODELS}


def case_of(mutation: Mutation) -> Case:
    found = next(case for case in cases(mutation.model) if case.title == mutation.noticed_by)
    layers = {"model.layers": 4} if "schedules" in found.group else {}
    return replace(found, sets=found.sets | layers, against=found.against | layers)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_broken_rule_is_noticed(mutation, proofs, monkeypatch):
    proof, case = proofs[mutation.model], case_of(mutation)
    proof.expected(case)
    mutation.apply(monkeypatch)
    verdict = proof.compare(case)
    assert not verdict.holds
    assert bool(verdict.error) == mutation.loud, verdict.error
