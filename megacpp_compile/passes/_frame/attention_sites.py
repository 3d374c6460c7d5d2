"""Tables who serves each attention of a frame, and why not who was asked; under the option `fa4` it also puts
FlashAttention-4 in the place of `scaled_dot_product_attention` where that can serve.

A graph has attention as torch's op, as FlexAttention, as the op of the pass `attention`, or as what
`megacpp_compile.attention` wrote, whose lines of code the nodes carry. Runs after the passes: they know torch's op by
name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import Captured
from megacpp_compile.frontend.sdpa_regions import choice_of, chosen
from megacpp_compile.fx.edit import Builder, dynamo_value, value
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.fx.sizes import hint
from megacpp_compile.fx.views import COPIES, PERMUTATIONS
from megacpp_compile.lowerings._registry import choose
from megacpp_compile.lowerings.attention._sdpa_calls import chosen as chosen_kernel
from megacpp_compile.lowerings.attention._sdpa_choice import UNFUSED, UNKNOWN, kernel_of
from megacpp_compile.matchers.latent_attention.core import arguments_of
from megacpp_compile.nn.attention import attention_order, bodies, fa4, fastest
from megacpp_compile.nn.attention.eligibility import AttentionCall
from megacpp_compile.report.attention import AttentionSite
from megacpp_compile.report.user_code import first_line
from megacpp_compile.targets import family

SDPA, FLEX, OURS, SPELLED = "sdpa", "flex_attention", "attention", "spelled out"
ALONE = "the frame was compiled as it was written"
NOT_CAPTURED, UNREAD = "not-captured", "unread"
FASTEST, MEASURED = "fastest", "measured"
_SDPA = (aten.scaled_dot_product_attention.default, F.scaled_dot_product_attention)
_FA4 = "megacpp.fa4_attention"
# "  File ".../nn/attention/bodies.py", line 51, in plain", of the line that made a node.
_BODY = re.compile(r'nn/attention/(?:bodies|fa4)\.py", line \d+, in (\w+)')
_UNFUSED = "no fused kernel: all scores in memory"


def wanted_by(config: Config) -> str:
    """`wanted` of `attention_sites`."""
    return "fa4" if config.fa4 else FASTEST if config.attention == FASTEST else ""


def attention_sites(captured: Captured, wanted: str, grad: bool) -> tuple[list[dict[str, Any]], int]:
    """A row for each attention of a captured graph, as plain data, and how many FlashAttention-4 was put in place of.
    wanted: "fa4" by the option of that name, FASTEST by the option `attention`, "" by neither. grad: whether the frame
    is compiled for training."""
    rows, swapped = [], 0
    for node in list(captured.gm.graph.nodes):
        if (row := _reported(node, value, wanted, grad)) is None:
            continue
        if row.effective == "fa4" and node.target in _SDPA:
            _swap(captured, node)
            swapped += 1
        rows.append(row)
    if swapped:
        captured.gm.graph.eliminate_dead_code()
        captured.gm.recompile()
    return [dataclasses.asdict(row) for row in rows], swapped


def unseen_sites(graph: fx.Graph, wanted: str, grad: bool) -> list[dict[str, Any]]:
    """The rows of a graph of Dynamo's that is compiled as it was written."""
    rows = (row for node in graph.nodes if (row := _reported(node, _dynamo_value, wanted, grad)) is not None)
    return [as_written(dataclasses.asdict(row)) for row in rows]


