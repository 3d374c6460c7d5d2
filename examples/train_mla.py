"""Train a small byte-level language model twice, eager and compiled, and compare the two runs.

The model is written the plain way, with multi-head latent attention (MLA) as in DeepSeek-V2, and knows nothing of
the package; `torch.compile(model, backend="megacpp")` is the only change between the runs. The text is Python's own
standard library, so that nothing has to be downloaded.

    python examples/train_mla.py                                             # some minutes on CPU
    python examples/train_mla.py --backend inductor --steps 50 --no-plot     # likewise
    PJRT_DEVICE=CPU python examples/train_mla.py --device xla --steps 50 --json out.json     # needs torch_xla

overlay.py draws what --json writes. The figure needs matplotlib.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 256  # bytes
    dim: int = 192
    layers: int = 4
    heads: int = 4
    q_rank: int = 96
    kv_rank: int = 64
    nope_dim: int = 32  # part of a head without position
    rope_dim: int = 16  # part of a head that RoPE rotates
    v_dim: int = 32
    mlp_dim: int = 512
    rope_base: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def rope_tables(length: int, dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


class PlainMLA(nn.Module):
    """Queries, keys and values each pass through a small latent; one rotated key slice serves every head."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.q_a_proj = nn.Linear(c.dim, c.q_rank, bias=False)
        self.q_a_norm = RMSNorm(c.q_rank)
        self.q_b_proj = nn.Linear(c.q_rank, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.dim, c.kv_rank + c.rope_dim, bias=False)
        self.kv_a_norm = RMSNorm(c.kv_rank)
        self.kv_b_proj = nn.Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.c
        batch, length, _ = x.shape

        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.view(batch, length, c.heads, c.nope_dim + c.rope_dim).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)

        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent))
        kv = kv.view(batch, length, c.heads, c.nope_dim + c.v_dim).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)

        q_rope = apply_rope(q_rope, cos, sin)
        k_rope = apply_rope(k_rope.view(batch, 1, length, c.rope_dim), cos, sin)

        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, c.heads, -1, -1)), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, c.heads * c.v_dim))


