"""What every pass keeps, asserted alike for each: switched off it stays out, and dynamic shapes and autocast are no
reason to be wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from megacpp_compile.config.options import Config
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rule import Match, Pass
from tests.frames import TOLERANCE, Frames, check, check_graph, largest_error, run, run_graph, train
from tests.lowerings import relative_error

Args = tuple[Tensor, ...]


def assert_fires(
    name: str, module: nn.Module, args: Args, count: int = 1, config: Config | None = None, *, dynamo: bool = False
) -> Frames:
    """`count` times, with eager's outputs and gradients, and no more on a second run over the result. dynamo: through
    Dynamo and the frontend, for what they make of a module; the graph is otherwise captured without them."""
    frames = (check if dynamo else check_graph)(module, args, config)
    assert frames.counts[name] == count, frames.misses
    assert not frames.again(config)
    return frames


def assert_refused(
    name: str, tag: str, module: nn.Module, args: Args, config: Config | None = None, *, dynamo: bool = False
) -> Frames:
    """The pass says why, does nothing, and the rest of the frame keeps eager's results."""
    frames = (check if dynamo else check_graph)(module, args, config)
    assert tag in frames.tags(name), f"refused {frames.misses}, fired {frames.fired}"
    assert not frames.counts[name]
    return frames


def assert_disabled(name: str, module: nn.Module, args: Args, *also: str) -> None:
    """Both ways to switch a pass off; the others go on. also: passes that are off throughout, as they would take what
    this one leaves."""
    on = run_graph(module, args, Config(strict=True, disable=also)).fired
    for config in (
        Config(strict=True, disable=(name, *also)),
        Config(strict=True, disable=also, passes={name: False}),
    ):
        frames = check_graph(module, args, config)
        assert name not in frames.counts
        assert frames.fired == {other: count for other, count in on.items() if other != name}


def assert_dynamic(
    name: str, module: nn.Module, make: Callable[[int], Args], count: int = 1, *, everything: bool = False,
    config: Config | None = None,
) -> None:  # fmt: skip
    """One graph serves every length. `make(length)` makes the arguments, which have it last but one.

    everything: `torch.compile(dynamic=True)`, which also makes inputs of plain floats, such as a norm's eps; otherwise
    only the length is dynamic, as it becomes by itself on the second length seen.
    """

    def args(length: int) -> Args:
        tensors = make(length)
        if not everything:
            for t in tensors:
                torch._dynamo.mark_dynamic(t, t.dim() - 2)
        return tensors

    frames = check(module, args(5), config, dynamic=True if everything else None)
    assert frames.counts[name] == count, frames.misses
    for length in (9, 4):
        got = train(frames.compiled, module, args(length))
        eager = copy.deepcopy(module)
        error, which = largest_error(got, train(eager, eager, make(length)))
        assert error <= TOLERANCE[torch.float32], (length, which, error)
    assert len(frames.graphs) == 1, "compiled again for another length"


class Watch:
    """Notes in `changed`, by the passes that may have done it, what their `find` has changed of a graph. What a graph is
    made of takes as long to gather as a pass takes to look at it: that is done before the first pass looks at a graph, and
    once more before somebody else changes it and when the last pass has looked."""

    def __init__(self) -> None:
        self.changed: dict[str, list[str]] = {}
        self.view: GraphView | None = None
        self.before: dict[Node, tuple[Any, ...]] = {}
        self.readers: list[str] = []

    def find(self, p: Pass, view: GraphView) -> list[Any]:
        new = view is not self.view
        if new:
            self.view, self.before, self.readers = view, _state(view.graph), []
        self.readers.append(p.name)
        found = list(p.find(view))
        if new or any(isinstance(one, Match) for one in found):  # the driver drops nodes, or rewrites them
            self.look()
        return found

    def look(self) -> None:
        if self.view is not None and self.readers:
            after = _state(self.view.graph)
            self.note(_changes(self.before, after) if self.before != after else ())
            self.before = after

    def note(self, changes: Iterable[str]) -> None:
        if changes := list(changes):
            self.changed.setdefault(", ".join(self.readers), []).extend(changes)
        self.readers = []

    def dropped(self, erased: bool) -> bool:
        """Told what the driver's `drop_dead` gives: after the first look there are dead nodes by a rewrite alone."""
        if erased and self.readers:
            self.note(["nodes that nobody reads"])
        return erased

    def until_the_end(self, passes: Iterable[Pass]) -> Iterator[Pass]:
        yield from passes
        self.look()
        self.view, self.before = None, {}


