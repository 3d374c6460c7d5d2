"""Every error a user can meet, one class each; the message says what, where, and what to do.

All derive from `MegacppError`. The constructors take the facts, keep them as attributes of the same name, and write the
message, so that no caller spells a message of its own. All can be pickled and copied. This file imports nothing of the
package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_MISSES_SHOWN = 8  # a message with one line per layer of a deep model would hide its own first line


class Miss(Protocol):
    """What an error shows of a missed fusion: `report.records.MissedFusion` is one."""

    @property
    def fqn(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def reason(self) -> str: ...


def closest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was most likely meant to be, or None; case is ignored."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _close_patterns(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """The patterns closest to `pattern` that hit some of `names`: those with a star for every number."""
    starred = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return tuple(difflib.get_close_matches(pattern, starred, n=3, cutoff=0.5))


def _did_you_mean(choice: str | None) -> str:
    return f" Did you mean {choice!r}?" if choice else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _some(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    rest = len(lines) - _MISSES_SHOWN
    return lines[:_MISSES_SHOWN] + ([f"  and {rest} more"] if rest > 0 else [])


def _place(fqn: str, source: str) -> str:
    """`module (file.py:12, in forward: ...)`, from whichever of the two is known."""
    if fqn and source:
        return f"{fqn} ({source})"
    return fqn or source or "an unresolved module"


def _rebuild(cls: type[MegacppError], args: tuple[Any, ...], state: dict[str, Any]) -> MegacppError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class MegacppError(Exception):
    """Base of every error raised by this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the subclass's constructor with the finished message.
        return _rebuild, (type(self), self.args, self.__dict__)


