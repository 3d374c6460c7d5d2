"""Every op as it is registered: what `torch.library.opcheck` asks, and that autocast does not reach inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings._op import define_op
from megacpp_compile.lowerings._registry import semantic_ops

from .agreement import KIND, bits, tensors_of
from .cases import CASES

OPS = {name: op for op, (_, name) in semantic_ops().items()}
# Of kinds with few cases all; of others those that differ in what is there, and in sizes that are none or one.
RULE = (
    "gate_a_head gate_a_channel no_gate no_beta bare no_state keys_as_they_are one_key_head one_token no_token no_batch "
    "whole_chunks chunk_32_channels documents documents_channels documents_no_state empty_documents higher_out_dtype"
)
SCAN = ("plain no_skip_no_state no_state one_group one_token no_batch no_token no_token_no_state chunk_128 "
        "float32_operands documents documents_no_state")  # fmt: skip
EXPERTS = "pair_separate gate_up_stacked some_of_none hidden_not_kept bias_of_up bias_of_down as_gpt_oss"
ATTENTION = "plain no_row_is_valid not_causal int32 one_token no_token fp8_tensor fp8_block"
DECODE = "one_token three_tokens no_row no_token fp8 codes"
LABELS = {"delta rule": RULE, "scan": SCAN, "experts": EXPERTS, "attention": ATTENTION}
CHECKED = [
    (name, label)
    for name, cases in CASES.items() if name not in ("moe_backward", "moe_sorted_backward")
    for label in cases if KIND[name] != "rotation"  # which `rotations.py` checks in all layouts
    if not (label == "no_batch" and name.endswith("_backward"))  # of no elements, with strides: torch cannot copy them
    if label in (DECODE if name == "mla_decode" else LABELS.get(KIND[name], label)).split()
]  # fmt: skip
# Operands that have a gradient, of ops that have others.
DIFFERENTIABLE = {"linear_cross_entropy": (0, 1, 2), "linear_fp8_weight": (0, 3), "sparse_mla": (0, 1), "mla_decode": ()}
# Torch cannot compare float8 with itself, nor give it a gradient.
OF_FLOAT8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WITHOUT_BACKWARD = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def checks_of(name: str, args: Any) -> dict[str, tuple[str, ...]]:
    which = WITHOUT_BACKWARD if name == "mla_decode" else ("test_faketensor",) if KIND[name] == "float8" else None
    if any(t.dtype.itemsize == 1 and t.is_floating_point() for t in tensors_of(args)):
        which = [check for check in OF_FLOAT8 if which is None or check in which]
    return {} if which is None else {"test_utils": tuple(which)}


def differentiable(name: str, args: Any) -> list[Any]:
    """The arguments of a forward as leaves; padding of sorted rows, which is no number, as numbers."""

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.nan_to_num(3.0).requires_grad_() if t.is_floating_point() else t

    none = name.endswith("_backward") or KIND[name] == "float8" or (name == "sparse_mla" and args[3] is not None)
    wanted = () if none else DIFFERENTIABLE.get(name, range(len(args)))
    return [tree_map_only(torch.Tensor, leaf, a) if i in wanted else a for i, a in enumerate(args)]


@pytest.mark.sampled(7, unit=29)
@pytest.mark.parametrize(("name", "label"), CHECKED)
def test_opcheck(rand, name, label):
    args = differentiable(name, CASES[name][label](rand, torch.float32))
    opcheck(OPS[name], tuple(args), **checks_of(name, args))


@pytest.mark.sampled(3, unit=9)
@pytest.mark.parametrize("name", [name for name in CASES if KIND[name] != "rotation"])
def test_opcheck_half_precision(rand, name):
    args = differentiable(name, next(iter(CASES[name].values()))(rand, torch.bfloat16))
    opcheck(OPS[name], tuple(args), **checks_of(name, args))


@pytest.mark.parametrize("name", CASES)
def test_autocast_does_not_reach_inside(rand, name):
    args = next(iter(CASES[name].values()))(rand, torch.float32)
    want = tensors_of(OPS[name](*args))
    with torch.autocast("cpu", torch.bfloat16):
        got = tensors_of(OPS[name](*args))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def _scaled(x: torch.Tensor, by: torch.Tensor | None, factor: float = 2.0, parts: type = tuple) -> torch.Tensor:
    """A reference, of which `parts` is its own."""
    assert parts is tuple and not torch.is_autocast_enabled("cpu")
    return x * factor if by is None else x * by * factor


def test_define_op():
    """Arguments that are left out are what they default to, for the check, too."""
    asked = []

    def check(factor: float, x: torch.Tensor) -> None:
        asked.append(factor)
        if factor < 0:
            raise ValueError("a factor below 0")

    @define_op(_scaled, check=check)
    def scaled(x, by, factor=2.0):
        """Of a test."""
        return x.new_empty(x.shape)

    op = torch.ops.megacpp._scaled.default
    assert str(op._schema) == "megacpp::_scaled(Tensor x, Tensor? by, float factor=2.) -> Tensor"
    x = torch.ones(3)
    with torch.autocast("cpu"):
        assert scaled(x, None).tolist() == [2, 2, 2] and scaled(x, x, factor=3.0).tolist() == [3, 3, 3]
    with FakeTensorMode() as mode:
        assert scaled(mode.from_tensor(x), None).shape == (3,) and asked == [2.0, 3.0, 2.0]
        with pytest.raises(ValueError, match="below 0"):
            scaled(mode.from_tensor(x), None, -1.0)
    with pytest.raises(ValueError, match="below 0"):
        scaled(x, None, -1.0)
    assert scaled.__doc__ == "Of a test."
