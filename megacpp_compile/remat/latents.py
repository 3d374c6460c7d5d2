"""A projection that is computed again hands its latent to its own backward, which else begins with the same product.

`down_norm_up` keeps no latent: its backward computes it from x. Where the policy has the op itself computed again in
backward, it has just been there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.remat.nodes import name_of

_LATENT = 3  # the op's last result


def pass_on(graph: fx.Graph, recomputed: Sequence[Node]) -> list[Node]:
    """The nodes added to `graph`: the latents of what is computed again, each read by that op's backward."""
    added = []
    for op in recomputed:
        if name_of(op) != "megacpp::down_norm_up" or op.args[8:] == (True,):
            continue
        parts = {u for u in op.users if u.target is operator.getitem}
        users = [(p, b) for p in parts for b in p.users if name_of(b) == "megacpp::down_norm_up_backward"]
        readers = [b for rrms, b in users if b.args[7] is rrms]
        if not readers:
            continue
        op.args = (*op.args[:8], True)
        with value(op.args[0]).fake_mode:
            op.meta["val"] = op.target(*fx.map_arg(op.args, value))  # type: ignore[operator]
        with graph.inserting_after(op):
            latent = graph.call_function(operator.getitem, (op, _LATENT))
        latent.meta = {k: v for k, v in op.meta.items() if k in ("nn_module_stack", "stack_trace", "seq_nr")}
        latent.meta["val"] = op.meta["val"][_LATENT]
        for backward in readers:
            backward.args = (*backward.args[:10], latent)
        added.append(latent)
    return added
