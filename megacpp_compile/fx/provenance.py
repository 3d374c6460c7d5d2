"""Where in the user's model a graph node comes from."""

from __future__ import annotations

import re

from torch.fx import GraphModule, Node

_OWN = ("/torch/nn/", "/torch/utils/", "/torch/_")


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
    return [getattr(kind, "__name__", str(kind).rpartition(".")[2]) for kind in reversed(kinds)]


def local_path(path: str) -> tuple[str, str]:
    """("self", "layers.0.weight") of Dynamo's "L['self']._modules['layers']._modules['0']._parameters['weight']"; the
    variable is "" for a path that begins with none."""
    root = re.match(r"L\['(\w+)'\]", path)  # the frame's own module, by whatever name its first argument has
    path = re.sub(r"\['?([^]']*)'?\]", r".\1", path[root.end() :] if root else path)
    path = re.sub(r"(^|\.)_(modules|parameters|buffers)(?=\.)", "", path)
    return root[1] if root else "", path.strip(".")


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
    """Whether a source file is one of torch's that runs a model's code: no line of the model's."""
    return any(part in path for part in _OWN)


def outermost_frame(node: Node) -> str:
    """ "forward (model.py:12)": the compiled function as far as the node knows, or ""."""
    frames = _frames(node)
    return f"{frames[0][2]} ({frames[0][0].rsplit('/', 1)[-1]}:{frames[0][1]})" if frames else ""


def source_line(node: Node) -> str:
    """ "file.py:123, in forward: code" of the innermost frame outside torch's own modules."""
    frames = _frames(node)
    if not frames:
        return ""
    path, line, function, code = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}, in {function}: {code.strip()}"


def no_graph_break(gm: GraphModule) -> bool:
    """Whether no graph break has happened so far in this process, so that `gm` is all there is to compile."""
    from megacpp_compile._torch.dynamo import counters

    reason = getattr(gm, "compile_subgraph_reason", None)
    return not counters["graph_break"] and not getattr(reason, "graph_break", False)
