"""`replace_linears`: puts Transformer Engine's modules where a plan asks for fp8, with the model's own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.config.rules import announce
from megacpp_compile.errors import (
    BadOptionError,
    CompiledTooEarlyError,
    EngineError,
    NotAModuleError,
    TargetRecipeError,
)
from megacpp_compile.fx.compiled_models import compiled_part
from megacpp_compile.precision import engine
from megacpp_compile.precision.checkpoint import guard
from megacpp_compile.precision.survey import DEFAULT_EXCLUSIONS, Found, survey, why_bf16
from megacpp_compile.report import log
from megacpp_compile.report.tables import table_text
from megacpp_compile.report.text import plural
from megacpp_compile.targets import chips

__all__ = ["DEFAULT_EXCLUSIONS", "Conversion", "ConversionTable", "replace_linears"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row: a linear, a norm in front of one, or an attention's core.

    Attributes:
        fqn: its name.
        module: its class before.
        role: one of `roles.ROLES`.
        shape: (out features, in features); (width,) of a norm.
        requested: recipe the plan asks for.
        rule: the pattern or role that asks for it.
        done: whether it was replaced.
        now: the module in its place and that one's recipe, "" if it was not replaced.
        reason: why it was not replaced, or, of a replaced norm, which linear computes it.
    """

    fqn: str
    module: str
    role: str
    shape: tuple[int, ...]
    requested: str
    rule: str
    done: bool
    now: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConversionTable:
    """Every linear of a model, replaced or not, and cores that are asked for in fp8; `str(table)` is a table.

    Attributes:
        rows: in the order of the model; norms last.
        reason: why no linear could be replaced, "" where some could.
    """

    rows: tuple[Conversion, ...]
    reason: str = ""

    def __iter__(self) -> Iterator[Conversion]:
        return iter(self.rows)

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the linears and norms that were replaced."""
        return tuple(row.fqn for row in self.rows if row.done)

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of those that were not."""
        return {row.fqn: row.reason for row in self.rows if not row.done}

    def to_dict(self) -> dict[str, Any]:
        return {"reason": self.reason, "rows": [asdict(row) for row in self.rows]}

    def summary(self) -> str:
        text = f"{len(self.done)} of {plural(len(self.rows), 'module')} replaced"
        return f"{text}: {self.reason}" if self.reason else text

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            size = "x".join(map(str, row.shape))
            rows.append((row.fqn, size, row.role, row.rule, row.requested, row.now or "left", row.reason or "-"))
        headers = ("module", "size", "role", "rule", "asked", "is now", "reason")
        return (table_text("linears", headers, rows) if rows else "") + f"precision: {self.summary()}"


