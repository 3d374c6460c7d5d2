"""Models, and parts of them, that cannot be what they are asked to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from megacpp_compile.errors._base import MegacppError, listed


def _close_patterns(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """The patterns closest to `pattern` that hit some of `names`: those with a star for every number."""
    starred = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return tuple(difflib.get_close_matches(pattern, starred, n=3, cutoff=0.5))


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
        meant = close if self.close else f"Modules: {listed(names[:8])}."
        super().__init__(
            f"blocks: no module is called {pattern!r}. {meant} "
            'A pattern matches whole names, as in "model.layers.*", and the outermost modules it matches are blocks.'
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
