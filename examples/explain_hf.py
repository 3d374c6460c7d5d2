"""Say what the backend does to a Hugging Face DeepSeek-V3, then train it beside eager.

The model is built from a small config with random weights; nothing is downloaded. Its code is the one transformers
ships, unchanged.

    python examples/explain_hf.py                   # some minutes on CPU; needs transformers
    megacpp explain examples.explain_hf:build       # the report alone; estimate and plan take it too
"""

import argparse
import sys
from typing import Any

import torch

VOCABULARY = 512


def tiny_deepseek_v3(layers: int, seed: int) -> Any:
    """DeepSeek-V3 in every part, small in every size: one dense layer, then mixture-of-experts layers. Raises
    ImportError without transformers."""
    try:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    except ImportError as error:
        raise ImportError("this example needs transformers: pip install 'transformers==5.17.0'") from error
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=256,
        use_cache=False,
    )
    return DeepseekV3ForCausalLM(config).train()


def build() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of two layers and the inputs of a training step, as the command line takes them."""
    tokens = torch.zeros(2, 64, dtype=torch.long)
    return tiny_deepseek_v3(layers=2, seed=0), {"input_ids": tokens, "labels": tokens}


def train(model: Any, step_model: Any, inputs: dict[str, torch.Tensor], steps: int) -> list[float]:
    """Losses of a few steps on one batch, which the model should soon know by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = step_model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """This file's own text as it is written, and the default of every option."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--backend", default="megacpp", help="backend of torch.compile; others print no explanation")
    parser.add_argument("--layers", type=int, default=2, help="depth of the model; the first layer is dense")
    parser.add_argument("--steps", type=int, default=5, help="training steps")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference allowed between the losses")
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(VOCABULARY, (args.batch, args.length), generator=generator).to(args.device)
    inputs = {"input_ids": tokens, "labels": tokens}

    if args.backend == "megacpp":
        try:
            import megacpp_compile
        except ImportError:
            sys.exit("megacpp_compile is not installed: pip install -e .  (or pass --backend inductor)")
        print("explaining: compiles the model once, without training it", file=sys.stderr, flush=True)
        model = tiny_deepseek_v3(args.layers, args.seed).to(args.device)
        print(megacpp_compile.explain(model, input_ids=inputs["input_ids"], labels=inputs["labels"]))
        torch._dynamo.reset()  # the model below is compiled afresh

    print(f"training {args.steps} steps in eager, then with {args.backend}", file=sys.stderr, flush=True)
    model = tiny_deepseek_v3(args.layers, args.seed).to(args.device)
    eager = train(model, model, inputs, args.steps)
    model = tiny_deepseek_v3(args.layers, args.seed).to(args.device)
    compiled = train(model, torch.compile(model, backend=args.backend), inputs, args.steps)

    print(f"\n{'step':>4}{'eager':>12}{args.backend:>12}{'difference':>14}")
    for step, (left, right) in enumerate(zip(eager, compiled, strict=True)):
        print(f"{step:>4}{left:>12.5f}{right:>12.5f}{right - left:>14.1e}")

    difference = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
    if not difference <= args.tolerance:  # written so that NaN fails too
        print(f"FAILED: the losses differ by {difference:.2e}, more than {args.tolerance:.0e}")
        return 1
    print(f"OK: the losses agree within {args.tolerance:.0e}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        sys.exit(str(error))
