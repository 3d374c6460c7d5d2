"""Who launches the kernels of a CUDA frame, as Inductor and its compile workers are told; on a GPU also who does."""

from __future__ import annotations

import contextvars
import logging
import operator
import os
import types

import pytest
import torch
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch.fx import Graph, GraphModule

import megacpp_compile
from benchmarks import models
from megacpp_compile import backend, pipeline
from megacpp_compile.backends import static_launch
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.backends.inductor import compile_lowered, compile_plain
from megacpp_compile.backends.static_launch import SETTING
from megacpp_compile.config.options import Config
from megacpp_compile.frontend import unbacked_shapes
from megacpp_compile.targets import CUDA, TARGETS


class Pool:
    """Of compile workers that are this process. `told`: settings that each kernel came with."""

    def __init__(self):
        self.told = []

    def submit(self, job, *args):
        if job is async_compile._worker_compile_triton:
            self.told.append(args[2])
        return len(self.told)


@pytest.fixture
def started(monkeypatch, caplog):
    """Pools that were started, which is at most one."""
    pools = []

    def process_pool():
        if not pools:
            pools.append(Pool())
        return pools[0]

    process_pool.cache_info = lambda: types.SimpleNamespace(currsize=len(pools))
    caplog.set_level(logging.INFO, "megacpp_compile")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(AsyncCompile, "process_pool", staticmethod(process_pool))
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: bool(process_pool())))
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", process_pool)
    monkeypatch.setattr(async_compile.CompiledTritonKernels, "_cache", {})
    return pools


@pytest.fixture
def handed(monkeypatch):
    """What `compile_fx` was given, under which a kernel is compiled with the patches of the frame."""
    patches = []

    def compile_fx(gm, inputs, config_patches=None, **_):
        patches.append(dict(config_patches or {}))
        with inductor_config.patch(config_patches or {}):
            AsyncCompile().triton("kernel", f"a kernel of frame {len(patches)}")
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return patches


def graph(*targets) -> GraphModule:
    g = Graph()
    x = g.placeholder("x")
    for target in targets:
        x = g.call_function(target, (x,))
    g.output((x,))
    return GraphModule(nn.Module(), g)


def compiled(target: str = "cuda", gm: GraphModule | None = None, lower=compile_lowered, **given) -> None:
    lower(gm or graph(operator.neg), [torch.ones(2)], Settings(TARGETS[target], Config(), given))


def test_a_cuda_frame_and_its_workers_are_told(started, handed):
    before = dict(os.environ), getattr(inductor_config, SETTING)
    for _ in range(2):
        compiled()
    assert [p[SETTING] for p in handed] == [True, True]
    assert [told[SETTING] for told in started[0].told] == [True, True]
    assert "use_static" in "".join(started[0].told[0]), "torch's own settings go along"
    assert before == (dict(os.environ), getattr(inductor_config, SETTING))


def test_workers_that_run_already_are_told(started, handed):
    AsyncCompile.process_pool()
    compiled()
    assert len(started) == 1 and started[0].told[0][SETTING] is True


def test_other_compilations_are_not_and_what_the_user_sets_goes_before(started, handed):
    compiled()
    compiled(lower=compile_plain)
    assert SETTING not in handed[1] and started[0].told[1][SETTING] is False
    assert started[0].submit(abs, -1) == 2
    compiled(**{SETTING: False})
    assert handed[2][SETTING] is False and started[0].told[2][SETTING] is False


@pytest.mark.parametrize("value", [False, True])
def test_the_environment_goes_before(started, handed, monkeypatch, value):
    """Torch reads it once, on import. A patch ends by setting what was read before it, which is the environment's then:
    a plain attribute, or a variable of the context since torch 2.12."""
    entry = inductor_config._config[SETTING]
    monkeypatch.setattr(entry, "user_override", entry.user_override)
    monkeypatch.setattr(entry, "env_value_force", value)
    context = contextvars.copy_context()
    context.run(compiled)
    context.run(compiled, **{SETTING: not value})
    assert [told[SETTING] for told in started[0].told] == [value, value]