def wrapped_in(error: BaseException) -> MegacppError | None:
    """The error of this package that Dynamo or Inductor wrapped into `error`; None where there is none."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, MegacppError):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    return inner


class UnknownOptionError(MegacppError, ValueError):
    """A key of `options` that is no field of `Config`.

    Args:
        key: the key as given.
        valid: every key that is accepted.
        of_inductor: whether it is a setting of Inductor's, and so no misspelling of ours.
        renamed: keys of earlier releases -> what they are called now, for the closest-match hint.
    """

    def __init__(
        self, key: object, valid: Sequence[str], of_inductor: bool = False, renamed: Mapping[str, str] | None = None
    ) -> None:
        self.key, self.valid = key, tuple(valid)
        old = dict(renamed or {})
        found = None if of_inductor else closest(str(key), (*valid, *old))
        self.closest = old.get(found, found) if found is not None else None
        super().__init__(
            f"unknown option {key!r} in torch.compile(..., backend='megacpp', options=...)."
            f"{_did_you_mean(self.closest)} Valid options: {_listed(valid)}. "
            "Inductor's own settings go under 'inductor'."
        )


class BadOptionError(MegacppError, ValueError, TypeError):
    """An option or environment variable with a value of the wrong type or outside its domain.

    Args:
        key: the option (`"verify"`, `"require['mla_rope_q']"`) or variable (`"MEGACPP_STRICT"`).
        got: the value as given.
        wanted: what is accepted, in words.
        valid: the accepted strings, for the closest-match hint; may be empty.
        meant: the hint, where the caller knows better than string similarity.
    """

    def __init__(self, key: str, got: object, wanted: str, valid: Sequence[str] = (), meant: str | None = None) -> None:
        self.key, self.got, self.wanted, self.valid = key, got, wanted, tuple(valid)
        self.closest = meant or (closest(got, valid) if isinstance(got, str) else None)
        what = "environment variable" if key.startswith("MEGACPP_") else "option"
        super().__init__(
            f"{what} {key}: got {got!r} ({type(got).__name__}), wanted {wanted}.{_did_you_mean(self.closest)}"
        )


class UnknownPassError(MegacppError, ValueError):
    """A pass name that no pass has.

    Args:
        name: the name as given.
        known: every pass there is.
        where: the option or environment variable that holds the name.
    """

    def __init__(self, name: str, known: Sequence[str], where: str) -> None:
        self.name, self.known, self.where, self.closest = name, tuple(known), where, closest(name, known)
        super().__init__(f"unknown pass {name!r} in {where}.{_did_you_mean(self.closest)} Passes: {_listed(known)}.")


class RequirementError(MegacppError):
    """`require={pass: count}` was not met.

    Args:
        pass_name: the pass.
        wanted: the count required.
        fired: the count reached.
        misses: the nearest misses of that pass; the message shows the first few.
        frames: frame -> how often the pass fired in it, where that is known.
        breaks: the graph breaks between the frames, a line each.
    """

    def __init__(
        self, pass_name: str, wanted: int, fired: int, misses: Sequence[Miss] = (),
        frames: Mapping[str, int] | None = None, breaks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.pass_name, self.wanted, self.fired, self.misses = pass_name, wanted, fired, tuple(misses)
        self.frames, self.breaks = dict(frames or {}), tuple(breaks)
        counts = f"the pass fired {_times(fired)}, wanted {_times(wanted)}."
        lines = [f"require={{{pass_name!r}: {wanted}}} was not met: {counts}"]
        shown = [f"  in {frame}: {_times(count)}" for frame, count in self.frames.items()]
        lines += _some(shown)
        if fired > wanted:
            lines.append("Raise the count, or leave the pass out with 'disable'.")
        else:
            near = (f"  {_place(m.fqn, m.source)}, node {m.node or '?'}: {m.reason} [{m.tag}]" for m in self.misses)
            lines += ["Nearest misses:", *_some(list(near))] if misses else []
            lines += [f"  {line}" for line in self.breaks[:_MISSES_SHOWN]]
            nothing = "Nothing in the graph came near the pattern"
            nothing += ": check that the pass is enabled and the code is compiled."
            lines.append("Rewrite the model where a miss says so, or lower the count." if misses else nothing)
        super().__init__("\n".join(lines))


class TargetUnavailableError(MegacppError):
    """The target asked for cannot be used on this machine.

    Args:
        target: `"cpu"`, `"cuda"` or `"tpu"`.
        missing: what is missing ("the package triton", "a CUDA device").
        install: how to get it ("pip install triton").
    """

    def __init__(self, target: str, missing: str, install: str) -> None:
        self.target, self.missing, self.install = target, missing, install
        super().__init__(
            f"target {target!r} is not available: {missing} is missing. To get it: {install}. "
            "Or let options={'target': 'auto'} choose what is there."
        )


class TargetRecipeError(MegacppError, ValueError):
    """A plan asks of a recipe what is refused on the device that is to run it.

    Args:
        target: label of the device, "sm_121a".
        recipe: the recipe.
        reason: why it is refused, as a sentence without its full stop.
        remedy: what to do, as a sentence.
    """

    def __init__(self, target: str, recipe: str, reason: str, remedy: str) -> None:
        self.target, self.recipe, self.reason, self.remedy = target, recipe, reason, remedy
        super().__init__(f"precision: {recipe!r} on {target}: {reason}. {remedy}")


class TargetMismatchError(MegacppError, ValueError):
    """Measurements or evidence of different devices were to be merged or compared.

    Args:
        what: what was to become of them, "one page of benchmarks".
        labels: the labels of the devices.
    """

    def __init__(self, what: str, labels: Sequence[str]) -> None:
        self.what, self.labels = what, tuple(labels)
        super().__init__(
            f"{what} would merge rows of {' and '.join(self.labels)}: figures and evidence of one target say nothing "
            "of another. Give the rows of one target at a time."
        )


class TorchTooOldError(MegacppError):
    """The installed torch is older than this package supports.

    Args:
        found: the version installed.
        needed: the oldest version that is supported.
    """

    def __init__(self, found: str, needed: str = "2.9") -> None:
        self.found, self.needed = found, needed
        super().__init__(
            f"torch {found} is too old for the megacpp backend, which needs {needed} or newer: "
            f"pip install 'torch>={needed}'."
        )


class TorchInternalsError(MegacppError):
    """Internal: the installed torch lacks a private symbol that this package uses. What was asked for then goes
    without it wherever it can, and this is the reason in the report; the user meets it where nothing else serves.

    Args:
        symbol: where torch had it.
        found: the version of torch.
        use: what it is for, as a noun.
        consequence: what happens without it, as a sentence.
    """

    def __init__(self, symbol: str, found: str, use: str, consequence: str) -> None:
        self.symbol, self.found, self.use, self.consequence = symbol, found, use, consequence
        super().__init__(f"torch {found} has no {symbol} (for {use}): {consequence}")


class VerificationError(MegacppError):
    """`verify="each"` found a pass that changed a result beyond its tolerance.

    Args:
        pass_name: the pass.
        fqn: module of the site, "" when unresolved.
        source: source line of the site, "" when unknown.
        tensor: which result differs ("output 0", "grad of q_proj.weight").
        error: the error measured.
        tolerance: the error allowed, in the same measure.
    """

    def __init__(self, pass_name: str, fqn: str, source: str, tensor: str, error: float, tolerance: float) -> None:
        self.pass_name, self.fqn, self.source = pass_name, fqn, source
        self.tensor, self.error, self.tolerance = tensor, error, tolerance
        super().__init__(
            f"pass {pass_name!r} changed {tensor} at {_place(fqn, source)}: "
            f"error {error:.3g}, tolerance {tolerance:.3g}. "
            f"Turn the pass off with options={{'disable': {pass_name!r}}} and report the module."
        )


class UnfoundedSiteError(MegacppError):
    """A pass reported an op that it has not put into the graph; raised under `strict`.

    Args:
        pass_name: the pass.
        op: qualified name of the op.
        node: name of the node it was said to be.
        fqn: module of the site, "" when unresolved.
        source: source line of the site, "" when unknown.
        problem: what is wrong, as the rest of a sentence.
    """

    def __init__(self, pass_name: str, op: str, node: str, fqn: str, source: str, problem: str) -> None:
        self.pass_name, self.op, self.node = pass_name, op, node
        self.fqn, self.source, self.problem = fqn, source, problem
        super().__init__(
            f"pass {pass_name!r} reported {op} ({node}) at {_place(fqn, source)}, but {problem}. "
            f"This is a defect of megacpp_compile: turn the pass off with options={{'disable': {pass_name!r}}}."
        )


class NotLoweredError(MegacppError):
    """A `megacpp::` op was handed to a backend without a lowering; a defect of this package.

    Args:
        op: the op's qualified name.
        target: the target compiled for.
        fqn: module of the node, "" when unresolved.
        source: source line of the node, "" when unknown.
    """

    def __init__(self, op: str, target: str, fqn: str = "", source: str = "") -> None:
        self.op, self.target, self.fqn, self.source = op, target, fqn, source
        super().__init__(
            f"{op} at {_place(fqn, source)} was left without a lowering for target {target!r}. "
            "Every op has at least its reference lowering, so this is a defect: please report it, "
            "and disable the pass that made the op."
        )


class BlockKindError(MegacppError, ValueError):
    """A pattern of `block_kinds` that hits no module.

    Args:
        pattern: the pattern as given.
        close: names of modules that it may have been meant for.
    """

    def __init__(self, pattern: str, close: Sequence[str]) -> None:
        self.pattern, self.close = pattern, tuple(close)
        super().__init__(
            f"block_kinds: the pattern {pattern!r} hits no module of the compiled code. Names there: "
            f"{_listed(self.close)}. Patterns are globs over the full name of a block, e.g. 'model.layers.*.mixer'."
        )


class TwoPoliciesError(MegacppError, ValueError):
    """Something beside the policy also says what backward recomputes.

    Args:
        what: what else says it, in words.
        remedy: what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"options['policy'] decides what backward recomputes, and so does {what}: {remedy}.")


