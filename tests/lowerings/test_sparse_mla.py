"""`megacpp::sparse_mla`: registration, gradients, the formula one query after the other, fp8 rows, what it keeps."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

from megacpp_compile.errors import ForwardOnlyError, OperandError
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.lowerings.sparse_mla import reference, sparse_mla

from . import addresses, relative_error, saved_by
from .agreement import DEVICE, KERNELS, disagreements, on, rarely
from .attention_cases import operands, quantised
from .cases import CASES

assert semantic_ops()
EMPTY = ("no_token", "no_sequence")


def formula(q, kv, indices, kv_scale, scale, d_v, causal=True, offset=0):
    """One query, one head and one row after the other."""
    b, t, h, d = q.shape
    if kv_scale is not None:
        lane = torch.arange(d) // 128 if kv_scale.shape[-1] > 1 else torch.zeros(d, dtype=torch.long)
        kv = kv.double() * kv_scale.double().expand(b, kv.shape[1], 1, -1)[..., lane]
    outs, sums = [], []
    for i in range(b):
        for j in range(t):
            named = [n for n in indices[i, j, 0].tolist() if 0 <= n < kv.shape[1] and not (causal and n > j + offset)]
            for head in range(h):
                if not named:
                    outs.append(q.new_zeros(d_v))
                    sums.append(q.new_full((), -math.inf))
                    continue
                scores = torch.stack([(q[i, j, head] * kv[i, n, 0]).sum() for n in named]) * scale
                total = scores.exp().sum()
                outs.append(sum(s.exp() / total * kv[i, n, 0, :d_v] for s, n in zip(scores, named, strict=True)))
                sums.append(total.log())
    return torch.stack(outs).view(b, t, h, d_v), torch.stack(sums).view(b, t, h)


def leaves(args):
    return [t.requires_grad_() for t in args[:2]]


@pytest.mark.parametrize("label", [name for name in CASES["sparse_mla"] if name not in EMPTY])
def test_is_the_formula(rand, label):
    args = CASES["sparse_mla"][label](rand, torch.float64)
    fp8 = args[3] is not None
    inputs = leaves(args) if not fp8 else []
    got, want = sparse_mla(*args), formula(*args[:8])
    assert all(relative_error(g, w) < 1e-12 for g, w in zip(got, want, strict=True))
    if fp8:
        return
    seeds = rand(*got[0].shape), rand(*got[1].shape)
    losses = [(out * seeds[0]).sum() + (lse.masked_fill(lse.isinf(), 0) * seeds[1]).sum() for out, lse in (got, want)]
    losses[1] = losses[1] + sum(0 * t.sum() for t in inputs)  # also where no query sees a row
    for a, b in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        assert (a - b).norm() < 1e-11


def test_chunks_of_queries_change_nothing(rand, monkeypatch):
    forward = operands(rand, torch.float64, t=7, offset=5)
    backward = CASES["sparse_mla_backward"]["plain"](rand, torch.float64)
    want = [*reference.sparse_mla(*forward), *reference.sparse_mla_backward(*backward)]
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    assert len(list(reference._chunks(forward[0], forward[2]))) == 7
    got = [*reference.sparse_mla(*forward), *reference.sparse_mla_backward(*backward)]
    assert all(relative_error(g, w) < 1e-13 for g, w in zip(got, want, strict=True))
    monkeypatch.setattr(reference, "MOST_CHUNKS", 3)
    assert len(list(reference._chunks(forward[0], forward[2]))) == 3


def test_a_row_nobody_may_see_does_no_harm(rand):
    """Not even as a NaN: nothing of it is read."""
    q, kv, indices, *others = operands(rand, torch.float32, s=9)
    kv[:, 8] = float("nan")
    out, lse = sparse_mla(q, kv, indices.masked_fill(indices == 8, -1), *others)
    assert not out.isnan().any() and not lse.isnan().any()


def test_a_scale_for_all_stays_one_number(rand):
    q, payload, indices, scale, *others = quantised(rand, operands(rand, torch.float32), "tensor")
    assert scale.shape[1] == payload.shape[1] and scale.untyped_storage().nbytes() == 4
    assert reference.LatentRows(payload, scale, torch.float32).scale.numel() <= q.shape[0]
    got = sparse_mla(q, payload, indices, scale, *others)
    want = sparse_mla(q, payload, indices, scale.clone(memory_format=torch.contiguous_format), *others)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_in_fp8_have_no_gradient(rand):
    q, *others = quantised(rand, operands(rand, torch.float32))
    out, _ = sparse_mla(q.requires_grad_(), *others)
    with pytest.raises(ForwardOnlyError, match=r"sparse_mla.*fp8"):
        out.sum().backward()


def test_operands_that_mean_nothing(rand):
    args = operands(rand, torch.float32)
    q, kv, indices, none, *others = args
    fp8 = quantised(rand, args)
    for wrong, words in (
        ((q, kv.squeeze(2), *args[2:]), "[b, s, 1, d_qk]"), ((q, kv[..., :20], *args[2:]), "kv 20"),
        ((q, kv[:1], *args[2:]), "b is 1 in kv"), ((q, kv, indices.float(), none, *others), "int32 or int64"),
        ((q, kv.bfloat16(), *args[2:]), "kv torch.bfloat16"), ((*fp8[:3], None, *fp8[4:]), "without kv_scale"),
        ((*fp8[:3], fp8[3].expand(-1, -1, 1, 3), *fp8[4:]), "kv_scale is (2, 9, 1, 3)"),
    ):
        with pytest.raises(OperandError) as caught:
            sparse_mla(*wrong)
        assert words in str(caught.value)


def test_keeps_operands_and_results(rand):
    args = operands(rand, torch.float32)
    inputs, results = leaves(args), []
    kept = saved_by(lambda: results.append(sparse_mla(*args)))
    assert kept == addresses(*inputs, args[2], *results[0])


def test_serves_a_compiled_graph(rand):
    args = operands(rand, torch.float32)
    inputs = leaves(args)
    compiled = torch.compile(lambda *a: sparse_mla(*a)[0] * 2, backend="aot_eager", fullgraph=True)
    got, want = compiled(*args), sparse_mla(*args)[0] * 2
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)), strict=True):
        assert relative_error(a, b) < 1e-6


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def filled_memory():
    """As `poisoned_memory`, for what is asked under deterministic algorithms that are no mere warning."""
    kept = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = kept


def chosen(name, args):
    op = getattr(torch.ops.megacpp, name).default
    return choose(op, "cuda", args)


@KERNELS
class TestKernels:
    def test_refusals(self, rand):
        args = operands(rand, torch.float32)
        for wrong, why in ((on("cpu", args, torch.float64), "float64"),
                           (operands(rand, torch.float32, d_qk=700, d_v=600), "channels"),
                           ((args[0].bfloat16(), *args[1:]), "rows in torch.float32")):
            choice = chosen("sparse_mla", wrong)
            assert choice.effective == "reference" and why in choice.reason

    @pytest.mark.parametrize("dtype, label", [
        (torch.float32, "parts_of_buffers"),
        *(rarely(torch.float32, name) for name in ("plain", "no_row_is_valid", "rows_there_are_not", "many_tiles")),
        rarely(torch.bfloat16, "odd_channels"), rarely(torch.float16, "not_causal"),
        rarely(torch.bfloat16, "two_blocks_of_heads"),
    ])  # fmt: skip
    def test_lists_in_place_of_atomics(self, rand, monkeypatch, label, dtype):
        """Rows' gradients in one order, under deterministic algorithms, some queries at a time."""
        args = on(DEVICE, CASES["sparse_mla_backward"][label](rand, torch.float32), dtype)
        args = (*args[:6], args[6].float(), *args[7:])
        from megacpp_compile.lowerings.sparse_mla import _lists, cuda_triton

        q, indices = args[2], args[4]
        two = 2 * q.shape[0] * indices.shape[-1] * q.shape[-1] * _lists.part_dtype(dtype).itemsize
        monkeypatch.setattr(_lists, "PART_BYTES", two)
        assert len(list(_lists.shares(q, indices))) > 1 or q.shape[1] < 3
        with deterministic():
            choice = chosen("sparse_mla_backward", args)
            with filled_memory():
                got, again = (cuda_triton.sparse_mla_backward(*args) for _ in range(2))
        assert choice.effective != "reference"
        assert not disagreements(got, "sparse_mla_backward", args)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))

    def test_no_atomics_under_deterministic_algorithms(self, rand, monkeypatch):
        from megacpp_compile.lowerings.sparse_mla import cuda_triton

        listed = []
        args = on(DEVICE, CASES["sparse_mla_backward"]["plain"](rand, torch.float32))
        launch = cuda_triton._rows_grad
        monkeypatch.setattr(cuda_triton, "_rows_grad", lambda *a, **k: (listed.append(k["LISTED"]), launch(*a, **k)))
        cuda_triton.sparse_mla_backward(*args)
        with deterministic():
            cuda_triton.sparse_mla_backward(*args)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            cuda_triton.sparse_mla_backward(*args)
        finally:
            torch.use_deterministic_algorithms(False)
        assert listed == [0, 1, 0]

    def test_lists_are_of_valid_pairs_in_order(self, rand):
        from megacpp_compile.lowerings.sparse_mla import _lists

        _, kv, indices, _, _, _, causal, offset = operands(rand, torch.float32, chosen="beyond", offset=2)
        pairs, starts = (t.tolist() for t in _lists.by_row(indices, kv.shape[1], causal, offset))
        b, t, _, k = indices.shape
        lists = [[] for _ in range(b * kv.shape[1])]
        for i, j, place in itertools.product(range(b), range(t), range(k)):
            row = int(indices[i, j, 0, place])
            if 0 <= row < kv.shape[1] and not (causal and row > j + offset):
                lists[i * kv.shape[1] + row].append((i * t + j) * k + place)
        assert sum(map(len, lists)) < indices.numel()
        assert [pairs[a:b] for a, b in itertools.pairwise(starts)] == lists

    @pytest.mark.parametrize("per", [rarely("tensor"), "row", rarely("block")])
    def test_rows_in_fp8_are_exact(self, rand, per):
        """No rounding but float32's: the payload is widened inside the kernel, never rounded again."""
        args = on(DEVICE, quantised(rand, operands(rand, torch.float32, d_qk=200, d_v=130, k=40, s=30, offset=20), per))
        from megacpp_compile.lowerings.sparse_mla import cuda_triton

        got, want = cuda_triton.sparse_mla(*args), reference.sparse_mla(*args)
        assert all(relative_error(g, w) < 2e-6 for g, w in zip(got, want, strict=True))
