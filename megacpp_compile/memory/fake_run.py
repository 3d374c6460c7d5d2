"""A training step on fake tensors: what autograd would keep, by module, in eager and of this compiler's graphs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacpp_compile._torch import functorch
from megacpp_compile._torch.fakes import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from megacpp_compile._torch.modules import compiled_call, eager_call, set_compiled_call
from megacpp_compile._torch.pytree import tree_leaves, tree_map
from megacpp_compile.backends import inductor
from megacpp_compile.config.options import Config
from megacpp_compile.errors import EstimateError, ForwardError, wrapped_in
from megacpp_compile.frontend.loop_advice import advice
from megacpp_compile.fx.fake_state import fake_state
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.memory.fields import FieldWatch, Made, by_field
from megacpp_compile.memory.shapes import shapes_mode
from megacpp_compile.regional import loss_region
from megacpp_compile.regional.compile import compile_kinds, compile_loss
from megacpp_compile.regional.repeated_blocks import Kind
from megacpp_compile.report import collector
from megacpp_compile.report.records import CompiledRegion, Frame
from megacpp_compile.report.user_code import first_line, place_of, user_frame

# Name of a module -> bytes first packed while it was the innermost one running.
Saved = dict[str, int]


class FakeRun:
    """A model and its inputs, ready to run on fake tensors.

    Attributes:
        frames: what `compiled` compiled, as reported.
        fields: what `eager` counted, by what it is (`memory.fields.FIELDS`).
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, device: torch.device, kinds: Sequence[Kind]
    ) -> None:
        self.model, self.inputs, self.device, self.kinds = model, (args, kwargs), device, kinds
        self.frames: list[Frame] = []
        self.fields: Saved = {}
        self.blocks = {fqn: m for kind in kinds for fqn, m in zip(kind.fqns, kind.modules, strict=True)}
        self._rows = _Rows(self.blocks)
        self._compiled: Saved | None = None

    def eager(self, config: Config) -> Saved:
        """What eager autograd keeps. Where values decide how many rows an expert has, the fused ops of the compiled
        graphs say how many all of them have, under `config`."""
        saved = self._eager()
        if self._rows.asked:
            asked = self._rows.asked.copy()
            self.compiled(config)
            if self._rows.share_out(asked):
                saved = self._eager()
        return saved

    def _eager(self) -> Saved:
        parts = dict(self.blocks)
        for fqn, block in self.blocks.items():
            parts |= {f"{fqn}.{name}": child for name, child in block.named_children()}
        with self._fakes() as (mode, (args, kwargs)), _calls(self.model), _Labels(parts) as labels:
            return self._count(mode, lambda: self.model(*args, **kwargs), labels, watch=FieldWatch())

    def compiled(self, config: Config) -> Saved:
        """What the partitioned graphs of this compiler keep, each block compiled by itself. Compiled once only."""
        if self._compiled is not None:
            return self._compiled
        kinds = self.kinds or [Kind(("",), (self.model,))]
        regions = [CompiledRegion(kind.fqns, "", 0, "compiled") for kind in kinds]
        self._rows.routed.clear()
        torch.compiler.reset()  # a code object keeps its compiled frames: none may be left that would run on fakes
        try:
            with self._fakes() as (mode, (args, kwargs)), _calls(self.model):
                compile_kinds(self.model, kinds, regions, config, None, inductor.without_codegen)
                with (
                    self._loss_region(kinds, regions, config),
                    _Labels(self.blocks) as labels,
                    functorch.config.patch(enable_autograd_cache=False),
                    collector.aside() as found,
                ):
                    self._compiled = self._count(mode, lambda: self.model(*args, **kwargs), labels, compiling=True)
                self.frames = found.frames
                return self._compiled
        finally:
            torch.compiler.reset()

    @contextlib.contextmanager
    def _loss_region(self, kinds: Sequence[Kind], regions: Sequence[CompiledRegion], config: Config) -> Iterator[None]:
        """The head and its loss compiled for the time of a `with`, as `megacpp_compile.compile` has them."""
        hooks = []
        if self.kinds and config.enabled(loss_region.PASS) and (apart := loss_region.runners(self.model, kinds)):
            hooks = compile_loss(self.model, kinds, apart, regions, config, None, inductor.without_codegen)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(
        self, mode: FakeTensorMode, forward: Callable[[], Any], labels: _Labels, compiling: bool = False,
        watch: FieldWatch | None = None,
    ) -> Saved:  # fmt: skip
        own = {_storage(t) for t in (*self.model.parameters(), *self.model.buffers(), *self._tensors)}
        alive: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed while counting
        kept: dict[int, tuple[str, int, Made | None]] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if (key := _storage(t)) not in own:
                kept.setdefault(key, (labels.current, _bytes_of_storage(t), watch.of(t) if watch else None))
            alive.append(t)
            return t

        self._rows.begin(labels)
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
            with mode, torch.enable_grad(), hooks, watch or contextlib.nullcontext():
                result = forward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            at = user_frame(error)
            raise EstimateError(str(error), place_of(at), advice("", at) if at else "") from error
        except Exception as error:
            if (meant := wrapped_in(error)) is not None:
                raise meant from None
            problem = ("under torch.compile, " if compiling else "") + first_line(error)
            raise ForwardError(type(self.model).__name__, problem, place_of(user_frame(error))) from error
        del result
        saved: Saved = {}
        for label, size, _ in kept.values():
            saved[label] = saved.get(label, 0) + size
        if watch is not None:
            self.fields = by_field((made, size) for _, size, made in kept.values())
        return saved

    @contextlib.contextmanager
    def _fakes(self) -> Iterator[tuple[FakeTensorMode, Any]]:
        """Model and inputs on fake tensors of the device, for the time of a `with`."""
        mode = shapes_mode(self._rows.picked, self._rows.saw)
        state = fake_state(self.model, mode, self.device)
        with state:
            inputs = tree_map(state.fake, self.inputs)
            self._tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
            yield mode, inputs