class StagesOffError(MegacppError, ValueError):
    """Inductor's settings switch off a stage that this package's passes are part of, under `strict`.

    Args:
        settings: their names.
        problem: what does not run, in words.
    """

    def __init__(self, settings: Sequence[str], problem: str) -> None:
        self.settings, self.problem = tuple(settings), problem
        super().__init__(
            f"{problem}. Set {'it' if len(settings) == 1 else 'them'} to True, choose another mode than 'lite', or "
            "compile without 'strict': Inductor then compiles the frame alone."
        )


class PeakUnreachableError(MegacppError):
    """A limit on peak memory that no plan of what to recompute meets.

    Args:
        limit: bytes asked for.
        lowest: bytes of the lowest peak that can be promised.
        before: bytes of it that are allocated before the step.
    """

    def __init__(self, limit: int, lowest: int, before: int) -> None:
        self.limit, self.lowest, self.before = limit, lowest, before
        asked, least, given = (f"{n / 2**30:.3g} GiB" for n in (limit, lowest, before))
        super().__init__(
            f"policy.peak_gib: {asked} cannot be met. The lowest peak that can be promised is {least}, of which "
            f"{given} are allocated before the step. Make the batch smaller, shard the model, or offload."
        )


class PackageMissingError(MegacppError, ImportError):
    """Something that was asked for needs a package that cannot be imported.

    Args:
        package: its name.
        asked: what asked for it.
        problem: what importing it said, "" for nothing.
    """

    def __init__(self, package: str, asked: str, problem: str = "") -> None:
        self.package, self.asked, self.problem = package, asked, problem
        super().__init__(
            f"{asked} needs the package {package!r}, which cannot be imported{f' ({problem})' if problem else ''}. "
            "Install it, or ask for something else."
        )


