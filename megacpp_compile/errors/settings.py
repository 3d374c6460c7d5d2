"""Options, rules and demands that do not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megacpp_compile.errors._base import SHOWN, MegacppError, Miss, closest, did_you_mean, listed, place, some


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


class UnknownOptionError(MegacppError, ValueError):
    """A key of `options` that is no field of `Config`.

    Args:
        key: the key as given.
        valid: every key that is accepted.
        elsewhere: where such a key goes, as a sentence, if it is one of others and so no misspelling of ours.
        renamed: keys of earlier releases -> what they are called now, for the closest-match hint.
    """

    def __init__(
        self, key: object, valid: Sequence[str], elsewhere: str = "", renamed: Mapping[str, str] | None = None
    ) -> None:
        self.key, self.valid = key, tuple(valid)
        old = dict(renamed or {})
        found = None if elsewhere else closest(str(key), (*valid, *old))
        self.closest = old.get(found, found) if found is not None else None
        super().__init__(
            f"unknown option {key!r} in torch.compile(..., backend='megacpp', options=...)."
            f"{f' {elsewhere}' if elsewhere else did_you_mean(self.closest)} Valid options: {listed(valid)}. "
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
            f"{what} {key}: got {got!r} ({type(got).__name__}), wanted {wanted}.{did_you_mean(self.closest)}"
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
        super().__init__(f"unknown pass {name!r} in {where}.{did_you_mean(self.closest)} Passes: {listed(known)}.")


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
        lines += some(shown)
        if fired > wanted:
            lines.append("Raise the count, or leave the pass out with 'disable'.")
        else:
            near = (f"  {place(m.fqn, m.source)}, node {m.node or '?'}: {m.reason} [{m.tag}]" for m in self.misses)
            lines += ["Nearest misses:", *some(list(near))] if misses else []
            lines += [f"  {line}" for line in self.breaks[:SHOWN]]
            nothing = f"Nothing {'else ' if fired else ''}in the graph came near the pattern: "
            nothing += "check that the pass is enabled and the code is compiled"
            nothing += f", or lower the count to {fired}." if fired else "."
            lines.append("Rewrite the model where a miss says so, or lower the count." if misses else nothing)
        super().__init__("\n".join(lines))


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
            f"{option}: the pattern {pattern!r} hits no {what}.{did_you_mean(self.closest)} It has to "
            "match a whole name; a star that is a segment stands for one or more segments, as in '*.mlp.*'."
        )


class RegistrationError(MegacppError, ValueError):
    """A rule or a lowering that cannot be registered, or is not.

    Args:
        what: the rule or lowering, as in "rule 'merge_clamps'".
        problem: what is wrong, as the rest of a sentence without its full stop.
        name: a name that is not known, where there is one.
        known: what there is instead, for the closest-match hint.
    """

    def __init__(self, what: str, problem: str, name: str = "", known: Sequence[str] = ()) -> None:
        self.what, self.problem, self.closest = what, problem, closest(name, known)
        super().__init__(f"{what} {problem}.{did_you_mean(self.closest)}")
