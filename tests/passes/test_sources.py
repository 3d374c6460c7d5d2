"""What the sources of passes and matchers leave alone: names of nodes, their meta, and caches that outlive a graph."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megacpp_compile

PACKAGE = Path(megacpp_compile.__file__).parent
EVERYWHERE = sorted(PACKAGE.rglob("*.py"))
MATCHING = [p for p in EVERYWHERE if p.relative_to(PACKAGE).parts[0] in ("passes", "matchers")]
# Objects that belong to a graph; a key that holds one keeps all of the graph.
OF_A_GRAPH = {"Node", "Graph", "GraphModule", "GraphView", "Match", "Captured", "Head", "Part", "Any", "object"}


def decided_by_name(tree: ast.AST) -> list[int]:
    """Lines that compare an attribute `name` with text, or look for text in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            text = any(isinstance(getattr(part, "value", None), str) for part in parts)
            if text and any(isinstance(part, ast.Attribute) and part.attr == "name" for part in parts):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            searched = node.func.attr in ("startswith", "endswith", "find", "count", "index", "partition", "split")
            if searched and isinstance(on, ast.Attribute) and on.attr == "name":
                found.append(node.lineno)
            elif any(isinstance(a, ast.Attribute) and a.attr == "name" for a in node.args) and node.func.attr in (
                "match", "search", "fullmatch", "fnmatch", "fnmatchcase",
            ):  # fmt: skip
                found.append(node.lineno)
    return found


def writes_meta(tree: ast.AST) -> list[int]:
    """Lines that store into a `meta`, or call what changes one."""

    def is_meta(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "meta"

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_meta(node.value) and not isinstance(node.ctx, ast.Load):
            found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            if node.func.attr in ("pop", "update", "setdefault", "clear", "popitem"):
                found.append(node.lineno)
    return found


def cached_by_graph(tree: ast.Module) -> list[int]:
    """Lines of functions with a cache of the process, and of dictionaries and sets of a module, whose keys may hold a
    graph's objects. A key of unknown type may; one that is held weakly keeps nothing alive."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_caches(d) for d in node.decorator_list):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if any(a.annotation is None or _names(a.annotation) & OF_A_GRAPH for a in arguments):
                found.append(node.lineno)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and _names(node.annotation) & {"Node", "Graph", "GraphModule", "GraphView"}:
            weak = isinstance(node.value, ast.Call) and "WeakKeyDictionary" in _names(node.value.func)
            if isinstance(node.value, ast.Dict | ast.Set | ast.List | ast.Call | ast.DictComp) and not weak:
                found.append(node.lineno)
    return found


def _caches(decorator: ast.AST) -> bool:
    return bool(_names(decorator) & {"cache", "lru_cache"})


def _names(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }


def lines(check, paths):
    found = {str(p.relative_to(PACKAGE)): check(ast.parse(p.read_text())) for p in paths}
    return {name: at for name, at in found.items() if at}


def test_targets_decide_and_names_do_not():
    """A node's name is torch's to choose, and changes with every node before it."""
    # Of modules of passes and of rules, and of arguments of operators, not of nodes.
    others = {"passes/_driver.py", "passes/_registered.py", "passes/_frame/document_sites.py"}
    assert set(lines(decided_by_name, MATCHING)) <= others


def test_matchers_leave_meta_alone():
    """A pass or matcher may note something at a node that it has made; what is applied gives readers their strides."""
    made = {"passes/_rewrites/experts.py", "passes/_rewriting.py", "matchers/softmax_attention/whole.py",
            "passes/_frame/long_loops.py", "passes/_frame/sites.py"}  # fmt: skip
    assert set(lines(writes_meta, MATCHING)) <= made


def test_no_cache_of_the_process_holds_a_graph():
    assert not lines(cached_by_graph, EVERYWHERE)


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (decided_by_name, "if 'getitem' in node.name: pass"),
        (decided_by_name, "x = n.args[0].name == 'mul_1'"),
        (decided_by_name, "x = node.name.lower() in ('a', 'b')"),
        (decided_by_name, "node.name.startswith('silu')"),
        (decided_by_name, "re.match('getitem', node.name)"),
        (writes_meta, "node.meta['_run'] = 1"),
        (writes_meta, "node.meta.pop('_run')"),
        (writes_meta, "del node.meta['_run']"),
        (cached_by_graph, "@functools.lru_cache(maxsize=4096)\ndef f(node: Node) -> Node: pass"),
        (cached_by_graph, "@functools.cache\ndef f(node): pass"),
        (cached_by_graph, "@cache\ndef f(graph: fx.Graph): pass"),
        (cached_by_graph, "known: dict[Node, int] = {}"),
        (cached_by_graph, "known: weakref.WeakValueDictionary[Node, int] = weakref.WeakValueDictionary()"),
    ],
)
def test_the_rules_are_watched(check, source):
    assert check(ast.parse(source))
