"""FlashAttention-4 behind `attention`: every tag, the order, the switch, the record, and the op with a stand-in kernel."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import megacpp_compile
from megacpp_compile import Validity, attention, attention_capability, explainer, last_attention, pipeline, targets
from megacpp_compile.errors import AttentionError, BadOptionError, OperandError
from megacpp_compile.nn.attention import bodies, eligibility, fa4, fa4_runtime, switch, te
from megacpp_compile.nn.attention.eligibility import AttentionCall, Runtime, eligible
from megacpp_compile.precision.native_attention import DotProductAttention as Native
from megacpp_compile.report.kernels import families
from tests.corpus.spellings import PlainMLA
from tests.nn.standing_in import forget, hopper_on_cpu
from tests.nn.test_attention import mathematics, with_gradients

DOCS = torch.tensor([[0] * 9 + [1] * 7, [0] * 16])
GOOD = AttentionCall("cuda", torch.bfloat16, (192, 128), (256, 256))
PROBE = 1  # the first question calls the kernel once
ABLE = Runtime("", (9, 0), softcap=True, backward=True)


@pytest.fixture
def hopper(monkeypatch):
    with hopper_on_cpu(monkeypatch) as module:
        yield module


@pytest.fixture
def missing(monkeypatch):
    forget()
    monkeypatch.setattr(fa4_runtime, "installed", lambda: False)
    yield
    forget()


@pytest.fixture(autouse=True)
def _off():
    yield
    switch.disable_fa4()


def operands(keys=64, values=64, groups=4, dtype=torch.bfloat16, tokens=16, grad=True):
    sizes = ((2, 4, tokens, keys), (2, groups, tokens, keys), (2, groups, tokens, values))
    return [(0.5 * torch.randn(*s)).to(dtype).requires_grad_(grad) for s in sizes]


@pytest.mark.parametrize(("tag", "call", "runtime"), [
    (None, {}, {}), (None, {"widths": (64, 64)}, {}), (None, {"widths": (128, 128), "dtype": torch.float16}, {}),
    (None, {"backward": True, "softcap": 30.0}, {}), (None, {"doc_ids": "uniform"}, {}),
    (None, {}, {"capability": (10, 0)}), (None, {}, {"capability": (12, 1)}),
    (eligibility.CUDA_ONLY, {"device": "cpu"}, {}), (eligibility.CUDA_ONLY, {"device": "xla"}, {}),
    (eligibility.CAPABILITY, {}, {"capability": (8, 0)}), (eligibility.CAPABILITY, {}, {"capability": (12, 0)}),
    (eligibility.CAPABILITY, {}, {"capability": None}), (eligibility.RUNTIME, {}, {"failure": "cannot be loaded"}),
    (eligibility.FP4, {"fp4": True}, {"capability": (12, 1)}), (eligibility.FP4, {"fp4": True}, {}),
    (eligibility.DTYPE, {"dtype": torch.float32}, {}), (eligibility.WIDTHS, {"widths": (56, 56)}, {}),
    (eligibility.WIDTHS, {"widths": (136, 136)}, {}), (eligibility.WIDTHS, {"widths": (68, 68)}, {}),
    (eligibility.WIDTHS, {"widths": (128, 192)}, {}), (eligibility.WIDTHS, {"widths": (192, 192)}, {}),
    (eligibility.ABSORBED, {"widths": (576, 512)}, {}), (eligibility.CAUSAL, {"causal": False}, {}),
    (eligibility.LENGTHS, {"tokens": (1, 256)}, {}), (eligibility.DOC_IDS, {"doc_ids": "non-uniform"}, {}),
    (eligibility.DOC_IDS, {"doc_ids": "unknown"}, {}), (eligibility.MASK, {"mask": True}, {}),
    (eligibility.WINDOW, {"window": 64}, {}), (eligibility.VALID_COUNTS, {"partial": True}, {}),
    (eligibility.DROPOUT, {"dropout": 0.1}, {}), (eligibility.SOFTCAP, {"softcap": 30.0}, {"softcap": False}),
    (eligibility.BACKWARD, {"backward": True}, {"backward": False}), (eligibility.TRACED, {"traced": True}, {}),
])
def test_eligibility(tag, call, runtime):
    found = eligible(dataclasses.replace(GOOD, **call), dataclasses.replace(ABLE, **runtime))
    assert (found and found[0]) == tag
    if found:
        assert tag in eligibility.TAGS and found[1] and not found[1].endswith(".")


def test_a_refused_capability_is_in_the_sentence_and_tags_are_apart():
    assert "sm_80" in eligible(GOOD, dataclasses.replace(ABLE, capability=(8, 0)))[1]
    assert "sm_121a" in eligible(dataclasses.replace(GOOD, fp4=True), dataclasses.replace(ABLE, capability=(12, 1)))[1]
    assert not set(bodies.TAGS) & set(eligibility.TAGS)
    assert all(tag.startswith("dense_fa4_") for tag in eligibility.TAGS)


def test_nothing_but_the_switch_turns_it_on(hopper):
    assert fa4_runtime.installed() and not switch.fa4_enabled()
    attention(*operands())
    assert last_attention().effective == "sdpa" and not last_attention().enabled and not hopper.CALLS
    megacpp_compile.enable_fa4()
    attention(*operands())
    assert last_attention().effective == "fa4" and last_attention().enabled and hopper.CALLS[-1] == "forward"
    megacpp_compile.disable_fa4()
    attention(*operands())
    assert last_attention().effective == "sdpa"


def test_as_a_context_manager_it_restores_what_was_before(hopper):
    with megacpp_compile.enable_fa4(doc_ids="error"):
        assert (switch.fa4_enabled(), switch.doc_ids_policy()) == (True, "error")
        with megacpp_compile.disable_fa4():
            assert not switch.fa4_enabled()
        with megacpp_compile.enable_fa4():
            assert switch.doc_ids_policy() == "fall through"
        assert (switch.fa4_enabled(), switch.doc_ids_policy()) == (True, "error")
    assert (switch.fa4_enabled(), switch.doc_ids_policy()) == (False, "fall through")
    with pytest.raises(BadOptionError, match="Did you mean 'error'"):
        megacpp_compile.enable_fa4(doc_ids="errors")


def test_without_the_package_enabling_and_naming_it_are_errors(missing):
    with pytest.raises(AttentionError, match=r"not installed.*\[dense_fa4_runtime\]. Install it, or do without enable_fa4"):
        megacpp_compile.enable_fa4()
    assert not switch.fa4_enabled()
    with pytest.raises(AttentionError, match=rf"\[{eligibility.CUDA_ONLY}\]"):
        attention(*operands(), backend="fa4")
    with pytest.raises(AttentionError, match=r"\[device\]"):
        attention(*operands(), backend="te")


@pytest.mark.usefixtures("missing", "no_kernels")
@pytest.mark.parametrize("run", ["compiled", "explained"])
def test_the_option_without_the_package_is_without_effect_on_cpu_and_an_error_on_cuda(monkeypatch, caplog, run):
    """What docs/options.md says. The error's advice is what options have."""
    model = torch.nn.Linear(4, 4)

    def call():
        torch._dynamo.reset()
        if run == "explained":
            megacpp_compile.explain(model, torch.randn(2, 4), options={"fa4": True})
        else:
            torch.compile(model, backend="megacpp", options={"fa4": True})(torch.randn(2, 4))

    call()
    assert "option fa4=True has no effect: FlashAttention-4 needs CUDA" in caplog.text
    for user in (pipeline, explainer):
        monkeypatch.setattr(user, "resolve_target", lambda *_: dataclasses.replace(targets.CPU, cublas=True))
    with pytest.raises(AttentionError, match=r"not installed.*\[dense_fa4_runtime\].*leave out the option 'fa4'") as caught:
        call()
    assert "backend=" not in str(caught.value)


