"""Lowering of semantic ops in a graph that autograd has differentiated.

Forward and backward graphs are lowered separately: the partitioner has then seen each op as one node whose saved
tensors are its own choice, and the GEMMs inside are plain `aten.mm` to everything behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.fakes import FakeTensor, detect_fake_mode
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.backends import joined_results
from megacpp_compile.backends.float32_gradients import keep_float32
from megacpp_compile.backends.joined_pieces import compute_apart
from megacpp_compile.backends.joined_results import Join
from megacpp_compile.backends.overlap import overlap
from megacpp_compile.backends.static_launch import compile_ahead
from megacpp_compile.config.options import Config
from megacpp_compile.errors import NotLoweredError, RegistrationError
from megacpp_compile.fx.aliasing import memory_of, overwritable
from megacpp_compile.fx.edit import drop_dead, same_sizes, value
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.materialize import operands_of
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.lowerings import _sum_gradient
from megacpp_compile.lowerings._gemm import outer_products, shared_input
from megacpp_compile.lowerings._kernels.trace_options import autotune, tracing
from megacpp_compile.lowerings._op import KERNEL_OPS, no_autocast
from megacpp_compile.lowerings._registry import AHEAD, Choice, choose, semantic_ops
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.report import stages
from megacpp_compile.report.pieces import OP
from megacpp_compile.report.records import lowering_text
from megacpp_compile.targets import CUDA, Target

Report = Callable[[str, str], None]
_BACKWARD = "_backward"
_INHERITED = ("nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "from_node", "custom", "autograd_backward")


class LowerSemanticOps(GraphPass):
    """Replace every `megacpp::` node by its lowering's ops. regions: tags of the graph's checkpoint regions, which
    torch's caches do not look at: a model compiled with and without checkpoints may have the same graph. report: as
    `Settings.on_backward`; not called where the code comes from a cache."""

    def __init__(
        self,
        target: Target,
        config: Config,
        before: Any = None,
        regions: tuple[Any, ...] = (),
        report: Report | None = None,
    ) -> None:
        self.target, self.config, self.before, self.regions, self.report = target, config, before, regions, report

    @stages.stage("lowering")
    def run(self, graph: fx.Graph) -> None:
        _sum_gradient.erase(graph)
        keep_float32(graph)
        traced: dict[Any, GraphModule] = {}
        with autotune(self.config.autotune):
            ops = [n for n in graph.nodes if n.op == "call_function" and n.target in semantic_ops()]
            policy = self.config.own_policy
            limited = policy is not None and policy.peak_gib is not None
            joins = joined_results.find(graph, self.target.name, late=limited)
            # Those that may leave out what nobody reads come last: others drop operands where they are lowered.
            ops.sort(key=lambda node: bool(_choice(node, self.target).skippable_outputs))
            held = {node for node in ops if _lower(graph, node, self.target, traced, self.report, joins.get(node))}
            for join in dict.fromkeys(joins.values()):
                join.finish(functools.partial(_copy, join.cat, self.target, traced))
        drop_dead(graph)
        if self.target.cublas:
            outer_products.multiply(graph)
        if self.config.fuse_shared_input_gemms and self.target.cublas:
            shared_input.merge(graph)
        for node in graph.nodes:
            if node.target in semantic_ops() and node not in held:
                raise NotLoweredError(str(node.target), self.target.name, module_fqn(node), source_line(node))
        compute_apart(graph)
        if self.config.overlap_collectives:
            overlap(graph)
        if self.target is CUDA:
            operands_of(graph, _is_kernel)
            compile_ahead(graph)

    def key(self) -> tuple[Any, ...]:
        return self.target.name, self.config.cache_key(), self.regions

    def __reduce__(self) -> Any:
        return LowerSemanticOps, (self.target, self.config, self.before, self.regions)


def _is_kernel(node: Node) -> bool:
    return node.target in KERNEL_OPS or "triton_kernel_wrapper" in str(node.target)


def expand(graph: fx.Graph, node: Node, target: Target, traced: dict[Any, GraphModule]) -> dict[Node, Node]:
    """Put the lowering of one op in its place ahead of the others, in a graph that is not divided yet; what stands in
    the place of each of its results. traced: the lowerings so far, which equal calls share. Raises NotLoweredError
    where its lowering is no graph."""
    replaced: dict[Node, Node] = {}
    if _lower(graph, node, target, traced, replaced=replaced):
        raise NotLoweredError(str(node.target), target.name, module_fqn(node), source_line(node))
    return replaced


def expand_ahead(graph: fx.Graph, target: Target) -> None:
    """Put what is quicker with autograd's backward than with the op's own in the place of ops that are marked so, in a
    graph that is to be differentiated: as ATen names it, of which Inductor's decompositions have no gradient."""
    traced: dict[Any, GraphModule] = {}
    for node in [n for n in graph.nodes if AHEAD in n.meta]:
        if not name_of(node).endswith(_BACKWARD):
            expand(graph, node, dataclasses.replace(target, decomposes=False), traced)


