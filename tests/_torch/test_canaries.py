"""This torch has every private symbol of the table, and those that more is asked of behave: what fails here says which
file to look at on a new torch, and what users will see there meanwhile."""

from __future__ import annotations

import ast
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.backends import registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

import megacpp_compile._torch.translator as translator
import megacpp_compile._torch.variables as variables
from megacpp_compile._torch import (
    autocast,
    autograd,
    calls,
    dispatch,
    fakes,
    functorch,
    guards,
    inductor,
    modes,
    modules,
)
from megacpp_compile._torch import dynamo as door
from megacpp_compile._torch import logging as torch_log
from megacpp_compile._torch._registry import find, release
from megacpp_compile._torch.ops import HigherOrderOperator, OpOverload, nn_linear, set_grad_enabled
from megacpp_compile._torch.pytree import tree_leaves, tree_map
from megacpp_compile._torch.symbols import RAISES, SYMBOLS
from megacpp_compile.errors import BadOptionError
from tests._torch.uses import PACKAGE, users
from tests.sources import ON_ONE_WORKER


def compiled(f, backend, *args):
    torch.compiler.reset()
    return torch.compile(f, backend=backend)(*args)


class Seen(dispatch.TorchDispatchMode):
    """What is called within, and `done` of each with its result."""

    def __init__(self, done=lambda func, result: None):
        super().__init__()
        self.called, self.done = [], done

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        result = func(*args, **(kwargs or {}))
        self.done(func, result)
        return result


THEMES = sorted({s.name.partition(".")[0] for s in SYMBOLS.values() if s.name})


@pytest.mark.parametrize("key", SYMBOLS)
def test_torch_has_it(key):
    """Also on releases after the last one it was seen in, which is what tells that one of them has changed."""
    symbol, nothing = SYMBOLS[key], object()
    if release(symbol.seen.partition("-")[0]) > release(torch.__version__):
        pytest.skip(f"newer than torch {torch.__version__}")
    assert find(symbol.path, nothing) is not nothing, (
        f"torch {torch.__version__} has no {symbol.path} (for {symbol.use}; seen in {symbol.seen}), which "
        f"{', '.join(users()[key])} use: {symbol.without}"
    )


@pytest.mark.end_to_end
@ON_ONE_WORKER
def test_rows_are_complete_and_unique_and_have_users():
    assert not set(SYMBOLS) - set(users())
    assert len({s.path for s in SYMBOLS.values()}) == len(SYMBOLS)
    for symbol in SYMBOLS.values():
        first, last = map(release, symbol.seen.split("-"))
        assert (2, 9) <= first <= last
        assert symbol.use and symbol.without
        assert symbol.instead is None or symbol.without != RAISES


@pytest.mark.parametrize("theme", THEMES)
def test_types_are_those_of_the_table(theme):
    """What a type checker reads of a theme is what the table hands out."""
    tree = ast.parse((PACKAGE / "_torch" / f"{theme}.py").read_text())
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    declared = {
        f"{theme}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    assert declared == {s.name: s.path for s in SYMBOLS.values() if s.name.startswith(f"{theme}.")}


def test_fakes():
    mode = fakes.FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.ones(2, 3), static_shapes=True)
    assert isinstance(fake, fakes.FakeTensor) and fakes.is_fake(fake) and not fakes.is_fake(torch.ones(1))
    assert fake.fake_mode is mode and fakes.detect_fake_mode([fake]) is mode and fakes.detect_fake_mode([]) is None
    with mode, pytest.raises(fakes.DataDependentOutputException):
        fake.sum().item()
    with mode, pytest.raises(fakes.DynamicOutputShapeException):
        fake.nonzero()
    seen, inner = [], mode.dispatch  # a mode may answer for an op
    mode.dispatch = lambda func, types, args=(), kwargs=None: seen.append(func) or inner(func, types, args, kwargs)
    with mode:
        torch.ones(2, 3) + 1
    assert torch.ops.aten.add.Tensor in seen


