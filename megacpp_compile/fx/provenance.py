"""Where in the user's model a graph node comes from."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch.fx import Graph, GraphModule, Node

from megacpp_compile._torch import autograd, calls, dynamo
from megacpp_compile.fx.module_names import canonical

_OWN = ("/torch/nn/", "/torch/utils/", "/torch/_", "/megacpp_compile/nn/")
# ".forward.__closure__.0.cell_contents.__self__": the module itself, by way of its own method. Trainers put a function
# around a module's `forward` that holds the bound method, as closure, partial or attribute (`_old_forward`).
_BY_ITS_FORWARD = re.compile(
    r"(^|\.)\w*forward\w*(\.__closure__\.\d+\.cell_contents|\.args\.\d+|\.func)*\.__self__(?=\.|$)"
)


def module_fqn(node: Node) -> str:
    """The innermost module's name, e.g. "model.layers.0.self_attn"; "" where the graph does not know one.

    After a graph break the name is relative to the resumed frame; it is reported as it is.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        name = entry[0] if isinstance(entry, tuple) else str(entry)
        path = name or path
    return local_path(path)[1]


def module_classes(node: Node) -> list[str]:
    """Class names of the modules around the node, the innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [entry[1] for entry in stack.values() if isinstance(entry, tuple)]
    return [_class_name(kind) for kind in reversed(kinds)]


def _class_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", str(kind).rpartition(".")[2]))


def modules_of(node: Node) -> dict[int, str]:
    """id of each module around the node -> its path as Dynamo has it, the outermost first."""
    found = {}
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        number = key.partition("@")[0]  # a second call of the module adds "@1"
        if isinstance(entry, tuple) and number.isdigit():
            found[int(number)] = str(entry[0])
    return found


def modules_called(graph: Graph) -> dict[str, str]:
    """Name -> class of the modules that the graph has nodes of, each after the one around it, in the order of their
    first calls; "" is the module whose code is compiled."""
    found, seen = dict[str, str](), set[str]()
    for node in graph.nodes:
        for key, entry in (node.meta.get("nn_module_stack") or {}).items():
            if key not in seen and isinstance(entry, tuple):
                seen.add(key)
                found.setdefault(local_path(str(entry[0]))[1], _class_name(entry[1]))
    return found


@functools.lru_cache(4096)  # there are many nodes of one module
def local_path(path: str) -> tuple[str, str]:
    """("self", "layers.0.weight") of Dynamo's "L['self']._modules['layers']._modules['0']._parameters['weight']"; the
    variable is "" for a path that begins with none. The name is canonical (`module_names`)."""
    root = re.match(r"L\['(\w+)'\]", path)  # the frame's own module, by whatever name its first argument has
    path = re.sub(r"\['?([^]']*)'?\]", r".\1", path[root.end() :] if root else path)
    path = re.sub(r"(^|\.)(__dict__\.)?_(modules|parameters|buffers)(?=\.)", "", path)
    path = _BY_ITS_FORWARD.sub("", path)
    return root[1] if root else "", canonical(path.strip("."))


def input_path(node: Node) -> tuple[str, str]:
    """("self", "layers.0.weight") of a placeholder of Dynamo's graph, ("", "") where Dynamo does not say."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return "", ""
    return local_path(source.name() if callable(source.name) else source.name)  # a property since torch 2.10


def input_name(node: Node) -> str:
    """The input's name in the model, as far as Dynamo knows it."""
    return input_path(node)[1] or node.name


def _frames(node: Node) -> list[tuple[str, str, str, str]]:
    """(path, line, function, code) of the node's stack outside torch, outermost first."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
    return [f for f in frames if not in_torch(f[0])]


def in_torch(path: str) -> bool:
    """Whether a source file is one of torch's or of this package's that a model's code calls: no line of it."""
    return any(part in path for part in _OWN)


def outermost_frame(node: Node) -> str:
    """ "forward (model.py:12)": the compiled function as far as the node knows, or ""."""
    frames = _frames(node)
    return f"{frames[0][2]} ({frames[0][0].rsplit('/', 1)[-1]}:{frames[0][1]})" if frames else ""


def source_line(node: Node) -> str:
    """ "file.py:123, in forward: code" of the innermost frame outside torch's own modules that does more than hand on
    its arguments: those are what trainers put around a module."""
    frames = _frames(node)
    if not frames:
        return ""
    frames = [f for f in frames if not f[3].strip().endswith("(*args, **kwargs)")] or frames
    path, line, function, code = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}, in {function}: {code.strip()}"


def is_backward(gm: GraphModule) -> bool:
    """Whether Dynamo's graph `gm` is a backward that compiled autograd has it translate."""
    return any(isinstance(node.target, autograd.CompiledAutogradOp) for node in gm.graph.nodes)


def is_whole(gm: GraphModule) -> bool:
    """Whether Dynamo's graph `gm` is all of what was compiled, and not a piece of it: between graph breaks, a bucket of
    DDP's, or a module that eager code calls, as between the hooks of FSDP."""
    if getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False):
        return False
    call = calls.current()
    return call is None or call.whole


def breaks_around(gm: GraphModule) -> list[str]:
    """ "graph break at model.py:12, in forward: reason", of the graph breaks that cut Dynamo's graph `gm` out of what
    was compiled: the one that ends it, and those in code that runs around it in eager."""
    call, own = calls.current(), getattr(gm, "compile_subgraph_reason", None)
    through = call.through if call is not None else frozenset()
    found = [own] if getattr(own, "graph_break", False) else []
    for reason in dynamo.graph_break_reasons:
        if any((at.filename, at.name) in through for at in reason.user_stack):
            found.append(reason)
    return list(dict.fromkeys(map(_spoken, found)))


def _spoken(reason: Any) -> str:
    at = (reason.user_stack or [None])[-1]
    place = f" at {at.filename.rsplit('/', 1)[-1]}:{at.lineno}, in {at.name}" if at is not None else ""
    return f"graph break{place}: {str(reason.reason).strip().splitlines()[0]}"
