"""Equations of `einsum` name every dimension: no ellipsis, no output left out, no spaces.

Before: `einsum("... c, h d c -> ... h d", [x, w])`          After: `einsum("abc,hdc->abhd", [x, w])`
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from megacpp_compile.fx.edit import value


def equations(graph: fx.Graph) -> None:
    """Rewrite in place."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default):
        equation, operands, *rest = node.args
        if not isinstance(equation, str):
            continue
        explicit = _explicit(equation.replace(" ", ""), [value(x).dim() for x in operands])  # type: ignore[union-attr]
        if explicit is not None and explicit != equation:
            node.args = (explicit, operands, *rest)


def _explicit(equation: str, ranks: Sequence[int]) -> str | None:
    """The same equation in full; None where an ellipsis is on one side only, or letters run out."""
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    dots = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if arrow and ("..." in given) != ("..." in out) or max(dots) > len(free):
        return None
    names = "".join(free[: max(dots)])
    terms = [term.replace("...", names[len(names) - n :]) for term, n in zip(terms, dots, strict=True)]
    if not arrow:  # what stands once, in the order of letters, behind the ellipsis
        once = [letter for letter, times in Counter(given.replace(",", "").replace(".", "")).items() if times == 1]
        out = "..." + "".join(sorted(once))
    return f"{','.join(terms)}->{out.replace('...', names)}"
