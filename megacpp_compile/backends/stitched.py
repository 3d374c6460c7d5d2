"""Runs a frame that was cut into pieces: one callable for each kind of piece, called in the order of the graph.

Autograd sees each piece as a function of its own, as it sees the graphs of blocks that are compiled by themselves: a
block's backward begins as soon as the gradients behind it are there, and what it saves is freed once that is done.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch.ddp import split_of
from megacpp_compile._torch.fakes import FakeTensorMode, detect_fake_mode
from megacpp_compile._torch.functorch import lowers_backward_with_forward
from megacpp_compile._torch.guards import TracingContext
from megacpp_compile.backends import cuda_graphs
from megacpp_compile.config import rules
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.config.options import Config
from megacpp_compile.frontend import unbacked_shapes
from megacpp_compile.frontend.calls_of_blocks import NotCut, Piece
from megacpp_compile.frontend.masks_in_blocks import with_own_masks
from megacpp_compile.frontend.opaque_ops import refake
from megacpp_compile.frontend.repeated_blocks import cut
from megacpp_compile.frontend.worth_cutting import fires_across, worth
from megacpp_compile.fx.edit import attribute_of, dynamo_value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.provenance import module_fqn, modules_called
from megacpp_compile.report.records import CompiledRegion
from megacpp_compile.targets import Target


@dataclasses.dataclass(frozen=True)
class Served:
    """What a graph serves: the first block's name and how many there are of its kind, "" and 0 between blocks, the
    settings it is compiled with, and of each further call what modules are called there that have a name in the first.
    """

    name: str
    blocks: int
    config: Config
    others: Sequence[Mapping[str, str]]


# (graph of a piece, what it is called with, what it serves) -> what runs in its place.
CompilePiece = Callable[[GraphModule, Sequence[Any], Served], Callable[..., Any]]
# (graph, what it is called with, settings) -> what would fire in it.
Fires = Callable[[GraphModule, Sequence[Any], Config], Counter[str]]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A call of a piece. reads, makes: places of its inputs and outputs; dead: of what nobody reads behind it.
    strides: of its outputs, as what comes behind was compiled for them; None where sizes are inputs."""

    run: Callable[..., Any]
    reads: Sequence[int]
    makes: Sequence[int]
    dead: Sequence[int]
    strides: Sequence[tuple[int, ...] | None]