class _Rows:
    """How many rows values pick. All that a mask has, but in a block where experts are fused: the fused op says how
    many rows its experts have together, and each asks for as many as any other.

    Attributes:
        labels: knows which block runs.
        known: of this run, masks and their rows: a mask that is read again picks the same rows.
        asked: how many masks picked rows, by block and elements of the mask.
        routed: rows of fused experts, by block.
    """

    def __init__(self, blocks: Iterable[str]) -> None:
        self.blocks = sorted(blocks, key=len)
        self.labels: _Labels | None = None
        self.known: dict[Any, tuple[torch.Tensor, int]] = {}
        self.asked: Counter[tuple[str, int]] = Counter()
        self.routed: Counter[str] = Counter()
        self.shares: dict[tuple[str, int], Iterator[int]] = {}

    def begin(self, labels: _Labels) -> None:
        self.labels = labels
        self.known.clear()

    def picked(self, mask: torch.Tensor) -> int:
        key = self._block(), mask.numel()
        same = _storage(mask), mask.storage_offset(), mask.shape, mask.stride()
        if same not in self.known:
            self.asked[key] += 1
            self.known[same] = mask, next(self.shares.get(key, iter(())), mask.numel())
        return self.known[same][1]

    def saw(self, op: Any, args: Sequence[Any]) -> None:
        if (position := traits_of(op).routed) is not None:
            self.routed[self._block()] += args[position].numel()

    def share_out(self, asked: Mapping[tuple[str, int], int]) -> bool:
        """Share the rows of each block out among those that asked, the most alike masks being the experts'. Whether
        any are shared."""
        for block, rows in self.routed.items():
            own = {key: count for key, count in asked.items() if key[0] == block}
            if own:
                loop = max(own, key=own.__getitem__)
                each, rest = divmod(rows, own[loop])
                self.shares[loop] = iter([each + (i < rest) for i in range(own[loop])])
        return bool(self.shares)

    def _block(self) -> str:
        label = self.labels.current if self.labels is not None else ""
        return next((b for b in reversed(self.blocks) if label == b or label.startswith(b + ".")), "")


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
