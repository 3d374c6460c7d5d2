"""Where in the user's model a graph node comes from."""

from __future__ import annotations

import re

from torch.fx import Node

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
    path = re.sub(r"\['?([^]']*)'?\]", r".\1", path)
    path = path.replace("._modules", "").replace("_modules.", "")
    return re.sub(r"^(L\.self\.|L__self___|L\.|self\.)|^(self|L)$", "", path).strip(".").replace("slf.", "")


def source_line(node: Node) -> str:
    """ "file.py:123, in forward: code" of the innermost frame outside torch's own modules."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
    for path, line, function, code in reversed(frames):
        if not any(part in path for part in _OWN):
            return f"{path.rsplit('/', 1)[-1]}:{line}, in {function}: {code.strip()}"
    return ""
