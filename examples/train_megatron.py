"""Train a GPT model of Megatron-Core with MLA as it is, in eager, and compiled with megacpp through `plain_mla`.

One rank, random weights, nothing is downloaded. On CPU with Megatron's local layers, whose attention is torch's, as its
own has no widths of MLA; `--te` takes its layers of Transformer Engine, on a GPU.

    python examples/train_megatron.py
    python examples/train_megatron.py --te --size large --steps 30

Prints the losses of both, the time of a step and the peak of memory, what stays Megatron's, and what fired.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megacpp_compile
from megacpp_compile.adapters import megatron

SIZES = {
    "tiny": {
        "tokens": 32, "batch": 2, "vocabulary": 256, "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4,
        "ffn_hidden_size": 224, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16,
        "v_head_dim": 40,
    },
    "large": {
        "tokens": 4096, "batch": 4, "vocabulary": 32768, "num_layers": 6, "hidden_size": 2048,
        "num_attention_heads": 16, "ffn_hidden_size": 5632, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip


class Core(nn.Module):
    """torch's attention with the constructor of Megatron's: [s, b, heads, d] to [s, b, heads * d]."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def begin(device: str) -> None:
    """Megatron's parallel state of one rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import multi_latent_attention

    store = tempfile.NamedTemporaryFile(delete=False).name
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    if device == "cuda":
        tensor_parallel.random.model_parallel_cuda_manual_seed(0)
    else:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not isinstance(multi_latent_attention.TELinear, type):  # a mock, which it takes for Transformer Engine
        multi_latent_attention.HAVE_TE = False


def build(asked: argparse.Namespace) -> nn.Module:
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    sizes = {name: n for name, n in SIZES[asked.size].items() if name not in ("tokens", "batch", "vocabulary")}
    config = MLATransformerConfig(
        **sizes, use_cpu_initialization=True, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=nn.functional.silu, attention_dropout=0.0, hidden_dropout=0.0, rope_type=asked.rope,
        apply_rope_fusion=False, bias_dropout_fusion=asked.fusions, bias_activation_fusion=asked.fusions,
        gradient_accumulation_fusion=False, params_dtype=asked.dtype, bf16=asked.dtype == torch.bfloat16,
    )  # fmt: skip
    options: dict[str, Any] = {"qk_layernorm": True, "multi_latent_attention": True}
    if asked.te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
        spec.submodules.self_attention.submodules.core_attention = Core
    torch.manual_seed(0)
    made: nn.Module = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=SIZES[asked.size]["vocabulary"],
        max_sequence_length=SIZES[asked.size]["tokens"], position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return made.to(device=asked.device, dtype=asked.dtype)


def train(asked: argparse.Namespace, compiled: bool) -> None:
    model = build(asked)
    call: Any = model
    if compiled:
        if not asked.as_it_is:
            print(megatron.plain_mla(model))
        options = {"policy": asked.policy} if asked.policy else {}
        call = torch.compile(model, backend="megacpp", options=options or None)
    optimizer, losses, took = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    tokens, batch = SIZES[asked.size]["tokens"], SIZES[asked.size]["batch"]
    places = torch.arange(tokens, device=asked.device).expand(batch, tokens)
    mask = None if asked.te else torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=asked.device).triu(1)
    cuda = asked.device == "cuda"
    for step in range(asked.steps):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(SIZES[asked.size]["vocabulary"], (batch, tokens + 1), generator=draw).to(asked.device)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = call(ids[:, :-1], places, mask, labels=ids[:, 1:]).mean()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if cuda else ""
    what = "megacpp" if compiled else "Megatron"
    print(f"{what}: losses {', '.join(f'{x:.5f}' for x in losses)}")
    print(f"{what}: {1000 * statistics.median(took[len(took) // 2 :]):.2f} ms forward and backward{peak}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=tuple(SIZES), default="tiny", help="large is for a GPU")
    made.add_argument("--steps", type=int, default=3, help="losses to compare")
    made.add_argument("--te", action="store_true", help="layers of Transformer Engine, in bfloat16 on a GPU")
    made.add_argument("--rope", choices=("rope", "yarn"), default="rope", help="Megatron's rope_type")
    made.add_argument("--fusions", action="store_true", help="Megatron's fused SwiGLU and dropout")
    made.add_argument("--policy", help="what backward recomputes: none, selective, full")
    made.add_argument("--as-it-is", action="store_true", help="compile Megatron's modules without plain_mla")
    return made


def main() -> None:
    asked = parser().parse_args()
    asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    asked.dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    if asked.te and asked.device != "cuda":
        sys.exit("--te needs a CUDA device")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        begin(asked.device)
    except ImportError as error:
        sys.exit(f"this example needs Megatron-Core: pip install megatron-core==0.16.1 einops ({error})")
    train(asked, compiled=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with megacpp_compile.record() as report:
        train(asked, compiled=True)
    counts = torch._dynamo.utils.counters
    print(f"graphs {counts['stats']['unique_graphs']}, breaks {sum(counts['graph_break'].values())}\n\n{report}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
