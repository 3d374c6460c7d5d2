"""Rules of other packages, registered by hand or by entry points `megacpp.rules`, and the order that passes run in."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import megacpp_compile.passes as package
from megacpp_compile.config import registered
from megacpp_compile.errors import MegacppError, RegistrationError, UnknownPassError
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rule import Pass

GROUP = "megacpp.rules"
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A pass that is registered: `passes._rule.Pass`, and what it was made of. doc: what it does, for people."""

    name: str
    op: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    by_default: bool
    find: Callable[[GraphView], Iterable[Any]]
    given: Any
    doc: str
    registered: bool = True


_rules: dict[str, Rule] = {}


@overload
def register(rule: R, *, name: str = ..., op: str = ..., after: Sequence[str] = ..., before: Sequence[str] = ...,
             by_default: bool = ...) -> R: ...  # fmt: skip
@overload
def register(*, name: str = ..., op: str = ..., after: Sequence[str] = ..., before: Sequence[str] = ...,
             by_default: bool = ...) -> Callable[[R], R]: ...  # fmt: skip
def register(
    rule: Any = None, *, name: str = "", op: str = "", after: Sequence[str] = (), before: Sequence[str] = (),
    by_default: bool = True,
) -> Any:  # fmt: skip
    """Add a rule to the passes of every frame that is compiled from now on; also a decorator.

    The rule has its name in reports and in the options `disable`, `passes` and `require`, and is verified by
    `verify="each"`. Its digest is part of the cache key. A rewrite whose results have another shape, dtype, strides or
    gradients than the code it replaces is refused, with the reason in the report, and so is one that raises.

    Args:
        rule: a function from the frame's graph to what it found, or an object with such a function `find`, and perhaps
            the other arguments as attributes. `find(view)` reads `view.graph`, an FX graph of ATen ops ahead of
            autograd, in which each node has its fake tensor in `node.meta["val"]`, and yields a `Match` for each
            site, and a `MatchFailure` for each near miss. It changes nothing.
        name: the rule's name; by default the function's.
        op: the qualified name of the op it emits, "" where it emits torch's own ops.
        after: names of passes and rules that run before this one.
        before: names of those that run after it, as where the rule writes what they match.
        by_default: False for a rule that runs only where the option `passes` enables it.

    Returns:
        `rule` itself. What is registered already stays as it is.

    Raises:
        RegistrationError: a rule without a name or without `find`, or a name that is taken.
    """
    if rule is None:
        return functools.partial(register, name=name, op=op, after=after, before=before, by_default=by_default)
    made = Rule(
        name or getattr(rule, "name", "") or getattr(rule, "__name__", ""),
        op or getattr(rule, "op", ""),
        tuple(after or getattr(rule, "after", ())),
        tuple(before or getattr(rule, "before", ())),
        by_default and getattr(rule, "by_default", True),
        getattr(rule, "find", rule),
        rule,
        inspect.getdoc(rule) or "",
    )
    if any(known.given is rule for known in _rules.values()):
        return rule
    _check(made)
    _rules[made.name] = made
    registered.CODE[f"rule {made.name}"] = registered.digest(rule)
    return rule


def unregister(name: str) -> None:
    """Take a registered rule out again: frames that are compiled from now on are without it.

    Raises RegistrationError for a name that no registered rule has.
    """
    if name not in _rules:
        raise RegistrationError(f"rule {name!r}", "is not registered", name, list(_rules))
    del _rules[name], registered.CODE[f"rule {name}"]


def rules() -> tuple[Rule, ...]:
    """What is registered, by name. The first call loads entry points, but for rules that have no place in the order."""
    before = set(_rules)
    points = {id(given): point for point, given in registered.load(GROUP, register)}
    waiting = {name: rule for name, rule in _rules.items() if name not in before and id(rule.given) in points}
    while waiting:
        kept = [rule for name, rule in _rules.items() if name not in waiting]
        problems = {name: _problem([*kept, rule]) for name, rule in waiting.items()}
        placed = {name for name, problem in problems.items() if problem is None}
        for name in placed or list(waiting):
            rule = waiting.pop(name)
            if (problem := problems[name]) is not None:
                unregister(name)
                registered.left_out(points[id(rule.given)], problem)
    return tuple(_rules[name] for name in sorted(_rules))


def _problem(added: Sequence[Rule]) -> MegacppError | None:
    try:
        in_order(tuple(added))
    except MegacppError as error:
        return error
    return None


@functools.lru_cache(maxsize=32)
def in_order(added: tuple[Rule, ...]) -> tuple[Pass, ...]:
    """The passes of this folder and the rules `added`, in the order their `after` and `before` ask for (ties by name,
    passes first). Raises UnknownPassError and RegistrationError for what has no place in it."""
    passes: dict[str, Any] = {n: importlib.import_module(f"{package.__name__}.{n}") for n in own_names()}
    passes |= {rule.name: rule for rule in added}
    earlier = {name: [*p.after] for name, p in passes.items()}
    for rule in added:
        for name in (*rule.after, *rule.before):
            if name not in passes:
                raise UnknownPassError(name, list(passes), f"'after' or 'before' of the rule {rule.name!r}")
        for name in rule.before:
            earlier[name].append(rule.name)
    ordered: list[Any] = []

    def place(name: str, chain: tuple[str, ...]) -> None:
        if name in chain:
            circle = chain[chain.index(name) :]
            rule = next((n for n in circle if isinstance(passes[n], Rule)), name)
            raise RegistrationError(f"rule {rule!r}", f"waits for itself: {' -> '.join((*circle, name))}")
        if passes[name] not in ordered:
            for other in earlier[name]:
                place(other, (*chain, name))
            ordered.append(passes[name])

    for name in passes:
        place(name, ())
    return tuple(ordered)


def own_names() -> list[str]:
    """The names of this package's passes, which are the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def _check(rule: Rule) -> None:
    what = f"rule {rule.name!r}"
    if not callable(rule.find) or inspect.isclass(rule.given):
        raise RegistrationError(what, "has no 'find': register a function, or an object with one, not its class")
    if not isinstance(rule.name, str) or not re.fullmatch(r"\w[\w.-]*", rule.name):
        raise RegistrationError(what, "needs a name of letters, digits, '_', '.' and '-'")
    if rule.name in own_names():
        raise RegistrationError(what, "has the name of a pass of this package: give it another, by 'name'")
    if rule.name in _rules:
        other = getattr(_rules[rule.name].given, "__module__", "another module")
        raise RegistrationError(
            what, f"is registered already, by {other}: give one of them another name, or unregister the first"
        )