def test_sparse_attention_and_this_do_not_ask_each_other(hopper):
    """Neither the other's settings nor its result: `uses_dense_fa4` is about the dense line."""
    q, rows = torch.randn(1, 3, 2, 24), torch.randn(1, 9, 1, 24)
    indices = torch.tensor([0, 3, -1]).expand(1, 3, 1, 3)
    attention(*operands())
    dense = last_attention()
    before = megacpp_compile.sparse_mla(q, rows, indices, d_v=16)
    megacpp_compile.enable_fa4()
    after = megacpp_compile.sparse_mla(q, rows, indices, d_v=16)
    assert all(map(torch.equal, before, after)) and "forward" not in hopper.CALLS and last_attention() is dense
    assert not megacpp_compile.uses_dense_fa4("cpu") and not megacpp_compile.uses_dense_fa4("xla")
    assert megacpp_compile.uses_dense_fa4("cuda") == torch.cuda.is_available()


@pytest.mark.end_to_end
def test_importing_asks_for_nothing():
    text = (
        "import sys, torch, megacpp_compile; from megacpp_compile.nn.attention import fa4_runtime; "
        "megacpp_compile.attention(*torch.randn(3, 1, 1, 4, 8)); "
        "print([n for n in sys.modules if n.split('.')[0] in ('flash_attn', 'transformer_engine', 'cutlass')],"
        "torch.cuda.is_initialized(), fa4_runtime.probe.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False 0"


def test_asked_first_and_the_default_serves_what_it_cannot(hopper):
    megacpp_compile.enable_fa4()
    found = attention_capability(*operands(dtype=torch.float32))
    assert found.backend == "sdpa" and found.tags == (eligibility.DTYPE,)
    found = attention_capability(*operands(), doc_ids=DOCS)
    assert found.backend == "plain" and found.tags == (eligibility.DOC_IDS, "doc-ids")
    found = attention_capability(*operands(), window=4)
    assert found.backend == "plain" and found.tags == (eligibility.WINDOW, "window")
    assert attention_capability(*operands(), causal=False).tags == (eligibility.CAUSAL,)


def test_documents_are_masked_or_an_error_and_never_ignored(hopper):
    tensors = operands(dtype=torch.float32, grad=False)
    narrow = [t.bfloat16() for t in tensors]
    megacpp_compile.enable_fa4()
    attention(*narrow)  # the probe's call, too
    hopper.CALLS.clear()
    got = attention(*narrow, doc_ids=DOCS)
    assert "forward" not in hopper.CALLS
    want = mathematics(*(t.double() for t in narrow), doc_ids=DOCS)
    assert (got.double() - want).abs().max() < 2e-2 * want.abs().max()
    assert attention_capability(*narrow, doc_ids=torch.zeros(2, 16, dtype=torch.long)).backend == "fa4"
    attention(*narrow, doc_ids=torch.zeros(2, 16, dtype=torch.long))
    assert (last_attention().effective, last_attention().doc_ids) == ("fa4", "uniform")
    with megacpp_compile.enable_fa4(doc_ids="error"):
        assert attention(*narrow).dtype == torch.bfloat16
        with pytest.raises(AttentionError, match=rf"\[{eligibility.DOC_IDS}\]") as caught:
            attention(*narrow, doc_ids=DOCS)
        assert (caught.value.backend, caught.value.tag) == ("fa4", eligibility.DOC_IDS)


def test_documents_on_a_device_are_not_known_to_be_uniform(hopper):
    megacpp_compile.enable_fa4()
    found = fa4.lacks(*operands(), None, None, True, None, False, "unknown")
    assert found[0] == eligibility.DOC_IDS and "nobody knows" in found[1]
    uniform = torch.zeros(2, 16, dtype=torch.long, device="meta")
    asked = sys.modules["megacpp_compile.nn.attention"]._asked(*operands(), uniform, None, True, None, None)
    assert asked.state == "unknown" and asked.ids is not None


def test_by_name_it_fails_closed(hopper):
    assert attention(*operands(), backend="fa4").shape == (2, 4, 16, 64) and not switch.fa4_enabled()
    assert (last_attention().requested, last_attention().effective, last_attention().enabled) == ("fa4", "fa4", False)
    with pytest.raises(AttentionError, match=rf"\[{eligibility.WINDOW}\]"):
        attention(*operands(), window=3, backend="fa4")
    with pytest.raises(OperandError, match="Did you mean 'fa4'"):
        attention(*operands(), backend="fa-4")


def test_a_probe_that_fails_is_asked_once_and_kept(monkeypatch):
    with hopper_on_cpu(monkeypatch) as module:
        def broken(*_, **__):
            module.CALLS.append("tried")
            raise RuntimeError("ptxas is too old")

        monkeypatch.setattr(module, "_flash_attn_fwd", broken)
        megacpp_compile.enable_fa4()
        for _ in range(3):
            attention(*operands())
            assert last_attention().tags == (eligibility.RUNTIME,) and "ptxas is too old" in last_attention().reason
        assert module.CALLS.count("tried") == 1


def test_a_package_that_does_not_load(monkeypatch, tmp_path):
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "interface.py").write_text("raise ImportError('no cutlass here')\n")
    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fa4, "DEVICES", ("cpu",))
    monkeypatch.setattr(fa4_runtime, "_capability", lambda index: (9, 0))
    megacpp_compile.enable_fa4()
    found = attention_capability(*operands())
    assert found.backend == "sdpa" and found.tags == (eligibility.RUNTIME,) and "no cutlass here" in str(found)
    forget()


