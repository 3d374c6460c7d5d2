"""`megacpp::linear_cross_entropy`: registration, gradients, PyTorch's own loss, what it keeps, what it never makes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.lowerings.linear_cross_entropy import GRADS, chunks, linear_cross_entropy, reference

from . import STRIDES, addresses, contract, pairwise, relative_error, saved_by, strided
from .contract import agree, gradcheck, leaves, widened

IGNORED = -100
TOKENS, HIDDEN, WORDS = 11, 6, 13
# bias, weights of rows, rows that are ignored, label smoothing, scale, soft cap, z loss: every two values together
OPTIONS = pairwise((False, True), (False, True), (0, 3, TOKENS), (0.0, 0.1), (1.0, 0.5), (None, 1.5), (0.0, 0.01))


def arguments(rand, bias=False, weighted=False, ignored=3, smoothing=0.0, scale=1.0, softcap=None, z_loss=0.0,
              reduction="sum", grads=None, tokens=TOKENS, words=WORDS, dtype=torch.float64):  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    x, w = rand(tokens, HIDDEN, dtype=dtype, grad=True), rand(words, HIDDEN, dtype=dtype, grad=True)
    b = rand(words, dtype=dtype, grad=True) if bias else None
    target = (rand(tokens).sigmoid() * words).long().clamp(max=words - 1)
    target[rand(tokens).argsort()[:ignored]] = IGNORED
    weight = rand(tokens, dtype=wide).exp() if weighted else None
    if grads is None:
        grads = ("xwb" if bias else "xw") if reduction == "sum" else ""
    return x, w, b, target, weight, IGNORED, smoothing, scale, softcap, z_loss, reduction, grads


def formula(x, w, b, target, weight, ignore_index, smoothing, scale, softcap, z_loss, reduction, grads):
    """The op by PyTorch's own functions, as models write it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x, w, b).to(wide) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")
    lse = torch.logsumexp(logits, -1)
    loss = loss + z_loss * lse.square() * (target != ignore_index)
    if weight is not None:
        loss = loss * weight
    return (loss.sum() if reduction == "sum" else loss), lse


REDUCTION = pytest.mark.parametrize("reduction", ["sum", "none"])


def both(rand, args, dtype=None):
    """Loss, lse and gradients by the op, and by PyTorch's own functions in float64; of a sum the loss's alone."""
    seeds = seeds_of(rand, args, dtype)
    given = (linear_cross_entropy, args), (formula, widened(args))
    return (contract.differentiate(f, a, seeds, 2) for f, a in given)


