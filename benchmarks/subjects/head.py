"""The head and its loss: projection to words, mean cross entropy, and gradients of both operands.

What memory the logits take is the question, and what it costs in time not to have them: "peak MiB" is what a step needs
beyond its operands. The floor is three GEMMs (logits and two gradients); rows of kind limit are cuBLAS's own time for
them, at once and by chunks as the op has them. The op's gradients are made in its forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import kernels
from benchmarks.ceilings import Work
from benchmarks.harness import STEP, Case, Contestant, Missing, Runner, Settings, reference, run_case, training
from benchmarks.peers import liger
from benchmarks.variants import inductor, ours

IGNORED = -100
# One row in so many has no target, as padding has none.
PADDING = 16
CHUNKS = 16
# A sum in bfloat16 over chunks rounds once a chunk; kernels of others are held to what that makes of it, too.
BOUND = 2e-2


@dataclasses.dataclass(frozen=True)
class Size:
    hidden: int
    words: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.hidden} → {self.words}, {self.tokens} tokens"


SIZES = (
    Size(2048, 131072, 16384),
    Size(4096, 131072, 8192),
    Size(7168, 131072, 4096),
    Size(2048, 32768, 16384),
    Size(4096, 262144, 4096),
    Size(768, 30522, 16384),
)
QUICK = (Size(16, 200, 64),)
# Of our kernels: MiB of logits in a chunk, and what the weight's gradient is added up in (None: its own dtype).
SETTINGS = ((512, torch.float32), (512, None), (256, None))


class Plain(nn.Module):
    """As a model has it."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.cross_entropy(F.linear(x, w).to(wide), self.target, ignore_index=IGNORED)


class ByHand(Plain):
    """Chunk by chunk, as recipes for training have it: each chunk's projection and loss compiled, logits kept."""

    def __init__(self, target: Tensor) -> None:
        super().__init__(target)
        self.chunk = torch.compile(self.loss_of_chunk)

    @staticmethod
    def loss_of_chunk(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), target, ignore_index=IGNORED, reduction="sum")

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        parts = zip(x.chunk(CHUNKS), self.target.chunk(CHUNKS), strict=True)
        loss = torch.stack([self.chunk(rows, w, target) for rows, target in parts]).sum()
        return loss / (self.target != IGNORED).sum()