class SwiGLU(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.mlp_dim, bias=False)
        self.up_proj = nn.Linear(c.dim, c.mlp_dim, bias=False)
        self.down_proj = nn.Linear(c.mlp_dim, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(c.dim)
        self.attention = PlainMLA(c)
        self.mlp_norm = RMSNorm(c.dim)
        self.mlp = SwiGLU(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class PlainLM(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rope_tables(tokens.shape[1], self.c.rope_dim, self.c.rope_base, tokens.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)  # the head shares the embedding's weight


# ----------------------------------------------------------------------------------------------------------- data


def standard_library_text(limit: int = 4_000_000) -> Tensor:
    """The interpreter's own modules, in name order, as one row of bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: Tensor, steps: int, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text and the same windows one byte later; a seed always gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        window = text[starts + torch.arange(length + 1)].long()
        yield window[:, :-1], window[:, 1:]


# ------------------------------------------------------------------------------------------------------- training


@dataclass
class Run:
    losses: list[float]
    tokens_per_second: float
    compile_seconds: float


def device_and_end_of_step(name: str) -> tuple[torch.device, Callable[[], Any]]:
    """XLA is lazy: what a step has recorded by its end is compiled and run there."""
    if name != "xla":
        return torch.device(name), lambda: None
    try:
        import torch_xla
    except ImportError:
        sys.exit("--device xla needs torch_xla and its torch: pip install torch==2.9.0 torch_xla==2.9.0")
    return torch_xla.device(), torch_xla.sync


def train(name: str, backend: str | None, text: Tensor, args: argparse.Namespace) -> Run:
    torch.manual_seed(args.seed)
    device, end_of_step = device_and_end_of_step(args.device)
    model = PlainLM(ModelConfig(dim=args.dim, layers=args.layers)).to(device, args.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    step_model = torch.compile(model, backend=backend) if backend else model

    losses: list[float] = []
    seconds: list[float] = []
    progress(name, 0, args.steps, "compiling, under a minute" if backend else "")
    for tokens, targets in batches(text, args.steps, args.batch, args.length, args.seed):
        start = time.perf_counter()
        tokens, targets = tokens.to(device), targets.to(device)
        logits = step_model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        end_of_step()
        losses.append(loss.item())  # waits for the device, so the time below is the step's own
        seconds.append(time.perf_counter() - start)
        progress(name, len(losses), args.steps, f"loss {losses[-1]:.4f}")

    # The first step compiles forward and backward; the median of the others is what a step takes.
    step_seconds = statistics.median(seconds[1:])
    compile_seconds = seconds[0] - step_seconds if backend else 0.0
    return Run(losses, args.batch * args.length / step_seconds, compile_seconds)


def progress(name: str, step: int, steps: int, note: str) -> None:
    """One line on stderr that rewrites itself, or ten lines where stderr is a file."""
    if sys.stderr.isatty():
        filled = 30 * step // steps
        line = f"\r{name:>8} [{'=' * filled}{' ' * (30 - filled)}] {step}/{steps} {note}\033[K"
        print(line, end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step % max(1, steps // 10) == 0 or step == steps:
        print(f"{name:>8} {step}/{steps} {note}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------- report


def print_comparison(backend: str, eager: Run, compiled: Run, report: Any) -> None:
    rows = [
        ("", "eager", backend),
        ("final loss", f"{eager.losses[-1]:.5f}", f"{compiled.losses[-1]:.5f}"),
        ("tokens/s", f"{eager.tokens_per_second:,.0f}", f"{compiled.tokens_per_second:,.0f}"),
        ("compile seconds", "-", f"{compiled.compile_seconds:.1f}"),
    ]
    print()
    for label, left, right in rows:
        print(f"{label:<22}{left:>14}{right:>14}")
    print(f"{'largest difference':<22}{largest_difference(eager, compiled):>28.2e}")

    if report is not None:
        measured = [s for s in report.sites if s.saved_before is not None and s.saved_after is not None]
        before, after = sum(s.saved_before for s in measured), sum(s.saved_after for s in measured)
        fused = {name: count for name, count in report.counts.items() if count}
        print(f"{'sites fused':<22}{', '.join(f'{name} {count}' for name, count in fused.items()) or 'none'}")
        print(f"{'saved for backward':<22}{before / 2**20:.2f} MiB -> {after / 2**20:.2f} MiB at these sites")


def largest_difference(a: Run, b: Run) -> float:
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def write(path: Path, args: argparse.Namespace, runs: dict[str, Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {"device": args.device, "dtype": str(args.dtype), "torch": torch.__version__}
    path.write_text(json.dumps([{"backend": name, **where, **vars(run)} for name, run in runs.items()], indent=1))


def plot(path: Path, backend: str, eager: Run, compiled: Run) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is missing (pip install matplotlib, or pass --no-plot)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(eager.losses, label="eager", color="0.7", linewidth=4)
    top.plot(compiled.losses, label=backend, color="tab:red", linewidth=1)
    top.set_ylabel("loss")
    top.legend()
    bottom.plot([b - a for a, b in zip(eager.losses, compiled.losses, strict=True)], color="tab:red", linewidth=1)
    bottom.set_ylabel(f"{backend} - eager")
    bottom.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"{'figure':<22}{path}")


# ----------------------------------------------------------------------------------------------------------- main

# Rounding differences grow as training goes on. Warm-up and clipping keep that growth small (about 1e-6 here in
# float32); without them, and at twice the learning rate, the curves of eager and Inductor came to differ by 5e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """An example's own text as it is written, and the default of every option."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--backend", default="megacpp", help="backend of torch.compile")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run, at least 2")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--dim", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="depth of the model")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="where to train: cpu, cuda, or xla")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and activations")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=argparse.SUPPRESS,
        help="largest difference allowed between the two loss curves "
        f"(default: {TOLERANCE[torch.float32]} in float32, {TOLERANCE[torch.bfloat16]} in bfloat16)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write losses and speed of both runs there")
    default_plot = Path(__file__).parent / "out" / "train_mla.png"
    drawn = "figure of the loss curves; the report as a page beside it"
    parser.add_argument("--plot", type=Path, default=default_plot, metavar="PATH", help=drawn)
    parser.add_argument("--no-plot", action="store_true", default=argparse.SUPPRESS, help="write neither")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is the one that compiles")
    args.dtype = getattr(torch, args.dtype)
    if "tolerance" not in args:
        args.tolerance = TOLERANCE[args.dtype]
    return args


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    print(f"{len(text):,} bytes of text, {args.device}, {args.dtype}, torch {torch.__version__}")

    # The backend itself needs no import; record() collects what it did.
    recording: Any = nullcontext()
    if args.backend == "megacpp":
        try:
            import megacpp_compile
        except ImportError:
            sys.exit("megacpp_compile is not installed: pip install -e .  (or pass --backend inductor)")
        recording = megacpp_compile.record()

    eager = train("eager", None, text, args)
    with recording as report:
        compiled = train(args.backend, args.backend, text, args)

    print_comparison(args.backend, eager, compiled, report)
    if args.json:
        write(args.json, args, {"eager": eager, args.backend: compiled})
    if "no_plot" not in args:
        plot(args.plot, args.backend, eager, compiled)
        if report is not None:  # beside the figure
            page = args.plot.with_suffix(".html")
            page.parent.mkdir(parents=True, exist_ok=True)
            report.to_html(page)
            print(f"{'report':<22}{page}")

    difference = largest_difference(eager, compiled)
    if not difference <= args.tolerance:  # written so that NaN fails too
        print(f"FAILED: the loss curves differ by {difference:.2e}, more than {args.tolerance:.0e}")
        return 1
    if report is not None and not report.sites:
        print(report)
        print("FAILED: nothing was fused; the report above says what was tried")
        return 1
    print(f"OK: the loss curves agree within {args.tolerance:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