def seeds_of(rand, args, dtype=None):
    return [torch.ones(())] if args[10] == "sum" else [rand(len(args[0]), dtype=dtype) for _ in range(2)]


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of four rows, the last of three."""
    monkeypatch.setattr(chunks, "CPU_BYTES", 4 * WORDS * 8)
    monkeypatch.setattr(chunks, "TILE", 2)


@pytest.mark.usefixtures("short_chunks")
@REDUCTION
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_pytorch(rand, options, reduction):
    agree(*both(rand, arguments(rand, *options, reduction=reduction)), 1e-13)


@pytest.mark.parametrize(("tokens", "words"), [(0, WORDS), (1, WORDS), (TOKENS, 1)])
@REDUCTION
def test_sizes(rand, reduction, tokens, words):
    args = arguments(rand, bias=True, ignored=0, tokens=tokens, words=words, reduction=reduction)
    assert all(torch.allclose(g, w, rtol=1e-13, atol=1e-13) for g, w in zip(*both(rand, args), strict=True))


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(rand, options):
    for reduction in ("none", "sum"):
        gradcheck(linear_cross_entropy, arguments(rand, *options, reduction=reduction))


@pytest.mark.parametrize("grads", GRADS)
def test_gradients_that_were_not_made_are_none(rand, grads):
    args = arguments(rand, bias=True, grads=grads)
    loss, lse, *made = linear_cross_entropy(*args)
    shapes = [t.shape if name in grads else (0,) for t, name in zip(leaves(args), "xwb", strict=True)]
    assert [t.shape for t in made] == shapes
    assert not lse.requires_grad and not any(t.requires_grad for t in made)
    found = torch.autograd.grad(loss, leaves(args), allow_unused=True)
    assert [g is not None for g in found] == [name in grads for name in "xwb"]


def test_only_the_gradients_that_are_needed(rand):
    """With "none", of the operands that need one, and of the results that are read."""
    x, w, b, *rest = arguments(rand, bias=True, reduction="none")
    w.requires_grad_(False)
    for result in (0, 1):
        out = [f(x, w, b, *rest)[result] for f in (linear_cross_entropy, formula)]
        got, want = (torch.autograd.grad(o.sum(), (x, b)) for o in out)
        assert all(relative_error(g, t) < 1e-13 for g, t in zip(got, want, strict=True))
    loss, lse, *_ = linear_cross_entropy(x.detach(), w, b.detach(), *rest)
    assert not loss.requires_grad and not lse.requires_grad


@REDUCTION
def test_gradients_have_no_gradients(rand, reduction):
    """They would be wrong: an error, as for any op without a second derivative."""
    args = arguments(rand, reduction=reduction)
    loss = linear_cross_entropy(*args)[0].sum()
    with pytest.raises(RuntimeError if reduction == "none" else OperandError, match="create_graph|no autograd formula"):
        first = torch.autograd.grad(loss, leaves(args), create_graph=True)
        torch.autograd.grad(first[0].sum(), leaves(args))


def test_the_losses_gradient_is_not_rounded_to_half_precision(rand):
    """A third is not a number of bfloat16's; a gradient is multiplied by it in float32, and rounded once."""
    args = arguments(rand, dtype=torch.bfloat16)
    loss, _, *made = linear_cross_entropy(*args)
    found = torch.autograd.grad(loss / 3, leaves(args))
    assert all(torch.equal(g, (m.float() / 3).bfloat16()) for g, m in zip(found, made, strict=False))


@pytest.mark.usefixtures("short_chunks")
@REDUCTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_no_worse_than_eager(rand, dtype, reduction):
    """Both see the same rounded inputs; float64 says how far off either is. By a tenth, as in the benchmarks: sums in
    another order. (In float32 what differs is the order alone: `test_lowerings_agree`.)"""
    args = arguments(rand, True, True, 3, 0.1, 0.5, 4.0, 0.01, reduction, tokens=64, words=200, dtype=dtype)
    seeds = seeds_of(rand, args, torch.float32)
    given = (linear_cross_entropy, args), (formula, args), (formula, widened(args))
    got, eager, want = (contract.differentiate(f, a, seeds, 2) for f, a in given)
    assert [t.dtype for t in got] == [t.dtype for t in eager]
    slack = 0.05 * torch.finfo(dtype).eps
    for g, e, exact in zip(got, eager, want, strict=True):
        assert relative_error(g, exact) <= 1.1 * relative_error(e, exact) + slack


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STRIDES)
@REDUCTION
def test_strided_inputs(rand, kind, reduction):
    _, _, *others = arguments(rand, reduction=reduction)
    args = strided(rand, kind, TOKENS, HIDDEN), strided(rand, kind, WORDS, HIDDEN), *others
    opcheck(linear_cross_entropy, args)
    agree(*both(rand, args), 1e-13)


def test_keeps_its_gradients_or_its_operands(rand):
    args, outputs = arguments(rand, bias=True, weighted=True), []
    assert saved_by(lambda: outputs.append(linear_cross_entropy(*args))) == addresses(*outputs[0][2:])
    args = arguments(rand, bias=True, weighted=True, reduction="none")
    assert saved_by(lambda: outputs.append(linear_cross_entropy(*args))) == addresses(*args[:5], outputs[1][1])


class Largest(TorchDispatchMode):
    """Elements of the largest floating point tensor that an op makes; `besides` are shapes that may be larger."""

    def __init__(self, *besides):
        super().__init__()
        self.besides, self.found = besides, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [] if func.is_view else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = (t.numel() for t in made if t.is_floating_point() and tuple(t.shape) not in self.besides)
        self.found = max([self.found, *new])
        return out


