"""Every `megacpp::` op declares its traits beside its definition; ops of torch have theirs in one table."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import megacpp_compile
from megacpp_compile.config.checkpointing import KINDS
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import declared, name_of, traits_of

PACKAGE = Path(megacpp_compile.__file__).parent
aten = torch.ops.aten


def registered() -> list[str]:
    """The `megacpp::` ops of the whole package, wherever a module registers one."""
    for path in PACKAGE.rglob("*.py"):
        if 'custom_op("megacpp::' in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(p for p in parts if p != "__init__"))
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("megacpp::"))


def op_of(name: str):
    return getattr(torch.ops.megacpp, name.removeprefix("megacpp::")).default


OPS = registered()


def test_all_ops_are_looked_at():
    assert {name_of(op) for op in semantic_ops()} < set(OPS)
    assert declared() <= set(OPS), "traits of ops that do not exist"


@pytest.mark.parametrize("name", OPS)
def test_op(name):
    assert name in declared(), f"{name} has no traits: call `declare` beside its definition"
    traits = traits_of(op_of(name))
    assert traits.block_kind in ("", *KINDS)
    assert not (traits.gemm and traits.core)


@pytest.mark.parametrize("name", [name for name in OPS if traits_of(op_of(name)).handed_over])
def test_what_is_handed_over_is_an_argument_of_the_backward(name):
    op = op_of(name)
    given = traits_of(op).handed_over
    backward = op_of(given.backward)
    first, of_backward = ([a.has_default_value() for a in o._schema.arguments].index(True) for o in (op, backward))
    assert given.flag == first and str(op._schema.arguments[first].type) == "bool"
    assert given.operand == of_backward
    result, operand = given.witness
    assert str(op._schema.returns[result].type) == str(backward._schema.arguments[operand].type) == "Tensor"


@pytest.mark.parametrize(
    ("op", "facts"),
    [(aten.mm.default, {"gemm"}), (aten.baddbmm.default, {"gemm"}), (aten.convolution.default, {"gemm"}),
     (aten._scaled_dot_product_flash_attention_for_cpu.default, {"core"}),
     (torch.ops.higher_order.flex_attention, {"core"}), (aten.topk.default, {"selection"}),
     (aten.argmax.default, {"selection", "reduction"}), (aten.amax.default, {"reduction"}),
     (aten.add.Tensor, {"pointwise"}), (torch.ops.prims.convert_element_type.default, {"pointwise"}),
     (aten.index_put.default, set()), (torch.ops._c10d_functional.all_reduce.default, {"unknown"}),
     (torch.sin, {"unknown"})],
    ids=lambda v: "-".join(sorted(v)) if isinstance(v, set) else getattr(v, "__name__", None) or str(v),
)
def test_torch(op, facts):
    traits = traits_of(op)
    found = {name for name in ("gemm", "core", "selection") if getattr(traits, name)}
    found |= {traits.kernel} - {"kernel"} | (set() if traits.recomputable else {"unknown"})
    assert found == facts
