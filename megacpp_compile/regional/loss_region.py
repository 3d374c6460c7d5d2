"""The head and its loss of a model that is compiled by blocks: one region, where forward computes a loss of labels.

The model's own forward is compiled around the modules that run its blocks: a graph break stands before each of those,
which runs as it would have, eager code around compiled blocks. Of the graphs of forward that are left, one that holds a
loss is compiled, and the others run op by op, as what is outside of the blocks does.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from megacpp_compile._torch.dynamo import graph_break
from megacpp_compile._torch.modules import compiled_call, eager_call, set_compiled_call
from megacpp_compile._torch.pytree import tree_leaves
from megacpp_compile.config.options import Config
from megacpp_compile.fx.edit import all_nodes, called
from megacpp_compile.fx.provenance import modules_of
from megacpp_compile.regional.repeated_blocks import Kind
from megacpp_compile.report import collector, log
from megacpp_compile.report.records import Frame, MissedFusion

PASS = "linear_cross_entropy"
REASON = "the head and its loss, where forward computes one"
TAG = "eager-loss"

# What losses over a vocabulary are made with; a graph with one of them is worth compiling.
_LOSSES = frozenset(("cross_entropy", "nll_loss", "log_softmax", "logsumexp"))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# The autograd nodes that losses leave behind, those that compiled code leaves, and how far behind a loss to look.
_EAGER_LOSS = ("NllLoss", "LogSoftmax", "Logsumexp")
_COMPILED = "CompiledFunction"
_NODES = 64

_BY_ITSELF = (
    "the forward of {model} runs its blocks itself, so that its head and loss are not compiled apart from them and run "
    "in eager: run the blocks in a module of their own, whose forward loops over them, or compile the model whole "
    "(whole_below=, above the number of its blocks)"
)
_NOT_COMPILED = (
    "the head and the loss run in eager: Dynamo does not compile the code of {model} that computes them "
    "(TORCH_LOGS=graph_breaks says why), or it stands outside of the model's forward; compile the model whole "
    "(whole_below=, above the number of its blocks), or head and loss as a module or function of their own"
)


def runners(model: nn.Module, kinds: Sequence[Kind]) -> tuple[nn.Module, ...]:
    """The modules that run the blocks, as far out as no linear or embedding stands beside them that may be the head's;
    () where the forward of `model` runs blocks itself."""
    blocks = _ids(kinds)

    def inside(module: nn.Module) -> list[nn.Module] | None:
        parts = list(_parts(module))
        holding = [part for part in parts if _holds(part, blocks)]
        if any(id(part) in blocks for part in holding):
            return None
        if any(_has_words(part) for part in parts if part not in holding):
            return holding
        return [one for part in holding for one in inside(part) or [part]]

    return tuple(dict.fromkeys(inside(model) or ()))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that forward of `module` may call: children, and those in lists of theirs."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _parts(child)
        else:
            yield child


def _holds(module: nn.Module, blocks: set[int]) -> bool:
    return any(id(part) in blocks for part in module.modules())


def _has_words(module: nn.Module) -> bool:
    return any(isinstance(part, (nn.Linear, nn.Embedding)) for part in module.modules())


def _ids(kinds: Sequence[Kind]) -> set[int]:
    return {id(module) for kind in kinds for module in kind.modules}


def config_of(config: Config) -> Config:
    """The settings that the region is compiled with: a limit of the policy is on the peak of one frame, a block's."""
    if config.own_policy is None or config.own_policy.peak_gib is None:
        return config
    return dataclasses.replace(config, policy=dataclasses.replace(config.own_policy, peak_gib=None))


class LossRegion:
    """The backend of the model's own forward: of its graphs, `compiler` compiles those with a loss, and with
    `everything` all of them."""

    __name__ = "megacpp"

    def __init__(
        self, model: nn.Module, kinds: Sequence[Kind], compiler: Callable[..., Any], everything: bool = False
    ) -> None:
        self.model, self.blocks = weakref.ref(model), _ids(kinds)
        self.compiler, self.everything = compiler, everything

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._runs_blocks(gm):  # called by other ways than their runner's own
            if (model := self.model()) is not None:
                set_compiled_call(model, None)
                tell(model, _BY_ITSELF.format(model=type(model).__name__))
            return gm.forward
        return self.compiler(gm, example_inputs) if self.everything or has_loss(gm) else gm.forward

    def _runs_blocks(self, gm: GraphModule) -> bool:
        return any(number in self.blocks for node in gm.graph.nodes for number in modules_of(node))


def has_loss(gm: GraphModule) -> bool:
    """Whether a call in Dynamo's graph `gm` is one that losses over words are made with."""
    calls = (node for node in all_nodes(gm) if node.op in ("call_function", "call_method"))
    return any(called(node).strip("_") in _LOSSES for node in calls)


def keep_apart(modules: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
    """Have compiled code break its graph before it calls one of `modules`, which then runs outside of it. The call does
    so, too: what Dynamo finds inside it would compile by itself."""
    for module in modules:
        set_compiled_call(module, torch.compiler.disable(eager_call(module)))
        yield module.register_forward_pre_hook(_apart)


def _apart(module: nn.Module, args: Any) -> None:
    graph_break()


def watch_compiled(model: nn.Module) -> None:
    """Tell of the first loss that `model`, whose forward is compiled, returns if that is not."""
    call = compiled_call(model) or eager_call(model)

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        _look(model, output, _NOT_COMPILED.format(model=type(model).__name__))
        return output

    set_compiled_call(model, watched)


def watch(model: nn.Module) -> RemovableHandle:
    """Tell of the first loss that `model`, whose forward runs its blocks itself, returns."""
    return model.register_forward_hook(_watch)


def _watch(model: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        _look(model, output, _BY_ITSELF.format(model=type(model).__name__))


# Models whose loss was looked at.
_looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _look(model: nn.Module, output: Any, why: str) -> None:
    if model not in _looked and (losses := list(_losses(output))):
        _looked.add(model)
        if any(map(in_eager, losses)):
            tell(model, why)


def _losses(output: Any) -> Iterator[torch.Tensor]:
    """The numbers with a gradient in what a forward returns."""
    for leaf in tree_leaves(output):
        found = vars(leaf).values() if dataclasses.is_dataclass(leaf) else (leaf,)
        yield from (t for t in found if isinstance(t, torch.Tensor) and t.dim() == 0 and t.grad_fn is not None)


def in_eager(loss: torch.Tensor) -> bool:
    """Whether autograd recorded a loss over words behind `loss`, not the call of a compiled graph."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending and len(seen) < _NODES:
        node = pending.pop(0)
        if node is None or node in seen or _COMPILED in node.name():
            continue
        if node.name().startswith(_EAGER_LOSS):
            return True
        seen.add(node)
        pending += [source for source, _ in node.next_functions]
    return False


def tell(model: nn.Module, reason: str) -> None:
    """Report that the loss of `model` runs in eager, with what to do."""
    code = getattr(type(model).forward, "__code__", None)
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
    log.logger.warning("%s: %s", PASS, reason)
    name, why = f"forward ({place})", "the head and its loss run in eager"
    frame = Frame(captured=False, name=name, reason=why, left_to="eager")
    collector.emit_frame(frame, [], [MissedFusion(PASS, "", f"{place}, in forward", "", TAG, reason)])
