"""What several test files compile with, and what each test is run in."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import random

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor import compile_fx as module
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from megacpp_compile.config import registered
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings import _registry
from megacpp_compile.lowerings._op import KERNEL_OPS
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.passes import _registered, linear_cross_entropy
from megacpp_compile.report.at_exit import ENDING
from tests import capture, quicker, quicker_fakes
from tests.seeds import move_written_seeds, seed_of

move_written_seeds()


@pytest.fixture(scope="session", autouse=True)
def _quick_compilers():
    with quick_compilers():
        yield


@contextlib.contextmanager
def quick_compilers():
    """Scalar C++, a third quicker to generate and compile than what Inductor vectorises: that is its own affair, and
    tests that are about kernels as users get them ask for `vectorised`. Collecting garbage among the millions of
    objects that imports leave behind finds nothing and takes a tenth of the time; how seldom it is looked for is in
    `tests/__init__.py`. The rest is in `tests/quicker.py`
    and `tests/quicker_fakes.py`."""
    gc.collect()
    gc.freeze()
    with (
        inductor_config.patch({"cpp.simdlen": 1}),
        torch._dynamo.config.patch(run_gc_after_compile=False),
        pytest.MonkeyPatch.context() as patch,
    ):
        quicker.without_telemetry(patch)
        quicker.without_repeats(patch)
        quicker.with_quick_stacks(patch)
        quicker.with_quick_settings(patch)
        quicker.without_searches(patch)
        quicker.with_quick_symbols(patch)
        quicker.with_quick_trees(patch)
        quicker_fakes.with_quick_keys(patch)
        quicker_fakes.with_quick_questions(patch)
        quicker_fakes.with_quick_fakes(patch)
        quicker_fakes.with_quick_memories(patch)
        quicker_fakes.with_quick_updates(patch)
        quicker.without_stances(patch)
        quicker.without_checks_of_integers(patch)
        yield


@pytest.fixture(autouse=True)
def seeded(request):
    """Inputs are the same in every run, whatever ran before in this worker."""
    seed_all(request.node.name)


@pytest.fixture(autouse=True)
def _enabled_nowhere():
    """A test that enables this backend for torch's own calls leaves that to no other."""
    before = torch.compile
    yield
    assert torch.compile is before, "torch.compile is not what it was before the test"


@pytest.fixture(scope="session")
def _installed():
    """What installed packages register is there before the first test: each would otherwise look for it anew."""
    _registered.rules()
    semantic_ops()


@pytest.fixture(autouse=True)
def _registered_nowhere(_installed):
    """Rules and lowerings that a test registers, or an entry point of its own, are gone after it."""
    kept = [(held, held.copy()) for held in (_registered._rules, registered.CODE, registered._loaded, _registry.ADDED)]
    yield
    for held, before in kept:
        if held != before:
            held.clear()
            held.update(before)
            semantic_ops.cache_clear()


@pytest.fixture(autouse=True)
def _warned_anew():
    """What is said once a process is said in each test that is about it, whatever ran before in this worker; and a
    worker does not end on frames that tests meant to fall back."""
    warn_once.cache_clear()
    yield
    ENDING.clear()


def seed_all(name):
    random.seed(seed_of(name))
    torch.manual_seed(seed_of(name))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is drawn from the fixture's name: whichever of them comes first in this worker makes it,
    and draws what it would have drawn without."""
    if fixturedef.scope == "function":
        return (yield)
    kept = random.getstate(), torch.get_rng_state()
    seed_all(fixturedef.argname)
    try:
        return (yield)
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])


def pytest_sessionstart(session):
    if getattr(session.config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        capture.remove_old()


def pytest_sessionfinish():
    """pytest looks for garbage five times before it ends, and Python once more, among all that tests leave in caches."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """No module draws from torch's generator while it is imported: what it got would depend on which modules were
    imported before it."""
    before = torch.get_rng_state()
    report = yield
    if report.passed and not torch.equal(torch.get_rng_state(), before):
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid}: draws random numbers while it is imported. Draw in the test, or by tests.seeds.Draws."
        )
    return report


@pytest.fixture
def few_objects():
    """Garbage is looked for among what is made from now on: among a worker's millions of objects that takes a second.
    They stay frozen, as what was imported is, which would come back with them."""
    gc.collect()  # among what was made since the last of these tests
    gc.freeze()


@pytest.fixture
def hopper():
    """A driver that names a GPU to compile for; Triton then says what a kernel writes, and nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

    if torch.cuda.is_available():
        yield
        return
    driver.set_active(Driver())
    yield
    driver._active = None


@pytest.fixture
def vectorised():
    """Inductor's own settings."""
    with inductor_config.patch({"cpp.simdlen": None}):
        yield


def held(node):
    """Whether a graph keeps this op: one for lowerings to call, or that cannot be traced, or that is called as it is."""
    called = "fa4_attention", "mtp_loss_gradient", "entering_states"
    if node.target in KERNEL_OPS or any(name in str(node.target) for name in called):
        return True
    found = semantic_ops().get(node.target)
    device = "cuda" if any(v.is_cuda for v in tree_leaves(value(node)) if isinstance(v, torch.Tensor)) else "cpu"
    return found is not None and not choose(node.target, device, fx.map_arg(node.args, value)).traced


@pytest.fixture
def no_kernels():
    with kernels_left_out():
        yield


@contextlib.contextmanager
def kernels_left_out(runs=lambda gm: None):
    """Inductor up to and including its post-grad passes, lowering among them; what they leave runs in eager. C++ takes
    most of the time of a test, and says nothing of what a frame's interface or its graphs look like. `runs` is told of each graph when it is called."""

    def inner_compile(gm, example_inputs, *, is_inference=False, **_):
        with V.set_fake_mode(torch._guards.detect_fake_mode(example_inputs)):
            module.view_to_reshape(gm)  # a lowered value may have other strides than its op promised
            module._recursive_post_grad_passes(gm, is_inference=is_inference)
        left = [str(n.target) for n in gm.graph.nodes if "megacpp" in str(n.target) and not held(n)]
        assert not left, f"left without a lowering: {left}"
        return make_boxed_func(lambda *args: (runs(gm), gm.forward(*args))[1])

    # The cache would store Inductor's own kind of result; torch 2.9 leaves such a scatter as a call for code generation.
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_config.patch(optimize_scatter_upon_const_tensor=False),
    ):
        patch.setattr(module, "compile_fx", functools.partial(module.compile_fx, inner_compile=inner_compile))
        yield


@pytest.fixture
def eager_backend(monkeypatch):
    """No Inductor at all, for what is about frames alone."""
    monkeypatch.setattr(module, "compile_fx", lambda gm, inputs, **_: gm.forward)


@pytest.fixture
def kernels_of_any_size(monkeypatch):
    """On CUDA small tensors, which would be left to Inductor, go to the kernels all the same, and small logits to the op
    that keeps none."""
    monkeypatch.setattr(linear_cross_entropy, "MIN_BYTES", 0)
    for folder in {folder for folder, _ in semantic_ops().values()}:
        name = f"megacpp_compile.lowerings.{folder}.cuda_triton"
        module = importlib.import_module(name) if importlib.util.find_spec(name) else None
        if hasattr(module, "MIN_BYTES"):
            monkeypatch.setattr(module, "MIN_BYTES", 0)
