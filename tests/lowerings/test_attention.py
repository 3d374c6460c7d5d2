"""`megacpp::attention`: the formula, gradients, what it keeps, rows without a key, and torch's kernels beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.lowerings._registry import choose
from megacpp_compile.lowerings.attention import _chunks, attention, cpu_chunks, cpu_sdpa, cuda_sdpa, reference
from megacpp_compile.lowerings.attention._dropout import WORDS, kept
from megacpp_compile.lowerings.attention._layout import heads_first, in_whole_rows

from . import STRIDES, relative_error, strided
from .agreement import poisoned_memory
from .contract import agree, assert_is, assert_keeps, differentiate, gradcheck, tolerances

B, H, G, T, S, D, E = 2, 4, 2, 5, 7, 6, 3
INF = float("-inf")
FORMS = {
    "plain": {}, "causal": {"right": 2}, "window": {"left": 1, "right": 2}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True},
    "sinks_of_rows": {"sinks": (B, H, T)}, "sinks_of_tokens": {"sinks": (1, 1, T)},
    "bias": {"bias": (1, H, T, S)}, "bias_of_keys": {"bias": (B, 1, 1, S)}, "mask": {"mask": True},
    "dropout": {"dropout": 0.25},
    "all": {"mask": True, "bias": (1, H, T, S), "sinks": True, "softcap": 2.0, "left": 2, "right": 3},
    "all_dropped": {"mask": True, "bias": (1, H, T, S), "sinks": True, "softcap": 2.0, "left": 2, "right": 3, "dropout": 0.5},
}  # fmt: skip


def arguments(rand, *, groups=G, mask=False, bias=None, sinks=False, softcap=0.0, left=None, right=None, fill=INF,
              ids=None, dropout=0.0, dtype=torch.float64):  # fmt: skip
    q, k, v = (
        rand(B, heads, n, c, dtype=dtype, grad=True) for heads, n, c in ((H, T, D), (groups, S, D), (groups, S, E))
    )
    seen = None
    if mask:
        seen = rand(B, 1, T, S) < 0.5
        seen[..., 2] = True
    added = rand(*bias, dtype=dtype, grad=True) if bias else None
    generator = torch.Generator().manual_seed(len(FORMS))
    drawn = (torch.randint(WORDS, [S + B * H * T], generator=generator), dropout) if dropout else ()
    logits = rand(*((H,) if sinks is True else sinks), dtype=dtype, grad=True) if sinks else None
    return q, k, v, seen, added, logits, ids, 0.4, softcap, left, right, fill, *drawn


def keeps(row, key, p):
    """What a weight is multiplied by: the hash of a row's word and a key's, in numbers of any length."""
    x = (((row >> 32) | 1) * (key % 2**32) + row % 2**32) % 2**32
    return (((x ^ x >> 15) * 0x735A2D97) % 2**32 >= p * 2**32) / (1 - p)


def formula(q, k, v, mask, bias, sinks, ids, scale, softcap, left, right, fill, words=None, dropout=0.0):
    """One query of one head after the other, by the definition."""
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                scores = []
                for j in range(k.shape[2]):
                    s = (q[b, h, i] * k[b, g, j]).sum() * scale
                    s = softcap * torch.tanh(s / softcap) if softcap else s
                    s = s if bias is None else s + bias.expand(B, H, T, S)[b, h, i, j]
                    if mask is not None and not mask.expand(B, H, T, S)[b, h, i, j]:
                        s = torch.full_like(s, fill)
                    if ids is not None and ids.expand(B, T)[b, i] != ids.expand(B, T)[b, j]:
                        s = torch.full_like(s, INF)
                    far = right is not None and j > i + right or left is not None and j < i - left
                    scores.append(torch.full_like(s, INF) if far else s)
                scores = torch.stack(scores + ([] if sinks is None else [sinks[h] if sinks.dim() == 1 else sinks.expand(B, H, T)[b, h, i]]))
                weights = scores.softmax(0)[: k.shape[2]]
                if words is not None:
                    row = int(words[S + (b * H + h) * T + i])
                    weights = torch.stack([w * keeps(row, int(words[j]), dropout) for j, w in enumerate(weights)])
                rows.append(weights @ v[b, g])
    return torch.stack(rows).view(*q.shape[:3], v.shape[-1])


def out_of(*args):
    return attention(*args)[0]


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(rand, form):
    gradcheck(out_of, arguments(rand, **FORMS[form]))


@pytest.mark.sampled(3)
@tolerances(1e-13, 3e-6, 1.2e-2)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_formula(rand, dtype, tolerance, form):
    args = arguments(rand, dtype=dtype, **FORMS[form])
    out, *_ = assert_is(out_of, formula, rand, args, tolerance, dtype=dtype)
    assert out.dtype == dtype


@pytest.mark.parametrize("ids", [[[0, 0, 1, 1, 1], [3, 4, 3, 4, 4]], [[2, 2, 2, 1, 0]]])
def test_documents(rand, ids):
    q, k, v, *others = arguments(rand, right=0, ids=torch.tensor(ids))
    args = q, k[:, :, :T].detach().requires_grad_(), v[:, :, :T].detach().requires_grad_(), *others
    assert_is(out_of, formula, rand, args, 1e-13)


@pytest.mark.parametrize("form", ["plain", "all"])
def test_keeps_operands_its_result_and_numbers_a_row(rand, form):
    args = arguments(rand, **FORMS[form])
    _, lse, top = assert_keeps(attention, args, args[:7], 0, 1, 2)
    assert lse.shape == (B, H, T) and top.shape == ((B, H, T) if form == "all" else (0,))


def by_chunks(monkeypatch, length=2):
    """Of `length` queries."""
    monkeypatch.setattr(_chunks, "MOST", length)
    monkeypatch.setattr(_chunks, "LEAST", length)


IDS = torch.tensor([[0, 0, 1, 1, 1], [3, 4, 3, 4, 4]])


@pytest.mark.parametrize("form", [form for form in FORMS if "drop" not in form] + ["documents", "prefix"])
@tolerances(1e-13, 3e-6, 2e-2)
def test_chunks_are_what_the_reference_is(rand, monkeypatch, form, dtype, tolerance):
    by_chunks(monkeypatch)
    given = {"right": 0, "ids": IDS} if form == "documents" else {"right": 0} if form == "prefix" else FORMS[form]
    args = [a.detach() if torch.is_tensor(a) else a for a in arguments(rand, dtype=dtype, **given)]
    if form == "documents":
        args[1:3] = (t[:, :, :T] for t in args[1:3])
    args += [None, 0.0, torch.tensor([3, 0])] if form == "prefix" else []
    assert cpu_chunks.supports("attention", args) is None
    with poisoned_memory():
        made = cpu_chunks.attention(*args)
    want = reference.attention(*args)
    grad, rest = rand(B, H, T, E, dtype=dtype), (True, *args[12:])
    assert cpu_chunks.supports("attention_backward", (grad, *args[:7], *made, *args[7:12], *rest)) is None
    with poisoned_memory():
        found = cpu_chunks.attention_backward(grad, *args[:7], *made, *args[7:12], *rest)
    exact = reference.attention_backward(grad, *args[:7], *want, *args[7:12], *rest)
    for got, right in zip((*made, *found), (*want, *exact), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (right.dtype, right.shape, right.stride())
        assert relative_error(got, right) <= tolerance


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_chunks_without_numbers_are_those_of_the_reference(rand, monkeypatch, what, which):
    """But for a key that none of a chunk's queries sees, whose value they need not read."""
    by_chunks(monkeypatch, T)
    args = [a.detach() if torch.is_tensor(a) else a for a in arguments(rand, **FORMS["all"])]
    args[which][0, 1, 2, 0] = what
    for got, want in zip(cpu_chunks.attention(*args), reference.attention(*args), strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and relative_error(got.nan_to_num(), want.nan_to_num()) < 1e-12


def test_a_chunk_reads_no_key_that_its_queries_do_not_see(rand, monkeypatch):
    by_chunks(monkeypatch)
    q, k, v = (rand(1, 1, 6, 4) for _ in range(3))
    v[:, :, 4:] = float("nan")
    out, *_ = cpu_chunks.attention(q, k, v, None, None, None, None, 0.4, 0.0, 1, 0, INF)
    assert not out[:, :, :4].isnan().any() and out[:, :, 4:].isnan().all()


@pytest.mark.parametrize(("tokens", "form", "dtype", "effective"), [
    (256, {"right": 0}, torch.float32, "cpu_sdpa"), (1024, {"right": 0}, torch.float32, "cpu_sdpa"),
    (1024, {"right": 0, "softcap": 2.0}, torch.float32, "cpu_chunks"), (512, {"left": 64, "right": 0}, torch.float32, "cpu_chunks"),
    (512, {"softcap": 2.0, "right": 0}, torch.float32, "cpu_autograd"), (2048, {"softcap": 2.0}, torch.float32, "cpu_chunks"),
    (1024, {"right": 0}, torch.bfloat16, "cpu_autograd"), (2048, {"right": 0}, torch.bfloat16, "cpu_sdpa"),
    (2048, {"right": 0, "softcap": 2.0}, torch.bfloat16, "cpu_autograd"), (4096, {"dropout": True}, torch.float32, "cpu_autograd"),
])  # fmt: skip
def test_who_serves_on_a_cpu(tokens, form, dtype, effective):
    with FakeTensorMode():
        q = torch.empty(1, 2, tokens, 16, dtype=dtype)
        words = [torch.empty(tokens * 3, dtype=torch.int64), 0.5] if form.get("dropout") else []
    args = [q, q, q, *[None] * 4, 0.4, form.get("softcap", 0.0), form.get("left"), form.get("right"), INF, *words]
    choice = choose(torch.ops.megacpp.attention.default, "cpu", args)
    assert (choice.effective, choice.ahead) == (effective, effective == "cpu_autograd")


@pytest.mark.parametrize("fill", [INF, torch.finfo(torch.float32).min])
def test_a_row_without_a_key_is_what_softmax_makes_of_it(rand, fill):
    """NaN, or the mean of all values; so in gradients, whose scores were written over."""
    q, k, v, _, *others = arguments(rand, groups=H, dtype=torch.float32)
    mask = torch.ones(B, 1, T, S, dtype=torch.bool)
    mask[0, :, 1] = False
    args = q, k, v, mask, *others[:-1], fill

    def eager(*_):
        return (q @ k.mT * 0.4).masked_fill(~mask, fill).softmax(-1) @ v

    seeds = [rand(B, H, T, E, dtype=torch.float32)]
    for got, want in zip(differentiate(out_of, args, seeds), differentiate(eager, args, seeds), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert bool(out_of(*args)[0, :, 1].isnan().all()) == (fill == INF)


def standings(x, kurtosis):
    """How many standard deviations the mean square of the correlations of rows of `x` [..., n, m], two by two, is from that
    of rows which know nothing of each other. Its numbers have mean 0 and variance 1."""
    n, m = x.shape[-2:]
    squares = (x @ x.mT).square() / m
    squares = (squares.sum((-2, -1)) - squares.diagonal(dim1=-2, dim2=-1).sum(-1)).mean() / (n * (n - 1))
    pairs = x.shape[:-2].numel() * n * (n - 1) / 2
    return (squares - 1).abs() / ((2 + kurtosis**2 / m) / pairs) ** 0.5


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_weights_are_dropped_independently(p):
    """As many as there should be, of any two rows, columns, heads, sequences and calls."""
    calls, b, h, n = 6, 2, 3, 160
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, [calls, n + b * h * n], generator=generator)
    x = torch.stack([kept(one, p, b, h, n, n) for one in words]).double()
    x = (x - (1 - p)) / (p * (1 - p)) ** 0.5
    assert x.mean().abs() < 4 / x.numel() ** 0.5
    for sums in (x.sum(-1), x.sum(-2)):
        assert (sums.square().mean() / n - 1).abs() < 4 * (2 / sums.numel()) ** 0.5
    for rows in (x, x.mT, x.flatten(3), x.flatten(2), x.flatten(1)):
        assert standings(rows, 1 / (p * (1 - p))) < 4


def test_three_keys_are_dropped_independently():
    """Whose words are a line, along which a * c + b goes evenly."""
    n, p = 2000, 0.1
    words = torch.cat([torch.arange(3), torch.randint(WORDS, [n], generator=torch.Generator().manual_seed(0))])
    x = (kept(words, p, 1, 1, n, 3).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    assert x.prod(-1).mean().abs() < 4 / n**0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mean_over_draws_is_attention_without_dropout(rand, p):
    """And the variance that of weights, dropped one by one."""
    given = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments(rand)]
    plain, draws = reference.attention(*given)[0], 1500
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, [draws, S + B * H * T], generator=generator)
    outs = torch.stack([reference.attention(*given, one, p)[0] for one in words])
    q, k, v = given[:3]
    weights = (q @ k.repeat_interleave(H // G, 1).mT * 0.4).softmax(-1)
    variance = weights.square() @ v.repeat_interleave(H // G, 1).square() * (p / (1 - p))
    off = (outs.mean(0) - plain) / (variance / draws).sqrt()
    assert off.abs().max() < 5 and (off.square().mean() - 1).abs() < 0.5
    assert (outs.var(0) / variance - 1).abs().mean() < 0.1


def test_all_or_nothing_is_dropped():
    words = torch.randint(WORDS, [8 + 2 * 3 * 5], generator=torch.Generator().manual_seed(0))
    assert not kept(words, 1.0, 2, 3, 5, 8).any() and kept(words, 0.0, 2, 3, 5, 8).all()


@pytest.mark.parametrize("layout", STRIDES)
def test_strides_do_not_matter(rand, layout):
    others = arguments(rand, right=2)[3:]
    given = [strided(rand, layout, B, *sizes) for sizes in ((H, T, D), (G, S, D), (G, S, E))]
    plain = [t.detach().contiguous().requires_grad_() for t in given]
    seeds = [rand(B, H, T, E)]
    agree(differentiate(out_of, (*given, *others), seeds), differentiate(out_of, (*plain, *others), seeds))


@pytest.mark.parametrize("tokens_first", [False, True])
def test_results_lie_as_operands_do(rand, tokens_first):
    q, k, v = (rand(B, T, n, D).transpose(1, 2) if tokens_first else rand(B, n, T, D) for n in (H, G, G))
    out, lse, top = reference.attention(q, k, v, None, None, None, None, 0.4, 0.0, None, 0, INF)
    settings = 0.4, 0.0, None, 0, INF, False
    grads = reference.attention_backward(out, q, k, v, None, None, None, None, out, lse, top, *settings)
    assert [heads_first(t) for t in (out, *grads[:3])] == [not tokens_first] * 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_s_kernel_serves_what_it_can(rand, causal, dtype):
    q, k, v, grad = (rand(B, H, 16, 16, dtype=dtype) for _ in range(4))
    args = q, k, v, None, None, None, None, 0.3, 0.0, None, 0 if causal else None, INF
    assert cpu_sdpa.supports("attention", args) is None
    out, lse, top = cpu_sdpa.attention(*args)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3))
    torch.testing.assert_close(lse.double(), reference.attention(*(t.double() for t in args[:3]), *args[3:])[1],
                               rtol=1e-2, atol=1e-2)  # fmt: skip
    backward = grad, *args[:7], out, lse, top, *args[7:], False
    assert cpu_sdpa.supports("attention_backward", backward) is None
    for got, want in zip(cpu_sdpa.attention_backward(*backward)[:3], reference.attention_backward(*backward)[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("channels", [40, 48])
def test_kernels_are_given_sixteens_of_channels_in_rows_that_begin_at_such(rand, channels):
    cuda_triton = pytest.importorskip("megacpp_compile.lowerings.attention.cuda_triton")
    whole = rand(1, 2, 32, channels, dtype=torch.bfloat16)
    odd = rand(1, 2, 32, channels + 1, dtype=torch.bfloat16)[..., 1:]
    for given in (whole, odd):
        got = cuda_triton._in_sixteens(given)
        assert got.shape[-1] == 48 and not any(n % 16 for n in got.stride()[:3]) and got.storage_offset() == 0
        assert torch.equal(got[..., :channels], given) and not got[..., channels:].any()
    assert (cuda_triton._in_sixteens(whole) is whole) == (channels == 48)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_torch_s_kernels_are_given_rows_of_sixteen_bytes(rand, tokens_first):
    def heads(channels):
        given = rand(1, 32, 2, channels, dtype=torch.bfloat16).transpose(1, 2)
        return given if tokens_first else given.contiguous()

    assert in_whole_rows(whole := heads(72)[..., :64]) is whole and in_whole_rows(heads(65)[..., :64]) is not whole
    for odd in (heads(65)[..., :64], heads(65)[..., 1:], heads(128)[..., ::2], heads(72)[..., 1:65]):
        got = in_whole_rows(odd)
        assert torch.equal(got, odd) and heads_first(got) == heads_first(odd) == (not tokens_first)
        assert got.stride(3) == 1 and not any(n % 8 for n in (*got.stride()[:3], got.storage_offset()))


def test_channels_that_torch_would_pad_are_left_to_others(rand):
    q = rand(1, 2, 128, 36, dtype=torch.bfloat16)
    assert "eights" in cuda_sdpa.supports("attention", (q, q, q, None, None, None, None, 0.4, 0.0, None, None, INF))


@pytest.mark.parametrize(("form", "word"), [
    ({"left": 1}, "window"), ({"sinks": True}, "sinks"), ({"softcap": 1.0}, "softcap"), ({"mask": True}, "mask"),
    ({"bias": (1, H, T, S)}, "bias"), ({"dropout": 0.5}, "dropout"), ({"right": 2}, "same tokens"), ({}, f"{S} keys"),
])  # fmt: skip
def test_what_torch_s_kernel_refuses_is_said(rand, form, word):
    assert word in cpu_sdpa.supports("attention", arguments(rand, groups=H, **form))
