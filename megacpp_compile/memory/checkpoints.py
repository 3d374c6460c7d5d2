"""`apply_checkpoints`: has a model that runs in eager recompute its blocks as a `CheckpointingPolicy` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megacpp_compile._torch.modules import COMPILED, checkpoint_wrapped, checkpoint_wrapper, compiled_call
from megacpp_compile.config import globs
from megacpp_compile.config.checkpointing import KINDS, CheckpointingPolicy
from megacpp_compile.errors import (
    AlreadyCompiledError,
    BadOptionError,
    BlockNotFoundError,
    CheckpointedTwiceError,
    NotAModuleError,
)
from megacpp_compile.fx.module_names import named_modules
from megacpp_compile.precision.checkpoint import BlockCheckpoint, checkpoint_for, guard
from megacpp_compile.regional.repeated_blocks import find_kinds
from megacpp_compile.report import log
from megacpp_compile.report.tables import table_text

# What eager can carry out of `config.checkpointing.ENTRIES`.
EAGER = ("none", "selective", "full", "full_plus_norms")
_GRAPH = "the rest needs a graph, options={'policy': ...} of the compiler"


@dataclass(frozen=True)
class CheckpointRow:
    """One block, or one layer.

    Attributes:
        fqn: its name.
        kind: "ablock", "mblock", "eblock" or "rblock"; "" where every kind has the same entry.
        entry: the policy's entry in force.
        checkpoint: what recomputes it; None where nothing does.
        reason: why nothing does, "" where something does.
    """

    fqn: str
    kind: str
    entry: str
    checkpoint: BlockCheckpoint | None
    reason: str = ""


@dataclass(frozen=True)
class CheckpointTable:
    """The blocks of a model and how each is recomputed; `str(table)` is a table of what is known by now.

    Attributes:
        rows: in the order of the model.
        guarded: how many modules of Transformer Engine refuse torch's checkpoint in fp8, beside `replace_linears`'s.
    """

    rows: tuple[CheckpointRow, ...]
    guarded: int = 0

    def __iter__(self) -> Iterator[CheckpointRow]:
        return iter(self.rows)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that backward recomputes."""
        return tuple(row.fqn for row in self.rows if row.checkpoint is not None)

    @property
    def relaxed(self) -> tuple[str, ...]:
        """Names of the blocks that route, by what their calls have shown: torch compares no shapes of theirs."""
        return tuple(row.fqn for row in self.rows if row.checkpoint is not None and row.checkpoint.relaxed)

    @property
    def flips(self) -> int:
        """Under `count_flips`: entries of choices that came out otherwise when made again, over all calls."""
        return sum(row.checkpoint.flips for row in self.rows if row.checkpoint is not None)

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            how = row.reason or "-"
            if row.checkpoint is not None:
                routes = {True: "choices kept, shapes not compared", False: "not watched", None: "no choice seen"}
                how = routes[row.checkpoint.routes]
                how += f", {row.checkpoint.flips} flips" if row.checkpoint.count_flips else ""
            done = "left" if row.checkpoint is None else "recomputed"
            rows.append((row.fqn, row.kind or "any", row.entry, done, how))
        return table_text("checkpoints", ("block", "kind", "entry", "is", "routing"), rows)