def test_the_record_of_each_branch(hopper):
    with megacpp_compile.record() as report:
        attention(*operands())
        attention(*operands())
        attention(*operands(192, 128), softcap=2.0)
        attention(*operands(dtype=torch.float64), doc_ids=DOCS)
        q, k, v = operands(grad=False)
        attention(q[:, :, :1], k, v, causal=False)
    assert [(c.effective, c.calls, c.doc_ids, c.kind) for c in report.attention] == [
        ("sdpa", 2, "absent", "prefill"), ("plain", 1, "absent", "prefill"), ("plain", 1, "non-uniform", "prefill"),
        ("sdpa", 1, "absent", "decode"),
    ]  # fmt: skip
    assert report.attention[1].shape == (2, 4, 4, 16, 16, 192, 128) and report.attention[1].tags == ("softcap",)
    assert report.attention[1].dtype == "bfloat16" and report.attention[1].device == "cpu"
    again = megacpp_compile.Report.from_json(report.to_json())
    assert again.attention == report.attention
    assert "attention, eager calls" in str(report) and "caps no scores [softcap]" in str(report)


def test_the_record_is_of_its_thread():
    attention(*operands())
    mine, seen = last_attention(), []

    def other():
        seen.append(last_attention())
        attention(*operands(dtype=torch.float32), softcap=1.0)
        seen.append(last_attention().effective)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, "plain"] and last_attention() is mine


