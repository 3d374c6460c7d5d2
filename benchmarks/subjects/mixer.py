"""Hugging Face's Mamba-2 mixer, as it is written: its path in plain PyTorch, which nothing else trains at this size.

Judged against the same mixer in careful einsums, which does fit, and which sets the bound: what it errs in the same
precision. The floor is the two projections. On CUDA the plain path of Hugging Face fails in eager and in Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import limits, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Missing, Runner, Settings, run_case, training, wider
from benchmarks.harness import reference as widely
from benchmarks.modules import leaves_of
from benchmarks.variants import inductor, ours

# dim, heads, head width, state, groups, chunk, batch, tokens
SIZE, QUICK = (2048, 64, 64, 128, 8, 256, 4, 4096), (32, 4, 16, 8, 2, 16, 2, 40)
TAPS, EPS = 4, 1e-5
ERRS = 1.25  # times the error of the einsums: gradients of 64 numbers differ by chance


def hugging_face(dim: int, heads: int, p: int, n: int, groups: int, chunk: int) -> nn.Module:
    try:
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    except ImportError as error:
        raise Missing(f"no transformers with Mamba-2: {error}") from None
    config = Mamba2Config(hidden_size=dim, num_heads=heads, head_dim=p, expand=heads * p // dim, state_size=n,
                          n_groups=groups, chunk_size=chunk, conv_kernel=TAPS, layer_norm_epsilon=EPS,
                          num_hidden_layers=1)  # fmt: skip
    return Mamba2Mixer(config, 0)


def cases(settings: Settings) -> Iterator[Case]:
    dim, heads, p, n, groups, chunk, batch, tokens = QUICK if settings.quick else SIZE
    tokens -= tokens % chunk  # the einsums know no padding
    model = hugging_face(dim, heads, p, n, groups, chunk).to(settings.device, torch.bfloat16)
    x = torch.randn(batch, tokens, dim, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def einsums(dtype: torch.dtype) -> nn.Module:
        made = models.Mamba2Mixer(dim, heads, p, n, groups, chunk, TAPS, EPS).to(settings.device, dtype)
        made.load_state_dict(model.state_dict())
        return made

    def in_order(made: nn.Module, x: Tensor) -> list[Tensor]:
        """The input, and the parameters in the order of Hugging Face's."""
        own = dict(made.named_parameters())
        return [x, *(own[name] for name, _ in model.named_parameters())]

    def wide() -> list[Tensor]:
        made = einsums(wider(x.dtype))
        return widely(made, (x,), lambda args: in_order(made, args[0]), [grad])

    def plain(compiler: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], Runner]:
        def build() -> Runner:
            made = einsums(x.dtype)
            return training(compiler(made), (x,), in_order(made, x), [grad])

        return build

    def theirs(compiler: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], Runner]:
        return lambda: training(compiler(model), (x,), leaves_of(model, x), [grad])

    rows = [
        Contestant("einsums, eager", "eager", plain(lambda model: model)),
        Contestant("einsums, Inductor", "peer", plain(inductor)),
        Contestant("einsums, megacpp", "ours", plain(ours({})), times_eager=ERRS),
        Contestant("Hugging Face, eager", "peer", theirs(lambda model: model)),
        Contestant("Hugging Face, Inductor", "peer", theirs(inductor)),
        Contestant("Hugging Face, megacpp", "ours", theirs(ours({})), times_eager=ERRS),
        Contestant("Hugging Face, megacpp, selective", "ours", theirs(ours({"policy": "selective"})), times_eager=ERRS),
    ]  # fmt: skip
    mixed = heads * p + 2 * groups * n
    forward = limits.linear_flops(batch * tokens, [(dim, heads * p + mixed + heads), (heads * p, dim)])
    work = {FORWARD: Work(flops=forward), STEP: Work(flops=3 * forward)}
    sizes = {"dim": dim, "heads": heads, "head width": p, "state": n, "groups": groups, "chunk": chunk,
             "batch": batch, "tokens": tokens}  # fmt: skip
    names = ["output", "grad x", *(f"grad {name}" for name, _ in model.named_parameters())]
    yield Case("mixer", "Mamba-2", sizes, work, wide, rows, torch.bfloat16, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
