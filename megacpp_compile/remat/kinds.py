"""Which block of the model a forward node belongs to, and of what kind that block is.

A layer is a numbered module ("layers.3") of a container that holds attention, scans or convolutions; a block is a
direct child of a layer, or of the frame where a layer is compiled by itself. A block is told by what it computes:
attention ("ablock"), a scan, a causal convolution or a linear recurrence of a state ("mblock"), a product with the same
weight of what it gave before, or recurrence by its module's class ("rblock"), other matrix products ("eblock"), and by
the user's own patterns before that.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.matchers.recurrences import find_recurrences
from megacpp_compile.remat.nodes import base_of, is_core, is_depthwise, is_gemm, name_of

_RECURRENT = re.compile(r"gru|lstm|(^|[^a-z])rnn|recurrent", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class BlockRef:
    """`layer`: its FQN, "" for the frame itself; `block`: the FQN of the block, None between blocks; `kind`: one of
    `policy.KINDS`, or "" where none is known."""

    layer: str
    block: str | None
    kind: str


def places(forward: Sequence[Node], patterns: Mapping[str, str]) -> dict[Node, BlockRef]:
    """The place of every forward node. patterns: glob over module names -> kind."""
    fqns: dict[Node, str] = {}
    last = ""
    for node in forward:  # what a pattern of Inductor's put in place has no module: it is where its neighbours are
        last = fqns[node] = module_fqn(node) or _through(node, fqns) or last
    containers = _containers(forward, fqns)
    members: dict[tuple[str, str], list[Node]] = {}
    named: dict[tuple[str, str], str] = {}
    of: dict[Node, tuple[str, str]] = {}
    for node in forward:
        layer, child = _split(fqns[node], containers)
        named_by = chosen(fqns[node], patterns)
        block = (layer, named_by[0] if named_by else f"{layer}.{child}".strip(".") if child else "")
        if named_by:
            named[block] = named_by[1]
        of[node] = block
        members.setdefault(block, []).append(node)
    kinds = {b: named.get(b) or (kind_of(nodes) if b[1] else "") for b, nodes in members.items()}
    return {n: BlockRef(b[0], b[1] if kinds[b] else None, kinds[b]) for n, b in of.items()}


def _containers(forward: Sequence[Node], fqns: Mapping[Node, str]) -> set[str]:
    """Names of modules whose numbered children are layers: those that hold what mixes tokens, else the outermost. The
    experts of a layer are numbered, too, and are none."""
    mixing, outermost = set(), set()
    for node in forward:
        parts = fqns[node].split(".")
        numbered = [".".join(parts[:i]) for i, p in enumerate(parts) if p.isdigit()]
        numbered = [c for c in numbered if "expert" not in c.rpartition(".")[2].lower()]
        if numbered:
            outermost.add(numbered[0])
            if _mixes(node):
                mixing.add(numbered[-1])
    if mixing or any(_mixes(n) for n in forward):
        return mixing
    return outermost


def _mixes(node: Node) -> bool:
    return is_core(node) or _convolves(node) or _attends(node)


def _convolves(node: Node) -> bool:
    """A convolution along the tokens, or the scan behind it."""
    name = name_of(node)
    if name == "aten::convolution":
        return value(node).dim() == 3 and is_depthwise(node)
    return name in ("megacpp::causal_conv1d", "megacpp::ssd_scan")


def _attends(node: Node) -> bool:
    """A product with the result of a softmax, which autograd's graph spells exp(x - amax(x)) / sum."""
    return name_of(node) == "aten::bmm" and any(_is_softmax(a, 8) for a in node.all_input_nodes)


def _is_softmax(node: Node, steps: int) -> bool:
    name = name_of(node)
    if name in ("aten::_softmax", "aten::softmax"):
        return True
    if name == "aten::exp":
        near = [b for a in node.all_input_nodes for b in a.all_input_nodes]
        return any("max" in name_of(n) or "online" in name_of(n) for b in near for n in (b, *b.all_input_nodes))
    if steps == 0 or is_gemm(node) or is_core(node):
        return False
    return any(_is_softmax(a, steps - 1) for a in node.all_input_nodes)


def _split(fqn: str, containers: set[str]) -> tuple[str, str | None]:
    """("model.layers.3", "self_attn") of "model.layers.3.self_attn.q_proj"; in no layer: ("", first part)."""
    parts = [p for p in fqn.split(".") if p]
    depths = [i + 1 for i, p in enumerate(parts) if p.isdigit() and ".".join(parts[:i]) in containers]
    depth = depths[-1] if depths else 0
    return ".".join(parts[:depth]), parts[depth] if len(parts) > depth else None


def _through(node: Node, fqns: Mapping[Node, str]) -> str:
    return next((fqns[a] for a in node.all_input_nodes if fqns.get(a)), "")


def chosen(fqn: str, patterns: Mapping[str, str]) -> tuple[str, str] | None:
    """(block, kind) by the longest of the user's patterns that hits the module or one around it."""
    parts = fqn.split(".")
    for pattern in sorted(patterns, key=lambda p: (-len(p), p)):
        for depth in range(1, len(parts) + 1):
            if hits(pattern, name := ".".join(parts[:depth])):
                return name, patterns[pattern]
    return None


def hits(pattern: str, name: str) -> bool:
    """Whether a module called `name` is meant. A frame that is one layer by itself knows its modules by the end of
    their names alone: there a pattern of such a name is told by its end."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    parts = pattern.split(".")
    numbered = any(p.isdigit() for p in name.split("."))
    return not numbered and any(fnmatch.fnmatchcase(name, ".".join(parts[i:])) for i in range(1, len(parts)))


def kind_of(nodes: Iterable[Node]) -> str:
    """The kind of a block by its operations; "" for one that multiplies no matrices, such as a norm."""
    nodes = list(nodes)
    if any(map(_convolves, nodes)) or any(True for _ in find_recurrences(nodes)):
        return "mblock"
    names = [name_of(n) for n in nodes]
    if any(map(is_core, nodes)) or any("mla_rope" in n or "rope_qk" in n for n in names):
        return "ablock"
    if any(map(_attends, nodes)):
        return "ablock"
    if any(_RECURRENT.search(t) for n in nodes for t in _types(n)) or _feeds_itself(nodes):
        return "rblock"
    return "eblock" if any(map(is_gemm, nodes)) else ""


def _feeds_itself(nodes: Sequence[Node]) -> bool:
    """Whether a weight multiplies what was computed from its own product, as in a loop over time."""
    behind: dict[Node, frozenset[Node]] = {}  # the weights whose products a node comes from
    for node in nodes:
        own = frozenset().union(*(behind.get(a, frozenset()) for a in node.all_input_nodes))
        if is_gemm(node):
            weights = frozenset(b for a in node.all_input_nodes if (b := base_of(a)).op == "placeholder")
            if weights & own:
                return True
            own |= weights
        behind[node] = own
    return False


def _types(node: Node) -> list[str]:
    """Class names of the modules around the node, short of the layer's own."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [getattr(e[1], "__name__", str(e[1]).rsplit(".", 1)[-1]) for e in stack.values() if isinstance(e, tuple)]
    return names[1:] if len(names) > 1 else names
