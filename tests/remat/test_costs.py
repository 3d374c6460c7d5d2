"""The cost of recomputing: a GEMM in float8 counts as the 16-bit FLOPs that take as long."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.remat import times
from megacpp_compile.remat.closure import settle
from megacpp_compile.remat.costs import flops
from megacpp_compile.remat.fusion import fuse, fuse_into
from megacpp_compile.remat.liveness import Facts, Run
from megacpp_compile.remat.plan import RECOMPUTE, SAVE
from tests.lowerings.agreement import reference_of
from tests.lowerings.cases import CASES

assert semantic_ops()


def call(op, *args):
    """A node of `op`, whose tensor arguments are placeholders."""
    graph = fx.Graph()

    def node(a):
        if not isinstance(a, torch.Tensor):
            return a
        held = graph.placeholder("held")
        held.meta["val"] = a
        return held

    nodes = ([node(i) for i in a] if isinstance(a, list) else node(a) for a in args)
    return graph.call_function(op.default, tuple(nodes))


def meta(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")


def test_experts_in_float8():
    tokens, d, n, experts, chosen = 64, 16, 24, 4, 2
    up, down = [meta(n, d)] * experts, [meta(d, n)] * experts
    routed = meta(tokens, d), meta(tokens, chosen, dtype=torch.long), meta(tokens, chosen)
    common = *routed, up, up, down, "silu", "out_in", torch.bfloat16, True
    wide, fp8 = (flops(call(torch.ops.megacpp.moe, *common, precision)) for precision in ("", "fp8_current"))
    assert wide == flops(call(torch.ops.megacpp.moe, *common)) == 2 * tokens * chosen * 3 * n * d
    assert fp8 == 0.8 * wide


def test_gemms_in_float8_take_half_the_time_and_one_chosen_by_measurement_the_whole():
    importlib.import_module("megacpp_compile.lowerings._gemm.autotune")  # where the op is registered
    ops, x, w, scale, wide = torch.ops.megacpp, meta(64, 32), meta(48, 32), meta(), torch.bfloat16
    payload = meta(48, 32, dtype=torch.float8_e4m3fn)
    assert flops(call(ops.fp8_linear, x, [w], x, scale, w, scale, [], "e4m3", wide)) == 64 * 48 * 32
    assert flops(call(ops.linear_fp8_weight, x, payload, meta(1, 1), None, wide)) == 64 * 48 * 32
    assert flops(call(ops.tuned_mm, x, meta(32, 48))) == 2 * 64 * 48 * 32


def test_a_latent_that_is_given_is_not_computed_again():
    """Two GEMMs a projection; down to 16 of 24 channels once more where the latent is not there."""
    x, w_down, w_up = meta(128, 32), meta(24, 32), meta(80, 16)
    grad_up, rest, rrms, latent = (meta(128, n) for n in (80, 8, 1, 16))
    common = [grad_up], rest, x, w_down, None, None, [w_up], rrms, 0, 16
    given = flops(call(torch.ops.megacpp.down_norm_up_backward, *common, latent))
    assert given == 2 * 128 * 2 * (24 * 32 + 80 * 16)
    assert flops(call(torch.ops.megacpp.down_norm_up_backward, *common)) == given + 2 * 128 * 16 * 32


def counted(op, args):
    """FLOPs of the GEMMs that the op's reference runs."""
    with FlopCounterMode(display=False) as counter:
        reference_of(op)(*args)
    return counter.get_total_flops()


def rand(*size, dtype=torch.float32):
    return torch.randn(*size, dtype=dtype)


@pytest.mark.parametrize(
    ("op", "label"),
    [("norm_linear", "qkv"), ("norm_linear", "one_no_gain"), ("sparse_mla", "one_head"),
     *((op, label) for op in ("compressed_linear", "compressed_linear_backward") for label in ("one", "three_biases")),
     *(("linear_cross_entropy", label) for label in ("plain", "bias", "gradients_none", "gradients_xb")),
     ("linear_cross_entropy", "all_of_each_row"), ("linear_cross_entropy_backward", "all"),
     ("linear_cross_entropy_backward", "gradient_of_a_sum")],
)  # fmt: skip
def test_gemms_of_an_op_are_counted(op, label):
    args = CASES[op][label](rand, torch.float32)
    assert flops(call(getattr(torch.ops.megacpp, op), *args)) == counted(op, args) > 0


