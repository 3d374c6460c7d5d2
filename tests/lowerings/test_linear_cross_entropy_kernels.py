"""`linear_cross_entropy` on CUDA beyond agreeing with the reference: several chunks, what the gradient of w is added up
in, what it allocates, and that its kernel compiles to whole vectors."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_compile.lowerings.linear_cross_entropy import chunks, linear_cross_entropy, reference

from .agreement import CUDA, DEVICE, OF_KERNELS, disagreements, module_of, on, poisoned_memory, rarely
from .gluon_kernels import assemble, needs_triton
from .loss_cases import ALL, operands
from .test_linear_cross_entropy import (
    Largest,
    check_rows_left_out,
    check_rows_whose_lse_is_read,
    check_sums_in_float16,
)

SELDOM = rarely(torch.float64), rarely(torch.float16)
NAMES = "logits target count dlse lse picked total".split()


def kernels():
    return module_of("linear_cross_entropy", "cuda_triton")


def runs_kernels(test):
    for mark in OF_KERNELS:
        test = mark(test)
    return test


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of four rows of forty words, in any dtype."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 4)


def calls(rand, dtype, **options):
    """name -> arguments of the forward, of that of each row, and of the backward."""
    given = on(DEVICE, operands(rand, dtype, n=11, **(ALL | options)))
    _, lse, *_ = reference.linear_cross_entropy(*given, "none", "")
    seeds = (rand(11, dtype=lse.dtype, device=DEVICE) for _ in range(2))
    return [("linear_cross_entropy", (*given, "sum", "xwb")), ("linear_cross_entropy", (*given, "none", "")),
            ("linear_cross_entropy_backward", (*seeds, *given[:5], lse, *given[5:], "xwb"))]


@runs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_count_for_nothing_are_zeros(rand, bad):
    check_rows_left_out(rand, kernels(), bad, DEVICE)


@runs_kernels
def test_rows_whose_lse_is_read_count_for_that(rand):
    check_rows_whose_lse_is_read(rand, kernels(), DEVICE)


@runs_kernels
def test_sums_in_float16_stay_in_range(rand):
    check_sums_in_float16(rand, kernels(), DEVICE)


@runs_kernels
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("most", "words"), [(0, 40), (8, 37)], ids=["wide", "in_place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *SELDOM], ids=str)
def test_several_chunks(rand, monkeypatch, dtype, most, words):
    monkeypatch.setattr(chunks, "MOST_IN_PLACE", most)
    for name, args in calls(rand, dtype, v=words):
        with poisoned_memory(), torch.no_grad():
            got = getattr(kernels(), name)(*args)
        assert not disagreements(got, name, args)


@runs_kernels
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, rarely(torch.float16)], ids=str)
def test_chunks_round_the_gradient_once(rand, monkeypatch, dtype):
    """That of w, added up in float32 as over many chunks: no further off than in one chunk. Added up in bfloat16 it is."""
    _, args = calls(rand, dtype, z_loss=0.0)[0]
    want = reference.linear_cross_entropy(*on("cpu", args, torch.float64))[3]

    def error():
        with torch.no_grad():
            return float((kernels().linear_cross_entropy(*args)[3].cpu().double() - want).norm())

    in_place = error()
    monkeypatch.setattr(chunks, "MOST_IN_PLACE", 2)
    parted = error()
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 11)
    whole = error()
    assert parted < 1.05 * whole  # sums in another order cross a tie now and then
    assert (
        in_place > 1.2 * whole if dtype == torch.bfloat16 else in_place == parted
    )  # float16 is never added up in place


@runs_kernels
def test_statistics_alone_leave_the_logits(rand):
    """What ranks that hold other words of these rows need before any gradient."""
    from megacpp_compile.lowerings.linear_cross_entropy._triton_rows import launch

    logits = rand(3, 48, dtype=torch.float32, device=DEVICE)
    before = logits.clone()
    target = torch.tensor([0, 39, -100], device=DEVICE)
    lse, picked, total, count = (torch.full((3,), torch.nan, device=DEVICE) for _ in range(4))
    launch(3, 40, logits=logits, ROOM=48, target=target, count=count, dlse=count, lse=lse, picked=picked, total=total,
           SMOOTHING=0.1, SCALE=1.0, SOFTCAP=0, Z_LOSS=0.0, STATISTICS=True, GRADIENT=False, DLSE=False, WIDE=False)
    assert torch.equal(logits, before)
    words = logits[:, :40].double()
    torch.testing.assert_close(lse.double(), words.logsumexp(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total.double(), words.sum(1), rtol=1e-6, atol=1e-5)
    assert picked.tolist()[:2] == [logits[0, 0].item(), logits[1, 39].item()]


@runs_kernels
def test_logits_of_minus_infinity(rand):
    """Words that a mask in the bias rules out, a whole block of them first."""
    x, w, _, target, *rest = on(DEVICE, operands(rand, torch.float32, n=3, v=9001, ignored=0))
    b = torch.zeros(9001, device=DEVICE)
    b[:8500] = -torch.inf
    target[:] = 8999
    args = x, w, b, target, *rest, "sum", "xwb"
    with torch.no_grad():
        assert not disagreements(kernels().linear_cross_entropy(*args), "linear_cross_entropy", args)


@runs_kernels
@pytest.mark.skipif(CUDA, reason="a device-side assertion ends the process's use of the GPU")
def test_a_target_that_is_no_word(rand):
    x, w, b, target, *rest = operands(rand, torch.float32)
    target[1] = 40
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernels().linear_cross_entropy(x, w, b, target, *rest, "sum", "xw")


@runs_kernels
@pytest.mark.skipif(CUDA, reason="counts what the interpreter allocates too")
@pytest.mark.usefixtures("short_chunks")
def test_makes_the_logits_of_one_chunk(monkeypatch, rand):
    monkeypatch.setattr(kernels(), "of_chunks", kernels().walk)  # modes do not see into an op
    for name, args in calls(rand, torch.bfloat16, v=300):
        x, w = args[:2] if name == "linear_cross_entropy" else args[2:4]
        with torch.no_grad(), Largest(tuple(x.shape), tuple(w.shape), (304, w.shape[1])) as seen:
            getattr(kernels(), name)(*args)
        assert seen.found == 4 * 304  # rows are multiples of 16 bytes, for which w has words of zeros


class Products(TorchDispatchMode):
    """Operands and result of every GEMM."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.found.append((func.overloadpacket, [a for a in args if isinstance(a, torch.Tensor)], out))
        return out


