"""`Fit.run` where a step does run out of memory: on CUDA by what torch lets the process have, on CPU by a count of what
is saved. The next lever serves, with nothing of the failed attempt left."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

import megacpp_compile
from benchmarks import models
from megacpp_compile.memory import estimate, fit
from tests.memory.layered import Model, Small, ids
from tests.remat import models as blocks

# One worker makes no other's tests wait for memory.
pytestmark = pytest.mark.xdist_group("fit")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])]


class Saved:
    """Bytes of storages saved for backward while it is entered; beyond `limit` there is no room."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit, self.kept = limit, {}

    def __enter__(self):
        self.kept.clear()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self.kept.values())

    def pack(self, t):
        self.kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        if self.bytes > self.limit:
            raise torch.OutOfMemoryError(f"{self.bytes} bytes saved, {self.limit} there")
        return t


class Allowed:
    """Bytes of the device that torch may have while it is entered."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit

    def __enter__(self):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total))

    def __exit__(self, *error):
        self.bytes = torch.cuda.max_memory_allocated()
        torch.cuda.set_per_process_memory_fraction(1.0)


def model_and_input(device, monkeypatch):
    """Blocks that save several times what one of them takes in passing."""
    if device == "cpu":
        return blocks.llama(2), blocks.hidden().requires_grad_()
    monkeypatch.setattr(blocks, "DIM", 512)
    monkeypatch.setattr(blocks, "HEADS", 4)
    torch.manual_seed(0)
    layers = (blocks.Layer(blocks.Attention(), models.SwiGLU(512, 1408)) for _ in range(8))
    return blocks.Model(*layers).to(device, torch.bfloat16), blocks.hidden(4096).to(device, torch.bfloat16).requires_grad_()


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
def test_the_next_lever_serves(device, few_objects, monkeypatch, request):
    if device == "cpu":
        request.getfixturevalue("no_kernels")
    memory = Saved if device == "cpu" else Allowed
    model, x = model_and_input(device, monkeypatch)
    wanted = [x, *model.parameters()]
    given, compiled = [], fit.compile

    def compile(model, **settings):
        given.append(settings)
        return compiled(model, **settings)

    monkeypatch.setattr(fit, "compile", compile)
    options = {"block_kinds": {"layers.*.second": "eblock"}, "keep_latents": True}
    settings = {"whole_below": 0, "dynamic": False}
    with megacpp_compile.record() as report:
        fitted = megacpp_compile.fit(model, x, limit_gib=64, optimizer="sgd", options=options, settings=settings)
        assert [t.name for t in fitted.tried] == ["none"], "64 GiB are enough for all"

        def step(within):
            with within:
                model(x).float().square().sum().backward()
            found, within.found = [t.grad.float().cpu() for t in wanted], within.bytes
            for t in wanted:
                t.grad = None  # behind, as many steps have it: what a failed one made is no part of the next
            return found

        free = memory()
        for _ in range(2):  # compiling may take more than running does
            want = fitted.run(lambda: step(free))
        before = free.before if device == "cuda" else 0
        enough = memory(before + 0.9 * (free.found - before))
        got = fitted.run(lambda: step(enough))
    names = [t.name for t in fitted.tried]
    assert names[:2] == ["none", "selective"] and len(names) <= 5 and enough.found <= enough.limit < free.found
    assert fitted.to_dict()["out_of_memory"] == names[:-1] and fitted.policy is not None
    policies = [one["options"].pop("policy") for one in given]
    assert policies == [t.policy for t in fitted.tried]
    assert all(one == {**settings, "options": options} for one in given), "every setting is as it was"
    # A frame for every lever, and one more where the last layer keeps what the others recompute: none was left to eager,
    # and all but the first keep less than they read.
    apart = [policy is not None and policy.of_last_layer() != policy for policy in policies]
    assert len(report.frames) == len(names) + sum(apart) and all(frame.captured for frame in report.frames)
    assert [frame.remat is not None for frame in report.frames] == [False] + [True] * (len(report.frames) - 1)
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    for mine, free_of_limits in zip(got, want, strict=True):
        scale = free_of_limits.abs().amax()
        torch.testing.assert_close(mine / scale, free_of_limits / scale, **tolerance)


@pytest.fixture
def estimated(monkeypatch):
    """Whatever is looked at fits, by an estimate that takes no time."""
    monkeypatch.setattr(fit, "estimate", lambda *_, **__: estimate.Estimate(0, 0, 0, 0, "sgd", (), "cpu"))


@pytest.mark.exhaustive
def test_no_lever_runs_in_eager(estimated, no_kernels):
    """Regression: Dynamo compiles a function eight times (here two), then leaves it to eager, which keeps everything."""
    model = Model(1, block=Small)
    with torch._dynamo.config.patch(recompile_limit=2), megacpp_compile.record() as report:
        fitted = megacpp_compile.fit(model, ids(), limit_gib=1)

        def step():
            model(ids())
            if len(fitted.tried) <= torch._dynamo.config.recompile_limit + 1:
                raise torch.OutOfMemoryError("no room")

        fitted.run(step)
    assert len(report.frames) == len(fitted.tried)


@pytest.fixture
def small(estimated, few_objects, monkeypatch):
    """Fitted, and compiled by nothing."""
    monkeypatch.setattr(fit, "compile", lambda model, **_: model)
    return megacpp_compile.fit(Model(1, block=Small), ids(), limit_gib=1.0)


@pytest.mark.end_to_end
def test_nothing_of_a_failed_step_is_left(small):
    """Tensors that its error's traceback holds, in a cycle at that, and gradients of a backward that was cut short."""
    made, attempts = [], 0

    def step():
        nonlocal attempts
        attempts += 1
        gc.disable()  # collected because it was asked for, not by chance
        assert all(t() is None for t in made)
        out = small.model(ids())
        made.append(weakref.ref(out))
        out.sum().backward()
        try:
            if attempts < 3:
                raise torch.OutOfMemoryError("no room")
        except torch.OutOfMemoryError as error:
            kept = error  # noqa: F841  a local of the frame that the error's traceback holds
            raise

    try:
        small.run(step)
    finally:
        gc.enable()
    found = [p.grad.clone() for p in small.model.parameters()]
    small.model.zero_grad()
    small.model(ids()).sum().backward()
    for once, p in zip(found, small.model.parameters(), strict=True):
        assert torch.equal(once, p.grad), "a gradient was added to that of the step that failed"
    assert attempts == 3 and len(small.tried) == 3


def test_an_update_that_was_begun_is_not_repeated(small):
    optimizer, calls = torch.optim.SGD(small.model.parameters(), lr=0.1), []

    def step():
        calls.append(1)
        small.model(ids()).sum().backward()
        optimizer.step()
        raise torch.OutOfMemoryError("no room for the rest")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        small.run(step)
    assert len(calls) == 1 and len(small.tried) == 1
    assert any("had been updated" in note for note in caught.value.__notes__)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("error", "again"), [
    (torch._dynamo.exc.BackendCompilerFailed(lambda: None, torch.OutOfMemoryError("CUDA out of memory."), None), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (RuntimeError("out of resource: shared memory"), False),
])
def test_what_is_an_error_of_memory(small, error, again):
    def step():
        if len(small.tried) == 1:
            raise error
        return "done"

    with contextlib.nullcontext() if again else pytest.raises(RuntimeError):
        assert small.run(step) == "done"
    assert len(small.tried) == 1 + again


def test_a_fraction_of_the_device_is_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = type("Device", (), {"total_memory": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    for fraction, limit in ((1.0, 920), (0.5, 460)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda f=fraction: f, raising=False)
        assert fit._limit(None) == limit
