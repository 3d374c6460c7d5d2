"""The entry point: `torch.compile(model, backend="megacpp")` finds `megacpp` here, through the entry point group
`torch_dynamo_backends`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.fx import GraphModule

from megacpp_compile._torch import dynamo
from megacpp_compile.backends.static_launch import start_workers_for_gpus
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BadOptionError, TorchTooOldError, wrapped_in
from megacpp_compile.frontend import unbacked_shapes
from megacpp_compile.fx.compiled_models import note_compiled
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.pipeline import WHOLE, Block, compile_frame
from megacpp_compile.report import stages

MINIMUM_TORCH = (2, 9)

Called = TypeVar("Called", bound=Callable[..., Any])


def raises_own_errors(backend: Called) -> Called:
    """`backend`, called by Dynamo, whose errors of this package reach the user by their own class: Dynamo would wrap
    them in BackendCompilerFailed."""

    @functools.wraps(backend)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return backend(*args, **kwargs)
        except Exception as error:
            own, frame = wrapped_in(error), inspect.currentframe()
            if own is None or frame is None:
                raise
            raise dynamo.unwrapped(own, frame) from error

    return cast(Called, called)


@raises_own_errors
def megacpp(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The `torch.compile` backend.

    gm, example_inputs: Dynamo's graph and its inputs. options: fields of `Config`, or a `Config`. mode: a
    `torch.compile` mode, whose Inductor settings are used. Raises the errors of `megacpp_compile.errors` for bad
    options, an unmet `require`, a failed verification under `strict`, or a target that is not there. They reach the
    user of `torch.compile` by their own class.
    """
    return compile_with(gm, example_inputs, checked_options(options, mode), mode)


def checked_options(options: Mapping[str, Any] | Config | None = None, mode: str | None = None) -> Config:
    """The settings that `options` and the environment make. Raises TorchTooOldError and the errors of
    `Config.from_options`, and BadOptionError for a `mode` that torch does not have. `torch.compile` calls it when the
    options are given."""
    check_torch()
    mode_patches(mode)
    return Config.from_options(options, pass_names())


def compile_with(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, mode: str | None = None, block: Block = WHOLE,
    inner_compile: Any = None,
) -> Callable[..., Any]:  # fmt: skip
    """`pipeline.compile_frame` with checked settings and a `torch.compile` mode."""
    note_compiled()
    try:
        return compile_frame(
            gm, example_inputs, config, {**mode_patches(mode), **config.inductor}, block, inner_compile
        )
    finally:
        stages.frame_goes_on()


def check_torch(found: str | None = None) -> None:
    """Raise TorchTooOldError for a torch older than 2.9."""
    found = found or torch.__version__
    if tuple(int(x) for x in found.split(".")[:2]) < MINIMUM_TORCH:
        raise TorchTooOldError(found)


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor's settings of a `torch.compile` mode. Raises BadOptionError for one that torch does not have."""
    if mode in (None, "default"):
        return {}
    from megacpp_compile._torch.inductor import list_mode_options

    try:
        return dict(list_mode_options(mode))
    except (RuntimeError, TypeError):
        known = list(list_mode_options())
        raise BadOptionError("mode", mode, "one of " + ", ".join(map(repr, known)), known) from None


class _Backend(ModuleType):
    """This module, callable: `torch.compile(model, backend=megacpp_compile.backend)` means `megacpp`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return megacpp(*args, **kwargs)


sys.modules[__name__].__class__ = _Backend
# `import megacpp_compile` does not come here; asking for the backend does.
for _backend in (megacpp, sys.modules[__name__]):
    unbacked_shapes.traces_unbacked_shapes(_backend)
unbacked_shapes.install(start_workers_for_gpus)
dynamo.registers_again(megacpp)
dynamo.check_when_given((megacpp, sys.modules[__name__]), checked_options)
