"""Tables the precision that a plan asks of each linear, routed expert layer and attention, and what each computes in.

`asked` reads the graph before the passes run. `answered` completes its rows afterwards from what each pass took or
refused. An attention's core has a role of its own and no fp8 op but on rows that are fp8 already: its row has the dtype
that it computes in, and where fp8 is asked for why not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import Node

from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.rules import role_at
from megacpp_compile.frontend.tensor_subclasses import LINEARS
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import argument, value
from megacpp_compile.fx.provenance import module_classes, module_fqn, source_line
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.lowerings.moe.reference import precision_of
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.views import is_cast
from megacpp_compile.nn.fp8_wrappers import FP8
from megacpp_compile.passes._driver import Outcome
from megacpp_compile.passes._rewrites.delayed_scaling import is_delayed
from megacpp_compile.passes._rewrites.experts import REASON
from megacpp_compile.reader.links import through
from megacpp_compile.report.records import Precision

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_FP8_WEIGHT = "megacpp.linear_fp8_weight"
_STACKED = ("aten.bmm", "aten.baddbmm", "aten.matmul", "aten.einsum", "aten._grouped_mm",
            "transformers.grouped_mm_fallback")  # fmt: skip
_CALLS: dict[Any, str] = dict.fromkeys(LINEARS, "linear") | {F.scaled_dot_product_attention: "attention"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A row before the passes have run. kind: "linear", "stacked" or "attention"."""

    node: Node
    kind: str
    row: Precision


def asked(graph: fx.Graph, weights: Set[Node], plan: PrecisionPlan | None) -> list[Asked]:
    """A row for every linear, GEMM with stacked weights and attention of a captured graph; none without a plan."""
    if plan is None:
        return []
    found = []
    for node in graph.nodes:
        if (linear := match_linear(node)) is not None:
            sizes = linear.out_features, value(linear.x).shape[-1]
            found.append(Asked(node, "linear", _row(node, "linear", plan, sizes)))
        elif _op_name(node) == _FP8_WEIGHT:
            found.append(Asked(node, "linear", _row(node, "linear", plan, value(node.args[1]).shape)))
        elif _multiplies_stacked(node, weights):
            role = "experts" if (own := role_at(node)) == "other" else own
            kind = "experts" if role == "experts" else "linear"
            found.append(Asked(node, "stacked", _row(node, kind, plan, (), role)))
        elif (traits := traits_of(node)).core and traits.block_kind == "ablock":
            found.append(Asked(node, "attention", _row(node, "attention", plan, (), "attention_core")))
    return found


def mixers_by_rule(graph: fx.Graph, rows: Sequence[Asked]) -> list[Precision]:
    """The rows of linears in Mamba's mixers that a rule of the plan puts in float8. A linear whose name tells no role
    is such a mixer's where the module around it convolves along the tokens."""
    linears = [ask for ask in rows if ask.kind == "linear" and not ask.row.rule.startswith("role ")]
    given = [(ask, role_at(ask.node)) for ask in linears if ask.row.requested != "bf16" and not ask.row.reason]
    around = {_around(node) for node in graph.nodes if given and _op_name(node) == "aten.conv1d"}
    return [ask.row for ask, role in given if role == "mamba" or role == "other" and _around(ask.node) in around]


def _around(node: Node) -> str:
    """The module that calls a convolution or a linear, as a module of its own or as a function."""
    own = (module_classes(node) or [""])[0].endswith(("Linear", "Conv1d"))
    return module_fqn(node).rpartition(".")[0] if own else module_fqn(node)


