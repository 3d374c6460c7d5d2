"""Train a tiny DeepSeek-V3 inside other people's trainers, in eager and compiled with megacpp, on CPU.

torchtitan's model is parallelized and compiled by its own functions, with as many gloo ranks as are asked for; its
GraphTrainer traces the whole step as one graph, ops in it; TRL's SFTTrainer trains the model of transformers. Sizes are
tiny and weights random; nothing is downloaded.

    python examples/inside_trainers.py trl --lora  # needs trl and peft
    python examples/inside_trainers.py torchtitan --ranks 2 --ep 2 --checkpoint selective  # needs torchtitan
    python examples/inside_trainers.py graph_trainer --ranks 2  # needs torchtitan

Each prints the losses of both runs, the sites that fired, and what did not with the reason.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import megacpp_compile

TOKENS, BATCH, VOCABULARY = 32, 2, 256
MISSING = "this example needs {}: pip install {}"


def compared(train: Callable[[bool], list[float]], options: dict[str, Any], said: bool = True) -> None:
    """Print what `train` returns in eager and, given True, compiled. said: whether this rank prints."""
    eager = train(False)
    torch._dynamo.reset()
    with megacpp_compile.enable(options), megacpp_compile.record() as report:
        compiled = train(True)
    if said:
        print(f"\nlosses, eager:    {', '.join(f'{x:.5f}' for x in eager)}")
        print(f"losses, compiled: {', '.join(f'{x:.5f}' for x in compiled)}\n\n{report}", flush=True)


# ------------------------------------------------------------------------------------------------------------------ TRL


def tokenizer() -> Any:
    """One of 61 words: t0 to t60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(61)} | {"<unk>": 61, "<eos>": 62, "<pad>": 63}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def trl(asked: argparse.Namespace) -> None:
    try:
        from datasets import Dataset
        from explain_hf import tiny_deepseek_v3
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise ImportError(MISSING.format("TRL and transformers", "trl 'transformers==5.17.0'")) from error
    draw = torch.Generator().manual_seed(0)
    lines = torch.randint(61, (BATCH * asked.steps, 16), generator=draw).tolist()
    rows = Dataset.from_list([{"text": " ".join(f"t{i}" for i in line)} for line in lines])
    adapters: dict[str, Any] = {}
    if asked.lora:
        from peft import LoraConfig

        adapters["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    def train(compiled: bool) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            settings = SFTConfig(
                output_dir=folder, max_steps=asked.steps, per_device_train_batch_size=BATCH, logging_steps=1,
                max_length=TOKENS, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
                gradient_checkpointing=False, disable_tqdm=True, seed=1, torch_compile=compiled,
            )  # fmt: skip
            model = tiny_deepseek_v3(layers=1, seed=0)
            trainer = SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer(), **adapters)
            trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    compared(train, asked.options)


# ----------------------------------------------------------------------------------------------------------- torchtitan


def titan_model(kind: Any = None) -> Any:
    """The configuration, of `kind` or DeepSeekV3Model's own, of a dense layer and one of experts, as torchtitan's
    `_debugmodel` writes its own, smaller. Its attention is `scaled_dot_product_attention`: FlexAttention has no
    backward on CPU."""
    import torchtitan.models.deepseek_v3 as v3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE

    dim, rope_dim = 64, 16
    layers = v3._build_dsv3_layers(
        n_layers=2, n_dense_layers=1, dim=dim, n_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=rope_dim, v_head_dim=16, mscale=1.0, dense_hidden_dim=96, moe_hidden_dim=48, num_experts=8,
        num_shared_experts=2, router_top_k=3, router_score_func="softmax", attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=rope_dim, max_seq_len=TOKENS, theta=10000.0),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return (kind or v3.DeepSeekV3Model).Config(
        vocab_size=VOCABULARY, dim=dim, layers=layers, mtp_layers=[],
        tok_embeddings=v3.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=v3._EMBEDDING_INIT),
        norm=v3.RMSNorm.Config(normalized_shape=dim, param_init=v3._NORM_INIT),
        lm_head=v3.Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=v3._output_linear_init(dim)),
    )  # fmt: skip