def test_writes_to_a_result_show_on_what_a_mode_keeps():
    kept = []

    def keep(func, result):
        if func is torch.ops.aten.mm.default:
            with dispatch.set_excluded(dispatch.DispatchKey.ADInplaceOrView, False):
                kept.append(result.detach())

    with Seen(keep):
        made = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        before = kept[0]._version
        made.mul_(2)
    assert kept[0]._version == before + 1 and kept[0].grad_fn is None


def test_a_frame_tells_its_sizes_and_its_interface():
    seen = {}

    def backend(gm, inputs):
        context = guards.TracingContext.try_get()
        seen["mode"] = context.fake_mode
        seen["contexts"] = [context.tensor_to_context.get(x) for x in inputs if isinstance(x, torch.Tensor)]
        seen["sources"] = [n._dynamo_source for n in gm.graph.find_nodes(op="placeholder")]
        offset = door.TensorPropertySource(seen["sources"][0], door.TensorProperty.STORAGE_OFFSET)
        before = len(list(context.guards_context.dynamo_guards))
        door.install_guard(offset.make_guard(door.GuardBuilder.EQUALS_MATCH))
        seen["guards"] = len(list(context.guards_context.dynamo_guards)) - before
        seen["reset"] = guards.tracing(None)
        return gm.forward

    compiled(lambda x: x.sin() + 1, backend, torch.ones(3))
    assert isinstance(seen["mode"], fakes.FakeTensorMode)
    assert all(hasattr(c, "tensor_source") for c in seen["contexts"])
    assert seen["guards"] == 1
    assert seen["sources"] and all(door.AttrSource(s, "payload") for s in seen["sources"])
    with seen["reset"]:
        assert guards.TracingContext.try_get() is None


def test_a_frame_finds_the_call_it_is_compiled_for():
    seen, events = [], []

    class Model(nn.Module):
        def forward(self, x):
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    def backend(gm, inputs):
        seen.append(call := calls.current())
        if len(seen) == 1:
            call.leave.append(lambda: events.append("left"))
            call.enter.append(lambda: events.append("entered") or (lambda: events.append("left again")))
        return gm.forward

    torch.compiler.reset()
    model = Model()
    call = torch.compile(model, backend=backend)
    assert calls.current() is None
    call(torch.ones(3))
    assert events == ["left"]
    call(torch.ones(3))
    assert events == ["left", "entered", "left again"]
    assert [call.whole for call in seen] == [True, False] and all(call.module is model for call in seen)
    assert seen[0].context is seen[1].context and (__file__, "forward") in seen[1].through
    torch.compile(torch.sin, backend=backend)(torch.ones(3))
    torch.compile(lambda x: x.cos(), backend=backend)(torch.ones(3))
    assert seen[-1].whole and seen[-1].module is None and seen[-1].context is not seen[0].context


def test_modules_are_wrapped_and_compiled_in_place():
    inner = nn.Tanh()
    assert getattr(torch.compile(inner), modules.COMPILED) is inner
    assert dict(checkpoint_wrapper(inner).named_children()) == {modules.checkpoint_wrapped: inner}
    assert f"self.{modules.fsdp_wrapped}" in inspect.getsource(FullyShardedDataParallel.module.fget)
    module = nn.Linear(2, 2)
    assert modules.compiled_call(module) is None
    assert torch.equal(modules.eager_call(module)(x := torch.ones(1, 2)), module(x))
    modules.set_compiled_call(module, lambda x: "compiled")
    assert module(x) == "compiled" and modules.compiled_call(module)(x) == "compiled"
    modules.set_compiled_call(module, None)
    assert torch.is_tensor(module(x))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo")
def test_fsdp2_gathers_into_the_same_parameter_every_time():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        seen, inner = [], nn.Linear(4, 4, bias=False)
        inner.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
        mesh = init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(fully_shard(inner, mesh=mesh), nn.Linear(4, 4, bias=False)), mesh=mesh)
        records = dict(modules.sharded_parameters(model))
        assert list(map(id, records.values())) == [id(p) for p in reversed(list(model.parameters()))]
        record = next(r for r, p in records.items() if p is inner.weight)
        assert modules.gathered_parameter(record) is None
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        assert all(weight is modules.gathered_parameter(record) for weight in seen) and len(seen) == 2
    finally:
        dist.destroy_process_group()