def test_the_kernel_that_ran(hopper):
    x = operands(grad=False)
    seen = megacpp_compile.observed_attention(lambda: attention(*x, softcap=1.0), "cpu")
    assert seen.effective == "plain" and any("softmax" in name for name in seen.kernels)
    megacpp_compile.enable_fa4()
    seen = megacpp_compile.observed_attention(lambda: attention(*x), "cpu")
    assert seen.effective == "fa4" and families(seen.kernels) == ("fa4",)
    assert megacpp_compile.observed_attention(lambda: scaled_dot_product_attention(*x), "cpu") is None


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("keys", "values", "groups"), [(192, 128, 4), (64, 64, 2), (128, 128, 1)])
def test_forward_and_gradients(hopper, keys, values, groups, softcap):
    """No further from float64 than rounding results to bfloat16 is: 2^-8 of each element, and of the largest."""
    tensors = operands(keys, values, groups)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    hopper.CALLS.clear()
    got = with_gradients(attention, tensors, backend="fa4", softcap=softcap)
    assert hopper.CALLS[-2:] == ["forward", "backward"]
    for g, w in zip(got, with_gradients(mathematics, exact, softcap=softcap), strict=True):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g.double(), w, rtol=2**-7, atol=2**-8 * w.abs().max().item())


def test_what_is_asked_of_a_custom_op(hopper):
    for grad in (True, False):
        q, k, v = operands(64, 64, 2, grad=grad)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        args = (q, k, v, 0.125, 0.0, True)
        torch.library.opcheck(torch.ops.megacpp.fa4_attention.default, args, test_utils=checks, atol=1e-2, rtol=1e-2)
    out, lse = torch.ops.megacpp.fa4_attention(q, k, v, 0.125, 0.0, True)
    grads = torch.ops.megacpp.fa4_attention_backward
    torch.library.opcheck(grads.default, (out, q, k, v, out, lse, 0.125, 0.0, True),
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip


def test_operands_of_any_layout(hopper):
    """As projections leave them, [B, S, H, D] behind a transpose, and with channels apart."""
    q, k, v = operands(grad=False)
    want = attention(q, k, v, backend="fa4")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    apart = [t.mT.contiguous().mT for t in (q, k, v)]
    assert torch.equal(attention(*turned, backend="fa4"), want) and torch.equal(attention(*apart, backend="fa4"), want)
    assert want.transpose(1, 2).is_contiguous(), "the output projection reads it without a copy"


def test_deterministic_algorithms_reach_the_kernel_and_another_dtype_is_a_defect(hopper, monkeypatch):
    torch.use_deterministic_algorithms(True)
    try:
        with_gradients(attention, operands(), backend="fa4")
    finally:
        torch.use_deterministic_algorithms(False)
    assert hopper.CALLS[-1] == "backward, deterministic"
    own = hopper._flash_attn_fwd
    megacpp_compile.enable_fa4()
    attention(*operands(grad=False))
    monkeypatch.setattr(hopper, "_flash_attn_fwd", lambda *a, **k: [t.float() for t in own(*a, **k)[:2]])
    with pytest.raises(AssertionError, match="returned torch.float32"):
        attention(*operands(grad=False))


def test_a_compiler_sees_one_graph(hopper):
    """`attention`, enabled: the op is in the graph, and disabling it is another graph, not a stale one."""
    graphs = []

    def backend(gm, _):
        graphs.append({str(n.target) for n in gm.graph.nodes})
        return gm.forward

    tensors, call = operands(), torch.compile(attention, backend=backend, fullgraph=True)
    with megacpp_compile.enable_fa4():
        call(*tensors)
    call(*tensors)
    assert [any("fa4_attention" in name for name in names) for names in graphs] == [True, False]


def results(model, call, x):
    """The output, and gradients of its square sum."""
    model.zero_grad()
    out = call(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


class Attend(nn.Module):
    def __init__(self, dim=128, heads=2, width=64):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(dim, 3 * heads * width), nn.Linear(heads * width, dim)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_the_option_reaches_a_plain_model(hopper):
    """Torch's own op, written in a model that knows of nothing, is served by the kernel in forward and backward, whole,
    and agrees with eager to bfloat16's rounding."""
    model, x = Attend().bfloat16(), torch.randn(2, 16, 128).bfloat16()
    want = results(model, model, x)
    hopper.CALLS.clear()
    with megacpp_compile.record() as report:
        found = results(model, torch.compile(model, backend="megacpp", options={"fa4": True}, fullgraph=True), x)
    assert hopper.CALLS.count("forward") == 2 and hopper.CALLS.count("backward") == 1, "one of the two is the probe's"
    [row] = report.frames[0].attention
    assert (row["call"], row["requested"], row["effective"], row["kernel"]) == ("sdpa", "fa4", "fa4", "fa4")
    assert "test_fa4.py" in row["source"] and "scaled_dot_product_attention(q, k, v" in row["source"]
    for g, w in zip(found, want, strict=True):
        assert (g.float() - w.float()).norm() < 2**-6 * w.float().norm(), "two bfloat16 results, rounded a few times"


def test_windows_against_mathematics():
    """By the plain body, forward and gradients, and by FlexAttention; `mathematics` knows documents alone, so a window
    is a document a query there."""
    tensors = [t.double().detach().requires_grad_() for t in operands(8, 8, 2, torch.float32)]

    def windowed(q, k, v):
        keep = torch.ones(16, 16, dtype=torch.bool).tril().triu(-2)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return (q @ k.mT * 8**-0.5).masked_fill(~keep, -torch.inf).softmax(-1) @ v

    want = with_gradients(windowed, tensors)
    torch.testing.assert_close(with_gradients(attention, tensors, window=3), want, rtol=1e-10, atol=1e-12)
    single = [t.detach().float() for t in tensors]
    torch.testing.assert_close(attention(*single, window=3, backend="flex").double(), want[0], rtol=1e-5, atol=1e-6)
    for window, causal in ((0, True), (3, False)):
        with pytest.raises(OperandError, match="window"):
            attention(*tensors, window=window, causal=causal)


def test_tokens_that_are_not_there():
    tensors = [t.double().detach() for t in operands(8, 8, 2, torch.float32)]
    validity = Validity.of_tokens([16, 5])
    assert validity.partial(16) and validity.tokens(16) == (16, 5) and not Validity.of_tokens([16, 20]).partial(16)
    got = attention(*tensors, validity=validity)
    ids = torch.where(torch.arange(16) < torch.tensor([[16], [5]]), 0, -1)
    torch.testing.assert_close(got, mathematics(*tensors, doc_ids=ids), rtol=1e-10, atol=1e-12)
    assert not got[1, :, 5:].any()
    both = torch.where(ids < 0, -1, DOCS)
    got = attention(*tensors, validity=validity, doc_ids=DOCS)
    torch.testing.assert_close(got, mathematics(*tensors, doc_ids=both), rtol=1e-10, atol=1e-12)
    assert attention_capability(*tensors, validity=Validity.of_tokens([16, 16])).backend == "sdpa"
    assert attention_capability(*tensors, validity=Validity()).backend == "sdpa"


def test_slots_that_are_not_there(hopper):
    megacpp_compile.enable_fa4()
    tensors = operands()
    assert Validity.of_slots(torch.tensor([4, 2]), 4).tokens(16) == (16, 8)
    found = attention_capability(*tensors, validity=Validity.of_slots([4, 2], 4))
    assert found.tags == (eligibility.VALID_COUNTS, "doc-ids")
    assert attention_capability(*tensors, validity=Validity.of_slots([4, 5], 4)).backend == "fa4"


@pytest.mark.parametrize("fields", [
    {"mode": "slot prefix", "counts": (1,)}, {"mode": "slot prefix", "counts": (1,), "slot": -4},
    {"mode": "token prefix", "counts": (1,), "slot": 4}, {"mode": "none", "counts": (1,)}, {"mode": "token prefix"},
    {"mode": "token prefix", "counts": (-1,)}, {"mode": "rows", "counts": (1,)},
])  # fmt: skip
def test_a_validity_that_means_nothing(fields):
    with pytest.raises(OperandError, match="attention validity"):
        Validity(**fields)


def test_a_validity_of_other_rows():
    with pytest.raises(OperandError, match="counts of 3 rows for 2"):
        attention(*operands(), validity=Validity.of_tokens([1, 2, 3]))
    q, *keyed = operands()
    with pytest.raises(OperandError, match="validity of 16 keys for 1 queries"):
        attention(q[:, :, :1], *keyed, validity=Validity.of_tokens([1, 2]))


class OnCuda:
    """An operand on a device that is not there."""

    def __init__(self, dtype=torch.bfloat16, tokens=16):
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, (2, 4, tokens, 64)


@pytest.mark.parametrize(("tag", "operand", "keys", "rest"), [
    ("dtype", OnCuda(torch.float32), OnCuda(), (None, None, True)), ("doc-ids", OnCuda(), OnCuda(), (DOCS, None, True)),
    ("window", OnCuda(), OnCuda(), (None, None, False, 3)), ("shape", OnCuda(), OnCuda(tokens=8), (None, None, True)),
    (None, OnCuda(), OnCuda(), (None, 2.0, True, 3)),
])
def test_what_the_engine_lacks(monkeypatch, tag, operand, keys, rest):
    monkeypatch.setattr(te.importlib.util, "find_spec", lambda name: name)
    assert ((found := te.lacks(operand, keys, keys, *rest)) and found[0]) == tag
    assert tag is None or tag in bodies.TAGS


def test_without_the_engine_and_in_a_graph(monkeypatch):
    monkeypatch.setattr(te.importlib.util, "find_spec", lambda name: None)
    assert te.lacks(OnCuda(), OnCuda(), OnCuda(), None, None, True)[0] == "no-te"
    monkeypatch.setattr(te.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert te.lacks(OnCuda(), OnCuda(), OnCuda(), None, None, True)[0] == "graph-break"


@pytest.mark.parametrize("given", [{}, {"softcap": 0.7}, {"causal": False}])
def test_the_engines_module_is_given_what_it_takes(monkeypatch, given):
    """With this package's module of the same signature in its place, against mathematics in float64."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", types.SimpleNamespace(DotProductAttention=Native))
    te._module.cache_clear()
    tensors = [t.detach().double().requires_grad_() for t in operands(24, 16, 2)]

    call = lambda q, k, v: te.attend(q, k, v, given.get("softcap"), 0.3, given.get("causal", True))  # noqa: E731
    want = with_gradients(mathematics, tensors, scale=0.3, **given)
    torch.testing.assert_close(with_gradients(call, tensors), want, rtol=1e-10, atol=1e-12)
    te._module.cache_clear()


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("policy", [None, "full"])
def test_a_plain_mla_block(hopper, policy):
    """Heads of 192 and 128 channels: the passes of latent attention fire as without, its attention is FlashAttention-4's,
    in one graph; under a policy the core is kept or recomputed whole, with the same gradients."""
    model = PlainMLA(64, heads=2, q_lora=32, kv_lora=32, nope=128, rope=64, v=128, table_source="buffer").bfloat16()
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()

    want, counts = results(model, model, x), []
    for options in ({}, {"fa4": True}):
        torch._dynamo.reset()
        hopper.CALLS.clear()
        with megacpp_compile.record() as report:
            call = torch.compile(model, backend="megacpp", options={**options, "policy": policy}, fullgraph=True)
            got = results(model, call, x)
        counts.append(report.counts)
        assert len(report.frames) == 1 and report.frames[0].captured
    assert counts[0] == counts[1] and counts[1]["mla_rope_q"] == counts[1]["mla_rope_kv"] == 1
    assert [row["effective"] for row in report.frames[0].attention] == ["fa4"]
    assert hopper.CALLS.count("backward") == 1 and hopper.CALLS.count("forward") == (2 if policy == "full" else 1) + PROBE
    for g, w in zip(got, want, strict=True):
        assert (g.float() - w.float()).norm() < 2**-5 * w.float().norm(), "some ten roundings to bfloat16 in a row"
