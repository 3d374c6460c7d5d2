"""The peak of a training step whose logits nothing reads, as transformers' Trainer trains.

    python -m benchmarks.logits_dropped --out docs/h200/logits_dropped.json
    python -m benchmarks.logits_dropped --rows dropped --layers 4

needs transformers and, for the peaks, a CUDA GPU. A model as wide as Qwen3-0.6B, its 151,936 words with it, is trained
in bfloat16 on 2 x 4096 tokens, each row in a process of its own: compiled by Inductor, by megacpp, and by what
`integrations.transformers.MegacppCallback` does (`prepare`), which makes no logits in training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.variants import registered

ROWS = ("inductor", "megacpp", "dropped")
WIDTHS = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 128, "tie_word_embeddings": True, "use_cache": False}  # fmt: skip


def build(layers: int, words: int, device: str) -> nn.Module:
    import transformers

    made = transformers.Qwen3Config(vocab_size=words, num_hidden_layers=layers, **WIDTHS)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()  # type: ignore[no-any-return]


def compiled(row: str, model: nn.Module) -> Callable[..., Any]:
    from megacpp_compile.integrations.training import prepare

    if row == "dropped":
        return prepare(model)
    return torch.compile(model, **({"backend": "megacpp"} if row == "megacpp" else {}))  # type: ignore[call-overload]


def measure(row: str, layers: int, words: int, tokens: int, device: str) -> dict[str, Any]:
    """A row's first step in seconds, its loss, and on a GPU the peak of the third step in MiB, parameters in it."""
    registered()
    torch.manual_seed(0)
    model = build(layers, words, device)
    ids = torch.randint(3, words, (2, tokens), device=device)
    call = compiled(row, model)

    def step() -> float:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    start = time.time()
    found: dict[str, Any] = {"row": row, "loss": step(), "first_s": round(time.time() - start, 1)}
    if device == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.logits_dropped", __doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what compiles")
    parser.add_argument("--layers", type=int, default=28, help="of the model")
    parser.add_argument("--words", type=int, default=151936, help="of its vocabulary")
    parser.add_argument("--tokens", type=int, default=4096, help="of each of two sequences")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu measures no peak")
    parser.add_argument("--out", type=Path, help="JSON file; default: none is written")
    parser.add_argument("--one", action="store_true", help="measure the one row in this process")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog} needs a CUDA GPU, and torch finds none; --device cpu only tries the rows.\n")
    if args.one:
        print(json.dumps(measure(args.rows[0], args.layers, args.words, args.tokens, args.device)))
        return 0
    given = ["--layers", str(args.layers), "--words", str(args.words), "--tokens", str(args.tokens)]
    found = []
    for row in args.rows:
        command = [sys.executable, "-m", "benchmarks.logits_dropped", "--rows", row, *given, "--device", args.device]
        print(f"{row} ...", file=sys.stderr, flush=True)
        done = subprocess.run([*command, "--one"], check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for each in found:
        peak = f"  peak {each['peak_mib']} MiB" if "peak_mib" in each else ""
        print(f"{each['row']:9} loss {each['loss']:.4f}  first step {each['first_s']} s{peak}")
    if args.out:
        about = {"layers": args.layers, "words": args.words, "tokens": [2, args.tokens]}
        rows = {"conditions": conditions(torch.device(args.device), 0), **about, "rows": found}
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