def titan_rank(rank: int, asked: argparse.Namespace, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.ranks))
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where torch finds no accelerator
    logging.disable(logging.INFO)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # for axes of one rank

    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=asked.ranks)
    graph = asked.trainer == "graph_trainer"
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, full_dtensor, utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.deepseek_v3 import parallelize_deepseekv3

    how = ParallelismConfig(tensor_parallel_degree=asked.tp, expert_parallel_degree=asked.ep, spmd_backend=asked.spmd)
    dims = ParallelDims.from_config(how, asked.ranks)
    dims.build_mesh()
    utils.set_spmd_backend(how.spmd_backend)
    context = utils.get_spmd_context(parallel_dims=dims)
    checkpoint = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[asked.checkpoint]

    def train(compiled: bool) -> list[float]:
        config = titan_model(graph_model() if graph else None)
        config.update_from_config(config=types.SimpleNamespace(parallelism=how))
        with torch.device("meta"):
            model = config.build()
        compile_config = graph_compile_config(compiled) if graph else CompileConfig(enable=compiled)
        model = (graph_parallelize() if graph else parallelize_deepseekv3)(
            model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"), parallelism=how,
            compile_config=compile_config, ac_config=checkpoint, dump_folder="",
        )  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction of torchtitan's
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()

        def loss_of(out: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor) -> torch.Tensor:
            return cross_entropy_loss(out, labels, global_vocab_size=VOCABULARY) / global_valid_tokens

        traced = graph_trainer_of(model, loss_of, config, compile_config, how, dims, context) if graph else None
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(asked.steps):
            draw = torch.Generator().manual_seed(100 * step + rank // asked.tp)
            tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=draw)
            labels, places = tokens, {"positions": torch.arange(TOKENS).expand(BATCH, -1).contiguous()}
            valid = torch.tensor(float(tokens.numel()))
            if how.spmd_backend == "full_dtensor":
                tokens, labels, places = full_dtensor.parallelize_inputs(dims, tokens, labels, places)
            if traced is not None and compiled:
                weights = [weight for weight in model.parameters() if weight.requires_grad]
                loss = traced._make_fx_forward_backward_step(model, tokens, labels, valid, weights, places)
            else:
                with context():
                    loss = loss_of(model(tokens, **places), labels, valid)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    if graph:
        from megacpp_compile.integrations.torchtitan import register

        register(options=asked.options)
    compared(train, asked.options, said=rank == 0)
    dist.destroy_process_group()


def graph_model() -> Any:
    from torchtitan.experiments.graph_trainer.deepseek_v3.model import GraphTrainerDeepSeekV3Model

    return GraphTrainerDeepSeekV3Model


def graph_parallelize() -> Any:
    from torchtitan.experiments.graph_trainer.deepseek_v3.parallelize import parallelize_deepseekv3

    return parallelize_deepseekv3


def graph_compile_config(compiled: bool) -> Any:
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    # Both are for CUDA: the second asks for a GPU's bandwidth.
    gpus = ["cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass"]
    return GraphTrainerCompileConfig(enable=compiled, pass_pipeline="megacpp", disable_passes=gpus)


def graph_trainer_of(
    model: Any, loss: Any, config: Any, compile_config: Any, how: Any, dims: Any, context: Any
) -> Any:
    """A GraphTrainer that only steps: the rest of one reads data sets and writes checkpoints."""
    from torchtitan.experiments.graph_trainer.registry import POST_INIT_HOOKS
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

    trainer = GraphTrainer.__new__(GraphTrainer)
    trainer._traced_step, trainer.model_parts, trainer.loss_fn = None, [model], loss
    trainer.parallel_dims, trainer.train_context = dims, context
    spec = types.SimpleNamespace(model=config)
    trainer.config = types.SimpleNamespace(compile=compile_config, parallelism=how, model_spec=spec)
    POST_INIT_HOOKS[compile_config.pass_pipeline](trainer)  # as its constructor ends
    return trainer


def torchtitan(asked: argparse.Namespace) -> None:
    try:
        import torchtitan.models.deepseek_v3  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING.format("torchtitan 0.3 and what it imports", "torchtitan==0.3.0")) from error
    if asked.ranks % asked.tp or asked.ranks % asked.ep:
        sys.exit(f"--ranks {asked.ranks} is no multiple of --tp {asked.tp} and --ep {asked.ep}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(titan_rank, (asked, port), asked.ranks)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("trainer", choices=("torchtitan", "graph_trainer", "trl"))
    made.add_argument("--steps", type=int, default=3, help="losses to compare")
    made.add_argument("--policy", help="what backward recomputes: none, selective, full")
    made.add_argument("--lora", action="store_true", help="trl: with PEFT's adapters on every linear")
    made.add_argument("--ranks", type=int, default=1, help="torchtitan: processes, which FSDP2 shards over")
    made.add_argument("--tp", type=int, default=1, help="torchtitan: tensor and sequence parallel")
    made.add_argument("--ep", type=int, default=1, help="torchtitan: expert parallel")
    made.add_argument(
        "--spmd", choices=("partial_dtensor", "full_dtensor", "spmd_types"), default="partial_dtensor",
        help="torchtitan: its spmd_backend; spmd_types, its default, needs torch 2.14",
    )  # fmt: skip
    made.add_argument("--checkpoint", choices=("none", "full", "selective"), default="none", help="torchtitan: its own")
    return made


def main() -> None:
    asked = parser().parse_args()
    asked.options = {"policy": asked.policy} if asked.policy else {}
    try:
        {"torchtitan": torchtitan, "graph_trainer": torchtitan, "trl": trl}[asked.trainer](asked)
    except ImportError as error:
        sys.exit(f"{error} ({error.__cause__})")


if __name__ == "__main__":
    main()
