"""DDP's optimizer, which cuts Dynamo's graph between the buckets of gradients that are reduced together."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Collection, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from megacpp_compile._torch._registry import find
from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._dynamo.backends.distributed import DDPOptimizer
else:
    __getattr__ = theme(__name__)


@dataclasses.dataclass(frozen=True)
class Split:
    """A graph that is cut.

    gm, inputs: Dynamo's graph before, and what it is called with. buckets: the calls of each piece, in the order they
    run. params: the placeholders of parameters that each piece's bucket is made of, in the order of the graph. index:
    the piece that is being compiled.
    """

    gm: GraphModule
    inputs: Sequence[Any]
    buckets: Sequence[Sequence[Node]]
    params: Sequence[Sequence[str]]
    index: int
    optimizer: Any


def cuts_for(compiler: Any) -> Any:
    """The backend that compiles the pieces, where a frame's `compiler` is the optimizer's; None for any other."""
    optimizer = getattr(compiler, "__self__", None)
    return getattr(optimizer, "backend_compile_fn", None) if hasattr(optimizer, "bucket_bytes_cap") else None


def split_of(piece: GraphModule) -> Split | None:
    """The cut that Dynamo's graph `piece` comes from, read off Python's stack; None for a graph that is whole."""
    if "torch._dynamo.backends.distributed" not in sys.modules:
        return None  # Dynamo loads it for the first graph that it cuts
    from megacpp_compile._torch import ddp  # its names are looked up there

    code = getattr(getattr(ddp.DDPOptimizer, "compile_fn", None), "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    held = frame.f_locals if frame is not None else {}
    pieces, buckets = held.get("split_gm"), held.get("buckets")
    if pieces is None or not buckets or not all(hasattr(b, "nodes") and hasattr(b, "params") for b in buckets):
        return None
    index = next((i for i in range(len(buckets)) if getattr(pieces, f"submod_{i}", None) is piece), None)
    if index is None:
        return None
    nodes, params = [b.nodes for b in buckets], [list(reversed(b.params)) for b in buckets]
    return Split(held["gm"], held["example_inputs"], nodes, params, index, held.get("self"))


def keep_together(split: Split, behind: Collection[str]) -> bool:
    """Have the graph, where it is cut once more, end no bucket right in front of the calls of those names: what such a
    bucket would hold counts once it may end. False where that is asked for already, or the optimizer is another."""
    optimizer = split.optimizer
    usual = getattr(optimizer, "add_param_args", None)
    if usual is None or "add_param_args" in vars(optimizer):
        return False
    # In front of the first call that the optimizer counts there is no other bucket.
    calls = (n for n in split.gm.graph.nodes if n.op == "call_function" or n.op == "call_method" and _named(n.args[0]))
    inner = set(behind) - {n.name for n in itertools.islice(calls, 1)}
    held: dict[int, int] = {}

    def add_param_args(bucket: Any, node: Node) -> None:
        usual(bucket, node)
        size = held.pop(id(bucket), 0) + bucket.size
        bucket.size = size
        if node.name in inner:
            held[id(bucket)], bucket.size = size, 0

    optimizer.add_param_args = add_param_args
    return True


def writes_buffers() -> bool:
    """Whether the frame is one of a model in DDP that has all ranks take the buffers of the first before each step."""
    return getattr(find("torch.nn.parallel.DistributedDataParallel._active_ddp_module"), "broadcast_buffers", False)


def _named(node: Any) -> bool:
    return isinstance(getattr(node, "target", None), str)