def lower_traced(graph: fx.Graph, target: Target, mark: Mapping[str, Any]) -> None:
    """Put the lowerings of all ops in their places in one graph of forward and backward, which need not be functional.
    mark: annotations of what stands there then, but where a size is known at run time only, as of a sum of two such
    Inductor makes no code on its own. An op whose lowering is no graph stays, and runs as it is."""
    _sum_gradient.erase(graph)
    traced: dict[Any, GraphModule] = {}
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in semantic_ops()]:
        operands = tree_leaves([value(n) for n in node.all_input_nodes])
        if not any(free_unbacked_symbols(v) for v in operands if isinstance(v, torch.Tensor | torch.SymInt)):
            node.meta["custom"] = {**node.meta.get("custom", {}), **mark}
        _lower(graph, node, target, traced)
    graph.lint()


def _lower(
    graph: fx.Graph,
    node: Node,
    target: Target,
    traced: dict[Any, GraphModule],
    report: Report | None = None,
    join: Join | None = None,
    replaced: dict[Node, Node] | None = None,
) -> bool:
    """Put the lowering of `node` in its place; true where the op itself stays. join: what its results are written to.
    replaced: is told what stands in the place of which result."""
    tensors: list[Node] = []

    def hole(a: Any) -> Any:
        if isinstance(a, Node) and isinstance(a.meta["val"], torch.Tensor):
            tensors.append(a)
            return _Hole(len(tensors) - 1)
        return a.meta["val"] if isinstance(a, Node) else a

    args = fx.map_arg(node.args, hole)
    choice = _choice(node, target)
    if report is not None and (op := name_of(node)).endswith(_BACKWARD):
        report(op.removesuffix(_BACKWARD), lowering_text(choice.requested, choice.effective, choice.reason))
    if not choice.traced:
        if choice.body is node.target:  # another package's op, which runs as it is
            return True
        if not target.graphs_hold_ops:  # else the op asks again when it runs
            node.target = choice.body
        return target.graphs_hold_ops
    in_place, body, promised, way = _in_place(node, choice.overwrites), choice.body, value(node), ""
    if in_place:
        body, way = functools.partial(body, in_place=True), "in place"
    elif unread := _unread(node, choice.skippable_outputs):
        body, way = functools.partial(body, unread=unread), f"without {sorted(unread)}"
        promised = type(promised)(None if i in unread else result for i, result in enumerate(promised))
    elif join is not None:
        way, places = f"into {join.width} channels at {join.written[node]}", join.written[node]
        body = functools.partial(_into, body, places, join.width)
        args = (*args, None if join.whole is None else hole(join.whole))
        promised = type(promised)(None if i in places else result for i, result in enumerate(promised))
    fakes = [t.meta["val"] for t in tensors]
    key = (node.target, repr(args), tuple(_signature(f) for f in fakes), way)
    if key not in traced:
        with stages.piece(OP, " at ".join(filter(None, (name_of(node), module_fqn(node))))):
            traced[key] = _trace(body, args, fakes, target)
        if choice.added and (problem := _broken(promised, traced[key])):
            raise RegistrationError(f"lowering {choice.effective!r} of {name_of(node)}", problem)
    with graph.inserting_before(node):
        result = _keep_layout(graph, promised, _inline(graph, traced[key].graph, tensors, node), node)
    if join is not None:
        join.write(node, result[next(iter(join.written[node]))])
    _rewire(node, result, {} if replaced is None else replaced)
    graph.erase_node(node)
    return False


def _choice(node: Node, target: Target) -> Choice:
    return choose(node.target, target.name, fx.map_arg(node.args, value))


def _unread(node: Node, results: Sequence[int]) -> frozenset[int]:
    """Those of an op's results that nobody reads."""
    read = {user.args[1] for user in node.users if user.users} if results else set()
    return frozenset(results) - read


def _into(body: Callable[..., Any], places: Mapping[int, int], width: int, *args: Any) -> Any:
    """A lowering that writes results to a joined tensor: the last of `args`, None where it is to make it."""
    from megacpp_compile.lowerings._kernels.columns import Columns

    *own, whole = args
    return body(*own, into={result: Columns(whole, first, width) for result, first in places.items()})


def _copy(like: Node, target: Target, traced: dict[Any, GraphModule], whole: Node, piece: Node, first: int) -> Node:
    """What `Join.finish` copies with, ahead of `like`."""
    from megacpp_compile.lowerings._kernels import columns

    operands = [whole, piece]
    fakes = [value(t) for t in operands]
    key = (columns.copy, first, tuple(_signature(f) for f in fakes))
    if key not in traced:
        traced[key] = _trace(columns.copy, (_Hole(0), _Hole(1), first), fakes, target)
    with like.graph.inserting_before(like):
        return _inline(like.graph, traced[key].graph, operands, like)  # type: ignore[no-any-return]