def _dynamo_value(given: Any) -> Any:
    return dynamo_value(given) if isinstance(given, Node) else given


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a site that was to be served by FlashAttention-4, in a frame that is compiled as it was written."""
    if row["effective"] == "fa4" and row["call"] == SDPA:
        row |= {"effective": "sdpa", "kernel": UNKNOWN, "tag": NOT_CAPTURED, "reason": ALONE}
    return row


def _reported(node: Node, of: Callable[[Any], Any], wanted: str, grad: bool) -> AttentionSite | None:
    """`_row`; a row is not worth a frame that compiles without it, so that what goes wrong is said in the row."""
    try:
        return _row(node, of, wanted, grad)
    except Exception as error:
        return _made(node, SDPA, wanted or "sdpa", "sdpa", UNKNOWN, UNREAD, first_line(error))


def _row(node: Node, of: Callable[[Any], Any], wanted: str, grad: bool) -> AttentionSite | None:
    """The row of `node`; None where it is no attention. of: the fake value of a node."""
    if node.op != "call_function":
        return None
    body = _body(node)
    fa4_first = wanted == "fa4"
    asked = "fa4" if fa4_first else ""
    if node.target in _SDPA:
        return _sdpa_row(node, of, wanted, grad, body)
    if str(node.target) == "megacpp.attention.default":
        return _spelled_row(node, of, wanted, grad, body)
    if str(node.target).startswith(_FA4) and "backward" not in str(node.target):
        return _made(node, OURS, "fa4", "fa4", "fa4")
    if str(node.target) == "flex_attention":
        tag, reason = _refusals(node, of(node.args[0]), of(node.args[2]), "flex", fa4_first, grad) if body else ("", "")
        return _made(node, OURS if body else FLEX, asked or _first(of(node.args[0]), body) or "flex", "flex", "flex",
                     tag, reason)  # fmt: skip
    return None


def _spelled_row(node: Node, of: Callable[[Any], Any], wanted: str, grad: bool, body: str) -> AttentionSite:
    """The row of an attention that the pass `attention` found written out, by a model or as the plain body here."""
    args: Any = fx.map_arg(node.args, of)
    (q, k, v), right = args[:3], args[10]
    choice = choose(node.target, family({q.device.type}).name, args)
    kernels = {"cuda_triton": "triton", "cpu_chunks": "chunks", "cpu_autograd": UNFUSED, "reference": UNFUSED}
    kernel = kernels.get(choice.effective)
    kernel = kernel or chosen_kernel(q, k, v, right is not None)
    tag = UNFUSED if kernel == UNFUSED else choice.effective if choice.reason else ""
    if not body:
        return _made(node, SPELLED, choice.requested, choice.effective, kernel, tag, choice.reason)
    refused, reason = _refusals(node, q, v, "plain", wanted == "fa4", grad)
    reason = "; ".join(filter(None, (reason, choice.reason, _UNFUSED if kernel == UNFUSED else "")))
    return _made(node, OURS, "fa4" if wanted == "fa4" else _first(q, body), "plain", kernel, refused or tag, reason)


def _sdpa_row(node: Node, of: Callable[[Any], Any], wanted: str, grad: bool, body: str) -> AttentionSite:
    call = OURS if body else SDPA
    given = arguments_of(node)
    q, k, v = (of(given[name]) for name in ("query", "key", "value"))
    mask = of(given["attn_mask"])
    # Floats of the model are inputs under `dynamic=True`.
    traced = any(isinstance(given[name], Node) for name in ("dropout_p", "scale", "is_causal", "enable_gqa"))
    operands = tuple(_layout(t, grad) for t in (q, k, v))
    requested, tag, reason = _first(q, body) or "sdpa", "", ""
    if wanted:
        requested = wanted
        asked = AttentionCall(
            q.device.type, q.dtype, (hint(q.shape[-1]), hint(v.shape[-1])), (hint(q.shape[-2]), hint(k.shape[-2])),
            traced or bool(given["is_causal"]), mask=mask is not None, dropout=0.0 if traced else given["dropout_p"],
            backward=grad, traced=traced,
        )  # fmt: skip
        lack = ("dense_fa4_widths", "operands have no heads of their own") if q.dim() != 4 else None
        lack = lack or fa4.against(asked, q.device)
        served = "sdpa" if lack else "fa4"
        if lack is None and wanted == FASTEST:
            served, told = _faster(q.device.type, operands, given, grad)
            lack = MEASURED, told
        tag, reason = lack or ("", "")
        if served == "fa4":
            return _made(node, call, requested, "fa4", "fa4", tag, reason)
    elif requested == "fa4":
        tag, reason = _refusals(node, q, v, "sdpa", False, grad)
    operands += (None if mask is None else _layout(mask, False),)
    kernel = UNKNOWN
    if not traced:
        numbers = float(given["dropout_p"]), bool(given["is_causal"]), bool(given["enable_gqa"])
        with chosen(choice_of(node)):
            kernel = kernel_of(q.device.type, operands, *numbers)
    if kernel == UNFUSED:
        tag, reason = tag or UNFUSED, "; ".join(filter(None, (reason, _UNFUSED)))
    return _made(node, call, requested, "sdpa", kernel, tag, reason)


def _faster(device: str, operands: Any, given: dict[str, Any], grad: bool) -> tuple[str, str]:
    """(the faster of torch's attention and FlashAttention-4 at these operands, their times for a reader)."""
    of_torch, of_fa4 = fastest.milliseconds(device, operands, given["scale"], given["is_causal"])
    what = "forward and backward" if grad else "forward"
    times = f"{what} measured: fa4 {of_fa4:.3g} ms, sdpa {of_torch:.3g} ms"
    return "fa4" if of_fa4 < fastest.WORTH * of_torch else "sdpa", times


def _made(
    node: Node, call: str, requested: str, effective: str, kernel: str, tag: str = "", reason: str = ""
) -> AttentionSite:
    return AttentionSite(module_fqn(node), source_line(node), call, requested, effective, kernel, tag, reason)


def _layout(tensor: Any, grad: bool) -> Any:
    sizes, strides = (tuple(map(hint, of)) for of in (tensor.shape, tensor.stride()))
    return sizes, strides, tensor.dtype, grad and tensor.dtype.is_floating_point


def _body(node: Node) -> str:
    """The function of `nn.attention` whose line made the node, "" where none did."""
    found = _BODY.findall(node.meta.get("stack_trace") or "")
    return found[-1] if found else ""


def _first(q: Any, body: str) -> str:
    """Who `megacpp_compile.attention` asks first for operands like `q`; "" for a site that is not of its making."""
    return attention_order(q.device.type)[0] if body else ""


def _refusals(node: Node, q: Any, v: Any, served: str, fa4_first: bool, grad: bool) -> tuple[str, str]:
    """(tag, reason) of the first that `megacpp_compile.attention` asked before `served`, as it found it then: what it
    was given is read off the lines of code in the nodes around; ("", "") where nobody was asked before."""
    facts = set(_facts(node))
    ids, window = ("documents" if "doc_ids" in facts else None), (1 if "window" in facts else None)
    softcap = 1.0 if "softcap" in facts else None
    stub = _Operand(q, grad)
    for name in attention_order(q.device.type, fa4_first):
        if name == served:
            break
        if name == "fa4":
            lack = fa4.against(
                AttentionCall(q.device.type, q.dtype, (hint(q.shape[-1]), hint(v.shape[-1])), (1, 1), True,
                     "unknown" if ids else "absent", window=window, softcap=softcap, backward=grad), q.device
            )  # fmt: skip
        elif (asked := getattr(bodies, f"{name}_lacks", None)) is not None:
            lack = asked(stub, stub, _Operand(v, grad), ids, softcap, True, window)
        else:
            continue
        if lack is not None:
            return lack
    return "", ""


class _Operand:
    """What a body's `lacks` reads of an operand."""

    def __init__(self, like: Any, grad: bool) -> None:
        self.shape, self.dtype, self.device, self.requires_grad = like.shape, like.dtype, like.device, grad


def _facts(node: Node) -> Iterator[str]:
    """What the call that made `node` was given, by the op, or by what its lines put into the graph."""
    if str(node.target) == "megacpp.attention.default":
        given = {"doc_ids": node.args[6], "softcap": node.args[8] or None, "window": node.args[9]}
        yield from (name for name, one in given.items() if one is not None)
        return
    place = _call(node)
    for other in node.graph.nodes:
        if _call(other) == place:
            if "in without_padding" in (other.meta.get("stack_trace") or ""):
                yield "doc_ids"
            if "tanh" in str(other.target):
                yield "softcap"


def _call(node: Node) -> tuple[str, str] | None:
    """(module, the stack down to the user's call of `attention`) of a node that was made in there."""
    trace = node.meta.get("stack_trace") or ""
    found = re.search(r'\s*File "[^"]*nn/attention/', trace)
    return (module_fqn(node), trace[: found.start()]) if found else None


def _swap(captured: Captured, node: Node) -> None:
    """Put the op in the place of torch's."""
    given = arguments_of(node)
    q, k, v = given["query"], given["key"], given["value"]
    scale = given["scale"] if given["scale"] is not None else hint(value(q).shape[-1]) ** -0.5
    build = Builder(captured.gm.graph, captured.fake_mode, node, node)
    both = build(torch.ops.megacpp.fa4_attention.default, q, k, v, float(scale), 0.0, True)
    out = build.item(both, 0)
    node.replace_all_uses_with(out)
    # Laid out otherwise than torch's may be, so that what was a view of that may be a copy of this.
    ahead = [out]
    for reader in ahead:
        for user in reader.users:
            if user.target is aten.view.default:
                user.target = aten.reshape.default
            if user not in ahead and user.target in {aten.reshape.default, *PERMUTATIONS, *COPIES}:
                ahead.append(user)
