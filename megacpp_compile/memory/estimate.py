"""`estimate`: the memory of a training step before anything is compiled or allocated.

The model runs on fake tensors, once as eager would run it and once compiled up to where Inductor would write kernels;
both times torch's saved-tensor hooks see what autograd keeps. The second count is that of the partitioned graphs of its
blocks, after our passes, each block by itself as `megacpp_compile.compile` compiles it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from megacpp_compile.backend import check_torch
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BadOptionError, NotAModuleError
from megacpp_compile.memory.fake_run import FakeRun, Saved, bytes_of
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.regional.repeated_blocks import Kind, find_kinds
from megacpp_compile.regional.split import split_by_rules
from megacpp_compile.report import collector
from megacpp_compile.report.records import Frame
from megacpp_compile.report.tables import family, table_text
from megacpp_compile.report.text import bytes_text
from megacpp_compile.targets import gpus, named_device

# Bytes of state for each trainable parameter.
OPTIMIZERS = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0, "adamw_master": 12.0, "momentum": 4.0, "sgd": 0.0}

_LEVERS = {"saved": "saved", "again": "computed again", "offloaded": "offloaded"}

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
        gradients: of the trainable parameters, in the dtype that autograd gives them.
        optimizer: state of `optimizer_name`.
        activations: by kind of block, what is outside of blocks last.
        fields: what eager autograd keeps, in bytes by what it is (`memory.fields.FIELDS`): a router's input and scores,
            dispatch, gathered rows, experts' hiddens, combine, attention, convolutions, scans, streams of a residual,
            loops over depth, the head's logits, the results of other GEMMs, the rest. Their sum is `eager`.
        device: where the step was traced; which attention runs, and so what it saves, depends on it.
        gpu, memory: the GPU by name that was estimated for, "h100", and its bytes; "" and 0 where none was named.
        levers: under a policy, by kind of block ("ablock", ..., "" between blocks) over all blocks: bytes "saved" on
            the device, "offloaded" to main memory, and recomputed ("again") of what backward reads.
        seconds: under a policy, the modelled time of what a step recomputes and moves, on an idle device.
        transient: under a policy, the most that one block takes in its forward or backward beyond what it saves.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_name: str
    activations: tuple[Activations, ...]
    device: str
    levers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    transient: int = 0
    seconds: float = 0.0
    fields: Mapping[str, int] = field(default_factory=dict)
    gpu: str = ""
    memory: int = 0

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

    @property
    def peak(self) -> int:
        """The peak of a step, as far as it can be told block by block: `total`, with what one block's backward takes,
        but activations and gradients are not all there at once. Less what runs outside of the blocks."""
        activations = self.eager if self.compiled is None else self.compiled
        away = sum(lever["offloaded"] for lever in self.levers.values())
        most = max(activations - away, self.gradients) + self.transient
        return self.parameters + self.buffers + self.optimizer + most

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, fit for JSON."""
        values = asdict(self)
        values["activations"] = list(values["activations"])
        return {**values, "eager": self.eager, "compiled": self.compiled, "total": self.total,
                "peak": self.peak}  # fmt: skip

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
        for name, size in self.fields.items():
            rows.append(("of which", name, "", bytes_text(size), ""))
        compiled = "-" if self.compiled is None else bytes_text(self.compiled)
        rows.append(("activations", "all", "", bytes_text(self.eager), compiled))
        whole = "-" if self.compiled is None else bytes_text(self.total)
        for kind, lever in self.levers.items():
            text = ", ".join(f"{bytes_text(lever[name])} {word}" for name, word in _LEVERS.items() if lever[name])
            rows.append(("policy", kind or "between blocks", "", "", text or "0 B saved"))
        rows.append(("total", "", "", bytes_text(sum(state.values()) + self.eager), whole))
        title = f"estimated memory of a step on {self.device}"
        table = table_text(title, ("what", "module", "class", "eager", "megacpp"), rows)
        return f"{table.rstrip()}\n\n{self._of_gpu()}" if self.gpu else table

    def _of_gpu(self) -> str:
        needs = self.total if self.compiled is None else self.peak
        verdict = "fits" if needs <= self.memory else "does not fit"
        size = bytes_text(self.memory)
        return (f"{self.gpu.upper()} ({size}): a step of {bytes_text(needs)} {verdict}. Traced on {self.device}: what "
                "kernels save is that device's")  # fmt: skip