@pytest.mark.parametrize("label", ["chunk_128", "whole_chunks", "group_of_each_head", "one_batch_odd_length"])
def test_a_scan_counts_its_gemms(label):
    """All but the states' way from chunk to chunk and the sums of decays; the reference pads the last chunk."""
    args = CASES["ssd_scan"][label](rand, torch.float32)
    x, chunk = args[0], args[7]
    length = min(chunk, x.shape[1])
    chunks = -(-x.shape[1] // length)
    (b, t, h, p), n = x.shape, args[3].shape[-1]
    carried = 2 * b * h * (chunks + 1) ** 2 * (p * n + 1)  # and the sums of the chunks' decays
    summed = 2 * b * chunks * h * length**2
    padded = t / (chunks * length)
    own = flops(call(torch.ops.megacpp.ssd_scan, *args))
    assert own == pytest.approx((counted("ssd_scan", args) - carried - summed) * padded, rel=1e-2)


def test_what_is_inlined_reads_the_inputs_that_it_is_made_of():
    """A kernel that gathers rows of a table reads as many as it has, whatever the table holds."""
    graph, aten = fx.Graph(), torch.ops.aten
    table, rows = graph.placeholder("table"), graph.placeholder("rows")
    table.meta["val"], rows.meta["val"] = meta(1000, 32), meta(64, dtype=torch.long)
    gathered = graph.call_function(aten.embedding.default, (table, rows))
    twice = graph.call_function(aten.mul.Tensor, (gathered, 2.0))
    total = graph.call_function(aten.sum.dim_IntList, (twice, [1]))
    gathered.meta["val"], twice.meta["val"], total.meta["val"] = meta(64, 32), meta(64, 32), meta(64)
    order = [gathered, twice, total]
    facts = Facts(order)
    given = times._given(Run(order, {}, [total], facts), facts)
    assert given[total] == {table: 64 * 32 * 4, rows: 64 * 8}


def test_what_is_computed_beside_two_kernels_does_not_make_them_one():
    graph = fx.Graph()
    saved = [graph.placeholder(name) for name in ("left", "right")]
    left, right = ((node, ()) for node in saved)

    def node(*operands):
        made = graph.call_function(torch.ops.aten.add.Tensor, operands)
        made.meta["val"] = meta(64, 32)
        return made

    for holder in saved:
        holder.meta["val"] = meta(64, 32)
    again, one, other = node(*saved), node(saved[0], 1.0), node(saved[1], 1.0)
    reads = {again: [left, right], one: [left], other: [right]}
    kinds = dict.fromkeys(reads, "pointwise")
    assert fuse(list(reads), reads, kinds) == [[again, one, other]]
    assert fuse_into([[one], [other]], list(reads), reads, kinds) == [[one, again], [other]]
    assert fuse_into([[one], [other]], list(reads), reads, {**kinds, again: "reduction"}) == [[one], [other], [again]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["scaled", "capped", "added", "moved", "cast"])
def test_what_is_saved_instead_of_what_it_is_made_from_is_not_rounded_for_it(name, dtype):
    """A scaled embedding or logits under a cap in half precision are recomputed of what they are made from, which is in
    memory as it is. A sum is saved, of which backward else would read two, and so is what a copy or a cast moves."""
    aten, graph = torch.ops.aten, fx.Graph()

    def node(op, *args):
        made = graph.call_function(op.default if hasattr(op, "default") else op, args)
        made.meta["val"] = op(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return made

    x, w = (graph.placeholder(n) for n in "xw")
    x.meta["val"], w.meta["val"] = meta(64, 32, dtype=dtype), meta(32, 48, dtype=dtype)
    product = node(aten.mm, x, w)
    other = node(aten.mm, x, w)
    last = {
        "scaled": lambda: node(aten.mul.Scalar, product, 0.3),
        "capped": lambda: node(aten.tanh, product),
        "added": lambda: node(aten.add.Tensor, product, other),
        "moved": lambda: node(aten.clone, product),
        "cast": lambda: node(torch.ops.prims.convert_element_type, product, torch.float8_e4m3fn),
    }[name]()
    forward = [product, other, last]
    plan = settle(forward, [last], {product: SAVE, other: SAVE, last: RECOMPUTE})
    kept = name in ("scaled", "capped") and dtype.itemsize < 4
    assert plan.saved == ([product] if kept else [last])