@runs_kernels
@pytest.mark.skipif(CUDA, reason="of a sum that is wider than its factors it is another GEMM")
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("words", [37, 40])
def test_gemms_are_of_whole_vectors(monkeypatch, rand, words):
    """Of an odd number of words cuBLAS takes half as long again; a bias is free where it is [v] and logits contiguous."""
    monkeypatch.setattr(kernels(), "of_chunks", kernels().walk)  # modes do not see into an op
    for name, args in calls(rand, torch.bfloat16, v=words):
        with torch.no_grad(), Products() as seen:
            getattr(kernels(), name)(*args)
        sizes = {n for _, operands, out in seen.found for t in (*operands, out) for n in t.shape}
        assert sizes == {24, 40, 4, 3}  # channels, words, rows of a chunk and of the last
        with_bias = [(operands[0], out) for kind, operands, out in seen.found if kind is torch.ops.aten.addmm]
        assert [tuple(b.shape) for b, _ in with_bias] == [(40,)] * 3
        assert all(b.is_contiguous() and out.is_contiguous() for b, out in with_bias)


@runs_kernels
@pytest.mark.parametrize("rows", [0, 1, 512, 1100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *SELDOM], ids=str)
def test_column_sums(rand, dtype, rows):
    d = rand(rows, 136, dtype=dtype, device=DEVICE)
    with poisoned_memory():
        got = kernels().column_sums(d, kernels().parts_of(rows, d.device))
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    eps = torch.finfo(got.dtype).eps
    bound = 32 * eps * (1 + rows) ** 0.5  # beside the root of rows, which a sum of them is about
    torch.testing.assert_close(got.double(), d.double().sum(0), rtol=0, atol=bound)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="a GPU's allocator says how much there was at once")
