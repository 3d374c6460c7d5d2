"""Names of modules and parameters as the user's model has them, whatever wraps its modules.

`checkpoint_wrapper`, FSDP and `torch.compile` put a module around a module, and DDP one around the whole: the names of
what is inside then have a segment more ("layers.0._checkpoint_wrapped_module.mlp"). Rules and reports have none of
these segments, and a wrapper has the name of what it wraps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from torch import nn

from megacpp_compile._torch import modules


def canonical(fqn: str) -> str:
    """`fqn` without the segments that wrappers add."""
    added = _added()
    return ".".join(part for part in fqn.split(".") if part not in added)


@functools.cache
def _added() -> frozenset[str]:
    return frozenset({modules.checkpoint_wrapped, modules.fsdp_wrapped, modules.COMPILED})


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(canonical name, module) of `model`, "" for itself, and of all modules in it; one with two names is there twice,
    and a wrapper in front of what it wraps."""
    names: dict[str, str] = {}
    found = dict(model.named_modules(remove_duplicate=False))
    for real, module in found.items():
        around, _, own = real.rpartition(".")
        replicated = own == "module" and isinstance(found[around], nn.parallel.DistributedDataParallel)
        names[real] = names[around] if replicated else canonical(f"{names[around]}.{own}".strip(".")) if real else ""
        yield names[real], module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of all parameters of `model`; one with two names is there twice."""
    for name, module in named_modules(model):
        yield from ((f"{name}.{own}".strip("."), p) for own, p in module.named_parameters(recurse=False))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, object]]:
    """`named_parameters`, and buffers likewise."""
    yield from named_parameters(model)
    for name, module in named_modules(model):
        yield from ((f"{name}.{own}".strip("."), b) for own, b in module.named_buffers(recurse=False))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The module `name` in other words: by its own entry in `names`, or by that of the nearest module around it."""
    above = name
    while above and above not in names:
        above = above.rpartition(".")[0]
    return f"{names[above]}{name[len(above) :]}" if above in names and (above or not name) else name