def compile_blocks(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target, patches: Mapping[str, Any],
    compile_piece: CompilePiece, fires: Fires,
) -> tuple[Callable[..., Any], list[CompiledRegion]]:  # fmt: skip
    """What does what Dynamo's graph `gm` does, with one code for each kind of block, and how the report has the blocks.
    Raises NotCut where the frame is to be one graph. patches: Inductor's settings for it."""
    why, auto = _why_whole(gm, example_inputs, config, target, patches), config.repeated_blocks == "auto"
    if why and not auto:
        raise NotCut(why)
    try:
        cut = _Cut.of(gm, example_inputs, config)
        spared = worth(gm, cut.pieces) if auto else ""
        if not why:
            cut = _masked(cut, example_inputs, fires)
    except Exception as error:  # a defect of ours must not become the user's
        if config.strict or isinstance(error, NotCut):
            raise
        raise NotCut(f"internal error: {type(error).__name__}: {error}"[:300]) from error
    if why:
        raise NotCut(why)
    if auto:
        _check_across(cut, fires)
    runs: dict[Hashable, Callable[..., Any]] = {}
    for kind, (first, *others) in cut.kinds.items():
        graph, examples = cut.alone(first)
        if not first.outputs:
            runs[kind] = graph.forward
            continue
        blocks = 1 + len(others) if first.name else 0
        names = [first.names_in(other, cut.gm) for other in others]
        runs[kind] = compile_piece(graph, examples, Served(first.name, blocks, cut.config_of(first), names))
    regions = [_region(like, cut.given, spared) for like in cut.kinds.values() if like[0].name]
    return _Stitched(cut.gm, cut.pieces, runs), regions


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A graph in pieces. last: the last layer, whose blocks are kinds of their own, where the policy has another entry
    there. given: what the graph is called with. kinds: the pieces that are one graph. fired: what `fires` found."""

    gm: GraphModule
    pieces: Sequence[Piece]
    last: str | None
    config: Config
    given: Mapping[Node, Any]
    mode: FakeTensorMode
    kinds: Mapping[Hashable, Sequence[Piece]]
    fired: dict[Hashable, Counter[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> _Cut:
        mode = _fake_mode(example_inputs)
        pieces, last = _pieces(gm, example_inputs, config)
        given = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
        return cls(gm, pieces, last, config, given, mode, by_key((piece.kind, piece) for piece in pieces))

    def alone(self, piece: Piece) -> tuple[GraphModule, list[Any]]:
        """A piece as a graph, and what that is called with."""
        return piece.graph_of(self.gm), [_example(self.gm, n, self.given, self.mode) for n in piece.inputs]

    def config_of(self, piece: Piece) -> Config:
        """The settings that a piece is compiled with: those of the last layer for what holds it."""
        policy = self.config.policy
        names = (piece.name, *map(module_fqn, piece.calls))
        if isinstance(policy, CheckpointingPolicy) and any(f"{name}.".startswith(f"{self.last}.") for name in names):
            policy = policy.of_last_layer()
        return dataclasses.replace(self.config, policy=policy, repeated_blocks=False, drop_outputs=())

    def fires(self, piece: Piece, of: Piece, fires: Fires) -> Counter[str]:
        """What passes find in a piece with the settings of another."""
        if piece.kind not in self.fired:
            self.fired[piece.kind] = fires(*self.alone(piece), self.config_of(of)) if piece.outputs else Counter()
        return self.fired[piece.kind]


def _masked(cut: _Cut, example_inputs: Sequence[Any], fires: Fires) -> _Cut:
    """The cut in which blocks make their masks themselves, where more fires in them so."""
    if (own := with_own_masks(cut.gm, cut.pieces)) is cut.gm:
        return cut
    masked = _Cut.of(own, example_inputs, cut.config)
    found, before = (
        sum(c.fires(first, first, fires).total() * len(like) for like in c.kinds.values() if (first := like[0]).name)
        for c in (masked, cut)
    )
    return masked if found > before else cut


def _check_across(cut: _Cut, fires: Fires) -> None:
    """Raises NotCut where a pass finds more in two neighbouring pieces than in one and the other."""
    for a, b in {(a.kind, b.kind): (a, b) for a, b in itertools.pairwise(cut.pieces)}.values():
        apart = cut.fires(a, a, fires) + cut.fires(b, b, fires)
        if across := fires_across(apart, cut.fires(a.joined(b), a, fires)):
            raise NotCut(f"{across} fires across blocks")


def whole(gm: GraphModule, why: str) -> CompiledRegion:
    """How the report has a frame that is one graph."""
    return CompiledRegion(("",), modules_called(gm.graph).get("", ""), 0, "compiled", f"as one: {why}")


def _region(like: Sequence[Piece], given: Mapping[Node, Any], spared: str) -> CompiledRegion:
    held = {n: given[n] for piece in like for n in piece.inputs if isinstance(given.get(n), torch.nn.Parameter)}
    reason = f"compiled once, called {len(like)} times" if len(like) > 1 else "compiled once"
    reason += f" (auto: {spared})" if spared else ""
    names = tuple(dict.fromkeys(piece.name for piece in like))
    return CompiledRegion(names, like[0].module, sum(p.numel() for p in held.values()), "compiled", reason)


def _why_whole(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, target: Target, patches: Mapping[str, Any]
) -> str:
    """Why the frame is to be one graph, "" where nothing is against its pieces."""
    policy = config.own_policy
    if target.device(example_inputs).backend != "inductor":
        return "XLA compiles what one graph is"
    if config.verify != "off":
        return f"verify={config.verify!r} replays sites on the inputs of the frame"
    if config.sharding is not None or policy is not None and policy.peak_gib is not None:
        return "'sharding' and 'policy.peak_gib' are about all of the frame"
    if cuda_graphs.asked(patches) and cuda_graphs.is_for_cuda(example_inputs):
        return "a CUDA graph is to hold all of it"
    if split_of(gm) is not None:
        return "DDP's optimizer has cut it into buckets"
    if unbacked_shapes.unknown_numbers(gm) or unbacked_shapes.numbers_assumed():
        return "sizes are known at run time only"
    if not lowers_backward_with_forward():
        return f"torch {torch.__version__} cannot compile a backward with its forward"
    return ""


def _pieces(gm: GraphModule, example_inputs: Sequence[Any], config: Config) -> tuple[list[Piece], str | None]:
    """The pieces of `gm`, and the last layer, whose blocks are kinds of their own, where the policy has another entry
    there."""
    policy = config.own_policy

    def treatment(name: str, names: Sequence[str], last: str | None = None) -> Hashable:
        return rules.treatment_of(name, names, config), last is not None and rules.layer_of(name) == last

    pieces = cut(gm, example_inputs, treatment)
    if policy is None or policy.of_last_layer() == policy:
        return pieces, None
    last = rules.layer_of([piece.name for piece in pieces if piece.name][-1])
    return cut(gm, example_inputs, functools.partial(treatment, last=last)), last


def _fake_mode(example_inputs: Sequence[Any]) -> FakeTensorMode:
    context = TracingContext.try_get()
    mode = (context.fake_mode if context else None) or detect_fake_mode(example_inputs)
    if mode is None:
        raise NotCut("Dynamo's fake tensors are not known")
    return mode


def _example(gm: GraphModule, node: Node, given: Mapping[Node, Any], mode: FakeTensorMode) -> Any:
    if node in given:
        return given[node]
    value = attribute_of(gm, node.target) if node.op == "get_attr" else dynamo_value(node)
    return refake(value, mode) if node.op != "get_attr" and isinstance(value, torch.Tensor) else value


class _Stitched:
    """Called as Dynamo calls a frame's code."""

    def __init__(self, gm: GraphModule, pieces: Sequence[Piece], runs: dict[Hashable, Callable[..., Any]]) -> None:
        holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        held = dict.fromkeys(n for piece in pieces for n in piece.inputs if n.op == "get_attr")
        results = gm.graph.output_node()
        for node in results.all_input_nodes:
            held |= {node: None} if node.op == "get_attr" else {}
        self.held = [attribute_of(gm, n.target) for n in held]
        place = {n: i for i, n in enumerate([*holders, *held, *(n for p in pieces for n in p.outputs)])}
        last = {n: i for i, piece in enumerate(pieces) for n in (*piece.outputs, *piece.inputs)}
        kept = set(results.all_input_nodes)
        self.spare = [None] * (len(place) - len(holders) - len(held))
        self.steps = [
            _Step(
                runs[piece.kind], [place[n] for n in piece.inputs], [place[n] for n in piece.outputs],
                [place[n] for n, at in last.items() if at == i and n not in kept and n.op != "get_attr"],
                [_strides(dynamo_value(n)) for n in piece.outputs],
            )
            for i, piece in enumerate(pieces)
        ]  # fmt: skip
        values = results.args[0] if isinstance(results.args[0], (list, tuple)) else (results.args[0],)
        self.results = [(place[v], None) if isinstance(v, Node) else (-1, v) for v in values]

    def __call__(self, *args: Any) -> Any:
        values = [*args, *self.held, *self.spare]
        for step in self.steps:
            made = step.run(*[values[i] for i in step.reads])
            for place, value, strides in zip(step.makes, made, step.strides, strict=True):
                values[place] = value if strides is None or value.stride() == strides else _laid_out(value, strides)
            made = None
            for place in step.dead:
                values[place] = None
        return tuple(constant if place < 0 else values[place] for place, constant in self.results)


def _strides(value: Any) -> tuple[int, ...] | None:
    known = isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in (*value.shape, *value.stride()))
    return tuple(value.stride()) if known else None


def _laid_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`value` with the strides of eager, where code made others."""
    ones = all(size == 1 or a == b for size, a, b in zip(value.shape, value.stride(), strides, strict=True))
    if ones or not value.numel():
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
