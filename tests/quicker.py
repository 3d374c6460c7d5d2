"""What torch does over and over while it compiles, done once, or not at all where no test looks at it.

Nothing of it changes what is compiled. What a release of torch has under another name stays as it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import traceback
from typing import Any

import pytest
import sympy
import torch
from torch import _ops
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import guards, symbolic_convert, trace_rules
from torch._dynamo import utils as dynamo_utils
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import _fake_tensor_utils, fake_tensor
from torch.fx.experimental import recording
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree, _traceback


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


def without_searches(patch: pytest.MonkeyPatch) -> None:
    """A fifteenth goes into the search of all operators, whenever a mode is entered before dispatch, for what they keep for
    that key: nothing is ever kept for it (`tests/test_suite.py` looks)."""
    if hasattr(_ops, "get_cached_ops"):
        patch.setattr(_ops, "get_cached_ops", lambda: ())


def with_quick_symbols(patch: pytest.MonkeyPatch) -> None:
    """A quarter of what graphs with symbolic sizes take goes into three things: fake tensors are kept for calls that are
    seldom met again before the symbols are gone, and each is made once more for that; and whether an expression is a
    number is asked of all its parts, each time anew, before a node's own memory of it is."""

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


def without_checks_of_integers(patch: pytest.MonkeyPatch) -> None:
    """A fourth of what Triton's interpreter takes goes into doing each operation of integers once more in 64 bits, to see
    whether it stays in range, which a GPU does not look at either."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
