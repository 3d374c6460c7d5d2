"""A training step of transformers' architectures at real widths, by each of torch.compile's backends.

    python -m benchmarks.architectures --out docs/h200/architectures.json
    python -m benchmarks.architectures llama qwen3_moe --rows inductor megacpp
    python -m benchmarks.architectures --list

needs a CUDA GPU and transformers. Each model is built from its configuration's defaults with four layers (two where
that is more than 2.2 B parameters), a vocabulary of 16384 words and at most 16 experts (8 where that is more), and
trained in bfloat16 on 2 x 4096 tokens, 2 x 2048 where eager has no room for more. A row is `torch.compile(model, ...)`
of the model as it is: its first step with empty caches, its peak, its gradients against eager's in float32 (bfloat16
above 0.7 B parameters), and, in turns with the other rows, seven times its step; where a row is slower than Inductor's,
the kernels of each. A process for each model, `--slots` at a time, of which one has the GPU while it is timed. The
columns are those of PyTorch's own dashboard. `python -m benchmarks.architectures_page` makes a page and a picture of
the result.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.harness import kernel_times, once, order_of
from benchmarks.variants import registered

ROWS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "megacpp": {"backend": "megacpp"},
    "none": {"backend": "megacpp", "options": {"policy": "none"}},
    "selective": {"backend": "megacpp", "options": {"policy": "selective"}},
    "fp8": {"backend": "megacpp", "options": {"precision": "fp8_current"}},
}
NAMES = """llama qwen3 qwen2 mistral gemma gemma2 gemma3_text phi3 olmo2 smollm3 cohere2 starcoder2 gpt_neox gpt2
    stablelm nemotron exaone4 seed_oss glm4 arcee apertus deepseek_v2 deepseek_v3 deepseek_v32 minicpm3 youtu
    longcat_flash glm4_moe_lite mixtral qwen2_moe qwen3_moe olmoe granitemoe flex_olmo phimoe dots1 ernie4_5_moe
    hunyuan_v1_moe afmoe glm4_moe gpt_oss minimax minimax_m2 hy_v3 solar_open mimo_v2_flash mamba2 nemotron_h bamba
    granitemoehybrid falcon_h1 zamba2 qwen3_next qwen3_5 qwen3_5_moe kimi_linear olmo_hybrid lfm2 lfm2_moe
    llama4_text olmo3 olmo granite cohere phi helium gptj codegen persimmon falcon mpt diffllama vaultgemma""".split()
DEVICE = "cuda"
TOKENS, FEWER_TOKENS, SEQUENCES, VOCABULARY, LAYERS = 4096, 2048, 2, 16384, 4
MOST_PARAMETERS, LARGEST_IN_FLOAT32 = 2.2e9, 7e8
SHORT = {"gpt_oss", "kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "deepseek_v32", "gemma2"}
# Configurations and models that no model type names.
CLASSES = {
    name: (f"{stem}TextConfig", f"{stem}ForCausalLM")
    for name, stem in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"), ("llama4_text", "Llama4"))
} | {"gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
EXPERTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"
# What four layers need that defaults have for more, and widths where a configuration has none of a released model.
CHANGED: dict[str, dict[str, Any]] = {
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_routed_experts": 16},
    "bamba": {"attn_layer_indices": [3]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"]},
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [2],
        "use_mamba_kernels": False,
    },
    "mamba2": {"hidden_size": 2560, "num_heads": 80, "n_groups": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"hidden_size": 3072, "num_layers": 2, "n_routed_experts": 16, "zero_expert_num": 8},
    "gpt2": {"n_embd": 2048, "n_head": 16, "n_positions": 8192, "n_layer": 4},
    "hunyuan_v1_moe": {"head_dim": 128},
    "mpt": {"max_seq_len": 2 * TOKENS},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "mixtral": {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16},
}
NOT_SLOWER = 1.01  # of Inductor's least time; above it the kernels of each row are written down
# Softcaps and sinks, which no kernel of torch's has, and models that transformers has no other attention of.
SPELLED_OUT = {"gemma2", "gpt_oss", "mimo_v2_flash", "gptj", "codegen", "mpt"}
NO_ATTENTION = {"mamba2"}


def configuration(name: str) -> Any:
    import transformers

    base = getattr(transformers, CLASSES[name][0])() if name in CLASSES else transformers.AutoConfig.for_model(name)
    layers = base.num_hidden_layers
    left_out = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype")
    given = {key: value for key, value in base.to_dict().items() if key not in left_out}
    given |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    given["max_position_embeddings"] = max(2 * TOKENS, given.get("max_position_embeddings") or 0)
    for key, value in given.items():
        if isinstance(value, list) and len(value) == layers:
            given[key] = value[:LAYERS]
        elif key in EXPERTS and isinstance(value, int):
            given[key] = min(value, 16)
        elif key in ("n_group", "topk_group", "num_expert_group") and value:
            given[key] = 1
    if "num_experts_per_tok" in given and any(given.get(key) for key in EXPERTS):
        given["num_experts_per_tok"] = min(given["num_experts_per_tok"] or 4, 4)
    if given.get("first_k_dense_replace"):
        given["first_k_dense_replace"] = 1
    made = type(base)(**given | CHANGED.get(name, {}))
    if name not in NO_ATTENTION:
        made._attn_implementation = "eager" if name in SPELLED_OUT else "sdpa"
    if isinstance(width := getattr(made, "moe_intermediate_size", None), int):
        made.moe_intermediate_size = min(-(-width // 16) * 16, 2048)
    return made


def build(name: str, device: str) -> tuple[nn.Module, Any, int]:
    """(model in bfloat16, configuration, parameters)"""
    made = configuration(name)
    count = _parameters(name, made)
    while count > MOST_PARAMETERS and (made.num_hidden_layers > 2 or _many(made)):
        if many := _many(made):
            for key in many:
                setattr(made, key, 8)
        else:
            made.num_hidden_layers -= 1
            for key, value in list(vars(made).items()):
                if isinstance(value, list) and len(value) == made.num_hidden_layers + 1:
                    setattr(made, key, value[: made.num_hidden_layers])
        count = _parameters(name, made)
    torch.manual_seed(0)
    with torch.device(device):
        model = _model(name, made, dtype=torch.bfloat16)
    return model.to(device).train(), made, count


def _model(name: str, made: Any, **options: Any) -> nn.Module:
    import transformers

    if name in CLASSES:
        return getattr(transformers, CLASSES[name][1])._from_config(made, **options)  # type: ignore[no-any-return]
    return transformers.AutoModelForCausalLM.from_config(made, **options)  # type: ignore[no-any-return]


def _parameters(name: str, made: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in _model(name, made).parameters())


def _many(made: Any) -> list[str]:
    return [key for key in EXPERTS if (getattr(made, key, 0) or 0) > 8]


class Subject:
    """A model on the GPU, its inputs, and eager's gradients of the first step."""

    def __init__(self, name: str, tokens: int | None = None) -> None:
        self.model, made, self.count = build(name, DEVICE)
        length = tokens or (FEWER_TOKENS if name in SHORT else TOKENS)
        self.ids = torch.randint(3, VOCABULARY, (SEQUENCES, length), device=DEVICE)
        self.about = {"name": name, "million_parameters": round(self.count / 1e6), "hidden": made.hidden_size,
                      "layers": made.num_hidden_layers, "tokens": [SEQUENCES, length]}  # fmt: skip
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.wanted: list[Tensor | None] | None = None

    def step(self, call: Callable[..., Any]) -> float:
        loss = call(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    def clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def error(self) -> float | None:
        """Of all gradients together, relative to the norm of eager's."""
        if self.wanted is None:
            return None
        off = of = 0.0
        for p, want in zip(self.parameters, self.wanted, strict=True):
            if want is not None and p.grad is not None:
                wide = want.to(p.device).float()
                off, of = off + float((p.grad.float() - wide).norm()) ** 2, of + float(wide.norm()) ** 2
        return float((off / max(of, 1e-30)) ** 0.5)

    def eager(self) -> dict[str, Any]:
        exact = self.count < LARGEST_IN_FLOAT32
        try:
            model = copy.deepcopy(self.model).float() if exact else self.model
            self.step(model)
            grads = [p.grad for p in model.parameters() if p.requires_grad]
            self.wanted = [None if g is None else g.cpu() for g in grads]
            del model, grads
            self.clear()
            return {"reference": "float32" if exact else "bfloat16", **self.measured(self.model)}
        except torch.OutOfMemoryError as error:
            return {"error": str(error)[:160]}
        finally:
            self.clear()
            torch.cuda.empty_cache()

    def measured(self, call: Callable[..., Any]) -> dict[str, Any]:
        """Peak in MiB, and the error of a step's gradients."""
        self.step(call)
        found = {"error_of_gradients": self.error()}
        self.clear()
        torch.cuda.reset_peak_memory_stats()
        self.step(call)
        self.clear()
        return {**found, "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)}

    def compiled(self, options: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        """(the model compiled, what there is to say of it before it is timed)"""
        from torch._dynamo.utils import counters
        from torch._inductor.utils import fresh_cache

        import megacpp_compile

        torch._dynamo.reset()
        counters.clear()
        with fresh_cache():
            call = torch.compile(self.model, **options)
            start = time.time()
            with megacpp_compile.record() as report:
                loss = self.step(call)
            first = time.time() - start
            self.clear()
            torch.cuda.empty_cache()
            found = {"first_s": round(first, 1), "loss": loss, **self.measured(call)}
        found |= {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
        if options:
            found["sites"] = {name: count for name, count in report.counts.items() if count}
            found["fell_back"] = sorted({f.reason[:120] for f in report.frames if f.reason})[:3]
        return call, found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The GPU to itself among the processes of a run."""
    name = f"architectures.{os.environ.get('CUDA_VISIBLE_DEVICES', 0)}.lock"
    with open(Path(tempfile.gettempdir()) / name, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def measure(name: str, rows: Sequence[str], file: Path, turns: int = 7) -> None:
    """One model here; `file` has what is known after each step of the way."""
    torch.cuda.set_per_process_memory_fraction(0.97 / int(os.environ.get("SLOTS", "1")))
    torch.compile(lambda x: (x * 2).sin())(torch.ones(8, device=DEVICE))  # what a process compiles once
    registered()
    subject = Subject(name)
    with alone():
        known: dict[str, Any] = {**subject.about, "eager": subject.eager()}
    calls = {}
    for row in rows:
        try:
            calls[row], known[row] = subject.compiled(ROWS[row])
        except Exception as error:  # whatever a backend fails with is its row
            known[row] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            subject.clear()
            torch.cuda.empty_cache()
        file.write_text(json.dumps(known))
    with alone():
        times = _in_turns(subject, {"eager": subject.model, **calls}, turns)
        for row, found in times.items():
            known[row] |= {"ms": statistics.median(found), "least_ms": min(found), "turns_ms": found}
        if any((ratio(known, row, "least_ms") or 0) > NOT_SLOWER for row in rows):
            for row, call in calls.items():
                known[row]["kernels"] = kernels(subject, call)
    file.write_text(json.dumps({**known, "done": True}))


def kernels(subject: Subject, call: Callable[..., Any], most: int = 16) -> list[tuple[str, float, float]]:
    """(name, ms, launches) of the `most` kernels that take the longest in a step, and of all others together"""
    times = kernel_times(lambda: subject.step(call), 1)
    subject.clear()
    ran = [(name[:90], round(ms, 3), count) for name, (ms, count) in times.items()]
    ran = sorted((each for each in ran if each[1]), key=lambda each: -each[1])
    rest = ran[most:]
    return [*ran[:most], ("others", round(sum(ms for _, ms, _ in rest), 3), sum(count for *_, count in rest))]


def _in_turns(subject: Subject, calls: dict[str, Callable[..., Any]], turns: int) -> dict[str, list[float]]:
    def timed(call: Callable[..., Any], count: int) -> float:
        def steps() -> None:
            for _ in range(count):
                subject.step(call)
                subject.clear()

        return once(steps) / count

    if subject.wanted is None:
        calls = {row: call for row, call in calls.items() if row != "eager"}
    counts, times = {}, {row: list[float]() for row in calls}
    for row, call in calls.items():
        timed(call, 2)
        counts[row] = 1 if row == "eager" else max(2, int(200 / max(timed(call, 2), 1)))
    for i in range(turns):
        for row in order_of(i, calls):
            if row != "eager" or i == 0:
                times[row].append(timed(calls[row], counts[row]))
    return times


def run(names: Sequence[str], rows: Sequence[str], slots: int, limit: float) -> list[dict[str, Any]]:
    """What is known of each model that was begun within `limit` seconds."""
    folder, begun, waiting = Path(tempfile.mkdtemp()), time.time(), queue.SimpleQueue[str]()
    for name in names:
        waiting.put(name)
    shared = {"SLOTS": str(slots), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4",
              "PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip

    def work(gpu: str) -> None:
        while (left := limit - (time.time() - begun)) > 0:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            file = folder / f"{name}.json"
            command = [sys.executable, "-m", "benchmarks.architectures", name, "--rows", *rows, "--one", str(file)]
            try:
                done = subprocess.run(
                    command, env={**os.environ, **shared, "CUDA_VISIBLE_DEVICES": gpu}, capture_output=True,
                    text=True, timeout=max(30, left),
                )  # fmt: skip
                failed = done.stderr[-400:] if done.returncode else ""
            except subprocess.TimeoutExpired:
                failed = "its time was over"
            found = json.loads(file.read_text()) if file.exists() else {"name": name}
            file.write_text(json.dumps({**found, "failed": failed} if failed else found))
            print(line(json.loads(file.read_text())), flush=True)

    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    threads = [threading.Thread(target=work, args=(gpu,)) for _ in range(slots) for gpu in seen.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [json.loads(f.read_text()) for name in names if (f := folder / f"{name}.json").exists()]


def write(file: Path, models: Sequence[dict[str, Any]], where: dict[str, Any]) -> None:
    """Put what was measured, each model with its conditions, into `file`, where other models stay. One whose time was
    over replaces none."""
    known = {m["name"]: m for m in json.loads(file.read_text())["architectures"]} if file.exists() else {}
    for model in models:
        if model.get("done") or model["name"] not in known:
            known[model["name"]] = {**model, "conditions": where}
    file.write_text(json.dumps({"architectures": [*known.values()]}, indent=1) + "\n")


def ratio(model: dict[str, Any], row: str, key: str, to: str = "inductor") -> float | None:
    """Of a row's figure to another row's, where both are there."""
    ours, theirs = (model.get(name, {}).get(key) for name in (row, to))
    return ours / theirs if ours and theirs else None


def line(model: dict[str, Any]) -> str:
    """A model in one line, for a terminal."""
    found = [f"{model['name']:17}"]
    for row in ("eager", *ROWS):
        if (of := model.get(row)) is not None:
            ms = f"{of['ms']:.1f} ms" if "ms" in of else of.get("error", "untimed")[:40]
            over = ratio(model, row, "least_ms")
            found.append(f"{row} {ms}" + (f" ({over:.3f})" if over and row != "inductor" else ""))
    return "  ".join(found) + (f"  FAILED: {model['failed'][-80:]!r}" if model.get("failed") else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.architectures", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types of transformers; default: all of --list")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["inductor", "megacpp", "none"], help="backends")
    parser.add_argument("--slots", type=int, default=3, help="processes for each GPU")
    parser.add_argument("--limit", type=float, default=3600, help="seconds, after which no model is begun")
    parser.add_argument("--out", type=Path, help="JSON file, where other models stay; default: none is written")
    parser.add_argument("--list", action="store_true", help="print the architectures, and leave")
    parser.add_argument("--one", type=Path, help="measure the one NAME in this process, into this file")
    args = parser.parse_args(argv)
    names = args.names or NAMES
    if args.list:
        print(*names)
        return 0
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog} needs a CUDA GPU, and torch finds none.\n")
    if args.one:  # a process of its own
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch._dynamo.config.recompile_limit = 64
        measure(names[0], args.rows, args.one)
        return 0
    models = run(names, args.rows, args.slots, args.limit)
    if args.out:
        write(args.out, models, conditions(torch.device(DEVICE), 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
