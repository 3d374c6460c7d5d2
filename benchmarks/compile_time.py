"""Cold compile time of a deep tiny DeepSeek-V3 or hybrid (transformers), backend against backend, and its step after.

    python -m benchmarks.compile_time --layers 24 --repeat 3      # the defaults; 20 minutes on two cores
    python -m benchmarks.compile_time --model plain --layers 2 --repeat 1

Every measurement is a process of its own with empty Inductor, AOTAutograd and Triton caches, and with `--warm` another
that finds what it left there; backends take turns. What is timed: the first forward and backward of a training step
under `torch.compile`, after imports and model building; imports are done by compiling a small function first, which
also starts torch's compile workers, and on CUDA these are waited for: they start while a model is built or loaded,
which takes longer than here. Models are of transformers, which has to be installed, but for two. `--model plain`: tiny
MLA and SwiGLU layers as in `benchmarks.models`; `--model mla` are such of width 2048 over 16384 tokens in bfloat16, for
a GPU. Steps are timed five in a row, as a training loop runs them: the host may be ahead of the device.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import arguments


def tiny_deepseek_v3(layers: int) -> Any:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=128, intermediate_size=224, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=40,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=48, n_group=2,
        topk_group=1, first_k_dense_replace=layers, max_position_embeddings=128, use_cache=False, pad_token_id=None,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def deepseek_v3(layers: int, device: str) -> tuple[Any, Any]:
    """The model, and what computes a loss with it (compiled)."""
    import torch

    model = tiny_deepseek_v3(layers).to(device)
    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    return model, lambda compiled: compiled(input_ids=ids, labels=ids, use_cache=False).loss


def hybrid(kind: str, layers: int, device: str) -> tuple[Any, Any]:
    """A tiny hybrid of transformers: Mamba-2 in all layers, or in half of them with attention (and an MLP) between."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    ids = {"vocab_size": 256, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    own: dict[str, dict[str, Any]] = {
        "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 24, "n_groups": 2, "chunk_size": 8,
                   "num_hidden_layers": layers},
        "bamba": {**heads, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24,
                  "mamba_chunk_size": 8, "intermediate_size": 224, "num_hidden_layers": layers,
                  "attn_layer_indices": list(range(1, layers, 2))},
        "nemotron_h": {**heads, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 24,
                       "n_groups": 2, "chunk_size": 8, "conv_kernel": 4, "intermediate_size": 224,
                       "layers_block_type": ["mamba", "attention", "mamba", "mlp"][:layers] * -(-layers // 4)},
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](hidden_size=128, **ids, **own[kind])).to(device)
    tokens = torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    return model, lambda compiled: compiled(input_ids=tokens, labels=tokens, use_cache=False).loss


def plain(layers: int, device: str) -> tuple[Any, Any]:
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    blocks = [models.Layer(models.MLA(128, 4, 96, 64, 32, 16, 40), 128, 224) for _ in range(layers)]
    model = models.Stack(blocks).to(device)
    # As behind an embedding: the first layer, too, gives its input a gradient, and is not a case of its own.
    x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    cos, sin = models.rotary_tables(16, 16, torch.device(device), torch.float32)
    return model, lambda compiled: compiled(x, cos, sin).square().mean()


def mla(layers: int, device: str) -> tuple[Any, Any]:
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    blocks = [models.Layer(models.MLA(2048, 16, 0, 512, 128, 64, 128), 2048, 5632) for _ in range(layers)]
    model = models.Stack(blocks).to(device, torch.bfloat16)
    x = torch.randn(4, 4096, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = models.rotary_tables(4096, 64, torch.device(device), torch.bfloat16)
    return model, lambda compiled: compiled(x, cos, sin).float().square().mean()


_IN_A_ROW = 5

# As `--one` names them; the first three are the default. By blocks: `megacpp_compile.compile`, one artifact for all
# layers, of which `repeated_blocks` makes one graph.
COMPILERS = ("inductor", "megacpp", "megacpp-by-blocks", "megacpp-repeated-blocks")
_OPTIONS: dict[str, Any] = {"megacpp-repeated-blocks": {"options": {"repeated_blocks": True}}}
MODELS: dict[str, Callable[[int, str], tuple[Any, Any]]] = {
    "deepseek_v3": deepseek_v3, "plain": plain, "mla": mla,
    **{kind: functools.partial(hybrid, kind) for kind in ("mamba2", "bamba", "nemotron_h")},
}  # fmt: skip


def model_for(device: str) -> str:
    """What to compile where nothing is asked for; DeepSeek-V3 needs transformers."""
    if device == "cuda":
        return "mla"
    return "deepseek_v3" if importlib.util.find_spec("transformers") else "plain"


def torch_sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class CompileFailed(Exception):
    """A measurement whose process failed; its text is the end of what that said."""


def compiled_by(backend: str, model: Any) -> Any:
    import torch

    import megacpp_compile

    if backend == "megacpp-by-blocks":
        return megacpp_compile.compile(model, whole_below=1)
    # By object, as the name is known to torch only where the package is installed.
    chosen: Any = backend if backend == "inductor" else megacpp_compile.backend
    return torch.compile(model, backend=chosen, **_OPTIONS.get(backend, {}))


def measure_here(backend: str, layers: int, model_name: str, device: str) -> dict[str, Any]:
    """One cold compile in this process."""
    import time

    import torch
    from torch._dynamo.utils import counters

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, loss_of = MODELS[model_name](layers, device)
    compiled = compiled_by(backend, model)
    _warm_up(backend, device)
    counters.clear()
    began, cpu = time.perf_counter(), _cpu_seconds()
    loss = loss_of(compiled)
    forward = time.perf_counter() - began
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    total, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    return {"backend": backend, "forward_s": forward, "total_s": total, "cpu_s": cpu, "loss": float(loss.detach()),
            "graphs": counters["stats"]["unique_graphs"], "step_ms": _step_ms(compiled, loss_of, device)}  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and of those it has waited for, as for compilers: other work on the machine adds least to it."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _warm_up(backend: str, device: str) -> None:
    """What a process pays once, whatever it compiles: imports, the compile workers, the device's own start."""
    import torch

    function = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).to(device)
    compiled = compiled_by("inductor" if backend == "inductor" else "megacpp", function)
    compiled(torch.ones(4, 16, device=device)).sum().backward()
    torch._dynamo.reset()
    if device == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()


