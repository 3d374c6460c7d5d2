"""Fields of an estimate: what the calls of a loop over depth keep.

`remat.depth_loops` says what is a loop, there of a graph and here of what a forward has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megacpp_compile.memory.made import Made
from megacpp_compile.remat.depth_loops import loops_of


class Calls:
    """Follows the calls of all modules inside of a `with`. `stack`: those that are running, the outermost first, by an
    identity of theirs, with the number of the call."""

    def __init__(self) -> None:
        self.stack: dict[str, int] = {}
        self._seen: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        self._hooks = (
            register_module_forward_pre_hook(self._begun),
            register_module_forward_hook(self._ended, always_call=True),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begun(self, module: nn.Module, _: Any) -> None:
        name = str(id(module))
        if name not in self.stack:  # else it calls itself
            self.stack = {**self.stack, name: self._seen[name]}
            self._seen[name] += 1

    def _ended(self, module: nn.Module, *_: Any) -> None:
        self.stack = {name: number for name, number in self.stack.items() if name != str(id(module))}


def mark_depths(order: Sequence[Made]) -> None:
    """Put what loops over depth have made beside other layers in their field, but for logits. order: as it was made."""
    found = loops_of(order, {m: m.calls for m in order}, [m for m in order if m.mixes], lambda m: m.parents)
    for made, call in found.items():
        if call.beside and made.field != "head logits":
            made.field = "depth loop"
