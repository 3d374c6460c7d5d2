"""The records of a report: sites fused, missed fusions, frames, compiled regions, precision."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from megacpp_compile.report.attention import AttentionCall
from megacpp_compile.report.auto_plan import AutoPlan

# Of everything that is collected: autograd compiles a lazy backward in another thread.
lock = threading.RLock()


def lowering_text(requested: str, effective: str, reason: str) -> str:
    """What `Site.lowering` says."""
    if requested == effective:
        return effective
    return f"{requested} → {effective}" + (f" ({reason})" if reason else "")


@dataclass(slots=True)
class Site:
    """One place where a pass put a semantic op.

    Attributes:
        pass_name: the pass; "pass" in JSON.
        op: qualified name of the op, "megacpp::down_norm_up".
        fqn: module the code belongs to, "" when it could not be resolved.
        source: "file.py:123, in forward: `code line`", or "".
        requested: lowering asked for.
        effective: lowering that runs.
        reason: why the two differ, "" when they do not.
        saved_before: bytes the replaced code would save for backward; None when unknown (inference).
        saved_after: bytes the op saves for backward; None when unknown.
        saved_reason: why bytes are unknown where they were to be counted, else "".
        frame: index of the frame within its report; set on collection.
        node: name of the op's node in the FX graph.
        note: what the pass decided, and by what, "" where there was nothing to decide.
        graph: the plain code ("before") and what stands in its place ("after"), each with its neighbours, as
            `fx.subgraph.described` has them; None where no report was open, and for an op that the model itself calls.
    """

    pass_name: str
    op: str
    fqn: str
    source: str
    requested: str
    effective: str
    reason: str = ""
    saved_before: int | None = None
    saved_after: int | None = None
    saved_reason: str = ""
    frame: int = 0
    node: str = ""
    note: str = ""
    graph: dict[str, Any] | None = None
    # Each report holds a copy, as frames are numbered per report; all copies share this list.
    _copies: list[Site] = field(default_factory=list, repr=False, compare=False)

    @property
    def lowering(self) -> str:
        """`effective`; where another was asked for, "cuda_triton → reference (why)"."""
        return lowering_text(self.requested, self.effective, self.reason)

    def set_saved(self, before: int | None, after: int | None, reason: str = "") -> None:
        """Fill in the bytes saved for backward, or the `reason` they are unknown, also in every report this site was
        emitted to."""
        with lock:
            for site in (self, *self._copies):
                site.saved_before, site.saved_after, site.saved_reason = before, after, reason


@dataclass(slots=True)
class MissedFusion:
    """A place that came near a pattern and was refused.

    Attributes:
        pass_name: the pass; "pass" in JSON.
        fqn: module the code belongs to, "" when it could not be resolved.
        source: "file.py:123, in forward: `code line`", or "".
        node: name of the FX node the refusal is about.
        tag: the reason for machines, "intermediate_escapes".
        reason: the reason in one sentence.
        frame: index of the frame within its report; set on collection.
    """

    pass_name: str
    fqn: str
    source: str
    node: str
    tag: str
    reason: str
    frame: int = 0


@dataclass(slots=True)
class Precision:
    """What a precision plan asks of a linear, of routed experts or of attention, and what it computes in.

    Attributes:
        fqn: module the code belongs to, "" when it could not be resolved.
        kind: "linear", "experts" or "attention".
        shape: "out x in" of a linear, else "".
        source: as in `Site`.
        requested: recipe the plan asks for; "bf16" is to be left as it is.
        effective: the recipe, or the dtype it computes in; "fp8 weight" or "fp8 rows" where these came as fp8; "as
            written" where Inductor compiled the frame alone.
        rule: what asked: a pattern of the plan, or "role attention".
        reason: why the plan's recipe is not in effect, "" where it is.
    """

    fqn: str
    kind: str
    shape: str
    source: str
    requested: str
    effective: str
    rule: str
    reason: str = ""


@dataclass(slots=True)
class Frame:
    """One graph that Dynamo handed over.

    Attributes:
        index: number of the frame within its report, from 0; set on collection.
        captured: True when the passes saw it, False when it compiled as plain Inductor would.
        reason: why it fell back, "" when captured.
        cached: True where its code came from a cache of torch's, of an earlier process or an equal frame. Nothing is
            decided then on the way to code: `remat` and `peak` are None, whatever the policy.
        graph_break: the line that the frame ends at while its function goes on, and why; "" for a whole frame.
        expert_loops: sums over the experts that have tokens, as loops over these write them, that were read as sums
            over all experts, an expert without tokens having been shown to add nothing and to do nothing else.
        name: what it compiles, e.g. the qualified name of the code object.
        nodes: number of FX nodes the passes saw, or Dynamo's when it fell back.
        target: "cpu", "cuda" or "tpu".
        label: of the device it was compiled for: on "cuda" a chip's, "sm_90" (`targets.chips`), else the target.
        passes: pass name -> times fired, with 0 for a pass that ran and did not fire.
        seconds: stage -> wall-clock seconds; stages do not overlap, so the sum is the whole. A stage is a pass, or one
            of `report.pieces.STAGES`, which says what each is.
        pieces: what is known of the stages in more detail: the "stage", "kind", "where" and "seconds" of each, as in
            `Cost`. `Report.costs` has what is left of the stages beside them.
        grad: True when compiled for training.
        policy: the checkpointing policy asked for, field by field; None without one.
        remat: what the policy decided: kind of block ("ablock", ..., "" for what lies between blocks) -> entries
            in force, blocks, bytes "saved" for backward, "offloaded" to main memory until then, and read by backward
            but recomputed ("again"), the number of nodes "recomputed", and the modelled "seconds" this takes. None
            without a policy, for inference, and where the code came from a cache.
        peak: under a policy, bytes allocated on the device at the peak of a training step: "before" the step (what
            its graph reads, or all that there was when a limit asked for it), "step" on top, "predicted" (both), and
            the "limit" that was asked for or None. With one artifact for several blocks, of all of them; "transient"
            is what one of them takes beyond what it saves. "over_time" has the bytes on top of "before" while the
            kernels of "forward" and of "backward" run one after another, neighbours joined where there are many: of
            the last of several blocks, and of its backward, which the peak is in.
        auto: under `policy="auto"`, an `AutoPlan` as a dict: what was chosen for a frame that is trained. It has no
            figures where the code came from a cache.
        block: the repeated block it was compiled for, the first of those that run it; "" outside of
            `megacpp_compile.compile`.
        blocks: how many blocks of that structure the model has, itself included; 0 outside of blocks.
        sharding: under a sharding plan, its "mesh" (axis -> number of devices) and the parameters that were "pinned":
            "fqn", "shape", "spec", "rule" and "by" of each, as in `Pinned`.
        chosen: settings that were left at "auto" and what they came to on this target.
        recognised: what was recognised and has no lowering: "kind", "fqn" and "source" of each, as in `Site`.
        left_to: who runs what was not captured: "backend", as it came; "eager", where Dynamo gave the frame up;
            "pieces", where graph breaks cut it. "" when captured.
        lost: whether it was not captured and may have held an idiom, so that the log warned of it.
        precision: under a precision plan, a `Precision` as a dict for every linear, routed expert layer and attention.
        attention: an `AttentionSite` as a dict for every attention.
        verified: under `verify="each"`, how many "sites" were replayed beside the plain code on the first call's inputs
            and agree, and of the one nearest to its "tolerance" the "difference", relative to the norm of the "tensor",
            "pass_name" and "fqn"; None where none was.
        backward: op that a pass put -> the lowerings of its backwards, each once, as `Site.lowering` has them. Empty
            for inference, and where the code came from a cache.
        cuda_graph: where CUDA graphs are asked for, "captured" or "not captured: why", as Inductor decided for the code
            it made, and what it leaves out; "" where nobody asked. Of a backward that is compiled when it first runs
            nothing is known yet.
        modules: name -> class of the modules that it has code of, "" being the one whose code is compiled, in the order
            of their first calls; empty where no report was open.
        recompiled: what has changed since it was compiled before, of the guard that failed; "" at the first time.
        calls: how often one call of Dynamo's frame runs it, under `repeated_blocks`. What is counted here is of all of
            them but for `nodes` and `seconds`, and so are the frame's sites and near misses.
    """

    index: int = 0
    captured: bool = True
    reason: str = ""
    cached: bool = False
    name: str = ""
    nodes: int = 0
    target: str = ""
    passes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    grad: bool = False
    policy: dict[str, Any] | None = None
    remat: dict[str, dict[str, Any]] | None = None
    peak: dict[str, Any] | None = None
    block: str = ""
    blocks: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)
    recognised: list[dict[str, str]] = field(default_factory=list)
    precision: list[dict[str, str]] = field(default_factory=list)
    sharding: dict[str, Any] | None = None
    graph_break: str = ""
    expert_loops: int = 0
    left_to: str = ""
    lost: bool = False
    attention: list[dict[str, str]] = field(default_factory=list)
    cuda_graph: str = ""
    label: str = ""
    auto: dict[str, Any] | None = None
    backward: dict[str, list[str]] = field(default_factory=dict)
    verified: dict[str, Any] | None = None
    modules: dict[str, str] = field(default_factory=dict)
    recompiled: str = ""
    pieces: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 1

    @property
    def outcome(self) -> str:
        """ "captured", "fell back: why" or "ran in eager: why", "from cache" where `cached`, what became of CUDA graphs
        where they are asked for, and where the graph breaks behind it."""
        left = "ran in eager" if self.left_to == "eager" else "fell back"
        text = "captured" if self.captured else f"{left}: {self.reason}"
        text += ", from cache" if self.cached else ""
        if self.captured and self.expert_loops:
            text += f"; sums over the experts that have tokens, read as sums over all: {self.expert_loops}"
        text += f"; CUDA graphs: {self.cuda_graph}" if self.cuda_graph else ""
        return f"{text}; graph break at {self.graph_break}" if self.graph_break else text

    def on_cuda_graph(self, text: str) -> None:
        """Note what became of CUDA graphs."""
        self.cuda_graph = text

    def on_backward(self, op: str, lowering: str) -> None:
        """Note what serves the backward of a call of `op`."""
        found = self.backward.setdefault(op, [])
        found += [lowering] if lowering not in found else []

    def on_auto(self, found: AutoPlan) -> None:
        """Note what `policy="auto"` chose."""
        self.auto = asdict(found)

    @property
    def mode(self) -> str:
        """ "training" or "inference"."""
        return "training" if self.grad else "inference"


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """What `megacpp_compile.compile` decided about a part of a model.

    Attributes:
        fqns: the modules, all of one structure; ("",) is the model itself.
        module: their class.
        parameters: number of parameters in all of them.
        treatment: "compiled" (in place, one artifact for all that guards cannot tell apart) or "eager".
        reason: why this is no repeated block, "" when it is one.
    """

    fqns: tuple[str, ...]
    module: str
    parameters: int
    treatment: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One parameter that a sharding plan pinned.

    Attributes:
        fqn: its name.
        shape: its size.
        spec: its partition spec in words, as `config.sharding.text` writes it.
        rule: the pattern that gave the spec; "" for a parameter of a fused op that no rule hits, which is a whole copy
            on every device.
        by: the fused ops that read it ("down_norm_up"), "" for one that only a rule names.
    """

    fqn: str
    shape: tuple[int, ...]
    spec: str
    rule: str
    by: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for JSON."""
        return {**asdict(self), "shape": list(self.shape)}


class Collected(Protocol):
    """What tables are made of: a `Report`, as far as they read it."""

    frames: list[Frame]
    sites: list[Site]
    misses: list[MissedFusion]
    regions: list[CompiledRegion]
    measured: dict[str, int | None] | None
    attention: list[AttentionCall]

    @property
    def predicted_step(self) -> int | None: ...
