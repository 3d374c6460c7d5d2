"""What is made for all tokens in front of a loop, of which a step reads one: the step is run from there where all of it
is made token by token."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.views import EXPANSIONS, REPETITIONS, SAME_VALUES
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, flat
from megacpp_compile.matchers.ssd.resize import Resized, tensor_dims
from megacpp_compile.matchers.ssd.roles import arranged
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, ELEMENTWISE, VIEWS
from megacpp_compile.matchers.token_loops.loops import Loop

# What works on each token alone where tokens are a dimension of its own before and behind.
_BY_TOKEN = ELEMENTWISE | SAME_VALUES | VIEWS | CONTRACTIONS | EXPANSIONS | REPETITIONS | {short_loops.shortened}


@or_none
def tokens_of(r: Resized, loop: Loop) -> set[Atom] | None:
    """The atoms of tokens, of which every tensor in front of `loop` has one; None where it is not made of tokens one by
    one, or read at another position than the last."""
    reads = {n: loop.reads[n] for n in r.nodes if n in loop.reads}
    dims = [flat(r.dims[read.source][read.dim]) for read in reads.values()]
    NoMatch.when(any(len(d) != 1 for d in dims) or any(read.at != read.count - 1 for read in reads.values()))
    t = {d[0] for d in dims}
    for n in r.nodes:  # of more tokens, of which those of a few steps are taken
        if n.target is short_loops.shortened and _count(r, n, t):
            t |= {a for a in flat(r.dims[n.args[0]][n.args[1]]) if len(flat(r.dims[n.args[0]][n.args[1]])) == 1}  # type: ignore[index]
    for n in r.nodes:
        mine, before = _count(r, n, t), max((_count(r, a, t) for a in n.all_input_nodes), default=0)
        if n in reads or n.target is aten.unbind.int or not before and not mine:
            continue
        NoMatch.when((mine, before) != (1, 1) or n.target not in _BY_TOKEN)
    return t


def _count(r: Resized, n: Node, t: Set[Atom]) -> int:
    return sum(a in t for d in tensor_dims(r.dims.get(n, [])) for a in flat(d))


def last_token(r: Resized, tensor: Tensor, n: Node, target: Sequence[Dim], t: Set[Atom]) -> Tensor:
    """The last token of `n`'s value, where it has tokens, with the dimensions of `target`."""
    dims = r.of(n)
    return arranged(r.axes, tensor, dims, [[a for d in dims for a in d if a in t], *target])[-1]