def test_ops_and_pytree():
    assert tree_leaves(({"a": 1}, [2, 3])) == [1, 2, 3]
    assert tree_map(lambda x: x + 1, ({"a": 1}, [2])) == ({"a": 2}, [3])
    assert isinstance(torch.ops.aten.add.Tensor, OpOverload)
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert torch.ops.aten.add.Tensor._opname == "add" and torch.ops.aten.add_.Tensor._schema.is_mutable

    def model(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.nn.functional.linear(x, w)
        with torch.no_grad():
            return x + 1

    graphs = []
    compiled(model, lambda gm, _: graphs.append(gm) or gm.forward, torch.ones(2, 2), torch.ones(2, 2))
    targets = [n.target for n in graphs[0].graph.nodes]
    assert {autocast.enter_autocast, autocast.exit_autocast, set_grad_enabled, nn_linear} <= set(targets)


def test_autocast():
    assert {"cpu", "cuda"} <= set(autocast.supported_devices())
    with torch.autocast("cpu", torch.bfloat16):
        with autocast.DisableAutocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_modes():
    with Seen() as seen:
        torch.ones(1) + 1
        count = len(seen.called)
        with dispatch.disable_current_modes():
            torch.ones(1) + 1
    assert count and len(seen.called) == count
    assert not dispatch.is_traceable_wrapper_subclass(torch.ones(1))
    assert dispatch.is_traceable_wrapper_subclass(dispatch.AsyncCollectiveTensor(torch.ones(1)))
    with dispatch.enable_python_dispatcher():
        assert (torch.ones(1) + 1).item() == 2


def test_paused_trace():
    """A trace records nothing in between, and goes on as it was; Dynamo compiles there and nowhere else."""
    if not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
        pytest.skip("this torch compiles no frames within a trace")
    forced = []

    def traced(x):
        stack = dispatch.function_modes()
        with modes.trace_paused():
            forced.append(torch._dynamo.config.force_compile_during_fx_trace)
            assert dispatch.proxy_mode() is None and not dispatch.function_modes()
            x.sin()
            with modes.trace_resumed():
                forced.append(torch._dynamo.config.force_compile_during_fx_trace)
                assert dispatch.function_modes() == stack
                y = x.cos()
            x.tan()
        assert dispatch.function_modes() == stack
        return y.exp()

    graph = make_fx(traced)(torch.ones(2)).graph
    assert [n.target._opname for n in graph.nodes if n.op == "call_function"] == ["cos", "exp"]
    assert forced == [True, False]


def test_layers_of_vmap():
    before, wrapped = functorch.layers(), []

    def layered(x):
        wrapped.append(functorch.is_functorch_wrapped_tensor(x))
        return x + functorch.layers()

    torch.func.vmap(layered)(torch.ones(2))
    assert wrapped == [True] and not functorch.is_functorch_wrapped_tensor(torch.ones(2))
    with functorch.temporarily_clear_interpreter_stack():
        assert functorch.layers() == 0
    assert functorch.layers() == before


def test_autograd_tells_where_it_is():
    assert autograd.current_autograd_node() is None and autograd.current_graph_task_id() == -1
    inside = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            inside.append((autograd.current_autograd_node()._sequence_nr(), autograd.current_graph_task_id()))
            return g

    before = autograd.get_sequence_nr()
    y = Note.apply(torch.ones(1, requires_grad=True))
    assert autograd.get_sequence_nr() > before
    y.backward()
    [(number, task)] = inside
    assert number >= before and task != -1
    assert autograd.top_saved_tensors_default_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(pack := lambda t: t, lambda t: t):
        assert autograd.top_saved_tensors_default_hooks(True)[0] is pack


def test_dynamo():
    assert "compiler_fn" in inspect.signature(door.frame_compiler()).parameters
    assert issubclass(door.TensorifyScalarRestartAnalysis, door.RestartAnalysis)
    assert door.TensorifyScalarRestartAnalysis(restart_reason="why").restart_reason == "why"
    assert not door.TensorifyState.should_specialize("zf0") and callable(door.TensorifyState.specialize)
    assert isinstance(door.graph_break_reasons, list)
    assert not door.counters["a name nobody counts"]
    assert isinstance(torch.compile(nn.Linear(1, 1)), door.OptimizedModule)
    assert door.skips(nn.TransformerEncoderLayer.forward) and not door.skips(test_dynamo)
    with door.config.patch(capture_dynamic_output_shape_ops=True):
        assert door.config.capture_dynamic_output_shape_ops
    assert isinstance(door.config.recompile_limit, int)


def test_dynamo_lets_a_backend_raise_its_own_error():
    def backend(gm, inputs):
        raise door.unwrapped(BadOptionError("verify", "eech", "off"), inspect.currentframe())

    with pytest.raises(BadOptionError) as caught:
        torch.compile(nn.Linear(1, 1), backend=backend)(torch.ones(1, 1))
    assert caught.value.got == "eech" and str(caught.value) == str(BadOptionError("verify", "eech", "off"))
    assert caught.traceback[-1].name == "backend" and caught.traceback[-2].name == "compile_wrapper"


def test_dynamo_says_when_a_backend_is_given(monkeypatch):
    def backend(gm, inputs, **_):
        return gm.forward

    given = []
    monkeypatch.setattr(eval_frame, "get_compiler_fn", eval_frame.get_compiler_fn)  # to be put back
    door.check_when_given([backend], lambda **kwargs: given.append(kwargs))
    for how in ({"options": {"a": 1}}, {"mode": "max-autotune"}, {"backend": "eager"}):
        torch.compile(nn.Linear(1, 1), **{"backend": backend} | how)
    assert given == [{"options": {"a": 1}}, {"mode": "max-autotune"}]


def test_dynamo_registers_again(monkeypatch):
    backend = lambda gm, inputs: gm.forward  # noqa: E731
    backend.__name__ = "a backend of this test's"
    for table in ("_COMPILER_FNS", "_BACKENDS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    door.registers_again(backend)
    for _ in range(2):
        registry.register_backend(backend, backend.__name__)
    assert registry.lookup_backend(backend.__name__) is backend
    with pytest.raises(AssertionError, match="duplicate name: eager"):
        registry.lookup_backend("eager")
        registry.register_backend(backend, "eager")


def differentiating(also=lambda: None):
    """(the graphs it is given, a backend that differentiates). also: what is done at each graph."""
    graphs = []

    def compiler(gm, _):
        also()
        graphs.append(gm)
        return functorch.make_boxed_func(gm.forward)

    return graphs, door.aot_autograd(fw_compiler=compiler, partition_fn=functorch.default_partition)


def test_dynamo_backends_and_guards():
    assert callable(door.lookup_backend("eager"))
    with pytest.raises(door.InvalidBackend):
        door.lookup_backend("no backend of this name")
    assert list(inspect.signature(door.openxla_eval_boxed).parameters)[:2] == ["model", "fake_tensor_inputs"]
    graphs, differentiate = differentiating()
    compiled(lambda x: x.sin().cos(), differentiate, torch.ones(2, requires_grad=True)).sum().backward()
    assert len(graphs) == 2


def test_export_keeps_whole_ops():
    class Linear(nn.Module):
        def forward(self, x, w):
            return (nn.functional.linear(x, w),)

    mode = fakes.FakeTensorMode()
    inputs = [mode.from_tensor(torch.ones(2, 2)) for _ in range(2)]
    gm = torch.fx.symbolic_trace(Linear())
    exported, signature = functorch.aot_export_module(gm, inputs, trace_joint=False, pre_dispatch=True)
    assert [n.target for n in exported.graph.nodes if n.op == "call_function"] == [torch.ops.aten.linear.default]
    assert not signature.parameters and not signature.buffers_to_mutate and not signature.user_inputs_to_mutate
    assert not signature.inputs_to_buffers


def test_partitioners_and_settings_of_functorch():
    for partition in (functorch.default_partition, functorch.min_cut_rematerialization_partition):
        parameters = list(inspect.signature(partition).parameters)
        assert parameters[:2] == ["joint_module", "_joint_inputs"] and "num_fwd_outputs" in parameters
    assert functorch.memory_budget() == 1.0
    with functorch.config.patch(activation_memory_budget=0.5, enable_autograd_cache=False):
        assert functorch.memory_budget() == 0.5


@pytest.mark.skipif(release(torch.__version__) < (2, 10), reason="torch 2.9 lowers a backward at its first run")
def test_a_backward_is_lowered_with_its_forward():
    """And one whose list of tensors to write into is emptied in time may run twice."""
    listed = []

    def listing():
        listed.append(guards.TracingContext.get().fw_metadata.bw_donated_idxs)
        functorch.keep_saved_tensors()

    graphs, differentiate = differentiating(listing)
    with functorch.backward_with_forward():
        y = compiled(lambda x: x.sin().exp().exp(), differentiate, torch.ones(2, requires_grad=True))
    assert len(graphs) == 2 and listed[0] and listed[1] == []
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(graphs) == 2


def test_a_backward_is_lowered_when_it_runs():
    graphs, differentiate = differentiating(functorch.keep_saved_tensors)
    compiled(lambda x: x.sin().cos(), differentiate, torch.ones(2, requires_grad=True))
    assert len(graphs) == 1
    assert guards.TracingContext.try_get() is None and functorch.keep_saved_tensors() is None


def test_dynamo_tells_why_a_graph_ends():
    reasons = []

    def backend(gm, _):
        reasons.append(gm.compile_subgraph_reason)
        return gm.forward

    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x + 1

    def gives_up(x):
        try:
            torch._dynamo.graph_break()
            return x + 1
        except ValueError:
            return x

    compiled(breaks, backend, torch.ones(1))
    first, last = reasons
    assert first.graph_break and not last.graph_break and first.reason
    assert first in door.graph_break_reasons and first.user_stack[-1].name == "breaks"
    original, met = door.frame_compiler(), []

    def watching(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        except door.Unsupported as error:
            met.append(error.real_stack[-1].name)
            raise

    door.set_frame_compiler(watching)
    try:
        torch.compile(gives_up, backend=backend)(torch.ones(1))
    finally:
        door.set_frame_compiler(original)
    assert met == ["gives_up"]


HOOKS = ("joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")


def test_inductor():
    assert {"inner_compile", "config_patches"} <= set(inspect.signature(inductor.compile_fx).parameters)
    for hook in (*HOOKS, "custom_partitioner_fn"):
        assert getattr(inductor.config, hook) is None
    for kind in (inductor.CustomGraphPass, inductor.CustomPartitionerFn):
        assert kind.__abstractmethods__ == {"__call__", "uuid"}
    assert inductor.list_mode_options("max-autotune")
    worker = list(inspect.signature(inductor.worker_compile_triton).parameters)
    assert worker == ["load_kernel", "extra_env", "extra_config"]
    assert inductor.get_compile_threads() >= 1 and callable(inductor.maybe_warm_pool)
    assert callable(inductor.AsyncCompile.use_process_pool) and callable(inductor.AsyncCompile.process_pool.cache_info)
    assert isinstance(inductor.has_triton_package(), bool)
    table = inductor.select_decomp_table()
    gm = make_fx(lambda x: torch.ops.aten.silu(x), decomposition_table=table)(torch.ones(2))
    assert torch.ops.aten.silu.default not in {n.target for n in gm.graph.nodes}


class Counting(inductor.CustomGraphPass):
    def __init__(self, key):
        self.key = key

    def __call__(self, graph):
        RAN.append(self.key)

    def uuid(self):
        return self.key


RAN: list[str] = []


def test_inductor_runs_passes_where_they_are_put(monkeypatch, no_kernels):
    from torch._inductor import compile_fx as module  # as patched: everything but code generation

    RAN.clear()
    patches = {name: Counting(name) for name in HOOKS}
    assert all(pickle.loads(pickle.dumps(p)).uuid() for p in patches.values())
    x = torch.ones(4, requires_grad=True)
    y = compiled(lambda x: x.sin().cos(), lambda gm, i: module.compile_fx(gm, i, config_patches=patches), x)
    y.sum().backward()
    assert RAN == [*HOOKS, *HOOKS[1:]]  # the joint graph, forward, backward


@pytest.mark.parametrize("channels", [8, 16])
def test_inductor_leaves_attention_where_it_is_told(no_kernels, channels):
    from torch._inductor import compile_fx as module

    def spelled(q, k, v):
        return (q @ k.mT).div(3.0).softmax(-1) @ v

    door.counters.clear()
    q, k, v = torch.randn(3, 2, 4, 6, channels)
    with inductor.attention_left(lambda operands: operands["query"].meta["val"].shape[-1] == 8):
        y = compiled(spelled, lambda gm, i: module.compile_fx(gm, i), q, k, v)
    torch.testing.assert_close(y, spelled(q, k, v))
    assert (door.counters["inductor"]["fuse_attention"] == 0) == (channels == 8)


@pytest.mark.parametrize("attends", [True, False])
def test_inductor_tries_patterns_of_calls_that_a_graph_has(no_kernels, monkeypatch, attends):
    from torch._inductor import compile_fx as module
    from torch._inductor.pattern_matcher import MultiOutputPattern, PatternExpr

    def function(q, k, v):
        scores = (q.reshape(4, 6, 8) @ k.reshape(4, 6, 8).mT).reshape(2, 2, 6, 6).div(3.0)
        return (scores.softmax(-1) if attends else scores) @ v

    tried = []
    for kind in (PatternExpr, MultiOutputPattern):
        monkeypatch.setattr(kind, "match", lambda self, node, match=kind.match: tried.append(self) or match(self, node))
    q, k, v = torch.randn(3, 2, 2, 6, 8)
    with inductor.attention_left(lambda operands: False):
        compiled(function, lambda gm, i: module.compile_fx(gm, i), q, k, v)
    assert any("amax" in str(pattern) for pattern in tried) == attends


def test_the_log_takes_artifacts():
    torch_log.trace_structured("artifact", metadata_fn=dict, payload_fn=str)
    inspect.signature(torch_log.trace_structured).bind("artifact", metadata_fn=dict, payload_fn=str)


def test_a_translation_is_watched():
    """Instruction by instruction, with what Dynamo holds for tensors, constants and tuples; changes tell their age."""
    seen, ages, read, grown = [], [], [], []

    class Watcher:
        def step(self, tx, proceed):
            inst = tx.instructions[tx.instruction_pointer] if tx.instruction_pointer is not None else None
            if inst is not None and inst.opname == "GET_ITER":
                entries = variables.realized(tx.stack[-1])
                seen.append(variables.tensor(entries)[1].shape)
                one = variables.computed(tx, torch.ops.aten.select.int, entries, 0, 0)
                variables.make_known(one, torch.tensor(7))
                tx.stack[-1] = variables.row([one, variables.constant(2)])
                assert variables.parts(tx.stack[-1])[0] is one and tx.symbolic_locals and tx.f_code and tx.output.graph
            return proceed()

        def read(self, tx, variable, proceed):
            read.append(variables.known(variable))
            with translator.reading(tx):
                return proceed()

        def changes(self, born):
            ages.append(born)

        def append(self, variable, added, proceed):
            grown.append(added)
            return proceed()

    def function(x):
        numbers, n = [], 0
        for e in x.long():
            numbers.append(int(e))
            n = n + int(e)
        return x * n + len(numbers)

    assert translator.install()
    with translator.watching(Watcher()):
        assert compiled(function, "eager", torch.ones(3)).tolist() == [11.0] * 3
    assert seen and read[0] == 7 and ages and max(ages) >= 0 and len(grown) == 2
