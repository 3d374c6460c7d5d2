"""Train a small MLA language model, or load one, then generate with each cache, and print what each takes and gives.

The model is train_mla.py's, which knows nothing of caches. What is added here is a step that writes the latents of new
tokens to `megacpp_compile.MLAKVCache` and attends over it by `latent_attention`; in a compiled run it is one graph for
all positions. Beside it stand a forward over all tokens at each step, and a cache of keys and values of all heads.

    python examples/generate.py                                              # some minutes on CPU
    python examples/generate.py --steps 300 --save out/model.pt              # likewise
    python examples/generate.py --load out/model.pt --backend eager          # likewise

The table: bytes a token and sequence in all layers, tokens a second without the first step, how many tokens are those
of the forward over all tokens, and the loss on text that was not trained on, as read through the cache.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train_mla import (
    Help,
    ModelConfig,
    PlainLM,
    PlainMLA,
    apply_rope,
    batches,
    progress,
    rope_tables,
    standard_library_text,
)

CODECS = {"latents": None, **{f"latents, {name}": name for name in ("fp8", "turboquant", "polarquant")}}

# ---------------------------------------------------------------------------------------------------------- caches


class FullCache:
    """Keys and values of all heads, for the comparison."""

    def __init__(self, c: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shapes = [(batch, c.heads, capacity, d) for d in (c.nope_dim + c.rope_dim, c.v_dim)]
        self.kept = [[torch.zeros(s, dtype=dtype, device=device) for s in shapes] for _ in range(c.layers)]
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.capacity = capacity

    def attend(self, layer: int, a: PlainMLA, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        c, tokens = a.c, latent.shape[1]
        kv = a.kv_b_proj(latent).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], -1)
        k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, c.heads, -1, -1)), -1)
        positions = self.cache_seqlens[0] + torch.arange(tokens, device=latent.device)
        for kept, new in zip(self.kept[layer], (k, v), strict=True):
            kept.index_copy_(2, positions, new)
        seen = torch.arange(self.capacity, device=latent.device) <= positions[:, None]
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        k, v = self.kept[layer]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    def advance(self, tokens: int) -> None:
        self.cache_seqlens.add_(tokens)

    def reset(self) -> None:
        self.cache_seqlens.zero_()

    def nbytes(self, length: int) -> int:
        return sum(t.nbytes for kept in self.kept for t in kept) // self.capacity * length


class LatentCache:
    """What the package has: a latent and one rotated key row a token and layer."""

    def __init__(
        self, c: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, codec: str | None
    ) -> None:
        from megacpp_compile import MLAKVCache

        self.rows = MLAKVCache(
            c.layers, batch, capacity, c.kv_rank, c.rope_dim, dtype=dtype, device=device, codec=codec,
            expanded_channels=c.heads * (c.nope_dim + c.rope_dim + c.v_dim),
        )  # fmt: skip
        self.cache_seqlens = self.rows.cache_seqlens
        self.advance, self.reset, self.nbytes = self.rows.advance, self.rows.reset, self.rows.nbytes

    def attend(self, layer: int, a: PlainMLA, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        from megacpp_compile import latent_attention

        rows = self.rows.update(layer, latent, k_rope.unsqueeze(2))
        return latent_attention(q_nope, q_rope, rows, a.kv_b_proj.weight)


def step(model: PlainLM, cache: Any, tables: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    """Logits of the next tokens [b, n], which the cache gets."""
    c, n = model.c, tokens.shape[1]
    positions = cache.cache_seqlens[0] + torch.arange(n, device=tokens.device)
    cos, sin = (table[positions] for table in tables)
    x = model.embedding(tokens)
    block: Any
    for i, block in enumerate(model.blocks):
        a, h = block.attention, block.attention_norm(x)
        q = a.q_b_proj(a.q_a_norm(a.q_a_proj(h))).unflatten(-1, (c.heads, -1))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], -1)
        latent, k_rope = a.kv_a_proj_with_mqa(h).split([c.kv_rank, c.rope_dim], -1)
        q_rope = apply_rope(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        out = cache.attend(i, a, q_nope, q_rope, a.kv_a_norm(latent), apply_rope(k_rope, cos, sin))
        x = x + a.o_proj(out.flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    cache.advance(n)
    return F.linear(model.norm(x), model.embedding.weight)


# ---------------------------------------------------------------------------------------------------------- runs


def trained(text: Tensor, args: argparse.Namespace) -> PlainLM:
    """The model after `--steps` optimizer steps, or as it was saved."""
    torch.manual_seed(args.seed)
    model = PlainLM(ModelConfig(dim=args.dim, layers=args.layers)).to(args.device)
    if args.load:
        model.load_state_dict(torch.load(args.load, weights_only=True, map_location=args.device))
        return model.to(args.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
    for i, (tokens, targets) in enumerate(batches(text, args.steps, 8, args.length, args.seed)):
        tokens, targets = tokens.to(args.device), targets.to(args.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        progress("training", i + 1, args.steps, f"loss {loss.item():.4f}")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.save)
    return model.to(args.dtype)


def generated(name: str, next_logits: Callable[[Tensor], Tensor], prompt: Tensor, new: int) -> tuple[Tensor, float]:
    """(The most likely next tokens [b, new], tokens a second without the prompt and the first step)."""
    found, start = [next_logits(prompt)[:, -1].argmax(-1, keepdim=True)], 0.0
    for i in range(1, new):
        found.append(next_logits(found[-1])[:, -1].argmax(-1, keepdim=True))
        if i == 1:
            found[-1].tolist()  # waits for the device
            start = time.perf_counter()
        progress(name, i + 1, new, "" if i > 1 else "first step")
    tokens = torch.cat(found, 1)
    tokens.tolist()
    return tokens, prompt.shape[0] * (new - 2) / (time.perf_counter() - start)


def held_loss(logits: Tensor, held: Tensor) -> float:
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), held[:, 1:].flatten()))


@torch.no_grad()
def compared(model: PlainLM, prompt: Tensor, held: Tensor, args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """A row for each cache: its name, bytes a token, tokens a second, tokens as in the first row, loss on held text."""
    capacity = max(prompt.shape[1] + args.new, held.shape[1])
    cos, sin = rope_tables(capacity, model.c.rope_dim, model.c.rope_base, torch.device(args.device))
    tables = cos.to(args.dtype), sin.to(args.dtype)

    so_far = prompt[:, :0]

    def from_all(tokens: Tensor) -> Tensor:
        nonlocal so_far
        so_far = torch.cat((so_far, tokens), 1)
        return model(so_far)

    want, speed = generated("no cache", from_all, prompt, args.new)
    rows: list[tuple[Any, ...]] = [("no cache", 0, speed, want.numel(), held_loss(model(held), held))]
    device = torch.device(args.device)
    sizes = model.c, len(prompt), capacity, args.dtype, device
    kinds: dict[str, Callable[[], Any]] = {
        "keys and values": partial(FullCache, *sizes),
        **{name: partial(LatentCache, *sizes, codec) for name, codec in CODECS.items()},
    }
    kinds = {name: make for name, make in kinds.items() if name in args.caches}
    for name, make in kinds.items():
        torch._dynamo.reset()
        cache = make()
        decode = step if args.backend == "eager" else torch.compile(step, backend=args.backend)

        def next_logits(tokens: Tensor, cache: Any = cache, decode: Any = decode) -> Tensor:
            one = decode if tokens.shape[1] == 1 else step  # a prompt has any length
            return one(model, cache, tables, tokens)  # type: ignore[no-any-return]

        found, speed = generated(name, next_logits, prompt, args.new)
        cache.reset()
        whole = held.expand(len(prompt), -1)  # a cache has one number of sequences
        loss = held_loss(step(model, cache, tables, whole), whole)
        rows.append((name, cache.nbytes(1) // len(prompt), speed, int((found == want).sum()), loss))
    return rows


def print_table(rows: list[tuple[Any, ...]], total: int, full: int) -> None:
    """full: bytes of keys and values of all heads."""
    print(f"\n{'cache':<22}{'bytes/token':>12}{'fewer':>8}{'tokens/s':>12}{'same tokens':>14}{'held loss':>12}")
    for name, held, speed, same, loss in rows:
        fewer = f"{full / held:.2f}x" if held else "-"
        print(f"{name:<22}{held:>12,}{fewer:>8}{speed:>12,.1f}{f'{same}/{total}':>14}{loss:>12.4f}")


# ----------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps before generating")
    parser.add_argument("--load", type=Path, metavar="PATH", help="weights to load instead of training")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the trained weights there")
    parser.add_argument("--backend", default="megacpp", help="backend that compiles the decoding step, or eager")
    names = ["keys and values", *CODECS]
    parser.add_argument("--caches", nargs="+", choices=names, default=names, help="which to generate with")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate, at least 3")
    parser.add_argument("--batch", type=int, default=2, help="sequences that are generated")
    parser.add_argument("--prompt", type=int, default=32, help="bytes of text that each begins with")
    parser.add_argument("--length", type=int, default=128, help="bytes of a training sequence, and of the held text")
    parser.add_argument("--dim", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="depth of the model")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="where to run: cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights while generating")
    args = parser.parse_args()
    if args.new < 3:
        parser.error("--new must be at least 3: the first step compiles, and speed is that of the others")
    args.dtype = getattr(torch, args.dtype)
    return args


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    # Weights are trained on the first nine tenths.
    border = len(text) * 9 // 10
    model = trained(text[:border], args)
    rest = text[border:].long().to(args.device)
    prompt = rest[: args.batch * args.prompt].view(args.batch, args.prompt)
    held = rest[args.batch * args.prompt :][: args.length].unsqueeze(0)
    rows = compared(model, prompt, held, args)
    total = args.batch * args.new
    c = model.c
    print_table(rows, total, c.layers * c.heads * (c.nope_dim + c.rope_dim + c.v_dim) * args.dtype.itemsize)

    exact = [row for row in rows if row[0] in ("keys and values", "latents")]
    if args.dtype == torch.float32 and not all(row[3] == total and abs(row[4] - rows[0][4]) < 1e-3 for row in exact):
        print("FAILED: an exact cache generates other tokens than a forward over all of them")
        return 1
    print("OK: " + ", ".join(f"{row[0]} agrees on {row[3]}" for row in exact) + f" of {total} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