class NotAModuleError(MegacppError, TypeError):
    """`megacpp_compile.compile`, `estimate` or `explain` was given something that is no model.

    Args:
        got: what it was given.
    """

    def __init__(self, got: object) -> None:
        self.got = type(got).__name__
        super().__init__(
            f"wanted a torch.nn.Module, got {self.got}. "
            "For a function: torch.compile(function, backend='megacpp', options=...)."
        )


class AlreadyCompiledError(MegacppError):
    """A module in the model is compiled already, so that compiling it by blocks would change nothing there.

    Args:
        fqn: its name in the model, "" for the model itself.
        module: its class.
    """

    def __init__(self, fqn: str, module: str) -> None:
        self.fqn, self.module = fqn, module
        super().__init__(
            f"{fqn or 'the model'} ({module}) is compiled already, by torch.compile, Module.compile or an earlier "
            "megacpp_compile.compile. Compile once, or begin with a model that is not compiled."
        )


class CompiledTooEarlyError(MegacppError):
    """A model that is compiled was to have modules replaced, which compiled code may not see.

    Args:
        fqn: the compiled module's name in the model, "" for the model itself.
        module: its class.
        asked: what was to replace modules.
    """

    def __init__(self, fqn: str, module: str, asked: str) -> None:
        self.fqn, self.module, self.asked = fqn, module, asked
        super().__init__(
            f"{asked} came after compilation: {fqn or 'the model'} ({module}) is compiled. Call {asked} first, then "
            "torch.compile or megacpp_compile.compile."
        )


