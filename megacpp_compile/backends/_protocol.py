"""What a backend is, and what it is told: the compilers of lowered graphs are modules that define these functions."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from torch.fx import GraphModule

from megacpp_compile.config.options import Config
from megacpp_compile.remat.tagging import OnPlan
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.targets import Target


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a frame is to be compiled.

    Attributes:
        target: what for.
        config: the user's settings.
        patches: Inductor's settings; they mean nothing to the other backends, which name them in the log.
        on_plan: called with what the checkpointing policy decided.
        inner_compile: makes code of a partitioned graph in place of Inductor's, as in `compile_fx`.
        copies: how many such frames run in one step.
        on_cuda_graph: called with what was decided on CUDA graphs, in words, where they are asked for.
        on_backward: called with an op and with what serves its backward, in words, for every call in a backward graph.
        on_auto: called with what `policy="auto"` chose; None where it does not choose. `config` has no policy then.
        in_pieces: whether the frame is one of several that Dynamo's is made of.
        allocated: bytes that are on the device already, where the policy limits the peak.
        auto_time: then the fraction of a step's predicted time that recomputing may take.
    """

    target: Target
    config: Config
    patches: dict[str, Any]
    on_plan: OnPlan | None = None
    inner_compile: Any = None
    copies: int = 1
    on_cuda_graph: Callable[[str], None] | None = None
    on_auto: Callable[[AutoPlan], None] | None = None
    on_backward: Callable[[str, str], None] | None = None
    auto_time: float = 0.0
    in_pieces: bool = False
    allocated: int = 0


class Backend(Protocol):
    """A module of this package."""

    def compile_plain(self, gm: GraphModule, inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
        """Compile a frame exactly as this compiler would by itself, but for the checkpointing policy, if any."""

    def compile_lowered(self, gm: GraphModule, inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
        """Compile a rewritten frame: differentiate it, plan remat, lower its semantic ops, and generate code."""

    def refusal(self, gm: GraphModule, patches: Mapping[str, Any], config: Config, grad: bool) -> str:
        """Why a frame cannot be compiled here once it is rewritten, "" where it can. patches: Inductor's settings for
        the frame. grad: whether it is compiled for training. Raises StagesOffError under `strict`."""


def backend_for(target: Target, inputs: Sequence[Any]) -> Backend:
    """The backend of the device of `target` that the frame's tensors are on."""
    return cast(Backend, importlib.import_module(f"megacpp_compile.backends.{target.device(inputs).backend}"))