@pytest.mark.parametrize("grads", ["", "xw"])
def test_peak(rand, grads):
    n, h, v = 16384, 256, 32768
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 16 for shape in ((n, h), (v, h)))
    target = torch.randint(v, (n,), device="cuda")
    args = x, w, None, target, None, -100, 0.0, 1.0, None, 0.0, "sum", grads
    linear_cross_entropy(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(*args)
    results = 2 * (n + v) * h if grads else 0
    few = 2 << 20
    assert torch.cuda.max_memory_allocated() - before <= chunks.CUDA_BYTES + results + few


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("words", "options"),
                         [(131072, {}), (50257, {}),
                          (131072, {"SMOOTHING": 0.1, "SCALE": 0.5, "SOFTCAP": 30.0, "Z_LOSS": 1e-4}),
                          (131072, {"STATISTICS": False, "DLSE": True}), (32000, {"GRADIENT": False})])  # fmt: skip
def test_compiles_for_hopper(words, options):
    """To loads and stores of 16 bytes, also where words are odd in number; and an exponential a word and sweep."""
    from megacpp_compile.lowerings.linear_cross_entropy._triton_rows import BLOCK, GROUP, WARPS, cross_entropy_rows

    usual = {"SMOOTHING": 0.0, "SCALE": 1.0, "SOFTCAP": 0, "Z_LOSS": 0.0, "STATISTICS": True, "GRADIENT": True,
             "DLSE": False, "WIDE": False, "BLOCK": BLOCK, "GROUP": GROUP, "WORDS": words, "ROOM": -(-words // 8) * 8}
    constants = usual | options
    names = cross_entropy_rows.arg_names
    assert [name for name in names if name not in constants] == NAMES
    types = dict.fromkeys(NAMES, "*fp32") | {"logits": "*bf16", "target": "*i64"}
    made = assemble(cross_entropy_rows, types, constants, ["logits"], plain=True, num_warps=WARPS)
    text = made.asm["ptx"]
    sweeps = constants["STATISTICS"] + constants["GRADIENT"]
    lanes, span = BLOCK // (32 * WARPS), BLOCK * GROUP
    steps = (words >= span) + (words % span > 0)  # of the code: whole groups, and what is behind them
    each = lanes * GROUP * steps
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == sweeps * each // 8
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == constants["GRADIENT"] * each // 8
    assert "f64" not in text
    if not constants["SOFTCAP"]:
        of_lanes = constants["STATISTICS"] * lanes * (steps + 1)
        assert sweeps * each < text.count("ex2.approx") <= sweeps * each + of_lanes + constants["GRADIENT"]


@runs_kernels
@pytest.mark.parametrize("rows", [4, rarely(11)], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("first", [rarely(0), 7])
@pytest.mark.parametrize("dtype", [torch.float32, rarely(torch.float64), rarely(torch.bfloat16)], ids=str)
def test_words_of_a_rank(rand, monkeypatch, alone, dtype, first, rows):
    """Of 60 words the rank has 40, as the group's only one: some rows' targets nobody has."""
    from megacpp_compile.lowerings.linear_cross_entropy import cuda_triton_ranks

    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: rows)
    for name, args in calls(rand, dtype, smoothing=0.0):
        at = next(i for i, t in enumerate(args) if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
        target = args[at].where(args[at] < 0, (args[at] * 60) // 40)
        args = (*args[:at], target, *args[at + 1 :], first, 60, alone)
        with poisoned_memory(), torch.no_grad():
            got = getattr(cuda_triton_ranks, name)(*args)
        assert not disagreements(got, name, args)
    assert "smoothing" in str(cuda_triton_ranks.supports(name, (*args[:9], 0.1, *args[10:])))
    assert "one-rank" in str(cuda_triton_ranks.supports(name, args[:-3]))
