"""`estimate`: the memory of a training step before anything is compiled or allocated.

The model runs on fake tensors, once as eager would run it and once compiled up to where Inductor would write kernels;
both times torch's saved-tensor hooks see what autograd keeps. The second count is that of the partitioned graphs of its
blocks, after our passes, each block by itself as `megacpp_compile.compile` compiles it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from megacpp_compile import handoff
from megacpp_compile.backend import check_torch
from megacpp_compile.config import Config
from megacpp_compile.errors import BadOptionError, EstimateError, NotAModuleError, TargetUnavailableError
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.regional import Regional, compile_in_place
from megacpp_compile.regions import Kind, find_kinds
from megacpp_compile.report import Region, bytes_text
from megacpp_compile.report_table import family, table_text

# Bytes of state for each trainable parameter.
OPTIMIZERS = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0, "adamw_master": 12.0, "momentum": 4.0, "sgd": 0.0}

OUTSIDE = "(outside the blocks)"


@dataclass(frozen=True)
class Activations:
    """What one kind of block keeps for backward, in bytes over all its blocks.

    Attributes:
        module: the blocks' names, "model.layers.{0..23}", or "(outside the blocks)".
        kind: their class, "" outside.
        blocks: how many.
        eager: kept by eager autograd.
        compiled: kept by the partitioned graphs of this compiler; None where it was not asked for.
        parts: `eager` by the blocks' own children; "" is the block's own code.
    """

    module: str
    kind: str
    blocks: int
    eager: int
    compiled: int | None
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """The memory of one training step, in bytes. `str(estimate)` is a table.

    Attributes:
        parameters, buffers: those of the model, tied ones once.
        gradients: of the trainable parameters, in their dtype.
        optimizer: state of `optimizer_name`.
        activations: by kind of block, what is outside of blocks last.
        device: what was estimated for; which attention runs, and so what it saves, depends on it.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_name: str
    activations: tuple[Activations, ...]
    device: str

    @property
    def eager(self) -> int:
        """Activations under eager autograd."""
        return sum(a.eager for a in self.activations)

    @property
    def compiled(self) -> int | None:
        """Activations under this compiler; None where it was not asked for."""
        known = [a.compiled for a in self.activations if a.compiled is not None]
        return sum(known) if known else None

    @property
    def total(self) -> int:
        """All of it, with the compiler's activations where they are known. Without what lives for less than a pass over
        a block: workspaces, gradients of activations, the allocator's gaps."""
        activations = self.eager if self.compiled is None else self.compiled
        return self.parameters + self.buffers + self.gradients + self.optimizer + activations

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, fit for JSON."""
        values = asdict(self)
        values["activations"] = list(values["activations"])
        return {**values, "eager": self.eager, "compiled": self.compiled, "total": self.total}

    def __str__(self) -> str:
        state = {"parameters": self.parameters, "buffers": self.buffers, "gradients": self.gradients,
                 f"optimizer ({self.optimizer_name})": self.optimizer}  # fmt: skip
        rows = [(name, "", "", bytes_text(size), bytes_text(size)) for name, size in state.items()]
        for a in self.activations:
            each = bytes_text(a.eager), "-" if a.compiled is None else bytes_text(a.compiled)
            rows.append(("activations", f"{a.module} ×{a.blocks}" if a.blocks > 1 else a.module, a.kind, *each))
            for name, size in sorted(a.parts.items(), key=lambda item: -item[1]):
                if len(a.parts) > 1 and size:
                    rows.append(("", f"  .{name}" if name else "  (its own code)", "", bytes_text(size), ""))
        compiled = "-" if self.compiled is None else bytes_text(self.compiled)
        rows.append(("activations", "all", "", bytes_text(self.eager), compiled))
        whole = "-" if self.compiled is None else bytes_text(self.total)
        rows.append(("total", "", "", bytes_text(sum(state.values()) + self.eager), whole))
        title = f"estimated memory of a step on {self.device}"
        return table_text(title, ("what", "module", "class", "eager", "megacpp"), rows)


def estimate(
    model: nn.Module,
    *args: Any,
    optimizer: str | float = "adamw",
    device: str | torch.device | None = None,
    compiled: bool = True,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Estimate:
    """The memory of a training step of `model(*args, **kwargs)`; nothing is allocated, and the model is left alone.

    model: a module on any device, meta included. args, kwargs: its inputs; only shapes, dtypes and devices matter.
    optimizer: a key of OPTIMIZERS ("adamw": two float32 moments; "adamw_master": and a float32 copy), or bytes a
        trainable parameter.
    device: the device to estimate for; by default the model's own, for a model on meta
        "cuda" where there is one.
    compiled: also count what this compiler's graphs save, at the price of tracing every kind of block.
    options: fields of `Config`, for what is compiled.

    Raises EstimateError where the model needs the values of its inputs, and what its forward raises on those shapes.
    """
    check_torch()
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    per_parameter = _per_parameter(optimizer)
    config = Config.from_options(options, pass_names())
    parameters = list(model.parameters())
    place = _place(device, parameters)
    kinds = find_kinds(model)
    run = _Run(model, args, kwargs, place, kinds)
    eager = run.eager()
    graphs = run.compiled(config) if compiled else None
    trainable = [p for p in parameters if p.requires_grad]
    return Estimate(
        parameters=sum(map(_bytes, parameters)),
        buffers=sum(map(_bytes, model.buffers())),
        gradients=sum(map(_bytes, trainable)),
        optimizer=int(per_parameter * sum(p.numel() for p in trainable)),
        optimizer_name=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes a parameter",
        activations=tuple(_activations(kinds, eager, graphs)),
        device=str(place),
    )


def _place(device: str | torch.device | None, parameters: Sequence[nn.Parameter]) -> torch.device:
    place = torch.device(device) if device is not None else next((p.device for p in parameters), torch.device("cpu"))
    if place.type == "meta":
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and not torch.cuda.is_available():
        # Autograd would abort the process on fake tensors of a device that torch has no code for.
        raise TargetUnavailableError("cuda", "a CUDA device", "install a CUDA build of torch")
    return place


def _per_parameter(optimizer: str | float) -> float:
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool) and optimizer >= 0:
        return float(optimizer)
    wanted = "bytes a trainable parameter, or one of " + ", ".join(map(repr, OPTIMIZERS))
    raise BadOptionError("optimizer", optimizer, wanted, tuple(OPTIMIZERS))


# Name of a module -> bytes first packed while it was the innermost one running.
_Saved = dict[str, int]


def _activations(kinds: Sequence[Kind], eager: _Saved, graphs: _Saved | None) -> Iterator[Activations]:
    rest, rest_compiled = dict(eager), dict(graphs or {})
    for kind in kinds:
        parts: dict[str, int] = {}
        for fqn in kind.fqns:
            for name in [n for n in rest if n == fqn or n.startswith(fqn + ".")]:
                part = name[len(fqn) + 1 :]
                parts[part] = parts.get(part, 0) + rest.pop(name)
        compiled = sum(rest_compiled.pop(fqn, 0) for fqn in kind.fqns)
        yield Activations(family(kind.fqns), type(kind.modules[0]).__name__, len(kind.fqns), sum(parts.values()),
                          None if graphs is None else compiled, parts)  # fmt: skip
    left = None if graphs is None else sum(rest_compiled.values())
    yield Activations(OUTSIDE if kinds else "(the model)", "", 1, sum(rest.values()), left, {})


class _Run:
    """A model and its inputs, ready to run on fake tensors."""

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, device: torch.device, kinds: Sequence[Kind]
    ) -> None:
        self.model, self.inputs, self.device, self.kinds = model, (args, kwargs), device, kinds
        self.blocks = {fqn: m for kind in kinds for fqn, m in zip(kind.fqns, kind.modules, strict=True)}

    def eager(self) -> _Saved:
        parts = dict(self.blocks)
        for fqn, block in self.blocks.items():
            parts |= {f"{fqn}.{name}": child for name, child in block.named_children()}
        with self._fakes() as (mode, (args, kwargs)), _calls(self.model), _Labels(parts) as labels:
            return self._count(mode, lambda: self.model(*args, **kwargs), labels)

    def compiled(self, config: Config) -> _Saved:
        chosen = self.blocks or {"": self.model}
        regions = [Region(tuple(chosen), "", 0, "compiled")]
        backend = Regional(self.model, regions, config, None, handoff.without_kernels)
        torch._dynamo.reset()  # a code object keeps its compiled frames: none may be left that would run on fakes
        try:
            with self._fakes() as (mode, (args, kwargs)), _calls(self.model):
                for module in chosen.values():
                    compile_in_place(module, len(chosen), backend=backend)
                with _Labels(self.blocks) as labels, torch._functorch.config.patch(enable_autograd_cache=False):
                    return self._count(mode, lambda: self.model(*args, **kwargs), labels)
        finally:
            torch._dynamo.reset()

    def _count(self, mode: FakeTensorMode, forward: Callable[[], Any], labels: _Labels) -> _Saved:
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
        except (torch._subclasses.fake_tensor.DataDependentOutputException,
                torch._subclasses.fake_tensor.DynamicOutputShapeException) as error:  # fmt: skip
            raise EstimateError(str(error)) from error
        del result
        saved: _Saved = {}
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
            inputs = torch.utils._pytree.tree_map(fake, self.inputs)
            self._tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
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
    """What the model's modules were compiled with is put aside."""
    kept = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module, _ in kept:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in kept:
            module._compiled_call_impl = call


class _Labels:
    """Knows which of some modules is running, the innermost one. Around what they call, as hooks would be traced."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules, self.stack = modules, [""]

    @property
    def current(self) -> str:
        return self.stack[-1]

    def __enter__(self) -> _Labels:
        for name, module in self.modules.items():
            module._compiled_call_impl = self._labelled(name, module._compiled_call_impl or module._call_impl)
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


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _bytes_of_storage(t: torch.Tensor) -> int:
    n = t.untyped_storage().nbytes()
    return n if isinstance(n, int) else int(n.node.hint or 0)
