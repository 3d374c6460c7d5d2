"""A training step on fake tensors: what autograd would keep, by module, in eager and of this compiler's graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacpp_compile._torch import functorch
from megacpp_compile._torch.fakes import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from megacpp_compile._torch.modules import compiled_call, eager_call, set_compiled_call
from megacpp_compile._torch.pytree import tree_leaves, tree_map
from megacpp_compile.backends import inductor
from megacpp_compile.config.options import Config
from megacpp_compile.errors import EstimateError
from megacpp_compile.regional.compile import compile_kinds
from megacpp_compile.regional.repeated_blocks import Kind
from megacpp_compile.report import collector
from megacpp_compile.report.records import CompiledRegion, Frame

# Name of a module -> bytes first packed while it was the innermost one running.
Saved = dict[str, int]


class FakeRun:
    """A model and its inputs, ready to run on fake tensors. `frames`: what `compiled` compiled, as reported."""

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, device: torch.device, kinds: Sequence[Kind]
    ) -> None:
        self.model, self.inputs, self.device, self.kinds = model, (args, kwargs), device, kinds
        self.frames: list[Frame] = []
        self.blocks = {fqn: m for kind in kinds for fqn, m in zip(kind.fqns, kind.modules, strict=True)}

    def eager(self) -> Saved:
        parts = dict(self.blocks)
        for fqn, block in self.blocks.items():
            parts |= {f"{fqn}.{name}": child for name, child in block.named_children()}
        with self._fakes() as (mode, (args, kwargs)), _calls(self.model), _Labels(parts) as labels:
            return self._count(mode, lambda: self.model(*args, **kwargs), labels)

    def compiled(self, config: Config) -> Saved:
        kinds = self.kinds or [Kind(("",), (self.model,))]
        regions = [CompiledRegion(kind.fqns, "", 0, "compiled") for kind in kinds]
        torch.compiler.reset()  # a code object keeps its compiled frames: none may be left that would run on fakes
        try:
            with self._fakes() as (mode, (args, kwargs)), _calls(self.model):
                compile_kinds(self.model, kinds, regions, config, None, inductor.without_codegen)
                with (
                    _Labels(self.blocks) as labels,
                    functorch.config.patch(enable_autograd_cache=False),
                    collector.aside() as found,
                ):
                    saved = self._count(mode, lambda: self.model(*args, **kwargs), labels)
                self.frames = found.frames
                return saved
        finally:
            torch.compiler.reset()

    def _count(self, mode: FakeTensorMode, forward: Callable[[], Any], labels: _Labels) -> Saved:
        own = {_storage(t) for t in (*self.model.parameters(), *self.model.buffers(), *self._tensors)}
        alive: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed while counting
        kept: dict[int, tuple[str, int]] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if (key := _storage(t)) not in own:
                kept.setdefault(key, (labels.current, _bytes_of_storage(t)))
            alive.append(t)
            return t

        try:
            with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                result = forward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise EstimateError(str(error)) from error
        del result
        saved: Saved = {}
        for label, size in kept.values():
            saved[label] = saved.get(label, 0) + size
        return saved

    @contextlib.contextmanager
    def _fakes(self) -> Iterator[tuple[FakeTensorMode, Any]]:
        """Model and inputs on fake tensors of the device, for the time of a `with`."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, torch.Tensor] = {}  # tied weights stay tied

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in memo:
                memo[id(value)] = _fake(value, mode, self.device)
            return memo[id(value)]

        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for module in self.model.modules():
                for table in (module._parameters, module._buffers):
                    kept.append((table, dict(table)))
                    table.update({name: fake(value) for name, value in table.items()})
            inputs = tree_map(fake, self.inputs)
            self._tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
            yield mode, inputs
        finally:
            for table, values in kept:
                table.update(values)


def _fake(value: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, value.requires_grad)
    return made.requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _calls(model: nn.Module) -> Iterator[None]:
    """Run the model's modules uncompiled inside, and restore what they were compiled with."""
    kept = [(module, compiled_call(module)) for module in model.modules()]
    try:
        for module, _ in kept:
            set_compiled_call(module, None)
        yield
    finally:
        for module, call in kept:
            set_compiled_call(module, call)


class _Labels:
    """Knows which of some modules is running, the innermost one. Around what they call, as hooks would be traced."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules, self.stack = modules, [""]

    @property
    def current(self) -> str:
        return self.stack[-1]

    def __enter__(self) -> _Labels:
        for name, module in self.modules.items():
            set_compiled_call(module, self._labelled(name, compiled_call(module) or eager_call(module)))
        return self

    def __exit__(self, *_: object) -> None:
        pass  # _calls restores

    def _labelled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def labelled(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                self.stack.pop()

        return labelled


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def bytes_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _bytes_of_storage(t: torch.Tensor) -> int:
    n = t.untyped_storage().nbytes()
    return n if isinstance(n, int) else int(n.node.hint or 0)
