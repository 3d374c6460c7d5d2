"""Runs a module through Dynamo, capture and passes, and then its rewritten graph op by op, without Inductor.

What Inductor makes of a graph costs seconds of C++ compilation and is `test_pipeline`'s subject; whether a pass fired,
where it did not and why, and whether outputs and gradients stayed eager's needs none of it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from megacpp_compile.analysis import Analysis, _rewrite, analyse
from megacpp_compile.config.options import Config
from megacpp_compile.passes._driver import run_passes
from megacpp_compile.remat.conflicts import trains
from megacpp_compile.report.records import Frame, MissedFusion
from megacpp_compile.targets import CPU
from tests import capture

# By the coarsest dtype in the model; relative to each tensor's largest value. bf16 keeps 8 bits, and an op rounds
# fewer times than the code it replaces.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@dataclasses.dataclass
class Frames:
    """What happened to a module's frames. `graphs` are those that ran, rewritten where a pass fired."""

    analyses: list[Analysis]
    graphs: list[GraphModule]
    compiled: Callable[..., Any]
    results: dict[str, Tensor]

    @property
    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for analysis in self.analyses:
            counts.update(analysis.frame.passes)
        return counts

    @property
    def fired(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}

    @property
    def misses(self) -> list[MissedFusion]:
        return [miss for analysis in self.analyses if analysis.outcome for miss in analysis.outcome.misses]

    def tags(self, name: str) -> set[str]:
        """The tags of all that the pass `name` refused."""
        return {miss.tag for miss in self.misses if miss.pass_name == name}

    @property
    def graph(self) -> GraphModule:
        """The rewritten graph of a module that is one frame."""
        (graph,) = self.graphs
        return graph

    def again(self, config: Config | None = None) -> dict[str, int]:
        """What fires when the passes run over their own results."""
        counts: Counter[str] = Counter()
        for analysis in self.analyses:
            if analysis.captured is not None:
                before = render(analysis.captured.gm)
                counts.update(run_passes(analysis.captured, config or Config(strict=True)).counts)
                assert render(analysis.captured.gm) == before
        return {name: count for name, count in counts.items() if count}


Around = Callable[[], contextlib.AbstractContextManager[Any]]


def train(
    call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], around: Around = contextlib.nullcontext
) -> dict[str, Tensor]:
    """Every output of `call(*args)`, and every gradient of their square sum, by name. `around`: the region, such as
    autocast, that the call is made in; backward runs outside, as in a training loop."""
    leaves = {f"argument {i}": a for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad}
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    for leaf in leaves.values():
        leaf.grad = None
    torch.manual_seed(5)  # for dropout
    with around():
        out = call(*args)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = sum(o.to(torch.promote_types(o.dtype, torch.float32)).square().sum() for o in outputs if o.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    results = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    results |= {f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()}
    return results | {f"gradient of {name}": t.grad.clone() for name, t in leaves.items() if t.grad is not None}


def largest_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """(error relative to the largest value, name) of the tensor that is furthest off; dtypes and shapes must agree."""
    assert got.keys() == want.keys()
    worst = (0.0, "")
    for name, b in want.items():
        a = got[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name}: {a.dtype} {a.shape}, eager {b.dtype} {b.shape}"
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        a, b = a.double(), b.double()
        error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if a.numel() and not a.equal(b) else 0.0
        worst = max(worst, (error, name)) if error == error else (float("inf"), name)
    return worst


def run(
    module: nn.Module,
    args: tuple[Any, ...],
    config: Config | None = None,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    captured: bool = True,
    around: Around = contextlib.nullcontext,
) -> Frames:
    """Train one step of `module` through the passes. `captured`: every frame has to be."""
    torch._dynamo.reset()
    config = config or Config(strict=captured)  # under which a frame that is not captured is an error
    analyses: list[Analysis] = []
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        result = analyse(gm, example_inputs, config, CPU)
        assert result.frame.captured or not captured, result.frame.reason
        rewritten = bool(result.outcome and result.outcome.sites)
        graph = result.captured.gm if rewritten else gm
        if rewritten:
            _assert_honest(graph, example_inputs)
        analyses.append(result)
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    one_graph = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True} if fullgraph else {}
    with torch._dynamo.config.patch(one_graph):  # as torch does for one graph by itself, but 2.9 does not
        return Frames(analyses, graphs, compiled, train(compiled, module, args, around))


def check(
    module: nn.Module,
    args: tuple[Any, ...],
    config: Config | None = None,
    *,
    tolerance: float | None = None,
    around: Around = contextlib.nullcontext,
    **kwargs: Any,
) -> Frames:
    """`run`, and all outputs, gradients and buffers have to be those of eager."""
    eager = copy.deepcopy(module)
    want = train(eager, eager, args, around)
    return _as_eager(run(module, args, config, around=around, **kwargs), want, _tolerance(module, args, tolerance))


def _tolerance(module: nn.Module, args: tuple[Any, ...], given: float | None) -> float:
    dtypes = {t.dtype for t in (*args, *module.parameters()) if isinstance(t, Tensor)}
    return given if given is not None else max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def _as_eager(frames: Frames, want: Mapping[str, Tensor], tolerance: float) -> Frames:
    error, name = largest_error(frames.results, want)
    assert error <= tolerance, f"{name} differs from eager's by {error:.2e}; fired {frames.fired}"
    return frames


