"""A recomputed op hands an intermediate to its own backward, which would otherwise compute the same again.

`down_norm_up` keeps no latent: its backward recomputes it from x. Where the policy has backward recompute the op
itself, the latent exists already (`OpTraits.handed_over`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._traits import OptionalSavedOutput, name_of, traits_of


def pass_on(graph: fx.Graph, recomputed: Sequence[Node]) -> list[Node]:
    """Add the intermediates of recomputed ops to `graph` as inputs of their backwards; the nodes added."""
    added = []
    for op in recomputed:
        given = traits_of(op).handed_over
        if given is None or not may_hand_over(op):
            continue
        readers = _backwards(op, given)
        op.args = (*op.args[: given.flag], True, *op.args[given.flag + 1 :])
        with value(op.args[0]).fake_mode:
            op.meta["val"] = op.target(*fx.map_arg(op.args, value))  # type: ignore[operator]
        with graph.inserting_after(op):
            intermediate = graph.call_function(operator.getitem, (op, given.result))
        intermediate.meta = {k: v for k, v in op.meta.items() if k in ("nn_module_stack", "stack_trace", "seq_nr")}
        intermediate.meta["val"] = op.meta["val"][given.result]
        for backward in readers:
            backward.args = (*backward.args[: given.operand], intermediate, *backward.args[given.operand + 1 :])
        added.append(intermediate)
    return added


def may_hand_over(op: Node) -> bool:
    """Whether `pass_on` would add an intermediate of `op`."""
    given = traits_of(op).handed_over
    return given is not None and op.args[given.flag : given.flag + 1] != (True,) and bool(_backwards(op, given))


def _backwards(op: Node, given: OptionalSavedOutput) -> list[Node]:
    """The backwards of this call of the op: those whose argument is the call's result, as `given.witness` has it."""
    result, operand = given.witness
    items = [u for u in op.users if u.target is operator.getitem and u.args[1] == result]
    return [b for i in items for b in i.users if name_of(b) == given.backward and b.args[operand] is i]
