"""Tells which module of a model runs, without hooks: Dynamo would trace them and compile another model than runs later.

In forward it is the innermost Python frame whose `self` is a module with a name. Backward has no such frames: autograd
numbers its nodes in forward, and the tracker keeps which module ran from which number on.
"""

from __future__ import annotations

import bisect
import sys
import traceback
import weakref

from torch import nn

from megacpp_compile._torch.autograd import current_autograd_node, get_sequence_nr


class ModuleTracker:
    """Follows which module runs: call `note` at every op of forward, and `here` for the module at any time.

    model: names are relative to it; without one, or in modules outside of it, to the outermost module that runs.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._starts: list[int] = []  # autograd's sequence numbers, ascending
        self._fqns: list[str] = []  # the module that runs from each of them on
        self._newest = -1

    def note(self) -> None:
        """Record the running module for backward; called within every op, when the newest autograd node is the op's."""
        own = get_sequence_nr() - 1
        if own <= self._newest or current_autograd_node() is not None:
            return
        self._newest, fqn = own, self._in_forward() or ""
        if not self._fqns or self._fqns[-1] != fqn:
            self._starts.append(own)
            self._fqns.append(fqn)

    def here(self) -> str:
        """The name of the innermost module that runs, in forward or backward; "" where there is none."""
        node = current_autograd_node()
        fqn = self._in_forward()
        if node is None or fqn:  # recomputation in backward has forward's frames
            return fqn or ""
        before = bisect.bisect_right(self._starts, node._sequence_nr())
        return self._fqns[before - 1] if before else ""

    def _in_forward(self) -> str | None:
        """The name of the innermost module on the Python stack, None where no frame is a named module's."""
        modules: list[nn.Module] = []
        for frame, _ in traceback.walk_stack(sys._getframe(2)):
            if "self" in frame.f_code.co_varnames:
                running = frame.f_locals.get("self")
                if isinstance(running, nn.Module) and (not modules or modules[-1] is not running):
                    modules.append(running)
        roots = filter(None, (self._model, modules[-1] if modules else None))
        named = (self._names_below(root).get(id(module)) for root in roots for module in modules)
        return next((name for name in named if name is not None), None)

    def _names_below(self, root: nn.Module) -> dict[int, str]:
        if root not in self._names:
            # A compiled module's name has the attribute of its wrapper in it.
            names = ((m, [part for part in n.split(".") if part != "_orig_mod"]) for n, m in root.named_modules())
            self._names[root] = {id(m): ".".join(parts) for m, parts in names}
        return self._names[root]