def run_graph(module: nn.Module, args: tuple[Any, ...], config: Config | None = None) -> Frames:
    """`run` of a module without Dynamo: on a graph that `tests/capture.py` keeps from run to run. For modules that write
    to nothing and stand in no region; what Dynamo or the frontend makes of a frame is not in it."""
    captured, inputs = capture.captured(module, args)
    config = config or Config(strict=True)
    config = config.on(CPU)
    frame = Frame(name=type(module).__name__, nodes=len(captured.gm.graph.nodes), target="cpu", grad=trains(inputs))
    outcome, shown = _rewrite(captured, inputs, config, frame, 0)
    frame.passes, graph = outcome.counts, captured.gm
    if outcome.sites:
        _assert_honest(graph, list(inputs))
    state = inputs[: len(inputs) - len(args)]
    call = lambda *args: graph(*state, *args)  # noqa: E731
    return Frames([Analysis(frame, captured, outcome, shown)], [graph], call, train(call, module, args))


def check_graph(
    module: nn.Module, args: tuple[Any, ...], config: Config | None = None, *, tolerance: float | None = None
) -> Frames:
    """`run_graph`, and all outputs and gradients have to be those of eager."""
    want = train(module, module, args)
    return _as_eager(run_graph(module, args, config), want, _tolerance(module, args, tolerance))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


class _HonestyCheck(Interpreter):
    """Runs a graph and compares each value with the fake one that the node carries."""

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.op == "call_function":
            assert "val" in node.meta or not isinstance(result, Tensor), f"{node.name} has no fake value"
            self._compare(node, node.meta.get("val"), result)
        return result

    def _compare(self, node: Node, fake: Any, real: Any) -> None:
        if isinstance(real, tuple | list):
            for a, b in zip(fake, real, strict=True):
                self._compare(node, a, b)
        elif isinstance(real, Tensor):
            said, found = _layout(fake, "megacpp" in str(node.target)), _layout(real, "megacpp" in str(node.target))
            pairs = zip(said, found, strict=True)
            assert all(a == b for a, b in pairs if not isinstance(a, torch.SymInt) and b is not None), (
                f"{node.name} says {said} and is {found}"
            )


def _layout(t: Tensor, strides: bool) -> list[Any]:
    """dtype and sizes; strides too where an op of ours promises them, None for dimensions that are 1 wide."""
    own = [s if isinstance(n, torch.SymInt) or n != 1 else None for s, n in zip(t.stride(), t.shape, strict=True)]
    return [t.dtype, t.dim(), *t.shape, *(own if strides else [])]


def _assert_honest(graph: GraphModule, example_inputs: list[Any]) -> None:
    """Fake metadata is what Inductor plans by: shapes, dtypes, and strides of our ops must be what comes out."""
    graph.graph.lint()
    for node in graph.graph.nodes:  # symbols are names that a graph's code does not know: nodes have to read them
        written: list[Any] = []
        torch.utils._pytree.tree_map(written.append, (node.args, node.kwargs))
        assert not any(isinstance(a, torch.SymInt | torch.SymFloat) for a in written), f"{node.name} has {written}"
    inputs = [x.node.hint if isinstance(x, torch.SymInt) else x for x in example_inputs]
    inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        _HonestyCheck(graph).run(*inputs)


# --- graphs as text


def render(gm: GraphModule) -> str:
    """One line per node that computes something: `name: dtype[shape] = op(args)`.

    Names are made here, from ops and from the inputs' places in the module: those of fx and Dynamo change with torch.
    """
    names: dict[Node, str] = {}
    taken: Counter[str] = Counter()
    lines = []
    for node in gm.graph.nodes:
        base = _input_name(node) if node.op in ("placeholder", "get_attr") else _op_name(node)
        names[node] = base + (f"_{taken[base]}" if taken[base] else "")
        taken[base] += 1
        if node.op == "call_function":
            arguments = [_show(a, names) for a in node.args]
            arguments += [f"{k}={_show(a, names)}" for k, a in node.kwargs.items()]
            kind = _kind(node.meta.get("val"))
            target = _target(node)
            call = f"{arguments[0]}[{arguments[1]}]" if target == "getitem" else f"{target}({', '.join(arguments)})"
            lines.append(f"{names[node]}: {kind} = {call}" if kind else call)
        elif node.op == "output":
            lines.append(f"return {_show(node.args[0], names)}")
    return "\n".join(lines)


def _target(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        return "view" if name in ("reshape", "_unsafe_view") else name  # which of them it is depends on torch
    return getattr(node.target, "__name__", str(node.target))


def _op_name(node: Node) -> str:
    return _target(node).removeprefix("megacpp.").split(".")[0].lstrip("_")


def _input_name(node: Node) -> str:
    name = str(node.meta.get("dynamo_name", node.target)).lower()
    name = re.sub(r"^l_(self_)?|_(modules|parameters|buffers)(?=_)|(?<![a-z])(modules|parameters|buffers)_", "", name)
    return name.strip("_")


def _kind(fake: Any) -> str:
    if isinstance(fake, tuple | list):
        return f"({', '.join(_kind(f) for f in fake)})"
    if not isinstance(fake, Tensor):
        return ""
    dtype = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "complex64": "c64", "int64": "i64", "bool": "b8"}
    text = str(fake.dtype).removeprefix("torch.")
    return f"{dtype.get(text, text)}[{', '.join(map(str, fake.shape))}]"


def _show(argument: Any, names: dict[Node, str]) -> str:
    if isinstance(argument, Node):
        return names[argument]
    if isinstance(argument, tuple | list):
        return f"[{', '.join(_show(a, names) for a in argument)}]"
    return str(argument).removeprefix("torch.")