class Op(Plain):
    """Our op, called by name."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        import megacpp_compile.lowerings.linear_cross_entropy  # noqa: F401  registers the op

        op, settings = torch.ops.megacpp.linear_cross_entropy, (IGNORED, 0.0, 1.0, None, 0.0, "sum", "xw")
        return op(x, w, None, self.target, None, *settings)[0] / (self.target != IGNORED).sum()


def auto_chunked(model: nn.Module) -> Callable[..., Any]:
    """Inductor with its own pass that chunks what amplifies its inputs."""
    import torch._inductor.config as config

    if not hasattr(config, "auto_chunker"):
        raise Missing(f"torch {torch.__version__} has no auto_chunker")
    return torch.compile(model, options={"auto_chunker.enable": True})


def of_torch(target: Tensor) -> Callable[..., Tensor]:
    """torch's function of the same meaning, in chunks."""
    function, options = getattr(F, "linear_cross_entropy", None), getattr(nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise Missing(f"torch {torch.__version__} has no linear_cross_entropy in chunks")
    return lambda x, w: function(x, w, target, ignore_index=IGNORED, options=options())


def gemms(x: Tensor, w: Tensor) -> Runner:
    """The three of them at once, each on all tokens."""
    x, w = x.detach(), w.detach()

    def step() -> tuple[Tensor, Tensor]:
        logits = x @ w.t()
        return logits @ w, logits.t() @ x

    return Runner({STEP: step})


def gemms_by_chunks(x: Tensor, w: Tensor) -> Runner:
    """The three of them as our kernels call them, without what stands between."""
    op = kernels.lowering("linear_cross_entropy", x.device)
    x, w = x.detach(), w.detach()
    target = torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def step() -> tuple[Tensor, ...]:
        of = op.HeadChunks(x, w, None, target, "xw")
        made = op.HeadGradients(of, "xw", w.dtype)
        for rows, logits in of.logits():
            made.add(rows, logits)
        return made.made()  # type: ignore[no-any-return]

    return Runner({STEP: step})


def our_kernels(
    x: Tensor, w: Tensor, target: Tensor, mib: int, accumulate: torch.dtype | None, tuned: bool = False
) -> Runner:
    """The lowering itself, under one choice of its settings; the sum's gradients, not yet over a count."""
    from megacpp_compile.lowerings.linear_cross_entropy import chunks

    op = kernels.lowering("linear_cross_entropy", x.device)
    x, w, count = x.detach(), w.detach(), (target != IGNORED).sum()

    def step() -> list[Tensor]:
        before = chunks.CUDA_BYTES, chunks.MOST_IN_PLACE
        chunks.CUDA_BYTES, chunks.MOST_IN_PLACE = mib << 20, 1 << 20 if accumulate is None else 0
        try:
            settings = IGNORED, 0.0, 1.0, None, 0.0, "sum", "xw"
            with kernels.tuning(tuned)():
                loss, _, dx, dw, _ = op.linear_cross_entropy(x, w, None, target, None, *settings)
        finally:
            chunks.CUDA_BYTES, chunks.MOST_IN_PLACE = before
        return [loss, dx, dw]

    def results() -> list[Tensor]:
        return [(t.float() / count).to(t.dtype) for t in step()]

    return Runner({STEP: step}, results)


def problem(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and target: logits of about one, as at the beginning of training."""
    x = torch.randn(size.tokens, size.hidden, device=device).to(torch.bfloat16)
    w = (torch.randn(size.words, size.hidden, device=device) / size.hidden**0.5).to(torch.bfloat16)
    target = torch.randint(size.words, (size.tokens,), device=device)
    target[::PADDING] = IGNORED
    return x.requires_grad_(), w.requires_grad_(), target


def case(size: Size, device: torch.device) -> Case:
    x, w, target = problem(size, device)
    model, one = Plain(target), torch.ones((), device=device)

    def row(name: str, kind: str, make: Callable[[], Callable[..., Tensor]], **judged: Any) -> Contestant:
        def build() -> Runner:
            fn = make()
            runner = training(lambda x, w: fn(x, w).float(), (x, w), (x, w), [one])
            return dataclasses.replace(runner, measures={STEP: runner.measures[STEP]})

        return Contestant(name, kind, build, **judged)

    times = kernels.times_eager(device)

    def setting(mib: int, accumulate: torch.dtype | None, tuned: bool = False) -> Contestant:
        sums = "bfloat16" if accumulate is None else "float32"
        bound = BOUND if accumulate is None else None
        name = f"our kernels, {mib} MiB a chunk, sums in {sums}{', tuned' * tuned}"
        return Contestant(name, "kernels", lambda: our_kernels(x, w, target, mib, accumulate, tuned), bound, times)

    rows = [
        Contestant("its GEMMs alone", "limit", lambda: gemms(x, w)),
        Contestant("its GEMMs alone, by chunks", "limit", lambda: gemms_by_chunks(x, w)),
        row("eager", "eager", lambda: model),
        row("Inductor", "inductor", lambda: inductor(model)),
        row("Inductor with auto_chunker", "control", lambda: auto_chunked(model), bound=BOUND),
        row("megacpp", "ours", lambda: ours({})(model)),
        row("our op", "ours", lambda: Op(target)),
        row("our op, compiled", "ours", lambda: ours({})(Op(target))),
        *(setting(mib, accumulate) for mib, accumulate in SETTINGS),
        setting(*SETTINGS[0], tuned=True),
        row("by hand, 16 compiled chunks", "peer", lambda: ByHand(target), bound=BOUND),
        row("torch's linear_cross_entropy", "peer", lambda: of_torch(target), bound=BOUND),
        row("Liger's kernel", "peer", lambda: liger.linear_cross_entropy(target, IGNORED), bound=BOUND),
    ]
    flops = 6.0 * size.tokens * size.words * size.hidden
    moved = 2.0 * (x.numel() + w.numel()) * x.element_size()
    return Case("head", size.name, dataclasses.asdict(size), {STEP: Work(moved, flops)},
                lambda: reference(model, (x, w), lambda wide: wide, [one]), rows, torch.bfloat16,
                ("loss", "grad x", "grad w"))  # fmt: skip


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for size in QUICK if settings.quick else SIZES:
        yield from run_case(case(size, settings.device), settings)
