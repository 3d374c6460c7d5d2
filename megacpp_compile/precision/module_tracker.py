"""Which module of a model runs, without hooks: Dynamo would trace them, and compile a model other than it runs.

In forward the Python stack says it: the innermost frame whose `self` is a module with a name. Backward has no such
frames; its nodes are known by the sequence number autograd gave them in forward, and so is where forward was then.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from types import FrameType

import torch
from torch import nn


class ModuleTracker:
    """model: whose names count; without one those below the outermost module that runs."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._began: list[int] = []  # sequence numbers, ascending
        self._there: list[str] = []  # the module from each of them on
        self._newest = -1

    def note(self) -> None:
        """Forward is where it is now; to be called at every op, within which the newest node is its own."""
        own = torch.autograd._get_sequence_nr() - 1
        if own <= self._newest or torch._C._current_autograd_node() is not None:
            return
        self._newest, fqn = own, self._in_forward() or ""
        if not self._there or self._there[-1] != fqn:
            self._began.append(own)
            self._there.append(fqn)

    def here(self) -> str:
        """The innermost module that runs, "" where there is none."""
        node = torch._C._current_autograd_node()
        fqn = self._in_forward()
        if node is None or fqn:  # what is computed again in backward has a forward's frames
            return fqn or ""
        before = bisect.bisect_right(self._began, node._sequence_nr())
        return self._there[before - 1] if before else ""

    def _in_forward(self) -> str | None:
        modules: list[nn.Module] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if "self" in frame.f_code.co_varnames:
                running = frame.f_locals.get("self")
                if isinstance(running, nn.Module) and (not modules or modules[-1] is not running):
                    modules.append(running)
            frame = frame.f_back
        for root in filter(None, (self._model, modules[-1] if modules else None)):
            names = self._names_below(root)
            for module in modules:
                if id(module) in names:
                    return names[id(module)]
        return None

    def _names_below(self, root: nn.Module) -> dict[int, str]:
        if root not in self._names:
            # A compiled module has its own below the name of its wrapper.
            names = ((m, [part for part in n.split(".") if part != "_orig_mod"]) for n, m in root.named_modules())
            self._names[root] = {id(m): ".".join(parts) for m, parts in names}
        return self._names[root]