def apply_checkpoints(
    model: nn.Module,
    policy: Any = "full_plus_norms",
    *,
    blocks: str | Sequence[str] | None = None,
    block_kinds: Mapping[str, str] | None = None,
    routes: Mapping[str, bool] | None = None,
    count_flips: bool = False,
) -> CheckpointTable:
    """Wrap the repeated blocks of `model` in place, so that backward recomputes them as `policy` says; for models that
    run in eager, as those with Transformer Engine's modules. Names in the state dict stay. Call it after
    `replace_linears`, and before FSDP and compilation.

    policy: what `CheckpointingPolicy.of` takes. Entries mean in eager:
        "full_plus_norms": a layer (a repeated block, as `compile` finds them) is recomputed from its input;
        "full": each child of a layer that holds a matrix is, and norms beside them are not;
        "selective": such a child keeps results of GEMMs and attention cores and recomputes the rest; one in fp8 by
        Transformer Engine is recomputed whole, as its GEMMs are not torch's;
        "none", and "never" of the last layer: everything is kept.
        `fp8_wrapper` says whose checkpoint blocks in fp8 go through. Other entries, budgets, limits and offloading need
        a graph (`options={"policy": ...}`).
    blocks: globs over the names of the layers, where structure finds them wrongly.
    block_kinds: glob over names of a layer's children -> kind, needed where the kinds' entries differ; eager shows no
        graph to tell a kind by.
    routes: glob over names of blocks -> whether they route tokens, for blocks where it is known; see
        `precision.checkpoint.checkpoint_for`. By default every recomputed call is watched.
    count_flips: debugging: count in the table what a second choice would have made otherwise.

    Modules of Transformer Engine that the model brought raise StockCheckpointError from now on where torch's own
    checkpoint is about to run them in fp8.

    Returns the table. Raises, before anything is changed, NotAModuleError; BadOptionError for a policy that eager
    cannot carry out and a child whose kind is not known; CheckpointedTwiceError; BlockNotFoundError for a glob without
    a hit or a model without repeated blocks; AlreadyCompiledError for a compiled model.
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    plan = _checked(CheckpointingPolicy.of(policy))
    known = dict(reversed(list(named_modules(model))))  # of a wrapper and what it wraps the wrapper
    every = [name for name in known if name]
    for pattern in globs.without_hit({**(block_kinds or {}), **(routes or {})}, every):
        raise BlockNotFoundError(pattern, every)
    for module in (m for m in model.modules() if compiled_call(m) is not None or COMPILED in m._modules):
        raise AlreadyCompiledError("", type(module).__name__)
    layers = _layers(model, blocks)
    found = [
        planned for fqn, layer in layers
        for planned in _planned(fqn, layer, plan, block_kinds or {}, last=fqn == layers[-1][0])
    ]  # fmt: skip
    rows = []
    for fqn, module, kind, entry, reason in found:
        again = None
        if not reason:
            hit = globs.longest_hit(routes or {}, fqn)
            asked = (routes or {})[hit[1]] if hit else None
            again = checkpoint_for(module, plan.fp8_wrapper, asked, count_flips, selective=entry == "selective")
            _wrap(model, module, again)
        rows.append(CheckpointRow(fqn, kind, entry, again, reason))
    table = CheckpointTable(tuple(rows), guard(model))
    log.logger.info("%s", table)
    return table


def _checked(policy: CheckpointingPolicy | None) -> CheckpointingPolicy:
    """Raise BadOptionError for what needs a graph."""
    if policy is None:
        raise BadOptionError("policy", None, "a CheckpointingPolicy or one of " + ", ".join(map(repr, EAGER)), EAGER)
    for kind in KINDS:
        if (entry := getattr(policy, kind)) not in EAGER:
            wanted = f"in eager one of {', '.join(map(repr, EAGER))}: {_GRAPH}"
            raise BadOptionError(f"policy.{kind}", entry, wanted, EAGER)
    for name, default in (("budget", None), ("peak_gib", None), ("offload", "none"), ("recompute", ())):
        if getattr(policy, name) != default:
            raise BadOptionError(f"policy.{name}", getattr(policy, name), f"{default!r} in eager: {_GRAPH}")
    return policy


def _layers(model: nn.Module, blocks: str | Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """(name, module) of the repeated blocks in the order of the model, once each. Raises BlockNotFoundError, and
    CheckpointedTwiceError for one that is checkpointed already."""
    kinds = find_kinds(model, [blocks] if isinstance(blocks, str) else blocks)
    names = {id(m): fqn for kind in kinds for fqn, m in zip(kind.fqns, kind.modules, strict=True)}
    layers = [(names[id(m)], m) for m in model.modules() if id(m) in names]
    if not layers:
        raise BlockNotFoundError("a repeated block", [name for name, _ in named_modules(model) if name])
    for fqn, layer in layers:
        for m in layer.modules():
            if checkpoint_wrapped in m._modules or getattr(m, "gradient_checkpointing", False) is True:
                raise CheckpointedTwiceError(fqn, type(m).__name__)
    return layers


def _planned(
    fqn: str, layer: nn.Module, policy: CheckpointingPolicy, block_kinds: Mapping[str, str], last: bool
) -> Iterator[tuple[str, nn.Module, str, str, str]]:
    """(name, module, kind, entry, why it is left alone) of a layer, or of the children that its entries speak of."""
    entries = {kind: policy.entry(kind, last) for kind in KINDS}
    distinct = set(entries.values())
    if len(distinct) == 1 and distinct <= {"none", "never", "full_plus_norms"}:
        (entry,) = distinct
        yield fqn, layer, "", entry, _why_kept(entry, last)
        return
    for name, child in layer.named_children():
        whole = f"{fqn}.{name}".strip(".")
        if not any(p.dim() > 1 for p in child.parameters()):
            continue  # a norm, which "full" leaves alone
        hit = globs.longest_hit(block_kinds, whole)
        kind = block_kinds[hit[1]] if hit else ""
        if not kind and len(distinct) > 1:
            wanted = f"a kind for {whole!r}, one of {', '.join(map(repr, KINDS))}: the kinds' entries differ, and eager"
            raise BadOptionError("block_kinds", dict(block_kinds), f"{wanted} has no graph to tell one by")
        entry = entries[kind] if kind else next(iter(distinct))
        reason = _why_kept(entry, last)
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            reason = f"a {type(child).__name__}, which nobody calls: name what is in it as blocks"
        yield whole, child, kind, entry, reason


def _why_kept(entry: str, last: bool) -> str:
    if entry not in ("none", "never"):
        return ""
    return "last layer: its backward comes at once" if last and entry == "never" else "the policy says so"


def _wrap(model: nn.Module, module: nn.Module, again: BlockCheckpoint) -> None:
    """Put torch's wrapper in every place of `module` in `model`."""
    wrapper = checkpoint_wrapper(module, checkpoint_fn=again)
    for parent in list(model.modules()):
        if parent is not wrapper:
            for name, child in parent._modules.items():
                if child is module:
                    parent._modules[name] = wrapper
