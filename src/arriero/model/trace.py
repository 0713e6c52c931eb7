"""Trace one block of a model on the meta device: its operators, and the bytes that live at each moment.

A compiled block is traced by AOTAutograd with the partitioner and decompositions that torch.compile uses, so
that it keeps and recomputes the same activations. Private torch APIs used here, tested with 2.11 and 2.13:
`_functorch`, `_inductor.decomposition`, `_python_dispatch`, `_cdata`.
"""

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeVar

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

from arriero.model.costs import CUSTOM, Affine, BlockCosts, Operation, OperatorCost, Split
from arriero.model.family import build_model, family_of
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Attention, Block, FusedQKVAttention, converted
from arriero.model.spec import ModelSpec

Found = TypeVar("Found")
# two lengths, of which the difference is the cost per token
_LENGTHS = (4096, 8192)
_TYPES = {2: torch.bfloat16, 4: torch.float32}
_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ATTENTION = "arriero::traced_attention"
_ATTENTION_BACKWARD = "arriero::traced_attention_backward"
# fmt: off
_VIEWS = frozenset(f"aten::{name}" for name in (
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "alias", "detach", "expand", "slice",
    "split", "split_with_sizes", "select", "squeeze", "unsqueeze", "as_strided", "unbind",
))
# fmt: on


