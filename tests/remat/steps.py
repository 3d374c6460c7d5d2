"""One training step under a policy: output, gradients, bytes saved for backward, the graphs and the report.

Inductor's code generation is left out: its passes over the joint graph and the partitioner run as ever, and so do the
lowerings; the two graphs that come out are then executed as they are. What is saved is what the forward graph hands to
autograd, counted by storage, without parameters and inputs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._inductor import compile_fx as inductor
from torch.fx import GraphModule

import megacpp_compile
from tests.precision.models import equal

# Up to torch 2.13 attention draws random numbers for all the partitioner knows, and runs again with the random state of
# the first time, which is saved. From 2.14 on the partitioner looks whether there is dropout.
KEEPS_RANDOM_STATE = not hasattr(partitioners, "is_rng_op")


@dataclasses.dataclass
class Step:
    output: Tensor
    gradients: list[Tensor]
    saved: int
    graphs: list[GraphModule]
    report: Any

    @property
    def remat(self) -> dict[str, dict[str, Any]]:
        """The plan's numbers of the only frame that has any."""
        (found,) = [f.remat for f in self.report.frames if f.remat]
        return found

    @property
    def predicted(self) -> int:
        return sum(kind["saved"] for frame in self.report.frames for kind in (frame.remat or {}).values())


def _draw(size: Any, seed: Tensor, mode: str, *, offset: int = 0) -> Tensor:
    """As Inductor's kernels do: the same seed, the same numbers."""
    return getattr(torch, mode)(size, generator=torch.Generator().manual_seed(int(seed) + offset))


@contextlib.contextmanager
def without_code(graphs: list[GraphModule]):
    whole = inductor.compile_fx

    def execute(gm: GraphModule, example_inputs: Any, **_: Any) -> Any:
        lower = torch._inductor.config.post_grad_custom_pre_pass
        if lower is not None:
            lower(gm.graph)
        for node in gm.graph.nodes:
            if "inductor_random" in str(node.target):
                node.target = _draw
        gm.recompile()
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **{"inner_compile": execute, **kwargs})

    # What is executed in place of Inductor's own kind of result is never kept, but its key would be made.
    with (
        mock.patch.object(inductor, "compile_fx", compile_fx),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def step(model: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any], around: Any = None, **kwargs: Any):
    """The first of `inputs` has a gradient. around: a context for the forward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    graphs: list[GraphModule] = []
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    x = inputs[0].detach().requires_grad_()
    with without_code(graphs), megacpp_compile.record() as report:
        compiled = torch.compile(model, backend=megacpp_compile.backend, options=options, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), around or contextlib.nullcontext():
            output = compiled(x, *inputs[1:])
        saved = dict(kept)  # what backward packs for itself is not the forward's
        gradients = torch.autograd.grad(output.float().square().sum(), [x, *model.parameters()])
    alive = {t.untyped_storage().data_ptr() for t in (x, *inputs[1:], *model.parameters(), *model.buffers())}
    size = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in alive)
    return Step(output, list(gradients), size, graphs, report)


def same(one: Step, other: Step) -> bool:
    """Bit by bit."""
    return equal([one.output, *one.gradients], [other.output, *other.gradients])


def count(gm: GraphModule, *names: str) -> int:
    return sum(any(name in str(n.target) for name in names) for n in gm.graph.nodes if n.op == "call_function")


def cores(backward: GraphModule) -> int:
    """How many attention cores without dropout run again, with the random state of the first time where torch keeps
    that."""
    held, plain = count(backward, "run_with_rng_state"), count(backward, "flash_attention_for_cpu.default")
    assert not (plain if KEEPS_RANDOM_STATE else held)
    return held + plain
