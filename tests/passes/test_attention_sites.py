"""The row of each attention of a compiled frame: torch's op, FlexAttention, and what `attention` writes into a graph."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import megacpp_compile
from megacpp_compile import analysis
from megacpp_compile._torch.autograd import get_sequence_nr
from megacpp_compile.errors import CaptureError
from megacpp_compile.lowerings.attention import _sdpa_choice
from megacpp_compile.nn.attention import eligibility, fastest
from megacpp_compile.passes._frame import attention_sites as sites
from tests.nn.standing_in import hopper_on_cpu

DOCS = torch.tensor([[0] * 3 + [1] * 5, [0] * 8])
UNFUSED = "no fused kernel: all scores in memory"


class Model(nn.Module):
    """Projections around `call`, so that the frame is large enough to be looked at."""

    def __init__(self, call, keys=16, values=16, dtype=torch.float32):
        super().__init__()
        self.call = call
        self.q, self.k = nn.Linear(32, 2 * keys), nn.Linear(32, 2 * keys)
        self.v, self.out = nn.Linear(32, 2 * values), nn.Linear(2 * values, 32)
        self.to(dtype)

    def forward(self, x):
        q, k, v = (p(x).view(2, 8, 2, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(self.call(q, k, v).transpose(1, 2).reshape(2, 8, -1))


class Inner(nn.Module):
    def forward(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def rows(call, *, options=None, keys=16, values=16, dtype=torch.float32, grad=True):
    x = torch.randn(2, 8, 32, dtype=dtype)
    with torch.set_grad_enabled(grad):
        report = megacpp_compile.explain(Model(call, keys, values, dtype), x, options=options)
    assert megacpp_compile.Report.from_json(report.to_json()).frames == report.frames
    return report, [row for frame in json.loads(report.to_json())["frames"] for row in frame["attention"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("keys", "values", "kernel"), [(16, 16, "flash"), (24, 16, "unfused")])
def test_torchs_own(keys, values, kernel, grad):
    report, [row] = rows(Inner(), keys=keys, values=values, grad=grad)
    tag, reason = ("", "") if kernel == "flash" else ("unfused", UNFUSED)
    assert row == {
        "fqn": "call", "source": row["source"], "call": "sdpa", "requested": "sdpa", "effective": "sdpa",
        "kernel": kernel, "tag": tag, "reason": reason, "observed": "",
    }  # fmt: skip
    assert row["source"].startswith("test_attention_sites.py:") and "return scaled_dot_product_attention" in row["source"]
    assert ("attention, unfused (1):\n  call: " + UNFUSED + " [unfused]" in report.summary()) == (kernel == "unfused")
    assert "attention, unfused" not in report.summary() or kernel == "unfused"


def test_what_the_row_says_is_what_the_graph_gets():
    """The kernel that was named is the one among the operators that run in the compiled graph."""
    seen = []

    def keep(gm, _):
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    for keys, kernel in ((16, "flash"), (24, "unfused")):
        seen.clear()
        torch._dynamo.reset()
        torch.compile(Model(Inner(), keys, 16), backend=aot_autograd(fw_compiler=keep))(torch.randn(2, 8, 32))
        assert any("_scaled_dot_product_flash" in name for name in seen) == (kernel == "flash")
        assert rows(Inner(), keys=keys)[1][0]["kernel"] == kernel


def test_what_a_context_allows_is_asked_each_time():
    shape = 2, 4, 64, 32
    layout = shape, torch.empty(shape).stride(), torch.float32, True
    found = []
    for allowed in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION]):
        with sdpa_kernel(allowed):
            found.append(_sdpa_choice.kernel_of("cpu", (layout, layout, layout, None), 0.0, True, False))
    assert found == ["flash", "unfused", "flash"]


def test_asking_for_the_kernel_leaves_no_trace():
    """Autograd counts its nodes by thread, and what a step saves goes by that count."""
    layout = ((2, 2, 8, 16), (256, 128, 16, 1), torch.float32, True)
    before = get_sequence_nr()
    _sdpa_choice._asked.cache_clear()
    assert _sdpa_choice.kernel_of("cpu", (layout, layout, layout, None), 0.0, True, False) == "flash"
    assert _sdpa_choice._asked.cache_info().misses == 1 and get_sequence_nr() == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("given", "effective", "kernel", "tag", "says"), [
    ({}, "sdpa", "flash", "", ""),
    ({"softcap": 5.0}, "plain", "unfused", "softcap", "caps no scores"),
    ({"doc_ids": DOCS}, "plain", "unfused", "doc-ids", "takes documents as a mask"),
    ({"window": 3}, "plain", "unfused", "window", "takes a window as a mask"),
    ({"backend": "plain"}, "plain", "unfused", "unfused", UNFUSED),
])  # fmt: skip
def test_this_packages_own(given, effective, kernel, tag, says):
    _, [row] = rows(lambda q, k, v: megacpp_compile.attention(q, k, v, **given))
    expected = ("attention", "sdpa", effective, kernel)
    assert (row["call"], row["requested"], row["effective"], row["kernel"]) == expected
    if given.get("backend") != "plain":
        assert row["tag"] == tag and says in row["reason"]
    assert "test_attention_sites.py" in row["source"] and "megacpp_compile.attention(q, k, v" in row["source"]


def test_two_calls_are_told_apart():
    def both(q, k, v):
        y = megacpp_compile.attention(q, k, v, softcap=5.0)
        return megacpp_compile.attention(y, k, v, window=2)

    assert [row["tag"] for row in rows(both)[1]] == ["softcap", "window"]


def test_flex_attention():
    _, [row] = rows(lambda q, k, v: flex_attention(q, k, v), grad=False)
    assert (row["call"], row["effective"], row["kernel"], row["tag"]) == ("flex_attention", "flex", "flex", "")


def test_what_is_no_attention_has_no_row():
    assert rows(lambda q, k, v: q.softmax(-1) * v)[1] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("call", "dtype", "keys", "tag"), [
    (Inner(), torch.float32, 64, eligibility.DTYPE),
    (Inner(), torch.bfloat16, 16, eligibility.WIDTHS),
    (lambda q, k, v: scaled_dot_product_attention(q, k, v), torch.bfloat16, 64, eligibility.CAUSAL),
    (lambda q, k, v: scaled_dot_product_attention(q, k, v, q.new_zeros(8, 8)), torch.bfloat16, 64, eligibility.MASK),
    (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1), torch.bfloat16, 64,
     eligibility.DROPOUT),
    (Inner(), torch.bfloat16, 64, ""),
    (lambda q, k, v: megacpp_compile.attention(q, k, v), torch.bfloat16, 64, ""),
    (lambda q, k, v: megacpp_compile.attention(q, k, v, softcap=2.0), torch.bfloat16, 64, "softcap"),
    (lambda q, k, v: megacpp_compile.attention(q, k, v, window=2), torch.bfloat16, 64, eligibility.WINDOW),
])  # fmt: skip
def test_flash_attention_4_by_the_option(monkeypatch, call, dtype, keys, tag):
    with hopper_on_cpu(monkeypatch):
        _, [row] = rows(call, options={"fa4": True}, dtype=dtype, keys=keys, values=keys)
    assert row["requested"] == "fa4" and row["tag"] == tag
    assert (row["effective"] == "fa4") == (tag == "")


def test_flash_attention_4_by_the_switch(monkeypatch):
    """What `attention` asks, it writes into the graph itself; torch's own op is left alone."""
    with hopper_on_cpu(monkeypatch), megacpp_compile.enable_fa4():
        _, [row] = rows(lambda q, k, v: megacpp_compile.attention(q, k, v), dtype=torch.bfloat16, keys=64, values=64)
        assert (row["call"], row["requested"], row["effective"], row["kernel"]) == ("attention", "fa4", "fa4", "fa4")
        assert "test_attention_sites.py" in row["source"]
        refused = lambda q, k, v: megacpp_compile.attention(q, k, v, window=2)  # noqa: E731
        _, [row] = rows(refused, dtype=torch.bfloat16, keys=64, values=64)
        assert (row["requested"], row["effective"], row["tag"]) == ("fa4", "plain", eligibility.WINDOW)
        _, [row] = rows(Inner(), dtype=torch.bfloat16, keys=64, values=64)
        assert (row["requested"], row["effective"]) == ("sdpa", "sdpa")