def estimate(
    model: nn.Module,
    *args: Any,
    optimizer: str | float = "adamw",
    device: str | torch.device | None = None,
    compiled: bool = True,
    options: Mapping[str, Any] | Config | None = None,
    **kwargs: Any,
) -> Estimate:
    """The memory of a training step of `model(*args, **kwargs)`; nothing is allocated, and the model is left alone.

    model: a module on any device, meta included. args, kwargs: its inputs; only shapes, dtypes and devices matter.
    optimizer: a key of OPTIMIZERS ("adamw": two float32 moments; "adamw_master": and a float32 copy), or bytes a
        trainable parameter.
    device: the device to estimate for; by default the model's own, for a model on meta
        "cuda" where there is one. "a100", "h100", "h200" or "b200" need not be here: times go by the rates of that
        GPU, its memory is in the result, and the step is traced on the GPU that is here, or on the CPU.
    compiled: also count what this compiler's graphs save, at the price of tracing every kind of block.
    options: fields of `Config`, or one, for what is compiled.

    What it says is in `report.estimate` of every open `record()`, too; what is traced for it is in none.

    Where values decide how many rows an expert has, each block's experts together have those that were routed; a mask
    elsewhere picks as many rows as it could.

    Raises NotAModuleError, BadOptionError for a device or an optimizer that is none, TargetUnavailableError for one
    that is not here, EstimateError where the model branches on values or reads them as numbers, and ForwardError where
    its forward raises on those shapes.
    """
    check_torch()
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    per_parameter = _per_parameter(optimizer)
    config = Config.from_options(options, pass_names())
    parameters = list(model.parameters())
    if (gpu := gpus.named(device)) is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = _place(device, parameters)
    rules.check_model(model, config)
    kinds = split_by_rules(model, find_kinds(model), config)
    run = FakeRun(model, args, kwargs, place, kinds)
    with gpus.supposing(gpu):
        eager = run.eager(config)
        graphs = run.compiled(config) if compiled else None
    levers, transient, seconds = _levers(run.frames)
    trainable = [p for p in parameters if p.requires_grad]
    found = Estimate(
        parameters=sum(map(bytes_of, parameters)),
        buffers=sum(map(bytes_of, model.buffers())),
        gradients=sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trainable),
        optimizer=int(per_parameter * sum(p.numel() for p in trainable)),
        optimizer_name=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes a parameter",
        activations=tuple(_activations(kinds, eager, graphs)),
        device=str(place),
        levers=levers,
        transient=transient,
        seconds=seconds,
        fields=run.fields,
        gpu=gpu.name if gpu else "",
        memory=gpu.memory if gpu else 0,
    )
    collector.emit_estimate(found.to_dict())
    return found


def _place(device: str | torch.device | None, parameters: Sequence[nn.Parameter]) -> torch.device:
    place = named_device(device if device is not None else next((p.device for p in parameters), "cpu"))
    return named_device("cuda" if torch.cuda.is_available() else "cpu") if place.type == "meta" else place


def _per_parameter(optimizer: str | float) -> float:
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool) and 0 <= optimizer < math.inf:
        return float(optimizer)
    wanted = "bytes a trainable parameter, or one of " + ", ".join(map(repr, OPTIMIZERS))
    raise BadOptionError("optimizer", optimizer, wanted, tuple(OPTIMIZERS))


def _levers(frames: Sequence[Frame]) -> tuple[dict[str, dict[str, int]], int, float]:
    """(`Estimate.levers`, `Estimate.transient`, `Estimate.seconds`) of the frames of all blocks. The first block may be
    compiled by itself, as its input asks for no gradient: of frames of one place in the code that keeps the most counts
    for all."""
    places: dict[tuple[str, str], Frame] = {}
    for frame in frames:
        if frame.remat is not None and frame.peak is not None:
            key = frame.block, frame.name
            if key not in places or _kept(places[key]) < _kept(frame):
                places[key] = frame
    found: dict[str, dict[str, int]] = {}
    for frame in places.values():
        for kind, numbers in (frame.remat or {}).items():
            levers = found.setdefault(kind, dict.fromkeys(_LEVERS, 0))
            for name in _LEVERS:
                levers[name] += _times(frame) * numbers[name]
    seconds = sum(_times(f) * n["seconds"] for f in places.values() for n in (f.remat or {}).values())
    return found, max(((f.peak or {})["transient"] for f in places.values()), default=0), seconds


def _times(frame: Frame) -> int:
    """How often a step runs it, beyond the calls that its numbers are of."""
    return max(frame.blocks, 1) if frame.calls == 1 else 1


def _kept(frame: Frame) -> int:
    return sum(numbers["saved"] for numbers in (frame.remat or {}).values())


def _activations(kinds: Sequence[Kind], eager: Saved, graphs: Saved | None) -> Iterator[Activations]:
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
