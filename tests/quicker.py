"""What torch does over and over while it compiles, done once, or not at all where no test looks at it.

Nothing of it changes what is compiled. What a release of torch has under another name stays as it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import _ops
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import eval_frame, guards, symbolic_convert, trace_rules
from torch._dynamo import utils as dynamo_utils
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import _fake_tensor_utils, fake_tensor, functional_tensor
from torch.fx import proxy as fx_proxy
from torch.fx.experimental import proxy_tensor, recording, sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _config_module, _pytree, _traceback

try:
    from torch._library import opaque_object
    from torch._opaque_base import OpaqueBaseMeta
except ImportError:  # an older torch
    opaque_object = None  # type: ignore[assignment]


def without_telemetry(patch: pytest.MonkeyPatch) -> None:
    """A tenth of the time goes into what torch measures of itself at each compilation: all graphs as text, which pytest
    has torch's trace log write, as that does not propagate, and a measurement of the guards, for which it flushes the
    CPU's caches."""
    trace = logging.getLogger("torch.__trace")
    trace.handlers, trace.propagate = [], True
    patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
    if hasattr(dynamo_utils, "record_compilation_metrics"):  # with copies of all settings, as JSON
        patch.setattr(dynamo_utils, "record_compilation_metrics", lambda *_: None)
    # The three graphs of AOTAutograd are printed before anybody is asked who reads them.
    for name, texts in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        if hasattr(graph_compile, name):
            patch.setattr(graph_compile, name, lambda *_, texts=texts: texts)
    # Each file that is traced is parsed for a line of a log that nobody reads; and each question that is put to symbols is
    # two such lines, around what keeps a record that torch asks for where it validates translations alone.
    if hasattr(symbolic_convert, "get_funcname"):
        patch.setattr(symbolic_convert, "get_funcname", lambda *_: "")
    for name, method in list(vars(ShapeEnv).items()):
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == recording.__file__:
            patch.setattr(ShapeEnv, name, method.__wrapped__)


def without_repeats(patch: pytest.MonkeyPatch) -> None:
    """A tenth goes into what is made anew each time: paths of files are made canonical at each call that is inlined, types
    are looked at for being named tuples at each leaf of a tree, empty tensors for random states are made at each trace,
    which nobody asks for unless AOTAutograd makes ops of them, lines of a stack are objects of each node's own, and a seed
    is written down with the stack it came from for every device that is not there."""
    if canonical := getattr(trace_rules, "_as_posix_path", None):
        patch.setattr(trace_rules, "_as_posix_path", functools.cache(canonical))
    if named := getattr(_pytree, "is_namedtuple_class", None):
        patch.setattr(_pytree, "is_namedtuple_class", functools.cache(named))
    if not torch._functorch.config.functionalize_rng_ops:
        PhiloxStateTracker.reset()
        patch.setattr(PhiloxStateTracker, "reset", lambda: None)
    if hasattr(_traceback, "_extract_symbolized_tb"):
        frame = functools.lru_cache(2**14)(traceback.FrameSummary)
        patch.setattr(
            _traceback,
            "_extract_symbolized_tb",
            lambda stack, skip: traceback.StackSummary(
                frame(f["filename"], f["line"], f["name"]) for f in reversed(stack[skip:])
            ),
        )
    if hasattr(torch.random, "_manual_seed_impl") and not torch.cuda.is_available():
        patch.setattr(torch.random, "_manual_seed_impl", lambda seed: torch.default_generator.manual_seed(int(seed)))


def with_quick_stacks(patch: pytest.MonkeyPatch) -> None:
    """A fortieth goes into where nodes come from: of each, all that is on the stack is gathered, looked up and made
    objects, for a few lines of a model."""
    seen: dict[tuple[int, int], tuple[types.CodeType, traceback.FrameSummary]] = {}  # holds what the number is of

    class Stack:
        @staticmethod
        def extract() -> types.SimpleNamespace:
            frame, lines = sys._getframe(1), []
            while frame is not None:
                code = frame.f_code
                key = (id(code), frame.f_lasti)
                if (known := seen.get(key)) is None:
                    line = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
                    known = seen[key] = (code, line)
                lines.append(known[1])
                frame = frame.f_back
            if len(seen) > 2**15:
                seen.clear()
            return types.SimpleNamespace(summary=lambda: traceback.StackSummary(reversed(lines)))

    if hasattr(fx_proxy, "CapturedTraceback"):
        patch.setattr(fx_proxy, "CapturedTraceback", Stack)