def replace_linears(
    model: nn.Module,
    plan: Any,
    exclude: Sequence[str] = DEFAULT_EXCLUSIONS,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    target: str = "auto",
    tp_comm_overlap: bool = False,
) -> ConversionTable:
    """Replace linears that `plan` wants in fp8 by Transformer Engine's modules, in place; call it after construction,
    before FSDP and compilation. Parameters stay the same objects under the same names, and the state dict keeps its
    keys and values.

    plan: a `PrecisionPlan`, or what `PrecisionPlan.of` takes.
    exclude: linears to leave alone. Words of DEFAULT_EXCLUSIONS match inside any segment of a name; others are globs
        over whole names (`config.globs`). To add to the defaults: (*DEFAULT_EXCLUSIONS, "...").
    example_inputs: arguments of the model's forward, as a tuple or by name. With them, an RMSNorm that one linear alone
        reads is folded into it (`te.LayerNormLinear`), for which the model runs once on shapes. Without, none is.
    target: "auto" goes by the parameters' device. "cuda" is for a model that is to be moved there.
    tp_comm_overlap: whether the run overlaps tensor-parallel communication by Transformer Engine's user buffers, which
        have to be initialised by then.

    Returns the conversion table, which has every linear, and every attention's core that the plan asks for in fp8,
    which is refused with the reason. On CPU and TPU, and where Transformer Engine is not available,
    nothing is replaced, and one line in the log says why. Raises, before anything is changed, NotAModuleError;
    BadOptionError for a plan that is none; RuleWithoutHitError for a rule of the plan or a glob of `exclude` that hits
    nothing; TargetRecipeError for a plan that asks what the device pins otherwise; EngineError for
    `tp_comm_overlap` without user buffers; and CompiledTooEarlyError for a model that is compiled.
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    compiled = compiled_part(model)
    if compiled is not None:
        raise CompiledTooEarlyError(*compiled, "replace_linears")
    plan = PrecisionPlan.of(plan)
    if plan is None:
        raise BadOptionError("plan", None, "a PrecisionPlan, or the name of a recipe")
    if tp_comm_overlap:
        check_user_buffers()
    found = survey(plan, model, exclude, target)
    nowhere, level = why_bf16(model, target), log.logger.info
    rht = check_recipes(plan, None if nowhere else chips.current())
    wanted = sorted({f.effective for f in found} - {"bf16"})
    if not nowhere and wanted:
        te, nowhere = engine.load()
        chip = chips.current()
        nowhere = nowhere or next(filter(None, (chip.lacks(recipe) for recipe in wanted)), "") if chip else nowhere
        nowhere = nowhere or next(filter(None, (engine.lacks(te, recipe) for recipe in wanted)), "")
        level = log.logger.warning if nowhere else level  # fp8 was asked for, on a device that may have it
    if nowhere:
        level("%s; replace_linears left all %d linears alone", plan.describe("cuda", nowhere), len(found))
        rows = (*(_row(f, "", f.reason or nowhere) for f in found), *_cores(model, plan, nowhere))
        return ConversionTable(rows, nowhere)
    announce(plan, "cuda")
    table = ConversionTable((*_replace(model, found, example_inputs, rht), *_cores(model, plan)))
    if "fp8_delayed" in wanted:
        from megacpp_compile.precision.te_modules import StepAutocast

        StepAutocast(model, "fp8_delayed")
    guard(model)
    if tp_comm_overlap:
        log.logger.warning("tp_comm_overlap: no nn.Linear is tensor parallel, so nothing overlaps in what was replaced")
    log.logger.info("%s", table)
    return table


def check_recipes(plan: PrecisionPlan, chip: chips.Chip | None) -> bool | None:
    """`disable_rht` of "nvfp4" as the plan has it on `chip`, None for Transformer Engine's default. chip: None where
    the plan is not carried out.

    Raises TargetRecipeError where the plan asks for what the chip pins otherwise.
    """
    if chip is None or "nvfp4" not in plan.recipes():
        return plan.disable_rht
    pinned = chip.pinned("nvfp4", "disable_rht", plan.disable_rht)
    if plan.disable_rht is not None and pinned != plan.disable_rht:
        raise TargetRecipeError(
            chip.label, "nvfp4", f"disable_rht={plan.disable_rht} is asked for, and {chip.why_pinned['nvfp4']}",
            f"Leave disable_rht out of the plan, or set it to {pinned}.",
        )  # fmt: skip
    return bool(pinned) if pinned is not None else None


def check_user_buffers() -> None:
    """Raise EngineError unless Transformer Engine's user buffers are initialised."""
    if not engine.user_buffers_initialised():
        raise EngineError(
            "tp_comm_overlap",
            "Transformer Engine's user buffers are not initialised, and its modules would wait for them",
            "Call transformer_engine.pytorch.initialize_ub(...) before, or turn tp_comm_overlap off.",
        )


def _row(f: Found, now: str, reason: str) -> Conversion:
    return Conversion(f.fqn, f.module, f.role, f.shape, f.requested, f.rule, bool(now), now, reason)