def test_kernels_of_the_users_own_are_left_as_they_were(started, handed, caplog):
    compiled(gm=graph(triton_kernel_wrapper_mutation))
    assert SETTING not in handed[0] and "some of its own" in caplog.text
    compiled(gm=graph(triton_kernel_wrapper_mutation), **{SETTING: True})
    assert handed[1][SETTING] is started[0].told[1][SETTING] is True


def test_nothing_for_other_targets_and_older_torch(started, handed, monkeypatch):
    with monkeypatch.context() as patch:  # and without workers the frame is told
        patch.setattr(async_compile, "get_compile_threads", lambda: 1)
        assert static_launch.patches(graph(), CUDA, {}) == {SETTING: True} and started == []
    assert static_launch.patches(graph(), "cpu", {}) == static_launch.patches(graph(), "tpu", {}) == {}
    monkeypatch.setattr(static_launch, "SETTING", "a_setting_of_another_torch")
    assert static_launch.patches(graph(), CUDA, {}) == {}
    static_launch.start_workers("cpu")
    assert started == []


def test_a_torch_with_other_internals_compiles_all_the_same(started, handed, monkeypatch, caplog):
    def other(load_kernel, extra):
        raise AssertionError

    monkeypatch.setattr("torch._inductor.runtime.compile_tasks._worker_compile_triton", other)
    compiled()
    assert SETTING not in started[0].told[0] and "take other arguments" in caplog.text


def test_a_torch_without_these_workers_compiles_all_the_same(started, monkeypatch, caplog):
    monkeypatch.delattr(AsyncCompile, "use_process_pool")
    assert static_launch.patches(graph(), CUDA, {}) == {} and "AttributeError" in caplog.text


def test_workers_are_started_once_a_frame(started, eager_backend, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(pipeline, "resolve_target", lambda *_: CUDA)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: calls.append(None))
    torch.compile(nn.Linear(4, 4), backend=backend.megacpp)(torch.ones(2, 4))
    assert len(calls) == 1


@pytest.mark.parametrize("initialized", [True, False])
def test_workers_start_before_a_frame_is_translated_where_a_gpu_is_in_use(started, eager_backend, monkeypatch, initialized):
    seen, translate = [], unbacked_shapes._traced_whole
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(unbacked_shapes, "_traced_whole", lambda *args: seen.append(len(started)) or translate(*args))
    torch.compile(nn.Linear(4, 4), backend=backend.megacpp)(torch.ones(2, 4))
    assert seen == [int(initialized)]


@pytest.mark.parametrize(("target", "pools"), [("auto", 0), ("cuda", 1)])
def test_workers_start_when_blocks_are_set_up(started, target, pools):
    megacpp_compile.compile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), target=target)
    assert len(started) == pools


def test_workers_that_do_not_start_stop_nothing(started, monkeypatch, caplog):
    def fails():
        raise OSError("no more processes")

    monkeypatch.setattr(async_compile, "maybe_warm_pool", fails)
    static_launch.start_workers(CUDA)
    assert "no more processes" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("by_torch", [True, False])
def test_every_kernel_is_launched_by_torch(kernels_of_any_size, monkeypatch, by_torch):
    """Compiled by workers, which are waited for, and on empty caches."""
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.utils import fresh_cache

    made = []
    for kind in (triton_heuristics.StaticTritonCompileResult, triton_heuristics.TritonCompileResult):

        def make_launcher(self, kind=kind, original=kind.make_launcher):
            made.append(kind.__name__)
            return original(self)

        monkeypatch.setattr(kind, "make_launcher", make_launcher)
    cos, sin = models.rotary_tables(128, 32, torch.device("cuda"), torch.bfloat16)
    layer = models.Layer(models.MLA(256, 4, 0, 128, 64, 32, 64), 256, 512).to("cuda", torch.bfloat16)
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"require": {"mla_rope_kv": 1}, "inductor": {} if by_torch else {SETTING: False}}
    AsyncCompile.wait_pool_ready()
    with fresh_cache():
        torch.compile(layer, backend=backend.megacpp, options=options)(x, cos, sin).sum().backward()
    torch.cuda.synchronize()
    assert "StaticTritonCompileResult" in made
    assert ("TritonCompileResult" in made) is not by_torch