def _in_place(node: Node, overwrites: Sequence[int]) -> bool:
    """Whether a lowering of `node` is to work in the memory of those arguments: dead after it, and not shared."""
    operands = [node.args[i] for i in overwrites]
    apart = len({memory_of(t) for t in operands}) == len(operands)
    return bool(operands) and apart and all(value(t).is_contiguous() and overwritable(t, node) for t in operands)


def _inline(graph: fx.Graph, body: fx.Graph, operands: Sequence[Node], like: Node) -> Any:
    """Copy `body` to the insertion point, reading `operands`, with the provenance of `like`; returns its result."""
    env: dict[Node, Any] = {}
    holes = iter(operands)
    for n in body.nodes:
        if n.op == "placeholder":
            env[n] = next(holes)
        elif n.op == "output":
            return fx.map_arg(n.args[0], env.__getitem__)
        else:
            env[n] = graph.node_copy(n, env.__getitem__)
            _inherit(env[n], like)
    raise AssertionError("a graph without an output")


def _inherit(node: Node, like: Node) -> None:
    node.meta |= {field: like.meta[field] for field in _INHERITED if field in like.meta}


class _Hole:
    """Stands for a tensor argument while the others are constants of the traced body."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


def _fill(args: Any, values: Sequence[Any]) -> Any:
    if isinstance(args, _Hole):
        return values[args.index]
    if isinstance(args, (list, tuple)):
        return type(args)(_fill(a, values) for a in args) if type(args) in (list, tuple) else [
            _fill(a, values) for a in args]  # fmt: skip
    return args


def _signature(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(str, t.shape)), tuple(map(str, t.stride())), t.dtype, t.device


def _trace(body: Callable[..., Any], args: Any, fakes: list[torch.Tensor], target: Target) -> GraphModule:
    from megacpp_compile._torch.inductor import select_decomp_table

    mode = detect_fake_mode(fakes)
    assert mode is not None and all(isinstance(f, FakeTensor) for f in fakes)

    def call(*values: torch.Tensor) -> Any:
        return body(*_fill(args, values))

    # Functional, so that a kernel which writes to its operands is one Inductor may run in place or on a clone.
    functional = torch.func.functionalize(call, remove="mutations")
    table = select_decomp_table() if target.decomposes else {}
    with mode, no_autocast(fakes[0]), torch.no_grad(), tracing():
        gm = make_fx(functional, decomposition_table=table, tracing_mode="real")(*fakes)
    # Functionalisation hands every overwritten operand back to its owner; here nobody reads it any more.
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return gm


def _broken(promised: Any, body: GraphModule) -> str:
    """What is another about a lowering's results than its op promises, as the rest of a sentence; "" for nothing."""
    (made,) = (n.args[0] for n in body.graph.find_nodes(op="output"))
    wanted, got = ([value(x) for x in tree_leaves(results)] for results in (promised, made))
    if len(wanted) == len(got) and all(map(_alike, wanted, got)):
        return ""
    return f"returns {', '.join(map(_kind, got))}, and the op promises {', '.join(map(_kind, wanted))}"


def _alike(a: Any, b: Any) -> bool:
    """Whether two fake values have one dtype and shape, as far as sizes are known."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor)
    return a.dtype == b.dtype and same_sizes(a.shape, b.shape)


def _kind(x: Any) -> str:
    return f"{x.dtype} [{', '.join(map(str, x.shape))}]" if isinstance(x, torch.Tensor) else type(x).__name__


def _keep_layout(graph: fx.Graph, promised: Any, result: Any, like: Node) -> Any:
    """`result` with every tensor laid out as the op `like` promised: what comes behind was traced on those strides.
    What is promised as None stays."""
    if promised is None:
        return result
    if isinstance(promised, (list, tuple)):
        return type(promised)(_keep_layout(graph, p, r, like) for p, r in zip(promised, result, strict=True))
    have = result.meta.get("val")
    if have is None or _signature(have)[1] == _signature(promised)[1] or not promised.is_contiguous():
        return result
    copy = graph.call_function(torch.ops.aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = promised
    _inherit(copy, like)
    return copy


def _rewire(node: Node, result: Any, replaced: dict[Node, Node]) -> None:
    """Give the op's readers the lowered values; readers of a structured result are `getitem`s, perhaps nested."""
    if not isinstance(result, (list, tuple)):
        node.replace_all_uses_with(result)
        replaced[node] = result
        return
    for user in list(node.users):
        _rewire(user, result[user.args[1]], replaced)  # type: ignore[index]
        user.graph.erase_node(user)
