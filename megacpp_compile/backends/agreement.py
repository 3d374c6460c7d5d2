"""What becomes of a frame in which ranks communicate, decided alike by all of them.

A rewritten frame may communicate otherwise than the frame as it came: gradients of what several linears read are
summed once, and a head whose words are sharded keeps no logits. Where one rank runs the one and another rank the other,
each waits for a collective that the other never issues. What a rank makes of a frame may hang on the rank: an error
while it compiles, a defect, options from the environment, packages that are there.

Each rank puts its outcome into the store of the default process group, and reads that of the ranks it meets in the
frame, of those that these meet, and so on. Where one of them has left the frame to the backend, or fuses something
else, all leave it to the backend.

A frame that all have agreed on may be compiled again, for other sizes, by one rank alone, while the others run what
they have. So it is settled anew where all ranks have begun before the first was done, and else each goes on with what
was agreed on; a rank that cannot waits for all, as at first.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dynamo import RestartAnalysis
from megacpp_compile._torch.ops import OpOverload, OpOverloadPacket
from megacpp_compile._torch.ranks import ranks_of, shared_store
from megacpp_compile.config.options import Config
from megacpp_compile.errors import RanksDifferError
from megacpp_compile.frontend.dtensors import is_dtensor, leaves
from megacpp_compile.fx.edit import all_nodes, called, dynamo_value
from megacpp_compile.fx.held import held
from megacpp_compile.fx.provenance import modules_called
from megacpp_compile.report import log

# Calls on DTensors that communicate, or whose gradients do.
_ON_DTENSORS = frozenset({"redistribute", "full_tensor", "from_local", "to_local", "distribute_tensor"})
_POLLS = 0.001, 0.05  # seconds between two looks into the store, at first and at most
_SILENT = 30.0  # seconds, after which a rank that waits says so
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rank makes of a frame.

    form: what fuses in it, in the order of the graph. left: why this rank leaves it to the backend, "" where it does
    not. again: why it has Dynamo trace the frame again, in pieces. error: how compiling it failed. gone: whether it
    runs what was agreed on before, and waits for no other rank.
    """

    form: str = ""
    left: str = ""
    again: str = ""
    error: str = ""
    gone: bool = False


