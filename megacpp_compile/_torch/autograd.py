"""Where autograd is: in which node, in which backward, under which hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._C import _current_autograd_node as current_autograd_node
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C._autograd import _get_current_graph_task_keep_graph as current_graph_is_kept
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_default_hooks
    from torch._dynamo.compiled_autograd import Op as CompiledAutogradOp
    from torch.autograd import _get_sequence_nr as get_sequence_nr
else:
    __getattr__ = theme(__name__)