@pytest.mark.usefixtures("eager_backend")
def test_frames_that_are_compiled_as_they_were_written(monkeypatch):
    """Too small for the passes, not captured, or refused by the backend: the rows stay, and claim no kernel that is not
    there."""
    def refuse(*_, **__):
        raise CaptureError("no")

    with hopper_on_cpu(monkeypatch):
        x = [torch.randn(1, 2, 8, 64).bfloat16() for _ in range(3)]
        for options, capture, expected in (
            ({}, None, ("sdpa", "sdpa", "", "flash")),
            ({"fa4": True}, None, ("fa4", "fa4", "", "fa4")),
            ({"fa4": True}, refuse, ("fa4", "sdpa", sites.NOT_CAPTURED, "?")),
            ({}, refuse, ("sdpa", "sdpa", "", "flash")),
        ):
            torch._dynamo.reset()
            with monkeypatch.context() as patch, megacpp_compile.record() as report:
                if capture is not None:
                    patch.setattr(analysis, "capture", capture)
                    patch.setattr(analysis, "nothing_to_do", lambda *_: None)
                torch.compile(Inner(), backend="megacpp", options=options)(*x)
            [row] = report.frames[0].attention
            assert (row["requested"], row["effective"], row["tag"], row["kernel"]) == expected
            assert "internal error" not in report.frames[0].reason
    before = {"effective": "fa4", "call": "attention", "kernel": "fa4", "tag": "", "reason": ""}
    assert sites.as_written(dict(before)) == before, "this one is in the graph that Dynamo made"