def with_quick_settings(patch: pytest.MonkeyPatch) -> None:
    """A fiftieth goes into settings of torch's, of which each is asked for five ways to say what it is, and into whether
    values of the usual kinds are opaque, for which each class they come from is looked for among weak references."""
    unset, immutable = (getattr(_config_module, name, None) for name in ("_UNSET_SENTINEL", "_IMMUTABLE_CONFIG_TYPES"))
    fields = {"alias", "deprecated", "hide", "env_value_force", "env_value_default", "user_override", "justknob", "default"}
    whole = _config_module.ConfigModule.__getattr__

    @functools.wraps(whole)
    def setting(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if entry is None or entry.alias is not None or entry.deprecated or entry.hide or entry.env_value_force is not unset:
            return whole(self, name)
        if (value := entry.user_override.get()) is not unset:
            return value
        if entry.env_value_default is not unset or entry.justknob is not None or not isinstance(entry.default, immutable):
            return whole(self, name)
        return entry.default

    as_of(_config_module, setting)
    some = next(iter(torch._dynamo.config._config.values()))
    if unset is not None and immutable is not None and all(hasattr(some, field) for field in fields):
        patch.setattr(_config_module.ConfigModule, "__getattr__", setting)

    resolve = getattr(opaque_object, "_resolve_opaque_type_info", None)
    if resolve is None:
        return
    usual = (
        int, float, bool, str, type(None), tuple, list, dict, slice, torch.Size, torch.dtype, torch.device, torch.Tensor,
        torch.nn.Parameter, torch.SymInt, fake_tensor.FakeTensor, functional_tensor.FunctionalTensor, torch.fx.Node,
        fx_proxy.Proxy,
    )  # fmt: skip
    plain = frozenset(kind for kind in usual if resolve(kind) is None)

    def resolved(kind: Any) -> Any:
        return None if isinstance(kind, type) and kind in plain else resolve(kind)

    as_of(opaque_object, resolved)
    patch.setattr(opaque_object, "_resolve_opaque_type_info", resolved)
    check = OpaqueBaseMeta.__instancecheck__

    def is_instance(cls: Any, instance: Any) -> bool:
        return type(instance) not in plain and check(cls, instance)

    as_of(opaque_object, is_instance)
    patch.setattr(OpaqueBaseMeta, "__instancecheck__", is_instance)


def without_searches(patch: pytest.MonkeyPatch) -> None:
    """A fifteenth goes into the search of all operators, whenever a mode is entered before dispatch, for what they keep for
    that key: nothing is ever kept for it (`tests/test_suite.py` looks)."""
    if hasattr(_ops, "get_cached_ops"):
        patch.setattr(_ops, "get_cached_ops", lambda: ())


def with_quick_symbols(patch: pytest.MonkeyPatch) -> None:
    """A third of what graphs with symbolic sizes take goes into four things: fake tensors are kept for calls that are
    seldom met again before the symbols are gone, and each is made once more for that; whether an expression is a
    number is asked of all its parts, each time anew, before a node's own memory of it is; and what two numbers give is
    found anew each time."""

    def seldom(self: Any, result: list[Any], arg: torch.SymInt) -> None:
        raise fake_tensor._BypassDispatchCache("symbolic shape")

    if hasattr(getattr(_fake_tensor_utils, "_CacheKeyState", None), "convert_sym_int"):
        patch.setattr(_fake_tensor_utils._CacheKeyState, "convert_sym_int", seldom)
    patch.setattr(sympy.Expr, "is_number", property(functools.lru_cache(2**16)(sympy.Expr.is_number.fget)))
    whole = SymNode.expr.fget

    def remembered(self: Any) -> sympy.Basic:
        env, kept = self.shape_env, getattr(self, "_expr_cache", None)
        if env is not None and kept is not None and self._expr_ver == env._replacements_version_counter:
            return kept
        return whole(self)

    patch.setattr(SymNode, "expr", property(remembered))
    for name in _OPERATIONS:
        if compute := vars(SymNode).get(name):
            patch.setattr(SymNode, name, _known_by_operands(compute))


# What two expressions give, whatever else is known of their symbols.
_OPERATIONS = ("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_mul", "_add", "_sub", "_floordiv", "_int_floordiv", "_sym_max",
               "_sym_and", "_sym_or", "_and", "_or")  # fmt: skip


def _known_by_operands(compute: Any) -> Any:
    """An operation on symbolic numbers, done once for each two expressions and what they are at present. While a graph is
    recorded it is a node of it each time."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    unknown = getattr(sym_node, "_NO_HINT", None)
    hints = (int, bool, float) if unknown is None else (int, bool, float, type(None))

    @functools.wraps(compute)
    def operation(self: SymNode, other: Any) -> SymNode:
        env = self.shape_env
        if type(other) is not SymNode or env is None or other.shape_env is not env or env._translation_validation_enabled:
            return compute(self, other)
        if type(self._hint) not in hints or type(other._hint) not in hints or proxy_tensor.get_proxy_mode() is not None:
            return compute(self, other)
        given = (self.expr, self.pytype, self._hint, self._optimized_summation, other.expr, other.pytype, other._hint,
                 other._optimized_summation)  # fmt: skip
        if (found := known.get(given)) is not None:
            expr, kind, hint, summed = found
            return SymNode(expr, env, kind, unknown if hint is None else hint, optimized_summation=summed)
        made = compute(self, other)
        if len(known) > 2**15:
            known.clear()
        if type(made._hint) in hints and made.constant is None:
            known[given] = made._expr, made.pytype, made._hint, made._optimized_summation
        return made

    as_of(sym_node, operation)
    return operation


def as_of(module: types.ModuleType, *functions: types.FunctionType) -> None:
    """Frames of `functions` are torch's, as those were that they stand for: what a user wrote is told by its file."""
    for function in functions:
        function.__code__ = function.__code__.replace(co_filename=module.__file__)


def with_quick_trees(patch: pytest.MonkeyPatch) -> None:
    """A thirtieth goes into trees: operands are tuples, lists and dicts of leaves, for which torch asks a table at each
    node and makes an object of the structure, to take it apart again at once."""
    if not all(hasattr(_pytree, name) for name in ("SUPPORTED_NODES", "is_namedtuple_class", "_LEAF_SPEC", "tree_iter")):
        return
    nodes, named = _pytree.SUPPORTED_NODES, _pytree.is_namedtuple_class
    whole_map, whole_iter = _pytree.tree_map, _pytree.tree_iter
    traced = torch.compiler.is_dynamo_compiling  # what Dynamo translates is torch's own

    def mapped(func: Any, tree: Any) -> Any:
        kind = type(tree)
        if kind is tuple:
            return tuple([mapped(func, part) for part in tree])
        if kind is list:
            return [mapped(func, part) for part in tree]
        if kind is dict:
            return {key: mapped(func, part) for key, part in tree.items()}
        return whole_map(func, tree) if kind in nodes or named(kind) else func(tree)

    @functools.wraps(whole_map)
    def tree_map(func: Any, tree: Any, *rests: Any, is_leaf: Any = None) -> Any:
        if rests or is_leaf is not None or traced():
            return whole_map(func, tree, *rests, is_leaf=is_leaf)
        return mapped(func, tree)

    def gather(tree: Any, leaves: list[Any]) -> None:
        kind = type(tree)
        if kind is tuple or kind is list:
            for part in tree:
                gather(part, leaves)
        elif kind is dict:
            for part in tree.values():
                gather(part, leaves)
        elif named(kind):
            leaves.extend(whole_iter(tree))
        elif kind in nodes:
            for part in nodes[kind].flatten_fn(tree)[0]:
                gather(part, leaves)
        else:
            leaves.append(tree)

    @functools.wraps(whole_iter)
    def tree_iter(tree: Any, is_leaf: Any = None) -> Iterator[Any]:
        if is_leaf is not None or traced():
            return whole_iter(tree, is_leaf=is_leaf)
        leaves: list[Any] = []
        gather(tree, leaves)
        return iter(leaves)

    whole_flatten, leaf = _pytree.tree_flatten, _pytree._LEAF_SPEC
    structure = functools.cache(lambda kind, parts: _pytree.TreeSpec(kind, None, [leaf] * parts))

    def taken_apart(tree: Any, leaves: list[Any]) -> Any:
        kind = type(tree)
        if kind is tuple or kind is list:
            specs = [taken_apart(part, leaves) for part in tree]
            flat = all(spec is leaf for spec in specs)
            return structure(kind, len(specs)) if flat else _pytree.TreeSpec(kind, None, specs)
        if kind is dict:
            return _pytree.TreeSpec(dict, list(tree), [taken_apart(part, leaves) for part in tree.values()])
        if kind in nodes or named(kind):
            found, spec = whole_flatten(tree)
            leaves.extend(found)
            return spec
        leaves.append(tree)
        return leaf

    @functools.wraps(whole_flatten)
    def tree_flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], Any]:
        if is_leaf is not None or traced():
            return whole_flatten(tree, is_leaf=is_leaf)
        leaves: list[Any] = []
        return leaves, taken_apart(tree, leaves)

    as_of(_pytree, mapped, tree_map, gather, tree_iter, taken_apart, tree_flatten)
    for quick, whole in ((tree_map, whole_map), (tree_iter, whole_iter), (tree_flatten, whole_flatten)):
        _wherever(patch, whole, quick)


