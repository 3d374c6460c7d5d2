"""Whether a checkpoint fits a model, told before anything is loaded, with the widths of latents in words.

Latent attention is recognised by shapes alone, in a model and in a file alike: a matrix [r + p, D] that projects down,
a norm's weight [r], and a matrix [N, r] that projects up, side by side in one module, with r < D. p is 0 for a latent
that is normed whole, as queries' is, and the channels of the shared RoPE key beside that of keys and values. Of several
matrices that could project down the one with the least p counts, then the one that stands nearest to the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megacpp_compile.errors import NotAModuleError, ResumeError
from megacpp_compile.fx.module_names import canonical

Shapes = dict[str, tuple[int, ...]]
_SHOWN = 6  # names of one list in an error


@dataclass(frozen=True)
class Latent:
    """The latent of one attention module.

    Attributes:
        module: the module's name.
        down: the weight that projects down, beside the module's name: "kv_a_proj.weight".
        width: channels that are normed and projected up; kv_lora_rank or q_lora_rank.
        beside: channels of the same projection beside them; those of the RoPE key.
        hidden: channels of its input.
    """

    module: str
    down: str
    width: int
    beside: int
    hidden: int

    def __str__(self) -> str:
        beside = f" + {self.beside}" if self.beside else ""
        return f"{self.down} ({self.width}{beside}, {self.hidden})"


@dataclass(frozen=True)
class Resume:
    """What `check_resume` found where a checkpoint fits.

    Attributes:
        latents: of the model, and so of the checkpoint.
        tensors: how many of the model's parameters and persistent buffers the checkpoint has.
        unexpected: names that the model does not have, where they were allowed.
    """

    latents: tuple[Latent, ...]
    tensors: int
    unexpected: tuple[str, ...] = ()


def check_resume(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Resume:
    """Hold a checkpoint against `model` before it is loaded; neither is changed.

    model: on any device, meta included, wrapped or not; of sharded parameters the whole shapes count.
    state_dict: name -> tensor, as for `model.load_state_dict`, on any device; names may have the segments of wrappers.
        What is no tensor is passed over, as Transformer Engine's `_extra_state` is.
    strict: whether names that the model does not have are an error, too, as in `load_state_dict`.

    Returns what was found. Raises NotAModuleError; and ResumeError where a tensor is missing or has another shape,
    which says of latent attention what both sides have: the latents' widths, or that one side has none and what it has
    there.
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    own = model.state_dict(keep_vars=True)
    wanted, found = _shapes(own), _shapes(state_dict)
    tied = _tied(own)
    missing = [name for name in wanted if name not in found and not tied[name] & found.keys()]
    unexpected = [name for name in found if name not in wanted]
    differing = [name for name in wanted if name in found and wanted[name] != found[name]]
    here, there = _latents(wanted), _latents(found)
    if missing or differing or (unexpected and strict):
        lines = [*_of_latents(here, there, wanted, found)]
        lines += _listed("another shape", [f"{n} {_size(wanted[n])} here, {_size(found[n])} there" for n in differing])
        lines += _listed("missing", [f"{n} {_size(wanted[n])}" for n in missing])
        lines += _listed("of no parameter here", [f"{n} {_size(found[n])}" for n in unexpected]) if strict else []
        raise ResumeError(lines, missing, unexpected, differing)
    return Resume(tuple(x for module in here.values() for x in module), len(wanted.keys() & found.keys()),
                  tuple(unexpected))  # fmt: skip


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    """Shapes by canonical name; without a "module." that all names begin with, as DDP's."""
    found = {canonical(name): tuple(t.shape) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    replicated = bool(found) and all(name.startswith("module.") for name in found)
    return {name.removeprefix("module.") if replicated else name: shape for name, shape in found.items()}


def _tied(own: Mapping[str, Any]) -> dict[str, set[str]]:
    """Name -> all names of the same parameter: a file may have one of them only."""
    groups: dict[int, set[str]] = {}
    for name, t in own.items():
        if isinstance(t, torch.Tensor):
            groups.setdefault(id(t), set()).update(_shapes({name: t}))
    return {name: names for names in groups.values() for name in names}


def _latents(shapes: Shapes) -> dict[str, list[Latent]]:
    """Module -> its latents, by the shapes of the weights that its children hold."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, _, own = name.rpartition(".")[0].rpartition(".")
        modules.setdefault(module, {})[f"{own}.{name.rpartition('.')[2]}"] = shape
    found: dict[str, list[Latent]] = {}
    for module, held in modules.items():
        matrices = {own: shape for own, shape in held.items() if len(shape) == 2}
        places = {own: i for i, own in enumerate(held)}
        norms = {own: shape[0] for own, shape in held.items() if len(shape) == 1 and own.endswith(".weight")}
        read = {inner for _, inner in matrices.values()}
        pairs = sorted(
            (out - norms[norm], abs(places[own] - places[norm]), norm, own)
            for norm in norms if norms[norm] in read
            for own, (out, inner) in matrices.items() if norms[norm] <= out < inner
        )  # fmt: skip
        chosen: dict[str, Latent] = {}
        for again in (False, True):  # a second norm of one projection only where there is no other
            for beside, _, norm, own in pairs:
                if norm not in chosen and (again or own not in {x.down for x in chosen.values()}):
                    chosen[norm] = Latent(module, own, norms[norm], beside, matrices[own][1])
        if chosen:
            found[module] = list(chosen.values())
    return {module: sorted(latents, key=str) for module, latents in found.items()}


def _of_latents(
    here: dict[str, list[Latent]], there: dict[str, list[Latent]], wanted: Shapes, found: Shapes
) -> Iterator[str]:
    """A line for the modules whose latents differ; equal lines once, as all layers of a model say the same."""
    said: dict[str, list[str]] = {}
    for module in dict.fromkeys((*here, *there)):
        if here.get(module) != there.get(module):
            sides = (
                _side("the model", module, here.get(module), wanted),
                _side("the checkpoint", module, there.get(module), found),
            )
            said.setdefault("; ".join(sides), []).append(module)
    for line, modules in said.items():
        others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        yield f"latent attention of {modules[0]}{others}: {line}"


def _side(which: str, module: str, latents: list[Latent] | None, shapes: Shapes) -> str:
    if latents:
        return f"{which} has {', '.join(map(str, latents))}"
    held = [f"{n.removeprefix(module + '.')} {_size(s)}" for n, s in shapes.items() if n.startswith(module + ".")]
    return f"{which} has no latents there, but {', '.join(_some(held))}" if held else f"{which} has no such module"


def _listed(what: str, lines: list[str]) -> list[str]:
    return [f"{what}: {', '.join(_some(lines))}"] if lines else []


def _some(lines: list[str]) -> list[str]:
    rest = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])


def _size(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
