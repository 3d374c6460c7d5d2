"""Stages 5 and 6: lower the semantic ops after autograd and give the rest to Inductor.

Lowering happens as Inductor's `post_grad_custom_pre_pass`, on the forward and the backward graph separately: the
partitioner has then seen each op as one node whose saved tensors are its own choice, and the GEMMs inside are plain
`aten.mm` to everything behind. Options travel as config patches; no global state is touched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.backends import static_launch
from megacpp_compile.config.options import Config
from megacpp_compile.errors import NotLoweredError
from megacpp_compile.frontend.capture import fake_inputs
from megacpp_compile.fx.edit import drop_dead, memory_of, overwritable, value
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.lowerings._gemm import shared_input
from megacpp_compile.lowerings._gemm.autotune import AutotuneGemms
from megacpp_compile.lowerings._kernels.autotune import autotune, tracing
from megacpp_compile.lowerings._op import no_autocast
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.remat.offload import Offload
from megacpp_compile.remat.plan import StepContext
from megacpp_compile.remat.tagging import OnPlan, TagForRemat
from megacpp_compile.report.measure import allocated
from megacpp_compile.targets import XLA_DEVICES


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a graph is to be compiled. patches: Inductor's settings, which mean nothing to the others and are named in
    the log; on_plan: told what the policy decided; inner_compile: what place of what makes code of a partitioned graph;
    copies: how many such graphs run in a step."""

    target: str
    config: Config
    patches: dict[str, Any]
    on_plan: OnPlan | None = None
    inner_compile: Any = None
    copies: int = 1


class LowerSemanticOps(GraphPass):
    """Replace every `megacpp::` node by its lowering's ops."""

    def __init__(self, target: str, config: Config, before: Any = None) -> None:
        self.target, self.config, self.before = target, config, before

    def run(self, graph: fx.Graph) -> None:
        traced: dict[Any, GraphModule] = {}
        with autotune(self.config.autotune):
            for node in [n for n in graph.nodes if n.op == "call_function" and n.target in semantic_ops()]:
                _lower(graph, node, self.target, traced)
        drop_dead(graph)
        if self.config.fuse_shared_input_gemms and self.target == "cuda":
            shared_input.merge(graph)
        for node in graph.nodes:
            if node.target in semantic_ops():
                raise NotLoweredError(str(node.target), self.target, module_fqn(node), source_line(node))

    def key(self) -> tuple[Any, ...]:
        return self.target, self.config.cache_key()

    def __reduce__(self) -> Any:
        return LowerSemanticOps, (self.target, self.config, self.before)