class AdapterError(MegacppError, ValueError):
    """Something that an adapter of another library cannot do with what is installed, or with what it is given.

    Args:
        what: what was asked for.
        reason: why it cannot be.
        remedy: what to do.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        super().__init__(f"{what}: {reason}. {remedy}")


class LayoutError(MegacppError, ValueError):
    """A pattern of layers, or a pipeline stage of one, that makes no model.

    Args:
        where: the layer or argument.
        problem: what is wrong with it, without a full stop.
    """

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"layout of layers: {where}: {problem}.")


class BlockNotFoundError(MegacppError, ValueError):
    """A pattern of `blocks` that no module's name matches.

    Args:
        pattern: the pattern.
        names: the names there are.
    """

    def __init__(self, pattern: str, names: Sequence[str]) -> None:
        self.pattern, self.names = pattern, tuple(names)
        self.close = _close_patterns(pattern, names)
        close = f"Close to it: {', '.join(map(repr, self.close))}."
        meant = close if self.close else f"Modules: {_listed(names[:8])}."
        super().__init__(
            f"blocks: no module is called {pattern!r}. {meant} "
            'A pattern matches whole names, as in "model.layers.*", and the outermost modules it matches are blocks.'
        )


class CheckpointedTwiceError(MegacppError, ValueError):
    """A block that is recomputed already was to be wrapped in a checkpoint once more.

    Args:
        fqn: the block's name.
        module: the class that recomputes, or is set to.
    """

    def __init__(self, fqn: str, module: str) -> None:
        self.fqn, self.module = fqn, module
        super().__init__(
            f"{fqn or 'the model'} is checkpointed already, by {module}: backward would recompute it twice. Apply "
            "checkpoints once, and switch the model's own off (gradient_checkpointing_disable() in transformers)."
        )


class ResumeError(MegacppError, ValueError):
    """A checkpoint that does not fit the model, told before anything is loaded.

    Args:
        lines: what differs, a line each.
        missing: names that the model has alone.
        unexpected: names that the checkpoint has alone.
        differing: names of tensors with another shape.
    """

    def __init__(
        self, lines: Sequence[str], missing: Sequence[str], unexpected: Sequence[str], differing: Sequence[str]
    ) -> None:
        self.lines, self.missing = tuple(lines), tuple(missing)
        self.unexpected, self.differing = tuple(unexpected), tuple(differing)
        super().__init__(
            "\n".join(("the checkpoint does not fit the model, and nothing was loaded:", *(f"  {x}" for x in lines)))
            + "\nBuild the model with the configuration that the checkpoint was trained with, or convert it first."
        )


class ScalingStateError(MegacppError, ValueError):
    """A state of delayed scaling that does not fit the model, told before anything is loaded.

    Args:
        lines: what does not fit, a line each.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        shown = [*self.lines[:6], *([f"and {len(self.lines) - 6} more"] if len(self.lines) > 6 else [])]
        super().__init__(
            "\n".join(("the scaling state does not fit the model, and nothing was loaded:", *(f"  {x}" for x in shown)))
            + "\nIt is what `scaling_state` returned of the same model; leave the line out to begin anew."
        )


class CompileCacheError(MegacppError, ValueError):
    """A file of compiled code that cannot be written, or is of no use in this process.

    Args:
        path: of the file.
        reason: why, as a sentence without its full stop.
        remedy: what to do, likewise.
    """

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        self.path, self.reason, self.remedy = path, reason, remedy
        super().__init__(f"{path}: {reason}. {remedy}.")


class FitError(MegacppError):
    """No policy makes a training step fit into the memory there is.

    Args:
        limit: bytes there are.
        lowest: bytes of the lowest estimated peak.
        lever: the policy that has it, in words.
    """

    def __init__(self, limit: int, lowest: int, lever: str) -> None:
        self.limit, self.lowest, self.lever = limit, lowest, lever
        super().__init__(
            f"no policy fits a training step into {limit / 2**30:.3g} GiB: the lowest estimated peak is "
            f"{lowest / 2**30:.3g} GiB ({lever}). Make the batch smaller, shard the model, or choose an optimizer with "
            "less state."
        )


class EstimateError(MegacppError):
    """The model's forward depends on the values of its tensors, so that its memory cannot be told from shapes.

    Args:
        problem: what asked for a value.
        where: source line that did, "" when unknown.
        advice: what to do, as a sentence without its full stop.
    """

    def __init__(self, problem: str, where: str = "", advice: str = "") -> None:
        self.problem, self.where, self.advice = problem, where, advice
        super().__init__(
            f"the model cannot run on shapes alone: {where or 'its forward'} reads values ({problem}). "
            f"{advice or 'Let shapes decide instead, or estimate the model without that part'}."
        )


