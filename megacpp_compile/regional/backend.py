"""The backend of a model's parts: `megacpp`, told which part of the model a frame is, and the model's own names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from megacpp_compile.backend import compile_with, raises_own_errors
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.frontend import unbacked_shapes
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.module_names import named_modules, named_parameters, named_tensors
from megacpp_compile.fx.provenance import input_path, local_path, modules_of
from megacpp_compile.passes._frame.required import Requirement
from megacpp_compile.pipeline import Block
from megacpp_compile.report import collector
from megacpp_compile.report.records import CompiledRegion
from megacpp_compile.sharding.pinning import SiblingParams


@unbacked_shapes.traces_unbacked_shapes
class Regional:
    """The backend of all parts of one model: `megacpp`, with names as they are in the model."""

    __name__ = "megacpp"

    def __init__(
        self, model: nn.Module, regions: Sequence[CompiledRegion], config: Config, mode: str | None,
        inner_compile: Any = None, required: Requirement | None = None,
    ) -> None:  # fmt: skip
        self.required = required
        self.model, self.regions, self.config, self.mode = weakref.ref(model), tuple(regions), config, mode
        self.inner_compile = inner_compile
        self.parts = {fqn: region for region in regions if region.treatment == "compiled" for fqn in region.fqns}

    @raises_own_errors
    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        collector.emit_regions(self.regions)
        roots = self._roots(gm, example_inputs)
        _name_absolutely(gm, roots)
        if (model := self.model()) is not None:
            rules.say_unnamed(gm, self.config, model)
        part = next((p for fqn in roots.values() if (p := self._part(fqn)) is not None), "")
        blocks = len(self.parts[part].fqns) if part else 0
        siblings = self._sibling_params(part) if self.config.sharding is not None else None
        block = Block(part, blocks, siblings, checked=True, required=self.required, model=self.model())
        return compile_with(gm, example_inputs, self.config, self.mode, block, self.inner_compile)

    def _sibling_params(self, part: str) -> SiblingParams:
        """Parameter -> (name, parameter) for all blocks like `part`, which run its artifact and are not compiled
        themselves."""
        model = self.model()
        known = {} if model is None else dict(named_parameters(model))
        first = {id(p): name for name, p in reversed(known.items())}
        prefix = f"{part}." if part else ""

        def alike(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
            own = first.get(id(parameter), "")
            if not own.startswith(prefix) or not own:
                return [(own, parameter)] if own else []
            inner = own.removeprefix(prefix)
            names = [f"{fqn}.{inner}" if fqn else inner for fqn in (self.parts[part].fqns if part else ("",))]
            return [(name, known[name]) for name in names if name in known]

        return alike

    def _roots(self, gm: GraphModule, example_inputs: Sequence[Any]) -> dict[str, str]:
        """Local variable of the frame ("self") -> name of the module it holds, read off the modules that the frame runs
        and the parameters it takes.

        Looked up now, as FSDP2 puts other parameters in place for the time of a forward; where DDP cuts a frame into
        buckets its parameters are fakes, and modules alone tell."""
        model = self.model()
        if model is None:
            return {}
        names = by_key((id(held), name) for name, held in (*named_modules(model), *named_tensors(model)))
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        inputs = zip(placeholders, example_inputs, strict=True)
        paths = [(id(value), input_path(node)) for node, value in inputs]
        for module in gm.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                paths += [(number, local_path(path)) for number, path in modules_of(node).items()]
        found: dict[str, str] = {}
        for number, (root, inner) in paths:
            for name in names.get(number, ()):  # a tied parameter may have another name here
                if root and f".{name}".endswith(f".{inner}" if inner else ""):
                    found.setdefault(root, name[: len(name) - len(inner)].strip("."))
        return found

    def _part(self, fqn: str) -> str | None:
        """The compiled part that the module `fqn` is or belongs to."""
        parts = fqn.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
        return next((name for name in above if name in self.parts), None)


def _name_absolutely(gm: GraphModule, roots: Mapping[str, str]) -> None:
    """Names in a block's graph are relative to the block; here they become those of the model."""
    own = next(iter(roots.values()), "") if len(roots) == 1 else ""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            stack = {}
            for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
                root, inner = local_path(path)
                stack[key] = (f"{roots[root]}.{inner}".strip(".") if root in roots else path, kind)
            if not stack and own:  # the code of the block itself
                stack = {"block": (own, nn.Module)}
            if stack:
                node.meta["nn_module_stack"] = stack
