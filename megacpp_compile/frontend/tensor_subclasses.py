"""Where wrapper tensors enter: recognised, reported, and split into payload and scale before any kernel sees them.

In a compiled frame, a wrapper that only serves linears as their weight is handed over as its payload and its scale, and
those linears become `megacpp::linear_fp8_weight`. Any other use is left as it came, to the wrapper's own class, and
reported. Outside of one, `linear` does the same for a call (as `nn.sparse_mla` does), and `split_linears` for a model:
classes that Dynamo can't trace (Transformer Engine's) get no further than that.

What is wide stays wide: a bfloat16 weight that is no wrapper is never rounded here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

# Registers its op, here and not where it is called: Dynamo traces that.
import megacpp_compile.lowerings.linear_fp8_weight  # noqa: F401
from megacpp_compile._torch.dynamo import AttrSource
from megacpp_compile._torch.fakes import detect_fake_mode
from megacpp_compile._torch.ops import nn_linear
from megacpp_compile.errors import TorchInternalsError
from megacpp_compile.fx.copies import copied
from megacpp_compile.fx.edit import replace
from megacpp_compile.fx.provenance import input_name, source_line
from megacpp_compile.nn.fp8_wrappers import Split, is_wrapper, split
from megacpp_compile.precision import sentinel
from megacpp_compile.report.records import MissedFusion

REPORTED_AS = "fp8_wrappers"
LINEARS = (F.linear, nn_linear)  # as Dynamo has them


@dataclasses.dataclass
class Boundary:
    """A frame behind the boundary.

    gm, inputs: what to compile, the frame's own where nothing was split. notes: what was found, for the report.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    notes: list[MissedFusion]
    split: dict[int, str] = dataclasses.field(default_factory=dict)  # position -> name

    def adapt(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, called with the frame's own inputs."""
        return functools.partial(_call_with_parts, compiled, self.split) if self.split else compiled


def _call_with_parts(compiled: Callable[..., Any], names: Mapping[int, str], *args: Any) -> Any:
    given: list[Any] = []
    for i, value in enumerate(args):
        given += _parts(split(value, names[i])) if i in names else (value,)
    return compiled(*given)


def enter(gm: fx.GraphModule, example_inputs: Sequence[Any], strict: bool = False) -> Boundary:
    """Split the wrappers among a frame's inputs. Never changes `gm`. Raises WrapperError for one that holds nothing.

    Where torch lacks what that takes, all are left as they came, with the reason in the report; under `strict` that is
    a TorchInternalsError.
    """
    if not any(is_wrapper(x) for x in example_inputs):
        return Boundary(gm, example_inputs, [])
    try:
        return _split_inputs(gm, example_inputs)
    except TorchInternalsError as error:
        if strict:
            raise
        return Boundary(gm, example_inputs, [MissedFusion(REPORTED_AS, "", "", "", "left-wrapped", str(error))])


def _split_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boundary:
    graph, copies = copied(gm.graph)
    graph._codegen = gm.graph._codegen
    made = Boundary(fx.GraphModule(gm, graph), [], [])
    # The mode of the frame: Dynamo's own values may be of another, which it traced in.
    mode = detect_fake_mode() or detect_fake_mode([n.meta.get("example_value") for n in gm.graph.nodes])
    inputs: list[Any] = []
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for i, (old, value) in enumerate(zip(holders, example_inputs, strict=True)):
        node = copies[old]
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
        if not is_wrapper(value):
            inputs.append(value)
            continue
        fqn = input_name(old)
        held = split(value, fqn)
        refusal = _refusal(node, held)
        if refusal is None:
            _split_node(graph, node, held, mode)
            made.split[i] = fqn
        inputs += [value] if refusal else _parts(held)
        made.notes.append(_note(old, fqn, held, refusal))
    made.inputs = inputs
    graph.lint()
    made.gm.meta.update(gm.meta)
    made.gm.recompile()
    return made if made.split else Boundary(gm, example_inputs, made.notes)


def widened(gm: fx.GraphModule, strict: bool) -> list[MissedFusion]:
    """What the sentinel finds in a frame and in the graphs it calls, for the report; an error under `strict`."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    found = [w for graph in graphs for w in sentinel.check(graph)]
    sentinel.raise_if_strict(found, strict)
    return [MissedFusion("sentinel", w.fqn, w.source, w.node, "widened", str(w)) for w in found]


def _parts(held: Split) -> tuple[Tensor, Tensor]:
    return held.payload, held.scale.to(torch.float32)


def _no_lane(held: Split) -> str | None:
    """Why no linear takes such a weight, or None."""
    if held.payload.dtype != torch.float8_e4m3fn:
        return "only an e4m3 payload has an fp8 lane"
    if held.payload.dim() != 2 or held.granularity not in ("tensor", "rows", "blocks of 128 x 128"):
        return f"no linear takes a scale of {held.granularity}"
    return None


def _refusal(node: fx.Node, held: Split) -> str | None:
    """Why an input is not split, or None."""
    if (reason := _no_lane(held)) is not None:
        return reason
    for user in node.users:
        weight = user.args[1] if len(user.args) > 1 else user.kwargs.get("weight")
        others = (*user.args[:1], *user.args[2:], *(v for k, v in user.kwargs.items() if k != "weight"))
        if user.op != "call_function" or user.target not in LINEARS or weight is not node or node in others:
            return f"it is read by {getattr(user.target, '__name__', user.target)}, which has no fp8 lane"
    return None


def _split_node(graph: fx.Graph, node: fx.Node, held: Split, mode: Any) -> None:
    source = getattr(node, "_dynamo_source", None)
    parts = []
    for name, value in zip(("payload", "scale"), _parts(held), strict=True):
        with graph.inserting_before(node):
            part = graph.placeholder(f"{node.name}_{name}")
        part.meta["example_value"] = mode.from_tensor(value, static_shapes=True) if mode is not None else value
        if source is not None:
            part._dynamo_source = AttrSource(source, name)  # type: ignore[attr-defined]
        parts.append(part)
    for user in list(node.users):
        x = user.args[0] if user.args else user.kwargs["input"]
        bias = user.args[2] if len(user.args) > 2 else user.kwargs.get("bias")
        with graph.inserting_before(user):
            lane = graph.call_function(
                torch.ops.megacpp.linear_fp8_weight.default, (x, *parts, bias, user.meta["example_value"].dtype)
            )
        lane.meta.update(user.meta)
        replace(user, lane)
    graph.erase_node(node)


def _note(node: fx.Node, fqn: str, held: Split, refusal: str | None) -> MissedFusion:
    user = next(iter(node.users), None)
    source = source_line(user) if user is not None else ""
    if refusal is None:
        return MissedFusion(REPORTED_AS, fqn, source, node.name, "split", f"{held}: linears take the payload")
    return MissedFusion(REPORTED_AS, fqn, source, node.name, "left-wrapped", f"{held}: left to its class, as {refusal}")


# --- outside of a compiled frame


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, on the payload where `weight` is a wrapper or, with the wide weight, where it is not.

    x [..., k], weight [n, k], bias [n] or None; the result is in x's dtype. Raises WrapperError and OperandError.
    """
    if not is_wrapper(weight):
        return F.linear(x, weight, bias)
    return torch.ops.megacpp.linear_fp8_weight(x, *_parts(split(weight)), bias, x.dtype)


class Fp8WeightLinear(nn.Module):
    """A linear whose weight is a payload and its scale, two buffers: `weight` [n, k] float8, `weight_scale` float32."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, held: Split, bias: nn.Parameter | None) -> None:
        super().__init__()
        payload, scale = _parts(held)
        self.out_features, self.in_features = payload.shape
        self.register_buffer("weight", payload)
        self.register_buffer("weight_scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.megacpp.linear_fp8_weight(x, self.weight, self.weight_scale, self.bias, x.dtype)


def split_linears(model: nn.Module) -> dict[str, str]:
    """Put `Fp8WeightLinear` where an `nn.Linear` has a wrapper for its weight, sharing its memory; name -> what it
    held, or why it was left. For wrappers that Dynamo can't trace. Raises WrapperError."""
    table: dict[str, str] = {}
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Linear or not is_wrapper(module.weight):
            continue
        held = split(module.weight, f"{fqn}.weight")
        if (reason := _no_lane(held)) is not None:
            table[fqn] = f"left: {held}, and {reason}"
            continue
        parent, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(parent), name, Fp8WeightLinear(held, module.bias))
        table[fqn] = f"split: {held}"
    return table
