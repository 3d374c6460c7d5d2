"""Decoding with a whole model: DeepSeek-V2-Lite's shapes from transformers, one new token for each sequence.

    python -m benchmarks.decode_model --layers 16 --batch 16 --context 16384

It needs a GPU (with `--device cpu --quick` none, at toy sizes) and a transformers whose DeepSeek-V2 keeps latents in
its own cache. Weights and the cached rows are random, the same in every row of the table:

- `static`: transformers' StaticCache under Inductor, `mode="reduce-overhead"`, which expands the latents in every step.
- `eager`: the same without compiling.
- `plain`: the same model and cache under megacpp; the pass `mla_decode` puts the absorbed form in its place.
- `latents`, `fp8`, `turboquant`: `megacpp_compile.use_latent_cache`, without a codec and with two.

For each row: the first step in seconds; the median step in ms and tokens a second; the bytes of the cache's rows; of
the first step, the share of sequences whose token is that of the first row, and the distance of the logits from the
first row's, over their norm; and how many graphs were compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megacpp_compile
from benchmarks import arguments

ROWS = ("eager", "static", "plain", "latents", "fp8", "turboquant")
SIZES = {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
         "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False}  # fmt: skip
QUICK = SIZES | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
                 "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                 "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1,
                 "num_experts_per_tok": 2}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = arguments.parser("benchmarks.decode_model", __doc__)
    p.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what decodes, in turn")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    p.add_argument("--quick", action="store_true", help="toy sizes: 2 layers, 2 sequences, 40 rows")
    p.add_argument("--layers", type=int, default=16, help="of the model")
    p.add_argument("--batch", type=int, default=16, help="sequences")
    p.add_argument("--context", type=int, default=16384, help="rows of a sequence when the last step is done")
    p.add_argument("--steps", type=int, default=64, help="new tokens")
    p.add_argument("--out", type=Path, help="a JSON file of the rows")
    return p.parse_args(argv)


def build(a: argparse.Namespace) -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    sizes = QUICK if a.quick else SIZES
    config = DeepseekV2Config(**sizes, num_hidden_layers=a.layers, max_position_embeddings=a.context)
    config._attn_implementation = "sdpa"
    dtype = torch.float32 if a.quick else torch.bfloat16
    with torch.device(a.device):
        torch.set_default_dtype(dtype)
        try:
            return DeepseekV2ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def cached_rows(a: argparse.Namespace, layer: int, config: Any) -> tuple[Tensor, Tensor]:
    """(latents [batch, 1, rows, latent], rotated keys [batch, 1, rows, rope]) of the tokens before the first step."""
    draw = torch.Generator(a.device).manual_seed(100 + layer)
    rows = a.context - a.steps
    dtype = torch.float32 if a.quick else torch.bfloat16
    shape = (a.batch, 1, rows)
    latents, keys = (
        torch.randn(*shape, width, generator=draw, device=a.device, dtype=dtype)
        for width in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    return latents, keys


def filled(row: str, model: Any, a: argparse.Namespace) -> tuple[Any, int]:
    """(the cache of a row with its rows in it, their bytes)"""
    import transformers

    config = model.config
    if row in ("eager", "static", "plain"):
        cache = transformers.StaticCache(config=config, max_cache_len=a.context)
        for i in range(a.layers):
            kept, _ = cache.update(*cached_rows(a, i, config), i)
            if kept.shape[1] != 1 or kept.shape[-1] != config.kv_lora_rank:
                raise SystemExit("this transformers keeps keys and values of every head: a newer one is needed")
        return cache, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    codec = None if row == "latents" else row
    cache = megacpp_compile.use_latent_cache(model, batch=a.batch, capacity=a.context, codec=codec)
    for i in range(a.layers):
        latents, keys = cached_rows(a, i, config)
        cache.latents.update(i, latents[:, 0], keys.transpose(1, 2))
    cache.latents.advance(a.context - a.steps)
    return cache, cache.latents.nbytes()


def decode(row: str, model: Any, a: argparse.Namespace, exact: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.set_attn_implementation("sdpa")
    cache, size = filled(row, model, a)
    call = model.forward
    mode = "reduce-overhead" if a.device == "cuda" else None
    if row == "static":
        call = torch.compile(model.forward, mode=mode)
    elif row != "eager":
        call = torch.compile(model.forward, backend="megacpp", mode=mode)
    ids = torch.arange(a.batch, device=a.device)[:, None] % model.config.vocab_size
    times, first = [], None
    with torch.no_grad(), megacpp_compile.record() as report:
        for _ in range(a.steps):
            begin = time.perf_counter()
            logits = call(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True).clone()
            if a.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            first = logits.float().clone() if first is None else first
    assert first is not None
    exact = first if exact is None else exact
    stats = torch._dynamo.utils.counters["stats"]
    step = statistics.median(times[a.steps // 4 :])
    found = {
        "row": row, "first": times[0], "step_ms": 1e3 * step, "tokens_s": a.batch / step, "bytes": size,
        "same": (first.argmax(-1) == exact.argmax(-1)).float().mean().item(),
        "off": ((first - exact).norm() / exact.norm()).item(), "graphs": stats["unique_graphs"],
        "sites": {name: count for name, count in report.counts.items() if count},
        "cuda_graphs": sorted({str(frame.cuda_graph) for frame in report.frames}),
        "misses": sorted({f"{m.pass_name}: {m.tag}: {m.reason}" for m in report.misses}),
    }  # fmt: skip
    return found, exact


def table(rows: list[dict[str, Any]]) -> str:
    names = f"{'first s':>9}{'step ms':>9}{'tokens/s':>10}{'cache GiB':>11}{'same':>6}{'off':>9}{'graphs':>8}"
    lines = [f"{'':12}{names}"]
    for r in rows:
        lines.append(f"{r['row']:12}{r['first']:9.1f}{r['step_ms']:9.2f}{r['tokens_s']:10.0f}{r['bytes'] / 2**30:11.3f}"
                     f"{r['same']:6.2f}{r['off']:9.1e}{r['graphs']:8d}")  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    if a.device == "cpu" and not a.quick or a.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU to measure on; the whole path at toy sizes: --device cpu --quick", file=sys.stderr)
        return 2
    if a.quick:
        a.layers, a.batch, a.context, a.steps = 2, 2, 40, 6
    model = build(a)
    own = model.forward
    rows: list[dict[str, Any]] = []
    exact: Tensor | None = None
    for row in a.rows:
        found, exact = decode(row, model, a, exact)
        model.forward = own
        rows.append(found)
        print(json.dumps({k: v for k, v in found.items() if k in ("row", "sites", "cuda_graphs", "misses")}))
        if a.out:
            device = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
            a.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))
        if a.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{a.layers} layers, {a.batch} sequences, {a.context} rows, {a.steps} steps")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