@pytest.mark.usefixtures("eager_backend")
def test_numbers_that_are_inputs_of_the_graph(monkeypatch):
    """Under `dynamic=True` a scale may be one: the row says what is not known, and the frame compiles."""
    def call(q, k, v, scale):
        return scaled_dot_product_attention(q * 2, k, v * 3, is_causal=True, scale=scale)

    with hopper_on_cpu(monkeypatch), megacpp_compile.record() as report:
        x = [torch.randn(1, 2, 8, 64).bfloat16() for _ in range(3)]
        compiled = torch.compile(call, backend="megacpp", options={"fa4": True}, dynamic=True)
        for scale in (0.1, 0.2, 0.3):
            torch.testing.assert_close(compiled(*x, scale), call(*x, scale), rtol=2e-2, atol=2e-2)
    assert {row["tag"] for frame in report.frames for row in frame.attention} <= {"", eligibility.TRACED}


def test_a_defect_of_a_row_costs_the_row_alone(monkeypatch):
    def broken(*_, **__):
        raise KeyError("defect")

    monkeypatch.setattr(sites, "_sdpa_row", broken)
    report, [row] = rows(Inner())
    assert (row["effective"], row["kernel"], row["tag"]) == ("sdpa", "?", sites.UNREAD) and "KeyError" in row["reason"]
    assert report.frames[0].captured


def test_reports_of_releases_before_have_no_rows():
    report, _ = rows(Inner())
    data = json.loads(report.to_json())
    del data["attention"], data["frames"][0]["attention"]
    again = megacpp_compile.Report.from_json(json.dumps(data))
    assert again.attention == [] and again.frames[0].attention == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("of_fa4", "effective"), [(1.9, "fa4"), (1.99, "sdpa"), (2.5, "sdpa")])
def test_the_faster_by_measurement(monkeypatch, of_fa4, effective):
    """And a hundredth of the time is not worth another package's kernel."""
    asked = []
    monkeypatch.setattr(fastest, "milliseconds", lambda *call: asked.append(call) or (2.0, of_fa4))
    with hopper_on_cpu(monkeypatch):
        report, [row] = rows(Inner(), options={"attention": "fastest"}, dtype=torch.bfloat16, keys=64, values=64)
        assert row["requested"] == "fastest" and row["effective"] == effective and row["tag"] == sites.MEASURED
        assert row["reason"] == f"forward and backward measured: fa4 {of_fa4} ms, sdpa 2 ms"
        layout = (2, 2, 8, 64), (1024, 64, 128, 1), torch.bfloat16, True
        assert asked == [("cpu", (layout, layout, layout), None, True)]
        _, [row] = rows(Inner(), options={"attention": "fastest"}, dtype=torch.float32, keys=64, values=64)
        assert (row["effective"], row["tag"]) == ("sdpa", eligibility.DTYPE) and len(asked) == 1


def test_nothing_is_measured_where_it_cannot_serve():
    _, [row] = rows(Inner(), options={"attention": "fastest"}, dtype=torch.bfloat16, keys=64, values=64)
    assert (row["requested"], row["effective"], row["tag"]) == ("fastest", "sdpa", eligibility.CUDA_ONLY)


@pytest.mark.parametrize("grad", [True, False])
def test_both_are_measured_at_the_shape(monkeypatch, grad):
    """Forward alone in inference; once a process; nobody's random numbers change."""
    shape = 1, 4, 8, 64
    layout = shape, torch.empty(shape).stride(), torch.bfloat16, grad
    calls = []
    monkeypatch.setattr(fastest, "_timed", lambda step, device: calls.append(step()) or float(len(calls) % 2 + 1))
    fastest.milliseconds.cache_clear()
    state = torch.get_rng_state()
    with hopper_on_cpu(monkeypatch) as package:
        ran = []
        of_package = package._flash_attn_fwd
        monkeypatch.setattr(package, "_flash_attn_fwd", lambda *a, **k: ran.append(1) or of_package(*a, **k))
        for _ in range(2):
            assert fastest.milliseconds("cpu", (layout, layout, layout), None, True) == (2.0, 1.0)
    assert len(calls) == 2 * fastest.TIMES and len(ran) == fastest.TIMES + 1
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_measured_stays_torchs(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("there is no room")

    monkeypatch.setattr(fastest, "milliseconds", full)
    with hopper_on_cpu(monkeypatch):
        _, [row] = rows(Inner(), options={"attention": "fastest"}, dtype=torch.bfloat16, keys=64, values=64)
    assert (row["effective"], row["tag"]) == ("sdpa", sites.UNREAD) and "there is no room" in row["reason"]
