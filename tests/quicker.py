"""What torch does over and over while it compiles, done once, or not at all where no test looks at it.

Nothing of it changes what is compiled. What a release of torch has under another name stays as it is there.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import sympy
import torch
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import guards, trace_rules
from torch._subclasses import _fake_tensor_utils, fake_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.utils import _pytree


def without_telemetry(patch: pytest.MonkeyPatch) -> None:
    """A tenth of the time goes into what torch measures of itself at each compilation: all graphs as text, which pytest
    has torch's trace log write, as that does not propagate, and a measurement of the guards, for which it flushes the
    CPU's caches."""
    trace = logging.getLogger("torch.__trace")
    trace.handlers, trace.propagate = [], True
    patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)


def without_repeats(patch: pytest.MonkeyPatch) -> None:
    """A twentieth goes into what is made anew each time: paths of files are made canonical at each call that is inlined,
    types are looked at for being named tuples at each leaf of a tree, and empty tensors for random states are made at
    each trace, which nobody asks for unless AOTAutograd makes ops of them."""
    if canonical := getattr(trace_rules, "_as_posix_path", None):
        patch.setattr(trace_rules, "_as_posix_path", functools.cache(canonical))
    if named := getattr(_pytree, "is_namedtuple_class", None):
        patch.setattr(_pytree, "is_namedtuple_class", functools.cache(named))
    if not torch._functorch.config.functionalize_rng_ops:
        PhiloxStateTracker.reset()
        patch.setattr(PhiloxStateTracker, "reset", lambda: None)


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