def test_no_tensor_is_larger_than_a_chunk(rand, monkeypatch):
    tokens, words, rows = 300, 101, 16
    monkeypatch.setattr(chunks, "CPU_BYTES", rows * words * 8)
    monkeypatch.setattr(chunks, "TILE", 1)
    options = True, True, 3, 0.1, 0.5, 1.5, 0.01
    args = arguments(rand, *options, tokens=tokens, words=words)
    operands = (tokens, HIDDEN), (words, HIDDEN), (HIDDEN, words)
    with torch.no_grad(), Largest(*operands) as ours:
        _, lse, *_ = reference.linear_cross_entropy(*args)
    with torch.no_grad(), Largest(*operands) as backward:
        reference.linear_cross_entropy_backward(lse, lse, *args[:5], lse, *args[5:10], "xwb")
    with Largest(*operands) as eager:
        torch.autograd.grad(formula(*args)[0].sum(), leaves(args))
    assert eager.found == tokens * words  # what is looked for is seen
    assert ours.found == backward.found == rows * words


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1000, 16384])
@pytest.mark.parametrize("words", [1, 50257, 131072, 262144])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks(tokens, words, device):
    found = list(chunks.chunks(tokens, words, 2, torch.device(device)))
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(tokens))
    longest = max((s.stop - s.start for s in found), default=1)
    assert longest <= chunks.chunk_rows(tokens, words, 2, torch.device(device))
    assert longest * words * 2 <= (chunks.CUDA_BYTES if device == "cuda" else chunks.CPU_BYTES)
    assert device == "cpu" or longest >= min(tokens, 1024)
    assert device == "cpu" or tokens <= longest or longest == 1 << longest.bit_length() - 1