class Meeting:
    """The ranks that meet in a frame, and what they have agreed on so far.

    key: of the frame in the store. left: why all ranks leave the frame to the backend, "" as long as they do not.
    """

    def __init__(self, key: str) -> None:
        self.key, self.place, self.within = key, "", (None, "")
        self.ranks, self.met = set[int](), set[int]()  # met: with those that its ranks meet, once they have
        self.calls, self.asked, self.begun = 0, Counter[int](), ""
        self.forget()

    def forget(self) -> None:
        """Forget what was agreed on."""
        self.left, self.agreed = "", set[str]()

    def begin(self, place: str, within: tuple[Any, str], ranks: set[int]) -> Meeting:
        """This meeting for one more frame of its key. within: the default process group, and options."""
        if within != self.within:
            self.forget()
        self.place, self.within, self.ranks = place, within, ranks
        store, key = shared_store(), self._round()
        if self.agreed and self.begun != key and store.add(f"{key}/begun", 1) == len(self.met):
            store.compare_set(f"{key}/way", "", "together")
        self.begun = key
        return self

    def _round(self) -> str:
        return f"{self.key}/{self.calls}/{self.asked[self.calls]}"

    def settle(self, own: Outcome, strict: bool) -> Outcome:
        """`own`, or what this rank is to follow: the `again` of another, or `left` with that rank and its reason. Waits
        for ranks that have not come so far yet. Raises RanksDifferError where one of them failed, does not come or runs
        what this rank cannot, and under `strict` where ranks differ."""
        if self.left:
            return own
        if self.agreed and shared_store().compare_set(f"{self._round()}/way", "", "alone") == b"alone":
            if not own.left and own.form in self.agreed:
                self.report(dataclasses.replace(own, gone=True))
                return own
        found = self._ask(own)
        for rank, other in found.items():
            if other.error:
                raise RanksDifferError(self.place, (rank,), f"failed to compile it: {other.error}")
            if other.gone:
                mine = f"leaves it to the backend: {own.left}" if own.left else f"fuses {own.form or 'nothing'}"
                raise RanksDifferError(self.place, (rank,), f"runs {other.form} as agreed on before. This rank {mine}")
        for rank, other in found.items():
            if other.again:
                return dataclasses.replace(own, again=f"rank {rank} has it traced again: {other.again}")
        differing = [rank for rank, other in found.items() if other.left or other.form != own.form]
        if not differing and not own.left:
            self.agreed.add(own.form)
            return own
        if not own.left and strict:
            raise RanksDifferError(self.place, differing, _how(found[differing[0]], own))
        self.left = own.left or f"rank {differing[0]}, which it communicates with, {_how(found[differing[0]], own)}"
        return dataclasses.replace(own, left=self.left)

    def report(self, own: Outcome) -> str:
        """Let ranks that wait for this one know its outcome; where that is in the store, but for the rank."""
        key = self._round()
        self.asked[self.calls] += 1
        said = {**dataclasses.asdict(own), "ranks": sorted(self.ranks)}
        shared_store().set(f"{key}/{dist.get_rank()}", json.dumps(said))
        return key

    def counting(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, whose calls are counted: ranks that meet in a frame have called it as often as each other."""
        return _Counted(compiled, self)

    def _ask(self, own: Outcome) -> dict[int, Outcome]:
        """The outcome of each other rank that is met, in the order of ranks."""
        store, key, found, met = shared_store(), self.report(own), dict[int, Outcome](), set(self.ranks)
        seconds = store.timeout.total_seconds()
        ends, pause = time.monotonic() + seconds, _POLLS[0]
        due = ends - seconds + _SILENT
        while missing := sorted(met - found.keys() - {dist.get_rank()}):
            came = [rank for rank in missing if store.check([f"{key}/{rank}"])]
            for rank in came:
                said = json.loads(store.get(f"{key}/{rank}"))
                met.update(said.pop("ranks"))
                found[rank] = Outcome(**said)
            if came:
                continue
            if time.monotonic() > ends:
                raise RanksDifferError(self.place, missing, f"did not compile it within {seconds:.0f} s")
            if due < time.monotonic():
                due = ends
                log.logger.warning("%s waits for rank %s to compile it", self.place, ", ".join(map(str, missing)))
            time.sleep(pause)
            pause = min(2 * pause, _POLLS[1])
        self.met = met
        return dict(sorted(found.items()))


class _Counted:
    def __init__(self, compiled: Callable[..., Any], meeting: Meeting) -> None:
        self.compiled, self.meeting = compiled, meeting

    def __call__(self, *args: Any) -> Any:
        self.meeting.calls += 1
        return self.compiled(*args)

    def __reduce__(self) -> Any:
        """Code in a file is run by processes that compile nothing."""
        return _itself, (self.compiled,)


def _itself(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def _how(other: Outcome, own: Outcome) -> str:
    """How the outcome of another rank differs from this one's."""
    if other.left:
        return f"leaves it to the backend: {other.left}"
    forms = other.form or "nothing", own.form or "nothing"
    return "fuses {} in it, and this rank {}: packages or options differ".format(*forms)


_meetings: dict[str, Meeting] = {}  # by their keys
# Of the frame that is being compiled.
_current: ContextVar[Meeting | None] = ContextVar("_current", default=None)


def meeting_of(gm: GraphModule, place: str, grad: bool, config: Config) -> Meeting | None:
    """The ranks that meet in Dynamo's graph `gm`; None where they are no more than this one. place: what reports call
    the frame. grad: whether it is compiled for training."""
    if shared_store() is None or len(ranks := _met(nodes := all_nodes(gm))) < 2:
        return None
    # What is alike on all ranks, and whatever sizes a rank has.
    like = place, grad, [c for n in nodes if (c := _communication(n))], sorted({*modules_called(gm.graph).values()})
    key = f"megacpp/{hashlib.sha256(repr(like).encode()).hexdigest()[:16]}"
    options = dataclasses.replace(config, policy=None).cache_key()
    meeting = _meetings.setdefault(key, Meeting(key)).begin(place, (dist.group.WORLD, options), ranks)
    _current.set(meeting)
    return meeting


def tells_failures(compile_frame: Callable[..., T]) -> Callable[..., T]:
    """`compile_frame`, whose errors are told to ranks that wait for the frame."""

    @functools.wraps(compile_frame)
    def call(*args: Any, **kwargs: Any) -> T:
        with held(_current, None):
            try:
                return compile_frame(*args, **kwargs)
            except (RestartAnalysis, RanksDifferError):
                raise
            except Exception as error:
                if (meeting := _current.get()) is not None:
                    meeting.report(Outcome(error=f"{type(error).__name__}: {error}"[:300]))
                raise

    return call


def form_of(gm: GraphModule | None, ops: Iterable[Any]) -> str:
    """What fuses in a rewritten graph, with a digest of the order in which that and collectives stand; "" for none."""
    if gm is None:
        return ""
    own = frozenset(ops)
    names = [str(n.target) if n.target in own else _communication(n) for n in gm.graph.nodes]
    order = [name for name in names if name]
    counts = Counter(name.split(".")[1] for name in order if name.startswith("megacpp."))
    digest = hashlib.sha256(repr(order).encode()).hexdigest()[:6]
    return f"{', '.join(f'{name} {count}' for name, count in sorted(counts.items()))} [{digest}]"


def _communication(node: Node) -> str:
    """What a call of a graph communicates by, "" for one that does not."""
    if node.op == "call_function" and _groups(node):
        return str(node.target)
    name = called(node) if node.op.startswith("call") else ""
    return name if name in _ON_DTENSORS else ""


def _groups(node: Node) -> list[Sequence[int]]:
    """The ranks of the groups that a call of an operator names."""
    if not isinstance(node.target, (OpOverload, OpOverloadPacket)) or str(node.target).startswith("aten."):
        return []
    named = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    return [ranks for name in named if (ranks := ranks_of(name))]


def _met(nodes: Sequence[Node]) -> set[int]:
    """The ranks that those nodes communicate with, by collectives or as DTensors."""
    found = {rank for node in nodes for ranks in _groups(node) for rank in ranks}
    meshes = {leaf.device_mesh for n in nodes for leaf in leaves(dynamo_value(n)) if is_dtensor(leaf)}
    return found.union(*(mesh.mesh.flatten().tolist() for mesh in meshes))