def _wherever(patch: pytest.MonkeyPatch, whole: Any, quick: Any) -> None:
    """Puts `quick` in the place of torch's function, also in modules that have imported it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get(whole.__name__) is whole:
            patch.setattr(module, whole.__name__, quick)


def without_stances(patch: pytest.MonkeyPatch) -> None:
    """Each call that a mode sees asks once more what Dynamo is to do with the mode's own code, which is nothing."""
    for mode in (
        fake_tensor.FakeTensorMode,
        functional_tensor.FunctionalTensorMode,
        proxy_tensor.ProxyTorchDispatchMode,
    ):
        skipped = hasattr(eval_frame, "_maybe_set_eval_frame") and getattr(mode, "_should_skip_dynamo", bool)()
        if skipped and (own := getattr(vars(mode).get("__torch_dispatch__"), "__wrapped__", None)):
            patch.setattr(own, "__dynamo_disable", _unseen(own), raising=False)


def _unseen(function: Any) -> Any:
    set_eval_frame, restore = eval_frame.set_eval_frame, eval_frame._maybe_set_eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            restore(prior)

    as_of(eval_frame, run)
    return run


def without_checks_of_integers(patch: pytest.MonkeyPatch) -> None:
    """A fourth of what Triton's interpreter takes goes into doing each operation of integers once more in 64 bits, to see
    whether it stays in range, which a GPU does not look at either."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
