"""Writes to tensors that a frame makes of numbers: `total = torch.tensor(0.0)`, then `total += loss`.

Traced before autograd, `torch.tensor` is a constant and a `detach` of it. To functionalisation that is a view, which it
takes anew of what was written: `detach(total + loss)`, which has no gradient. A copy of what is written to is a tensor
of its own.
"""

from __future__ import annotations

from torch.fx import GraphModule

from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.fx.copies import changed, clone_for_users
from megacpp_compile.fx.edit import called

_MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")


def without_writes_to_constants(gm: GraphModule) -> GraphModule:
    """Dynamo's graph `gm` with a copy of each tensor made of numbers that is written to; itself where there is none."""
    made = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method") and called(n) in _MAKERS]
    written = {storage_of(w) for n in gm.graph.nodes for w in written_tensors(n)} if made else set()
    found = [n for n in made if storage_of(n) is not None and storage_of(n) in written]
    return changed(gm, found, clone_for_users)