class DeviceNotMeasuredError(MegacppError, ValueError):
    """Memory of a device that torch keeps no account of was to be measured.

    Args:
        device: the device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(f"the memory of {device!r} cannot be measured: give measure() a CUDA device or 'cpu'.")
class ForwardError(MegacppError):
    """The model's own forward raised when it ran on fake tensors of the shapes of its inputs.

    Args:
        model: the model's class.
        problem: what it raised, without a full stop.
        where: source line that raised, "" when unknown.
    """

    def __init__(self, model: str, problem: str, where: str = "") -> None:
        self.model, self.problem, self.where = model, problem, where
        super().__init__(
            f"{model} cannot run on these inputs: {problem}{f' (at {where})' if where else ''}. "
            "Give it the inputs of a training step; only shapes, dtypes and devices matter."
        )


class BuilderError(MegacppError, ValueError):
    """A `module:callable` of the command line that gives no model and inputs.

    Args:
        target: as given.
        problem: what is wrong with it, without a full stop.
        remedy: what to do, as a sentence.
    """

    def __init__(self, target: str, problem: str, remedy: str) -> None:
        self.target, self.problem, self.remedy = target, problem, remedy
        super().__init__(f"cannot build {target!r}: {problem}. {remedy}")


class ReportFormatError(MegacppError, ValueError):
    """Text or data that is not a report written by this version's `Report.to_json`.

    Args:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a megacpp report: {problem}. Write it anew with Report.to_json().")


class RuleWithoutHitError(MegacppError, ValueError):
    """A pattern of a plan, or of `exclude`, that hits nothing.

    Args:
        pattern: the pattern as given.
        names: the names there are.
        option: the plan: "precision", "compress" or "sharding".
        what: what its names are those of.
        meant: the hint, where the caller knows better than string similarity.
    """

    def __init__(
        self, pattern: str, names: Sequence[str], option: str = "precision", what: str = "module with a weight",
        meant: str | None = None,
    ) -> None:  # fmt: skip
        self.pattern, self.closest = pattern, meant or closest(pattern.replace("*", "0"), names)
        super().__init__(
            f"{option}: the pattern {pattern!r} hits no {what}.{_did_you_mean(self.closest)} It has to "
            "match a whole name; a star that is a segment stands for one or more segments, as in '*.mlp.*'."
        )


class ShardingError(MegacppError, ValueError):
    """A tensor that cannot be laid out over the devices as a sharding plan says.

    Args:
        name: the tensor's name, "" when unknown.
        spec: its partition spec.
        problem: why it cannot, as a sentence without its full stop.
        remedy: what to do.
    """

    def __init__(self, name: str, spec: object, problem: str, remedy: str) -> None:
        self.name, self.spec, self.problem, self.remedy = name, spec, problem, remedy
        super().__init__(f"sharding {name or 'a tensor without a name'} as {spec!r}: {problem}. {remedy}")


class PlanMismatchError(MegacppError):
    """A model that does not hold what its precision plan says.

    Args:
        differences: one line for each linear that differs.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        shown = [f"  {line}" for line in self.differences[: 4 * _MISSES_SHOWN]]
        rest = len(self.differences) - len(shown)
        super().__init__(
            "\n".join((f"{len(self.differences)} linears differ from the precision plan:", *shown))
            + (f"\n  and {rest} more" if rest else "")
        )


class ManifestError(MegacppError, ValueError):
    """Text that is not a manifest of a precision plan.

    Args:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a precision manifest: {problem}. Write it anew with PrecisionPlan.manifest().")