def _replace(model: nn.Module, found: Sequence[Found], inputs: Any, rht: bool | None) -> Iterator[Conversion]:
    """Carry it out, row by row; norms first, as one decides what its linear becomes."""
    convertible = {f.fqn: f for f in found if f.effective != "bf16" and f.holds == "bf16"}
    norms = list(_fold(model, convertible, inputs, rht))
    folded = {row.reason.removeprefix("computed by ") for row in norms if row.done}
    for f in found:
        if f.fqn in folded:
            yield _row(f, f"te.LayerNormLinear, {f.effective}", "")
        elif f.fqn in convertible:
            from megacpp_compile.precision import te_modules

            _put(model, f.fqn, te_modules.linear(f.found, f.effective, rht))  # type: ignore[arg-type]
            yield _row(f, f"te.Linear, {f.effective}", "")
        else:
            yield _row(f, "", f.reason or ("" if f.holds == "bf16" else f"replaced before: {f.holds}"))
    yield from norms


def _cores(model: nn.Module, plan: PrecisionPlan, nowhere: str = "") -> Iterator[Conversion]:
    """A row for each attention's core that the plan asks for in fp8, and one where it asks and no module is a core's:
    refused, each with the reason. nowhere: why nothing is replaced."""
    cores = [(fqn, type(module).__name__) for fqn, module in model.named_modules() if _is_core(module)]
    why = "Transformer Engine's fp8 attention (fp8_dpa of its recipes) is not switched on: it has not run here"
    said = [(fqn, kind, plan.decide(fqn, "attention_core")) for fqn, kind in cores]
    asked = [(fqn, kind, one.requested, one.rule) for fqn, kind, one in said]
    if not cores:  # a rule over names is about modules, the role about any core
        asked = [("(attention cores)", "", dict(plan.roles)["attention_core"], "role attention_core")]
        why = "no module is Transformer Engine's DotProductAttention: attention in code has no fp8 core"
    for fqn, kind, requested, rule in asked:
        if requested != "bf16":
            log.logger.warning("%s: %s asks for %s: %s", fqn, rule, requested, nowhere or why)
            yield Conversion(fqn, kind, "attention_core", (), requested, rule, False, "", nowhere or why)


def _is_core(module: nn.Module) -> bool:
    return type(module).__name__ == "DotProductAttention" and (
        engine.is_of_transformer_engine(module) or type(module).__module__.startswith("megacpp_compile.")
    )


def _fold(
    model: nn.Module, convertible: Mapping[str, Found], inputs: Any, rht: bool | None
) -> Iterator[Conversion]:
    if inputs is None or not convertible:
        return
    from megacpp_compile.precision import te_modules
    from megacpp_compile.precision.norms import Deferred, as_rms_norm, readers

    pairs, refused = readers(model, inputs)
    for fqn, module in [(name, m) for name, m in model.named_modules() if name in pairs or name in refused]:
        linear, reason = convertible.get(pairs.get(fqn, "")), refused.get(fqn, "")
        if linear is None and not reason:
            reason = f"read by {pairs[fqn]}, which stays in bf16"
        elif linear is not None and module.weight.dtype != linear.found.weight.dtype:
            reason = f"in {module.weight.dtype}, its linear in {linear.found.weight.dtype}"
        width = tuple(module.weight.shape)
        kind, role = type(module).__name__, "norm"
        if reason or linear is None:
            yield Conversion(fqn, kind, role, width, "bf16", f"role {role}", False, "", reason)
            continue
        what = as_rms_norm(module)
        assert what is not None
        kept = Deferred(module)
        settings = what.eps, what.zero_centered, linear.effective, rht
        new = te_modules.normed_linear(linear.found, kept, *settings)  # type: ignore[arg-type]
        _put(model, fqn, kept)
        _put(model, linear.fqn, new)
        now = f"te.LayerNormLinear, {linear.effective}"
        yield Conversion(fqn, kind, role, width, linear.requested, linear.rule, True, now, f"computed by {linear.fqn}")


def _put(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