def _step_ms(compiled: Any, loss_of: Callable[[Any], Any], device: str) -> float:
    """Of a step after the first: the median over turns of five."""
    import time

    import torch

    times = []
    for _ in range(7 if device == "cuda" else 4):
        began = time.perf_counter()
        for _ in range(_IN_A_ROW):
            loss_of(compiled).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / _IN_A_ROW)
    return statistics.median(times[1:])


def measure(
    backend: str, layers: int, model: str = "deepseek_v3", device: str = "cpu", warm: bool = False
) -> dict[str, Any]:
    """One cold compile in a fresh process with fresh caches. warm: one more beside it, in a process that finds the
    caches of the first: "warm"."""
    with tempfile.TemporaryDirectory() as cache:
        row = _measure_on(cache, backend, layers, model, device)
        return {**row, "warm": _measure_on(cache, backend, layers, model, device)} if warm else row


def _measure_on(cache: str, backend: str, layers: int, model: str, device: str) -> dict[str, Any]:
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=os.path.join(cache, "triton"))
    env.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_time", "--one", backend]
    command += ["--layers", str(layers), "--model", model, "--device", device]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise CompileFailed(f"{backend} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.compile_time", __doc__)
    parser.add_argument("--layers", type=int, default=24, help="depth of the model")
    parser.add_argument("--repeat", type=int, default=3, help="turns of every compiler")
    parser.add_argument(
        "--model", choices=MODELS, help="default: mla on CUDA, else deepseek_v3, or plain without transformers"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compile for")
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=COMPILERS[:3], help="which, in turns")
    parser.add_argument("--warm", action="store_true", help="also a process on the caches that each has left")
    parser.add_argument("--out", help="also write the measurements as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    a.model = a.model or model_for(a.device)
    if a.device == "cuda" and not torch_sees_cuda():
        parser.exit(2, f"{parser.prog} --device cuda needs a CUDA GPU: torch sees none\n")
    if a.one:
        print(json.dumps(measure_here(a.one, a.layers, a.model, a.device)))
        return
    rows = []
    for turn in range(a.repeat):
        for backend in a.compilers:
            rows.append(row := measure(backend, a.layers, a.model, a.device, a.warm))
            again = f"on its caches {row['warm']['total_s']:.1f} s, " if a.warm else ""
            print(f"turn {turn} {backend:17s} {row['total_s']:7.1f} s ({row['cpu_s']:.1f} s of CPU), {again}"
                  f"{row['graphs']} graphs, then {row['step_ms']:.1f} ms a step, loss {row['loss']:.6f}",
                  flush=True)  # fmt: skip
    median = {b: statistics.median(r["total_s"] for r in rows if r["backend"] == b) for b in a.compilers}
    first = median[a.compilers[0]]
    ratios = {name: seconds / first for name, seconds in median.items()}
    text = ", ".join(f"{name} {seconds:.1f} s ({first / seconds:.2f}x)" for name, seconds in median.items())
    print(f"{a.layers} layers, median of {a.repeat}: {text}")
    if a.out:
        with open(a.out, "w") as f:
            json.dump({"layers": a.layers, "rows": rows, "median_s": median, "ratios": ratios}, f, indent=1)


if __name__ == "__main__":
    try:
        main()
    except CompileFailed as failed:
        raise SystemExit(str(failed)) from None