class Watched:
    """A pass in all but that `watch` is told of its `find`."""

    def __init__(self, watched: Pass, watch: Watch):
        self.watched, self.watch = watched, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)

    def find(self, view: GraphView) -> list[Any]:
        return self.watch.find(self.watched, view)


_PARTS = ("target", "args", "kwargs", "users", "next", "keys of meta", "meta")


def _state(graph: Graph) -> dict[Node, tuple[Any, ...]]:
    """All that a node is made of, as `_PARTS` has it; values in its meta by identity, and what mutable ones hold."""
    return {
        n: (n.target, n.args, n.kwargs, tuple(n.users), n.next, tuple(n.meta),
            [_held(v) if issubclass(type(v), _HOLDERS) else id(v) for v in n.meta.values()])
        for n in graph.nodes
    }  # fmt: skip


_HOLDERS = (dict, list, set)


def _held(v: Any) -> tuple[Any, ...]:
    parts = [_held(part) if issubclass(type(part), _HOLDERS) else id(part) for part in (v.values() if isinstance(v, dict) else v)]
    return (id(v), *v, *parts) if isinstance(v, dict) else (id(v), *parts)


def _changes(before: dict[Node, tuple[Any, ...]], after: dict[Node, tuple[Any, ...]]) -> Iterator[str]:
    for n in before.keys() | after.keys():
        was, now = (dict(zip(_PARTS, state.get(n, ()), strict=False)) for state in (before, after))
        for part in _PARTS[:5]:
            if was.get(part) != now.get(part):
                yield f"{n.name}: {part}"
        was, now = (dict(zip(of.get("keys of meta", ()), of.get("meta", ()), strict=True)) for of in (was, now))
        yield from (f"{n.name}: meta {key}" for key in was.keys() | now.keys() if was.get(key) != now.get(key))


class Autocast(nn.Module):
    """A module under bfloat16 autocast, entered by the caller or, as part of the frame, by the module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.module(*args)


def assert_half_precision(name: str, module: nn.Module, args: Args) -> Frames:
    """A module of bfloat16 fires once, and each of its outputs and gradients is as far from float64 as eager's is, or a
    quarter more: over so large a batch that this is one figure."""
    wide = copy.deepcopy(module).double()
    want = train(wide, wide, tuple(a.double() if a.is_floating_point() else a for a in args))
    eager, frames = train(module, module, args), run(module, args)
    assert frames.counts[name] == 1, frames.misses
    for which, exact in want.items():
        ours, theirs = (relative_error(of[which], exact) for of in (frames.results, eager))
        assert 0 < ours < 1.25 * theirs, which
    return frames


def assert_autocast(name: str, module: nn.Module, args: Args, count: int = 1, config: Config | None = None) -> None:
    """Fires when the caller turned autocast on, and is as near to float32's results as eager's autocast is."""
    exact = train(module, module, args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = train(module, module, args)
        frames = run(module, args, config)
    assert frames.counts[name] == count, frames.misses
    error, which = largest_error(frames.results, want)
    assert error <= TOLERANCE[torch.bfloat16], (which, error)
    ours, eagers = (_mean_error(results, exact) for results in (frames.results, want))
    assert ours <= 2 * eagers, f"{ours:.1e} from float32, eager is {eagers:.1e} from it"


def assert_autocast_inside(name: str, module: nn.Module, args: Args, count: int = 1) -> None:
    """Fires in a region entered within the frame, and keeps eager's dtypes and results."""
    frames = check(Autocast(module), args, tolerance=TOLERANCE[torch.bfloat16])
    assert frames.counts[name] == count, frames.misses


def _mean_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The root of the mean over results of their squared errors, relative to each one's norm. Of two results that round
    alike, the largest errors of single elements differ by more than twice on some processors."""
    errors = [relative_error(got[name], t) for name, t in want.items()]
    return math.hypot(*errors) / math.sqrt(len(errors))
