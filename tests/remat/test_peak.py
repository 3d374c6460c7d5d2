"""The predicted peak, beside the one that compiled code has; and what says so."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import async_compile

import megacpp_compile
from megacpp_compile.errors import BadOptionError, PeakUnreachableError
from megacpp_compile.lowerings.linear_cross_entropy import chunks, linear_cross_entropy
from megacpp_compile.report.report import Report
from tests.memory.layered import Model as Layered
from tests.precision.models import Of
from tests.remat import models
from tests.remat.steps import step
from tests.sharding.one_rank import one_rank  # noqa: F401


@pytest.fixture
def one_thread():
    """torch's attention on CPU keeps a buffer for every thread, which no graph says."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def idle_kernels(monkeypatch):
    """The code that allocates and frees is as ever, but its C++ is neither compiled nor run."""
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)


def measured(model, *inputs):
    """(report, memory at the peak of a step of `model` under a budget, beside what was there before)"""
    with megacpp_compile.record() as report, torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(model, backend=megacpp_compile.backend, options={"policy": 0.4})

        def run():
            out = compiled(*inputs)
            return torch.autograd.grad(out, [inputs[0], *model.parameters()], torch.ones_like(out))

        run()
    # Parameters and input were there before: both figures are of what the step allocates.
    return report, report.measure(run, "cpu")


@pytest.mark.end_to_end
def test_predicted_is_what_the_code_of_inductor_allocates(one_thread, idle_kernels):
    """Nothing is predicted where the code comes from a cache."""
    torch._dynamo.reset()
    model = models.llama(1)
    report, found = measured(model, models.hidden(512).requires_grad_())
    assert found == pytest.approx(report.predicted_step, rel=0.05)
    assert report.predicted_peak > report.predicted_step + sum(p.nbytes for p in model.parameters())
    assert "measured memory at the peak of a step" in str(report)
    again = Report.from_json(report.to_json())
    assert (again.measured["step"], again.frames) == (found, report.frames)


@pytest.mark.end_to_end
def test_a_limit_reaches_the_graph_and_the_report():
    model = models.llama(2)
    high = step(model, (models.hidden(),), {"policy": {"peak_gib": 1.0}})
    (found,) = [f.peak for f in high.report.frames]
    over_time = found["over_time"]
    assert max(over_time["forward"] + over_time["backward"]) == found["step"]
    assert over_time["forward"][0] == 0 and len(over_time["backward"]) > 20
    assert found["limit"] == 2**30 and found["predicted"] == found["before"] + found["step"] < 2**30
    assert found["before"] >= sum(p.nbytes for p in model.parameters())
    assert high.remat["ablock"]["entries"] == ["1 GiB"]
    low = step(model, (models.hidden(),), {"policy": {"peak_gib": 0.95 * found["predicted"] / 2**30}})
    assert low.report.predicted_peak < 0.95 * found["predicted"] and low.saved < high.saved
    # What is not there yet is left free.
    reserve = 2.0**-10
    with pytest.raises(PeakUnreachableError):
        step(model, (models.hidden(),), {"policy": {"peak_gib": reserve + 1e-4, "reserve_gib": reserve}})


@pytest.mark.end_to_end
def test_ranks_plan_by_the_one_that_has_most(monkeypatch, request):
    """The other rank is one of another model's: what it says is put where it would arrive."""
    model, gather = models.llama(1), torch.distributed.all_gather_object

    def before(**policy):
        (found,) = [f.peak for f in step(model, (models.hidden(),), {"policy": {"peak_gib": 1.0, **policy}}).report.frames]
        return found["before"]

    def gathered(every, own, group):
        gather(every, own, group)
        every.append(own + 3 * 2**28)

    alone = before(same_on_ranks=True)
    request.getfixturevalue("one_rank")
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    assert before() == alone < 3 * 2**28 == before(same_on_ranks=True)


def test_kinds_of_blocks_that_share_a_limit():
    with pytest.raises(BadOptionError, match="one kind of block"):
        megacpp_compile.compile(Layered(4, dense=1), policy={"peak_gib": 1.0}, whole_below=0)


def loss(m, x, target):
    """A layer's, of which the op keeps no logits."""
    x, how = torch.nn.functional.silu(m.layer(x)), (None, -100, 0.0, 1.0, None, 0.0, "sum", "xw")
    return linear_cross_entropy(x, m.head.weight, None, target, *how)[0]


@pytest.mark.end_to_end
def test_what_an_op_holds_while_it_runs_is_counted(one_thread, monkeypatch):
    """Logits of a chunk, here most of what a step takes; measured on a CPU, where the reference has some of them at once."""
    tokens, words, rows = 1024, 4096, 256
    monkeypatch.setattr(chunks, "CPU_BYTES", rows * words * 4)
    torch._dynamo.reset()
    model = Of(loss, layer=torch.nn.Linear(32, 32), head=torch.nn.Linear(32, words, bias=False))
    report, found = measured(model, torch.randn(tokens, 32, requires_grad=True), torch.arange(tokens))
    assert rows * words * 4 < found < tokens * words * 4 * 2
    assert found == pytest.approx(report.predicted_step, rel=0.1)
