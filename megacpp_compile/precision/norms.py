"""Finds RMSNorms that one linear alone reads, by running the model on fake tensors.

Folded into that linear (`te.LayerNormLinear`), such a norm is computed where its result is quantised. A norm that feeds
several linears stays, as each of them would recompute it. The module tree does not say who reads a tensor, so the model
runs once on shapes and a dispatch mode watches every op that reads a norm's result. Whether a module is an RMSNorm is
told by what it computes on test values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from megacpp_compile._torch.dispatch import TorchDispatchMode
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile._torch.pytree import tree_leaves, tree_map
from megacpp_compile.fx.fake_state import fake_state
from megacpp_compile.fx.views import RESHAPES
from megacpp_compile.precision.survey import HOOKS

# Views whose last axis is their operand's wherever the two have the same length.
_VIEWS = RESHAPES - {aten.reshape.default} | {aten.unsqueeze.default, aten.squeeze.dim, aten.detach.default}


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """What an RMSNorm computes.

    Attributes:
        eps: added to the mean square.
        zero_centered: whether the gain is 1 + weight.
    """

    eps: float
    zero_centered: bool


class Deferred(nn.Module):
    """Stands in for an RMSNorm that a linear computes: keeps the parameter and its name, and returns x, contiguous, as
    code behind it may take views of a norm's result that a slice does not allow."""

    weight: torch.Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight  # type: ignore[assignment]
        self.train(norm.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, computed by the linear behind it"


def as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """The RMSNorm over the last axis that `module` computes, or None."""
    parameters = dict(module.named_parameters())
    eps = next((e for e in (getattr(module, n, None) for n in ("eps", "variance_epsilon")) if e is not None), None)
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    if any(True for _ in module.buffers()) or any(True for _ in module.children()):
        return None
    width = parameters["weight"].shape[0]
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=draw, dtype=torch.float64).float()
    # Its mean square is about eps, so that an eps of another value or in another place shows.
    x = torch.randn(3, width, generator=draw, dtype=torch.float64).float() * max(eps, 1e-12) ** 0.5
    try:
        with torch.no_grad(), torch.device("cpu"):
            got = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:
        return None
    for zero_centered in (False, True):
        want = rms_norm(x, (width,), weight + 1 if zero_centered else weight, eps)
        if isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, 1e-4, 1e-5):
            return RMSNorm(eps, zero_centered)
    return None


def readers(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """({norm: the one linear that reads it, and reads nothing else}, {norm: why there is none}), by names in `model`.

    inputs: arguments of the model's forward, as a tuple or by name; only their shapes, dtypes and devices matter. If
    the forward cannot run on shapes, that is the reason for every norm.
    """
    norms = {name: m for name, m in model.named_modules() if as_rms_norm(m) is not None}
    if not norms:
        return {}, {}
    watch = _Watch(model, norms)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = tree_map(fake, (args, kwargs))
    try:
        with fake_state(model, mode), watch.hooked(), torch.no_grad(), mode, watch:
            out = model(*args, **kwargs)
    except Exception as error:
        why = f"the forward cannot run on shapes alone: {type(error).__name__}: {str(error)[:120]}"
        return {}, dict.fromkeys(norms, why)
    for leaf in tree_leaves(out):
        watch.used(leaf, "the model's output")
    return watch.verdicts(model)


@dataclass
class _Reads:
    """Who reads one norm's result: linears, and other readers in words."""

    linears: set[str] = field(default_factory=set)
    others: list[str] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.reads = {name: _Reads() for name in norms}
        self.linears = {m: name for name, m in model.named_modules() if type(m) is nn.Linear}
        self.norms = {m: name for name, m in norms.items()}
        self.results: dict[int, tuple[str, torch.Tensor]] = {}  # by id; holds the tensors, so that no id is reused
        self.fed_otherwise: set[str] = set()
        self.inside: list[nn.Module] = []

    @contextlib.contextmanager
    def hooked(self) -> Any:
        with contextlib.ExitStack() as hooks:
            for module in (*self.norms, *self.linears):
                hooks.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave))
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in self.linears:
            name = self.linears[module]
            source = self.results.get(id(args[0] if args else kwargs.get("input")))
            if source is None:
                self.fed_otherwise.add(name)
            else:
                self.reads[source[0]].linears.add(name)
        self.inside.append(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.inside.pop()
        if module in self.norms:
            if isinstance(out, torch.Tensor) and all(out is not a for a in args):
                self.results[id(out)] = (self.norms[module], out)
            else:
                self.reads[self.norms[module]].others.append("something other than one new tensor comes out")

    def used(self, value: Any, by: str) -> None:
        if id(value) in self.results:
            self.reads[self.results[id(value)][0]].others.append(by)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Ops that return no tensor ask for a shape or a device, and read no values.
        reads = out is None or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(out))
        if reads and (not self.inside or self.inside[-1] not in self.linears):
            if func in _VIEWS and id(args[0]) in self.results and out.shape[-1] == args[0].shape[-1]:
                self.results[id(out)] = (self.results[id(args[0])][0], out)  # the same rows, rearranged
            else:
                for leaf in tree_leaves((args, kwargs or {})):
                    self.used(leaf, str(func))
        return out

    def verdicts(self, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
        pairs, refused = {}, {}
        for norm, reads in self.reads.items():
            if reads.others:
                refused[norm] = f"read by {reads.others[0]}, too"
            elif len(reads.linears) != 1:
                count = len(reads.linears)
                refused[norm] = f"read by {count} linears, each of which would compute it" if count else "not run"
            elif (linear := next(iter(reads.linears))) in self.fed_otherwise:
                refused[norm] = f"{linear} reads something else, too"
            elif any(getattr(model.get_submodule(norm), name) for name in HOOKS):
                refused[norm] = "has hooks, which would be lost"
            else:
                pairs[norm] = linear
        for linear in {name for name in pairs.values() if list(pairs.values()).count(name) > 1}:
            for norm in [n for n, name in pairs.items() if name == linear]:
                del pairs[norm]
                refused[norm] = f"{linear} reads other norms, too"
        return pairs, refused