class EngineError(MegacppError):
    """Something that Transformer Engine cannot do, or cannot do here.

    Args:
        what: what was asked for.
        reason: why it cannot be.
        remedy: what to do.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        super().__init__(f"{what}: {reason}. {remedy}")


class StockCheckpointError(EngineError):
    """A block with fp8 modules of Transformer Engine under a checkpoint that is not Transformer Engine's own."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} computes in fp8 under torch.utils.checkpoint",
            "the second forward would quantise with other scales than the first, and count its maxima twice",
            "Call the block through megacpp_compile.precision.checkpoint.checkpoint_for(block), or let "
            "megacpp_compile.apply_checkpoints(model) do so for every block, with fp8_wrapper='auto' or "
            "'te_checkpoint'.",
        )


class AttentionError(MegacppError, ValueError):
    """A backend of `attention` that was asked for by name and cannot serve the call.

    Args:
        backend: its name.
        tag: why, for machines: one of `nn.attention.bodies.TAGS`, or of `nn.attention.eligibility.TAGS` of "fa4".
        reason: why, in words.
    """

    def __init__(self, backend: str, tag: str, reason: str) -> None:
        self.backend, self.tag, self.reason = backend, tag, reason
        super().__init__(f"attention by {backend!r}: {reason} [{tag}]. Let backend='auto' choose what can.")


class EvidenceError(MegacppError, ValueError):
    """A profile, a surface or a record of evidence that claims what it cannot, or that there is none of.

    Args:
        what: which of them, "profile 'dense_fa4_forward'".
        problem: what is wrong with it.
    """

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what}: {problem}.")


class OperandError(MegacppError, ValueError):
    """Operands that an op called by the user cannot mean anything with.

    Args:
        op: the op's qualified name.
        problem: what is wrong with which of them, and what it should be.
    """

    def __init__(self, op: str, problem: str) -> None:
        self.op, self.problem = op, problem
        super().__init__(f"{op}: {problem}.")


class WrapperError(MegacppError):
    """A wrapper tensor that does not hold what it should.

    Args:
        name: the tensor's name, "" when unknown.
        kind: its package and class.
        problem: what is wrong, as the rest of a sentence.
    """

    def __init__(self, name: str, kind: str, problem: str) -> None:
        self.name, self.kind, self.problem = name, kind, problem
        super().__init__(f"{name or 'a tensor without a name'} ({kind}) {problem}.")


class DequantisationError(MegacppError):
    """An fp8 payload was widened where nobody allowed it, under `strict`.

    Args:
        findings: each of them as a line.
    """

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        lines = [f"{len(self.findings)} fp8 payload{'' if len(self.findings) == 1 else 's'} widened in silence:"]
        lines += [f"  {finding}" for finding in self.findings[:_MISSES_SHOWN]]
        if len(self.findings) > _MISSES_SHOWN:
            lines.append(f"  and {len(self.findings) - _MISSES_SHOWN} more")
        lines.append("Give the payload and its scale to an op with an fp8 lane, or allow the op or the module.")
        super().__init__("\n".join(lines))


class ForwardOnlyError(MegacppError):
    """A gradient was asked of an op that has none for such operands.

    Args:
        op: the op's qualified name.
        operands: what about them, in words.
        remedy: what to do.
    """

    def __init__(self, op: str, operands: str, remedy: str) -> None:
        self.op, self.operands, self.remedy = op, operands, remedy
        super().__init__(f"{op} has no gradient for {operands}: {remedy}, or call it under torch.no_grad().")


class AbsorbedInTrainingError(MegacppError):
    """Attention with absorbed weights was asked to train.

    Args:
        where: the op or function.
        score_channels: of a query and a row.
        value_channels: of a row's values.
    """

    def __init__(self, where: str, score_channels: int, value_channels: int) -> None:
        self.where, self.score_channels, self.value_channels = where, score_channels, value_channels
        super().__init__(
            f"{where} is for decoding, and an operand or weight requires a gradient: with absorbed weights a score "
            f"takes {score_channels} channels and a value {value_channels} instead of one head's own, no flash kernel "
            "takes the two parts of a score, and the memory it saves is not held in training where keys and values are "
            "recomputed from the latent. Decode under torch.no_grad(), or expand keys and values to train."
        )