@torch.library.custom_op(_ATTENTION, mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stand for a fused attention kernel, which no backend of the meta device is."""
    raise NotImplementedError


@_attention.register_fake
def _(q, k, v):  # noqa: ARG001
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(_ATTENTION_BACKWARD, mutates_args=())
def _attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@_attention_backward.register_fake
def _(gradient, q, k, v, out, lse):  # noqa: ARG001
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx, gradient, _):
    return torch.ops.arriero.traced_attention_backward(gradient, *ctx.saved_tensors)


_attention.register_autograd(_gradients, setup_context=_save)


class _OneAttentionOperator(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = (*args, *(kwargs.get(name) for name in ("query", "key", "value")[len(args) :]))[:3]
        return torch.ops.arriero.traced_attention(q, k, v)[0]


# the partitioner weighs recomputation by FLOPs, which torch's own attention counts without the causal mask
@register_flop_formula([torch.ops.arriero.traced_attention])
def _attention_flops(q, k, *_, **__) -> int:
    return 4 * prod(q) * k[2]


def trace_block(
    spec: ModelSpec, compiled: bool, element: int = 2, fused_qkv: bool = False, budget: float = 1.0
) -> BlockCosts:
    """Return the costs of a block of this model; see `arriero.model.costs.block_costs`, which caches them."""
    with torch.device("meta"):
        model = build_model(spec).to(_TYPES[element])
        block = next(iter(model.blocks.values()))
        if fused_qkv and isinstance(block, Block) and type(block.attention) is Attention:
            block.attention = converted(block.attention, FusedQKVAttention)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            small, large = (
                (_trace_compiled if compiled else _trace_eager)(block, *_arguments(model, tokens, element))
                for tokens in _LENGTHS
            )
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    return _difference(small, large, family_of(spec.family).placements, shapes)


def _arguments(model: LanguageModel, tokens: int, element: int) -> tuple[Tensor, Any]:
    x_BTD = torch.empty(1, tokens, model.spec.dim, dtype=_TYPES[element], requires_grad=True)
    return x_BTD, model.rotation(torch.arange(tokens)[None])


@dataclass(frozen=True)
class _Call:
    """One operator at one sequence length; `weight` is its parameter, or that of its gradient."""

    name: str
    cost: OperatorCost
    shape: tuple[int, ...] = ()
    weight: str = ""


@dataclass(frozen=True)
class _Trace:
    """The operators and the bytes of one sequence length."""

    tokens: int
    forward: Sequence[_Call]
    backward: Sequence[_Call]
    kept: float
    forward_peak: float
    backward_peak: float


def _cost(name: str, args: Sequence[Any], tensors: Sequence[Tensor], results: Sequence[Tensor]) -> _Call:
    """Return the cost of one call from the shapes of its arguments and results."""
    shapes = [tuple(each.shape) for each in tensors]
    read, written = (float(sum(map(_bytes, each))) for each in (tensors, results))
    if name in CUSTOM:
        cost = CUSTOM[name](shapes, args)
        given = (cost.read, cost.written)
        cost = cost._replace(read=read if given[0] is None else given[0])
        return _Call(name, cost._replace(written=written if given[1] is None else given[1]))
    if name in _MATMULS:
        *batch, rows, inner = shapes[-2]
        columns = shapes[-1][-1]
        flops = 2.0 * prod(batch) * rows * columns * inner
        # a batched matmul fills a device as one with all rows does
        return _Call(name, OperatorCost("matmul", flops, read, written), (prod(batch) * rows, columns, inner))
    if name in (_ATTENTION, _ATTENTION_BACKWARD):
        rows, heads, tokens, width = shapes[0] if name == _ATTENTION else shapes[1]
        # causal: half of two products; backward has five, of which one is recomputed
        flops = 2.0 * rows * heads * tokens**2 * width * (1.0 if name == _ATTENTION else 2.5)
        return _Call(name, OperatorCost("attention", flops, read, written))
    return _Call(name, OperatorCost("elementwise", 0.0, read, written))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Recorder(TorchDispatchMode):
    """Record every operator, and the live bytes of all storages but the `given` ones."""

    def __init__(self, given: Mapping[int, str]) -> None:
        super().__init__()
        self._given = given
        self._sizes: dict[int, int] = {}
        self.calls: list[_Call] = []
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        inputs, results = _of_type(Tensor, args), _of_type(Tensor, result)
        for tensor in results:
            self._count(tensor.untyped_storage())
        if name not in _VIEWS:
            call = _cost(name, args, inputs, results)
            weights = [self._given.get(_key(t.untyped_storage()), "") for t in inputs]
            self.calls.append(replace(call, weight=next(filter(None, weights), "")))
        return result

    def _count(self, storage) -> None:
        key = _key(storage)
        if key not in self._sizes and key not in self._given:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _key(storage: Any) -> int:
    return storage._cdata


def _trace_eager(block: nn.Module, x_BTD: Tensor, rotation: Any) -> _Trace:
    names = {_key(p.untyped_storage()): name for name, p in block.named_parameters()}
    shared = {_key(t.untyped_storage()): "" for t in _of_type(Tensor, (x_BTD, rotation))}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _key(storage) not in names | shared:
            saved[_key(storage)] = storage.nbytes()
        return tensor

    forward = _Recorder(names | shared)
    with saved_tensors_hooks(pack, lambda tensor: tensor), forward, _OneAttentionOperator():
        y_BTD = block(x_BTD, rotation, None)
    x_bytes = _bytes(x_BTD)
    gradient = torch.empty_like(y_BTD)
    live, calls = forward.live, len(forward.calls)
    forward_peak, forward.peak = forward.peak, live
    # gradients of an earlier trace would be added to
    block.zero_grad()
    with forward:
        y_BTD.backward(gradient)
    return _Trace(
        x_BTD.shape[1],
        forward.calls[:calls],
        forward.calls[calls:],
        kept=x_bytes + sum(saved.values()),
        forward_peak=x_bytes + forward_peak,
        # the result of the block is the input of the next one
        backward_peak=x_bytes + _bytes(gradient) + forward.peak - _bytes(y_BTD),
    )


def _trace_compiled(block: nn.Module, x_BTD: Tensor, rotation: Any) -> _Trace:
    """Trace what torch.compile would run: elementwise operators are fused up to the next matmul."""
    parameters, graphs = dict(block.named_parameters()), {}

    def function(x: Tensor, rotation: Any, *values: Tensor) -> Tensor:
        with _OneAttentionOperator():
            return torch.func.functional_call(
                block, dict(zip(parameters, values, strict=True)), (x, rotation, None)
            )

    def keep(kind: str):
        def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:  # noqa: ARG001
            graphs[kind] = gm.graph
            return make_boxed_func(gm)

        return compiler

    traced = aot_function(
        function,
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    y_BTD = traced(x_BTD, rotation, *parameters.values())
    y_BTD.backward(torch.empty_like(y_BTD))
    inputs = [n for n in graphs["forward"].nodes if n.op == "placeholder"]
    count = len(parameters)
    names = {node.name: name for node, name in zip(inputs[-count:], parameters, strict=True)}
    shared = {node.name: "" for node in inputs[1:-count]}
    forward = _Graph(graphs["forward"], names | shared)
    outputs = _outputs(graphs["forward"])
    kept = {each.name: forward.base(each) for each in outputs[1:]}
    kept_names = set(kept.values()) - set(names) - set(shared) | {inputs[0].name}
    results = _outputs(graphs["backward"])[-count:]
    gradients = {node.name: name for node, name in zip(results, parameters, strict=True)}
    given = {base: forward.given[base] for base in kept.values() if base in forward.given}
    sizes = {base: forward.size(base) for base in kept.values()}
    backward = _Graph(graphs["backward"], given, kept, gradients, sizes)
    return _Trace(
        x_BTD.shape[1],
        forward.calls(),
        backward.calls(),
        kept=sum(map(forward.size, kept_names)),
        forward_peak=forward.peak({inputs[0].name}, {*kept_names, forward.base(outputs[0])}),
        backward_peak=backward.peak(
            {backward.base(n) for n in graphs["backward"].nodes if n.op == "placeholder"},
            {backward.base(n) for n in _outputs(graphs["backward"])},
        ),
    )


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _of_type(fx.Node, output.args)


def _of_type(kind: type[Found], value: Any) -> list[Found]:
    """Return the objects of a type in nested lists and tuples."""
    if isinstance(value, kind):
        return [value]
    return (
        [found for each in value for found in _of_type(kind, each)] if isinstance(value, list | tuple) else []
    )


class _Graph:
    """A graph of AOTAutograd as kernels: matmuls and other whole operators, and fused elementwise ones.

    `given` maps tensors that belong to no pass, such as parameters, to their names. `aliases` maps inputs to
    the tensor of the forward pass whose memory they share, and `gradients` results to the parameter.
    """

    def __init__(
        self,
        graph: fx.Graph,
        given: Mapping[str, str],
        aliases: Mapping[str, str] | None = None,
        gradients: Mapping[str, str] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._graph, self.given, self._aliases = graph, given, aliases or {}
        self._gradients = gradients or {}
        # an input may be a view of a larger tensor
        self._sizes: dict[str, int] = dict(sizes or {})
        self._base: dict[str, str] = {}
        self._made_by: dict[str, fx.Node] = {}
        self._level: dict[str, int] = {}
        for node in graph.nodes:
            self._add(node)
        outputs = {self.base(node) for node in _outputs(graph)}
        read_whole = {t for n in graph.nodes if _is_whole(n) for t in self._inputs(n)}
        self._stored = {
            t for t, node in self._made_by.items() if _is_whole(node) or t in outputs | read_whole
        } | {self.base(n) for n in graph.nodes if n.op == "placeholder"}
        self._leaves = {
            t: self._find_leaves(t)
            for t in self._made_by
            if t in self._stored and not _is_whole(self._made_by[t])
        }

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder":
            self._base[node.name] = self._aliases.get(node.name, node.name)
        elif node.op == "call_function" and _is_view(node):
            self._base[node.name] = self.base(node.all_input_nodes[0])
            return
        elif node.op == "call_function":
            source = node.all_input_nodes[0] if _is_item(node) else node
            self._base[node.name] = node.name
            self._made_by[node.name] = source
            whole = [t for t in self._inputs(source) if t in self._made_by and _is_whole(self._made_by[t])]
            below = [self._level.get(t, 0) for t in self._inputs(source)]
            self._level[node.name] = max(below, default=0) + bool(whole)
        if isinstance(value, Tensor):
            self._sizes.setdefault(self.base(node), _bytes(value))

    def base(self, node: fx.Node) -> str:
        """Return the tensor whose memory a result is, or is a view of."""
        return self._base.get(node.name, node.name)

    def size(self, name: str) -> int:
        return 0 if name in self.given else self._sizes.get(name, 0)

    def _inputs(self, node: fx.Node) -> list[str]:
        return list(dict.fromkeys(self.base(each) for each in node.all_input_nodes))

    def _find_leaves(self, name: str) -> list[str]:
        """Return the stored tensors that a fused kernel reads to compute a result."""
        found, waiting, seen = {}, [name], set()
        while waiting:
            for each in self._inputs(self._made_by[waiting.pop()]):
                if each in self._stored:
                    found[each] = True
                elif each in self._made_by and each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return list(found)

    def calls(self) -> list[_Call]:
        """Return the kernels in their order."""
        found: list[_Call] = []
        kernels = self._fused()
        gradients = {self._base.get(name, name): weight for name, weight in self._gradients.items()}
        for node in self._graph.nodes:
            if node.op == "call_function" and _is_whole(node) and not _is_item(node):
                values = [n.meta["val"] for n in node.all_input_nodes]
                call = _cost(
                    _name(node), node.args, _of_type(Tensor, values), _of_type(Tensor, node.meta["val"])
                )
                read = [self._leaves.get(t, [t]) for t in self._inputs(node)]
                # concatenated weights are computed from weights alone
                own = (self.given[each[0]] for each in read if all(t in self.given for t in each))
                weights = [gradients.get(node.name, ""), *own]
                found.append(replace(call, weight=next(filter(None, weights), "")))
            elif node.name in kernels:
                read, written = kernels[node.name]
                sizes = (float(sum(self._sizes.get(t, 0) for t in each)) for each in (read, written))
                found.append(_Call("fused", OperatorCost("elementwise", 0.0, *sizes)))
        return found

    def _fused(self) -> dict[str, tuple[set[str], set[str]]]:
        """Return for the last result of each fused kernel what the kernel reads and writes."""
        groups: list[tuple[int, set[str], set[str]]] = []
        for name, leaves in self._leaves.items():
            level, read, written = self._level[name], set(leaves), {name}
            near = [g for g in groups if g[0] == level and (g[1] & read or g[2] & read)]
            for group in near:
                groups.remove(group)
                read, written = read | group[1], written | group[2]
            groups.append((level, read, written))
        position = {name: i for i, name in enumerate(self._made_by)}
        return {max(w, key=position.__getitem__): (read - w, w) for _, read, w in groups}

    def peak(self, live: set[str], keep: set[str]) -> int:
        """Return the largest number of live bytes; tensors are freed after their last use, unless kept."""
        last: dict[str, int] = {}
        steps: list[tuple[str, list[str]]] = []
        for name, node in self._made_by.items():
            if name in self._stored:
                needs = self._inputs(node) if _is_whole(node) else self._leaves[name]
                last.update(dict.fromkeys([*needs, name], len(steps)))
                steps.append((name, needs))
        live, total = set(live), sum(map(self.size, live))
        peak = total
        for i, (name, needs) in enumerate(steps):
            dead = {t for t in needs if last[t] == i and t in live} - keep
            freed = sum(map(self.size, dead))
            live = live - dead | {name}
            # a fused kernel may write its result in the place of an argument
            early = 0 if _is_whole(self._made_by[name]) else freed
            peak = max(peak, total - early + self.size(name))
            total += self.size(name) - freed
            if last[name] == i and name not in keep:
                live.remove(name)
                total -= self.size(name)
        return peak


def _name(node: fx.Node) -> str:
    """Return the operator's name without its overload; "" for functions of Python."""
    target: Any = node.target
    return target.name().partition(".")[0] if hasattr(target, "overloadpacket") else ""


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if _is_item(node):
        return _name(node.all_input_nodes[0]) in _VIEWS
    return _name(node) in _VIEWS


def _is_whole(node: fx.Node) -> bool:
    """Return whether an operator is a kernel of its own that nothing is fused with."""
    if node.op != "call_function":
        return False
    name = _name(node.all_input_nodes[0] if _is_item(node) else node)
    return name in _MATMULS or name.partition("::")[0] not in ("aten", "prims", "")


def _difference(
    small: _Trace, large: _Trace, placements: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> BlockCosts:
    """Return costs per token and fixed costs from traces of two sequence lengths."""

    def affine(one: float, two: float) -> Affine:
        per_token = (two - one) / (large.tokens - small.tokens)
        return Affine(per_token, one - per_token * small.tokens)

    def operation(one: _Call, two: _Call) -> Operation:
        assert one.name == two.name, "the operators of a block depend on the sequence length"
        is_attention = one.cost.kind == "attention"
        per_length = one.cost.flops / small.tokens**2 if is_attention else 0.0
        weight = one.weight or next(
            (n for n, s in shapes.items() if s in (one.shape[:2], one.shape[1::-1])), ""
        )
        module = weight.rpartition(".")[0] if one.cost.kind == "matmul" else ""
        return Operation(
            one.name.partition("::")[2] or one.name,
            one.cost.kind,
            0.0 if is_attention else one.cost.flops / small.tokens,
            per_length,
            affine(one.cost.read or 0.0, two.cost.read or 0.0),
            affine(one.cost.written or 0.0, two.cost.written or 0.0),
            tuple(None if n != m else n for n, m in zip(one.shape, two.shape, strict=True)),
            module,
            _split(module, placements),
        )

    return BlockCosts(
        shapes,
        tuple(operation(*both) for both in zip(small.forward, large.forward, strict=True)),
        tuple(operation(*both) for both in zip(small.backward, large.backward, strict=True)),
        affine(small.kept, large.kept),
        affine(small.forward_peak, large.forward_peak),
        affine(small.backward_peak, large.backward_peak),
    )


def _split(module: str, placements: Mapping[str, str]) -> Split:
    for pattern, placement in placements.items():
        if module and fnmatchcase(f"blocks.0.{module}", pattern):
            return placement if placement in ("column-wise", "row-wise") else ""
    return ""