@pytest.mark.parametrize("grads", ["", "x", "xw"])
@pytest.mark.parametrize(("dtype", "tokens", "words", "rows", "wide"), [
    (torch.bfloat16, 16384, 131072, 2048, False),
    (torch.bfloat16, 8192, 131072, 2048, False),
    (torch.bfloat16, 4096, 262144, 1024, False),
    (torch.bfloat16, 16384, 32768, 4096, False),
    (torch.bfloat16, 1024, 32768, 1024, False),
    (torch.bfloat16, 32768, 131072, 4096, False),  # a larger chunk, as eight of them may be added up in place
    (torch.bfloat16, 131072, 131072, 2048, True),  # which costs more than a sum in float32 here
    (torch.float16, 16384, 131072, 2048, True),
])  # fmt: skip
def test_what_it_holds_while_it_runs(dtype, grads, tokens, words, rows, wide):
    """On a GPU: a chunk of logits, and where there are several the gradient of w in what they are added up in."""
    on_gpu = {"dtype": dtype, "device": torch.device("cuda")}
    x, w = (SimpleNamespace(shape=(n, 2048), **on_gpu) for n in (tokens, words))
    if "w" not in grads:
        rows = min(rows, chunks.CUDA_BYTES // (2 * words))  # nothing to add up
    logits = 2 * rows * words
    wide = 2 * words * 2048 if wide and "w" in grads else 0  # beside the result
    want = max(logits + wide, 2 * wide)
    in_forward = logits if dtype == torch.float16 else want  # whose result is what they are added up in
    assert traits_of(torch.ops.megacpp.linear_cross_entropy.default).workspace(x, w, *[None] * 9, grads) == in_forward
    backward = traits_of(torch.ops.megacpp.linear_cross_entropy_backward.default)
    assert backward.workspace(None, None, x, w, *[None] * 9, grads) == want


@pytest.mark.parametrize(("hidden", "words", "rows"), [
    (2048, 32768, 2048), (1024, 32768, 4096), (768, 50265, 4096), (256, 30522, 8192), (8, 30522, 8192), (8, 8000, 32768),
])  # fmt: skip
def test_chunks_of_few_channels_are_longer(hidden, words, rows):
    """On a GPU, where a GEMM of a chunk has too few tiles else; as far as they fit."""
    on_gpu = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    x, w = (SimpleNamespace(shape=(n, hidden), **on_gpu) for n in (8192 if rows <= 8192 else rows, words))
    width = -(-words // 8) * 8
    of_w = 2 * width * hidden if words % 8 else 0  # with the words that pad it
    trait = traits_of(torch.ops.megacpp.linear_cross_entropy.default)
    assert trait.workspace(x, w, *[None] * 9, "xw") == 2 * rows * width + of_w


def check_rows_left_out(rand, module, bad, device="cpu"):
    """Rows that count for nothing are zeros, whatever their logits and what multiplies them."""
    args = [a.detach().to(device) if isinstance(a, torch.Tensor) else a for a in arguments(rand, bias=True, dtype=torch.float32)]
    x, left_out = args[0], args[3] == IGNORED
    x[left_out] = bad
    with torch.no_grad():
        _, lse, dx, _, db = module.linear_cross_entropy(*args)
        assert not dx[left_out].any() and dx.isfinite().all() and db.isfinite().all() and db.any()
        upstream = torch.where(left_out, bad, 1.0)
        given = upstream, None, *args[:5], lse, *args[5:10], "xwb"
        behind, _, db_behind = module.linear_cross_entropy_backward(*given)
    torch.testing.assert_close((behind, db_behind), (dx, db))


def check_rows_whose_lse_is_read(rand, module, device="cpu"):
    args = [a.detach().to(device) if isinstance(a, torch.Tensor) else a for a in arguments(rand, dtype=torch.float32)]
    of_lse = rand(TOKENS, dtype=torch.float32).to(device)
    with torch.no_grad():
        lse = F.linear(args[0], args[1]).logsumexp(-1)
        got = module.linear_cross_entropy_backward(None, of_lse, *args[:5], lse, *args[5:10], "x")[0]
        want = (of_lse[:, None] * F.linear(args[0], args[1]).softmax(-1)) @ args[1]
    torch.testing.assert_close(got, want)


def check_sums_in_float16(rand, module, device="cpu"):
    """128 tokens of one word, with one channel of 1000, which no score reads: the sum is 118 000, the mean 920."""
    tokens = 128
    x, w = (rand(n, HIDDEN, dtype=torch.float16).to(device) for n in (tokens, WORDS))
    x[:, 2], w[:, 2] = 1000.0, 0.0
    args = x, w / 64, None, torch.full((tokens,), 5, device=device), None, *arguments(rand)[5:11], "xw"
    with torch.no_grad():
        made = module.linear_cross_entropy(*args)[3]
    assert made.dtype == torch.float32 and made.isfinite().all()
    assert made.abs().max() > torch.finfo(torch.float16).max
    return args


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_count_for_nothing_are_zeros(rand, bad):
    check_rows_left_out(rand, reference, bad)


def test_rows_whose_lse_is_read_count_for_that(rand):
    check_rows_whose_lse_is_read(rand, reference)


def test_sums_in_float16_stay_in_range(rand):
    x, w, *rest = check_sums_in_float16(rand, reference)
    loss = linear_cross_entropy(x, w.requires_grad_(), *rest)[0] / len(x)
    got = torch.autograd.grad(loss, w)[0]
    want = torch.autograd.grad(F.cross_entropy(F.linear(x.double(), w.double()), rest[1]), w)[0]
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_of_no_labels_has_no_gradient_whatever_multiplies_it(rand, factor):
    """As a mean over no labels is a sum divided by 0."""
    args = arguments(rand, bias=True, ignored=TOKENS, dtype=torch.float32)
    grads = torch.autograd.grad(linear_cross_entropy(*args)[0] * factor, args[:3])
    assert not any(g.any() for g in grads)


REFUSED = {
    "x": (lambda a: (a[0][0], *a[1:]), "x is (6,), w (13, 6), not [n, h] and [v, h]"),
    "columns": (lambda a: (a[0][:, 1:], *a[1:]), "x is (11, 5), w (13, 6)"),
    "w's dtype": (lambda a: (a[0], a[1].float(), *a[2:]), "x is torch.float64, w torch.float32"),
    "b": (lambda a: (*a[:2], a[1][1:, 0], *a[3:]), "b is torch.float64 (12,), not torch.float64 [v], v = 13"),
    "target's dtype": (lambda a: (*a[:3], a[3].int(), *a[4:]), "target is torch.int32 (11,), not int64 [n], n = 11"),
    "target": (lambda a: (*a[:3], a[3][1:], *a[4:]), "target is torch.int64 (10,)"),
    "weight": (lambda a: (*a[:4], a[0][:4, 0], *a[5:]), "weight has 4 rows, x 11"),
    "weight's dtype": (lambda a: (*a[:4], a[3], *a[5:]), "weight is torch.int64 (11,), not torch.float64 [n], n = 11"),
    "no words": (lambda a: (a[0], a[1][:0], *a[2:]), "w has no word"),
    "smoothing": (lambda a: (*a[:6], 1.0, *a[7:]), "label_smoothing is 1.0"),
    "softcap": (lambda a: (*a[:8], 0.0, *a[9:]), "softcap is 0.0: a positive number, or None"),
    "reduction": (lambda a: (*a[:10], "mean", "xw"), "'sum' or 'none'; divide the sum for a mean"),
    "grads": (lambda a: (*a[:11], "wx"), "grads is 'wx': letters of 'xwb' in that order"),
    "grads of rows": (lambda a: (*a[:10], "none", "x"), "whose gradients backward makes"),
    "grads of no bias": (lambda a: (*a[:11], "xwb"), "there is no b"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operands_it_cannot_mean_anything_with(rand, what, device):
    change, words = REFUSED[what]
    args = change(tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments(rand)))
    with pytest.raises(OperandError, match="megacpp::linear_cross_entropy: ") as error:
        linear_cross_entropy(*args)
    assert words in str(error.value)


@pytest.mark.parametrize("wrong", [WORDS, -1, 1 << 40])
def test_a_target_that_is_no_word(rand, wrong):
    args = arguments(rand)
    args[3][2] = wrong
    for function in (linear_cross_entropy, formula):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            function(*args)


def test_an_index_to_ignore_that_is_a_word(rand):
    args = arguments(rand, ignored=0)
    args = *args[:5], int(args[3][0]), *args[6:]
    agree(*both(rand, args), 1e-13)


def test_logits_that_softmax_cannot_sum_naively(rand):
    """exp(1000) is no number; and a row of bfloat16's largest numbers."""
    got, want = both(rand, arguments(rand, scale=1000.0))
    assert all(g.isfinite().all() and relative_error(g, w) < 1e-13 for g, w in zip(got, want, strict=True))


class Head(torch.nn.Module):
    """A layer, and the mean loss of what it says of the next token."""

    def __init__(self, reduction, softcap=4.0):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, WORDS)
        self.rest = IGNORED, 0.1, 1.0, softcap, 1e-3, reduction, "xwb" if reduction == "sum" else ""

    def forward(self, x, target, op=linear_cross_entropy):
        y = F.silu(self.inner(x)).flatten(0, -2)
        loss, lse, *_ = op(y, self.outer.weight, self.outer.bias, target.flatten(), None, *self.rest)
        if self.rest[-2] == "none":
            loss = (loss + 0.1 * lse.sin()).sum()
        return loss / (target != IGNORED).sum()


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.usefixtures("no_kernels", "short_chunks")
@pytest.mark.parametrize(("dynamic", "policy"), [(False, "selective"), (False, 0.3), (True, "none"), (True, "full")])
@REDUCTION
def test_in_compiled_graphs(rand, monkeypatch, reduction, dynamic, policy):
    """The op stays in the graph, whatever there are of tokens, and no policy runs it a second time."""
    torch._dynamo.reset()
    model, calls, plain = Head(reduction).double(), [], reference.linear_cross_entropy
    monkeypatch.setattr(reference, "linear_cross_entropy", lambda *args: (calls.append(args), plain(*args))[1])
    compiled = torch.compile(model, backend="megacpp", dynamic=dynamic, fullgraph=True,
                             options={"strict": True, "policy": policy})
    for tokens in (5, 9):
        x, target = rand(2, tokens, HIDDEN), torch.arange(2 * tokens).remainder(WORDS).view(2, tokens)
        target[0, 1] = IGNORED
        calls.clear()
        losses = compiled(x, target), model(x, target, formula)
        got, want = ([loss, *torch.autograd.grad(loss, tuple(model.parameters()))] for loss in losses)
        assert all(relative_error(g, w) < 1e-12 for g, w in zip(got, want, strict=True))
        assert len(calls) == 1
    with torch.no_grad():
        assert relative_error(compiled(x, target), losses[1]) < 1e-12
    torch._dynamo.reset()