class CacheError(MegacppError, ValueError):
    """A cache of latents was used in a way that would leave rows where they do not belong. Nothing was written.

    Args:
        call: the method that refuses.
        expected: what it takes, in words.
        found: what it was given.
        remedy: what to do, as a sentence without its full stop.
        layer: which layer it is about, None where it is about all.
    """

    def __init__(self, call: str, expected: str, found: object, remedy: str, layer: int | None = None) -> None:
        self.call, self.expected, self.found, self.remedy, self.layer = call, expected, found, remedy, layer
        of = "" if layer is None else f" of layer {layer}"
        super().__init__(f"{call}{of}: expected {expected}, found {found}. {remedy}.")


class CodecError(MegacppError, ValueError):
    """A codec of cached rows was given what it cannot store or read.

    Args:
        codec: its name.
        wanted: what it takes, and what it was given.
        remedy: what to do, as a sentence without its full stop.
    """

    def __init__(self, codec: str, wanted: str, remedy: str) -> None:
        self.codec, self.wanted, self.remedy = codec, wanted, remedy
        super().__init__(f"{codec} takes {wanted}. {remedy}{'' if remedy.endswith('?') else '.'}")


class LatentCacheError(MegacppError):
    """A model that cannot decode from a cache of latents.

    Args:
        where: the model, or the layer of it.
        reason: why, as a sentence without its full stop.
    """

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(
            f"{where} cannot decode from a cache of latents: {reason}. Decode with its own cache, or write the step "
            "with megacpp_compile.MLAKVCache and latent_attention."
        )


class ServingConfigError(MegacppError, ValueError):
    """A serving configuration that nothing serves.

    Args:
        tag: why, for machines.
        reason: why, in words.
    """

    def __init__(self, tag: str, reason: str) -> None:
        self.tag, self.reason = tag, reason
        super().__init__(f"this serving configuration is refused: {reason} [{tag}].")


class ServingRecordError(MegacppError, ValueError):
    """A record of a prefill that says too little, or more than it bears.

    Args:
        tag: why, for machines.
        problem: why, in words.
    """

    def __init__(self, tag: str, problem: str) -> None:
        self.tag, self.problem = tag, problem
        super().__init__(f"this record of a prefill is invalid: {problem} [{tag}].")


class NotCapturedError(MegacppError):
    """A frame that cannot be rewritten, under `strict`.

    Args:
        frame: the function it compiles and where that stands.
        reason: why not, as a sentence without its full stop.
    """

    def __init__(self, frame: str, reason: str) -> None:
        self.frame, self.reason = frame, reason
        super().__init__(
            f"{frame} cannot be rewritten: {reason}. Change what the reason names, or compile without 'strict': "
            "Inductor then compiles the frame alone."
        )


class GraphBreakError(MegacppError):
    """The model's code cuts its graph in pieces, under `strict`.

    Args:
        place: the line that does.
        reason: why, as a sentence without its full stop.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"the graph breaks at {place}: {reason}. Take that out of the compiled code, or compile without 'strict'."
        )


class DroppedOutputError(MegacppError):
    """Something reads an output that the option 'drop_outputs' has dropped.

    Args:
        name: the output's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the output {name!r} is read, and the option 'drop_outputs' has dropped it: it was never made as a whole. "
            f"Take {name!r} out of 'drop_outputs', or do not read it."
        )


class CaptureError(MegacppError):
    """Internal: why a frame cannot be captured. It compiles as plain Inductor would and `reason` goes to the report;
    under `strict` the user meets it as the reason of a NotCapturedError.

    Args:
        reason: one sentence.
        where: node, module or source line it is about, "" when it is about the whole frame.
    """

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason, self.where = reason, where
        super().__init__(f"{reason} (at {where})" if where else reason)