def answered(rows: Sequence[Asked], outcome: Outcome, config: Config) -> list[dict[str, Any]]:
    """The rows with their answers, and those of routed experts, as plain data."""
    plan = config.precision
    if plan is None:
        return []
    refused = {miss.node: miss.reason for miss in outcome.misses if miss.pass_name == "linear"}
    op_of = {id(site): node for site, node in zip(outcome.sites, outcome.op_nodes, strict=True)}
    done = []
    for ask in rows:
        row, node = ask.row, ask.node
        if ask.kind == "stacked" and node._erased:
            continue  # the layer of experts has a row of its own
        if node in outcome.replaced and outcome.replaced[node].pass_name == "linear":
            site, row.effective = outcome.replaced[node], row.requested
            if row.requested == "fp8_delayed" and not is_delayed(op_of[id(site)]):
                row.effective, row.reason = "fp8_current", site.note
        elif _op_name(node) == _FP8_WEIGHT:
            row.effective, row.reason = "fp8 weight", "the weight is fp8 already"
        elif ask.kind == "attention" and any(_is_fp8(a) for a in node.all_input_nodes):
            row.effective, row.reason = "fp8 rows", _of_rows(node)
        elif row.requested != "bf16":
            row.reason = refused.get(node.name) or row.reason or _why(ask, outcome, config)
        done.append(row)
    for site, node in zip(outcome.sites, outcome.op_nodes, strict=True):
        if site.pass_name == "moe":
            done.append(_row(node, "experts", plan, (), "experts", site.fqn))
            done[-1].reason = node.meta[REASON]
            done[-1].effective = precision_of(site.op.removeprefix("megacpp::"), node.args) or done[-1].effective
    return [dataclasses.asdict(row) for row in done]


def unseen(graph: fx.Graph, plan: PrecisionPlan | None, reason: str) -> list[dict[str, Any]]:
    """The rows, as plain data, of Dynamo's calls in `graph` where `reason` kept the passes from them: all of a frame's,
    or those that a captured graph holds as they were written. They run as written."""
    rows = []
    for node in graph.nodes if plan is not None else ():
        kind = _CALLS.get(node.target)
        if kind is not None and plan is not None:
            fqn = module_fqn(node)
            said = plan.decide(fqn, "attention_core" if kind == "attention" else role_at(node))
            why = said.exclusion or (reason if said.requested != "bf16" else "")
            rows.append(Precision(fqn, kind, "", source_line(node), said.requested, "as written", said.rule, why))
    return [dataclasses.asdict(row) for row in rows]


def _is_fp8(node: Node) -> bool:
    held = value(node)
    return isinstance(held, torch.Tensor) and held.dtype in FP8


def _of_rows(node: Node) -> str:
    if _op_name(node) == "megacpp.sparse_mla" and argument(node, 8, "fp8_gemms", False):
        return "its rows are fp8 already, and fp8_gemms lets a kernel multiply them so"
    return "its rows are fp8 already; what is multiplied with them is as wide as it was"


def _op_name(node: Node) -> str:
    """The operation without its overload, "aten.bmm"."""
    return str(getattr(node.target, "overloadpacket", node.target))


def _multiplies_stacked(node: Node, weights: Set[Node]) -> bool:
    """Whether `node` is a GEMM with the weights of several experts or heads, [experts, ., .]."""
    return _op_name(node) in _STACKED and any(_is_stack(a, weights) for a in node.all_input_nodes)


def _is_stack(node: Node, weights: Set[Node]) -> bool:
    """Whether `node` is a view or cast of a weight [experts, ., .]."""
    node = through(memory_of(node), lambda n: is_cast(n) and memory_of(n.args[0]))
    return node in weights and value(node).dim() == 3


def _why(ask: Asked, outcome: Outcome, config: Config) -> str:
    """Why a node that the plan wants in fp8, and of which the pass gave no reason, is not."""
    if ask.kind == "attention":
        return "an attention's core has no fp8 op in the graph, and Transformer Engine's module breaks it"
    if ask.kind == "stacked":
        return "GEMMs with stacked weights have no fp8 op in the graph"
    if not config.enabled("linear", True):
        return "the pass linear is off"
    if ask.node._erased:
        return "part of megacpp::moe, which has a row of its own"
    return "its input has one dimension"


def _row(
    node: Node, kind: str, plan: PrecisionPlan, shape: Sequence[Any], role: str | None = None, fqn: str = ""
) -> Precision:
    """The row of `node` with what `plan` asks for, and the dtype of its output as the answer so far."""
    fqn = fqn or module_fqn(node)
    said = plan.decide(fqn, role or role_at(node))
    held = value(node)
    dtype = (held[0] if isinstance(held, (tuple, list)) else held).dtype
    computed = _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
    size = "x".join(map(str, shape))
    return Precision(fqn, kind, size, source_line(node), said.requested, computed, said.rule, said.exclusion)