def _lower(graph: fx.Graph, node: Node, target: str, traced: dict[Any, GraphModule]) -> None:
    tensors: list[Node] = []

    def hole(a: Any) -> Any:
        if isinstance(a, Node) and isinstance(a.meta["val"], torch.Tensor):
            tensors.append(a)
            return _Hole(len(tensors) - 1)
        return a.meta["val"] if isinstance(a, Node) else a

    args = fx.map_arg(node.args, hole)
    fakes = [t.meta["val"] for t in tensors]
    choice = choose(node.target, target, fx.map_arg(node.args, value))
    if not choice.traced:
        if target != "cuda":  # Inductor's graphs hold ops: this one asks again when it runs
            node.target = choice.body
        return
    in_place = _in_place(node, choice.overwrites)
    key = (node.target, repr(args), tuple(_signature(f) for f in fakes), in_place)
    if key not in traced:
        traced[key] = _trace(functools.partial(choice.body, in_place=True) if in_place else choice.body, args, fakes)
    with graph.inserting_before(node):
        result = _keep_layout(graph, value(node), _inline(graph, traced[key].graph, tensors, node))
    _rewire(node, result)
    graph.erase_node(node)


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
            for field in ("nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "from_node"):
                if field in like.meta:
                    env[n].meta[field] = like.meta[field]
    raise AssertionError("a graph without an output")


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


def _trace(body: Callable[..., Any], args: Any, fakes: list[torch.Tensor]) -> GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    mode = detect_fake_mode(fakes)
    assert mode is not None and all(isinstance(f, FakeTensor) for f in fakes)

    def call(*values: torch.Tensor) -> Any:
        return body(*_fill(args, values))

    # Functional, so that a kernel which writes to its operands is one Inductor may run in place or on a clone.
    functional = torch.func.functionalize(call, remove="mutations")
    # XLA has its own way to compute whatever ATen has a name for.
    table = {} if fakes[0].device.type in XLA_DEVICES else select_decomp_table()
    with mode, no_autocast(fakes[0]), torch.no_grad(), tracing():
        gm = make_fx(functional, decomposition_table=table, tracing_mode="real")(*fakes)
    # Functionalisation hands every overwritten operand back to its owner; here nobody reads it any more.
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return gm


def _keep_layout(graph: fx.Graph, promised: Any, result: Any) -> Any:
    """`result` with every tensor laid out as the op promised: what comes behind was traced on those strides."""
    if isinstance(promised, (list, tuple)):
        return type(promised)(_keep_layout(graph, p, r) for p, r in zip(promised, result, strict=True))
    have = result.meta.get("val")
    if have is None or _signature(have)[1] == _signature(promised)[1] or not promised.is_contiguous():
        return result
    copy = graph.call_function(torch.ops.aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = promised
    return copy


def _rewire(node: Node, result: Any) -> None:
    """Give the op's readers the lowered values; readers of a structured result are `getitem`s, perhaps nested."""
    if not isinstance(result, (list, tuple)):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        _rewire(user, result[user.args[1]])  # type: ignore[index]
        user.graph.erase_node(user)


def to_inductor(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a rewritten graph with Inductor."""
    user = settings.patches.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    lower = LowerSemanticOps(settings.target, settings.config, user)
    launches = static_launch.patches(gm, settings.target, settings.patches) if settings.inner_compile is None else {}
    patches = {**launches, **products(settings), "post_grad_custom_pre_pass": lower}
    return plain_inductor(gm, example_inputs, dataclasses.replace(settings, patches=patches))


def products(settings: Settings) -> dict[str, Any]:
    """The patches, with what has large products choose their kernels by measurement behind Inductor's own passes."""
    if settings.target != "cuda" or not settings.config.autotune_gemms:
        return settings.patches
    user = settings.patches.get("post_grad_custom_post_pass", inductor_config.post_grad_custom_post_pass)
    return {**settings.patches, "post_grad_custom_post_pass": AutotuneGemms(user)}


def plain_inductor(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a frame exactly as `backend="inductor"` would, but for the policy, if there is one."""
    from torch._inductor.compile_fx import compile_fx

    patches = _with_policy(settings, example_inputs)
    inputs, inner = _inner(settings.inner_compile, example_inputs)
    return compile_fx(gm, inputs, config_patches=patches or None, **inner)  # type: ignore[arg-type,return-value]


def from_pattern_matcher(error: BaseException) -> bool:
    """Whether Inductor failed inside its pattern matcher. Torch 2.13's does on MLA in float32 on CPU with a batch of
    one: its attention pattern 29 takes an axis of length one for another and traces a replacement that can't be."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "torch._inductor.pattern_matcher":
            return True
        trace = trace.tb_next
    return False


def _with_policy(settings: Settings, example_inputs: Sequence[Any]) -> dict[str, Any]:
    config, patches = settings.config, settings.patches
    if config.policy is None:
        return patches
    user = patches.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)
    inputs = tuple(
        i for i, x in enumerate(example_inputs)
        if isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, torch.nn.Parameter)
    )  # fmt: skip
    given = 0
    if config.policy.peak_gib is not None:
        on = next((x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"), "cpu")
        given = allocated(on)
    around = StepContext(settings.copies, given, inputs, len(example_inputs))
    tags = TagForRemat(config.policy, dict(config.block_kinds), user, settings.on_plan, around)
    # To use a dead buffer again Inductor holds it until then: memory that a policy is there to save, and that the
    # device's own allocator hands out again at once.
    patches = {"allow_buffer_reuse": False, **patches, "joint_custom_post_pass": tags}
    if config.policy.offload != "none":
        partitioner = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
        patches["custom_partitioner_fn"] = Offload(partitioner)
    return patches


def _inner(inner_compile: Any, example_inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """(inputs, arguments) of a compilation. Without kernels a model may run on fake tensors, which torch 2.9 does not
    take for its own where they are of another mode than the frame's."""
    if inner_compile is None:
        return example_inputs, {}
    return fake_inputs(example_inputs)[1], {"inner_compile": inner_compile}


def without_codegen(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """In the place of Inductor's code generation: the graph itself, semantic ops and all. Enough for shapes, and for
    what the partitioner saves."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)  # type: ignore[no-any-return]
