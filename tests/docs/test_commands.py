"""Every command that the documentation prints: it runs here, or the text beside it says what it needs.

A command is one of `commands.commands_of`, on a page or in the `--help` of what can be started. It is in `RUNS`, as what
is run for it here, in `ELSEWHERE`, as the test that runs it, or in `NEEDS`, as what this machine may lack and the text
has to name; in two of them where the cheap form goes another way than the command does. Options are parsed as printed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.docs.commands import PAGES, ROOT, Printed, commands_of, programs, started

TARGETS = (
    "unit", "suite", "kernels", "test", "test-all", "demo", "accept", "pages", "docs", "build", "wheel-runs", "release", "lint",
    "test-xla",
)
# What is run -> the commands that it stands for. {tmp}: a folder, with what `made` puts there.
RUNS = {
    "megacpp tags escapes dtype": ["megacpp tags", "megacpp tags escapes dtype"],
    "megacpp passes": ["megacpp passes"], "megacpp doctor --device cpu": ["megacpp doctor"],
    "megacpp evidence status": ["megacpp evidence status"],
    "megacpp evidence status --page {tmp}/evidence.md": ["megacpp evidence status --page docs/generated/evidence.md"],
    "megacpp explain examples.explain_hf:build": [
        "megacpp explain module:callable", "megacpp explain examples.explain_hf:build"],
    "python -m benchmarks --help": ["python -m benchmarks --help"],
    "python -m benchmarks --device cpu --quick --turns 1 --plain --subject gated_rms_norm --out {tmp}": [
        "python -m benchmarks --device cpu --quick"],
    "python -m benchmarks.figures --out {tmp} docs/h200/block.json": [
        "python -m benchmarks.figures --out docs/figures docs/h200/block.json",
        "python -m benchmarks.figures --out docs/figures docs/h200/block.json docs/h200/remat.json"],
    "python -m benchmarks.performance_page": ["python -m benchmarks.performance_page"],
    "python -m benchmarks.performance_page --figures {tmp} docs/h200/block.json": [
        "python -m benchmarks.performance_page --figures docs/figures docs/h200/*.json > docs/generated/performance.md",
    ],
    "python -m benchmarks.recall_table": [
        "python -m benchmarks.recall_table", "python -m benchmarks.recall_table > docs/generated/recall.md"],
    "python -m benchmarks.coverage --page": [
        "python -m benchmarks.coverage --page", "python -m benchmarks.coverage --page > docs/generated/coverage.md"],
    "python -m benchmarks.recall_table --figure {tmp}/recall.png docs/generated/recall.md": [
        "python -m benchmarks.recall_table --figure docs/figures/recall.png docs/generated/recall.md"],
    "python -m benchmarks.architectures --list": ["python -m benchmarks.architectures --list"],
    "python -m benchmarks.architectures_page": ["python -m benchmarks.architectures_page"],
    "python -m benchmarks.architectures_page --figure {tmp}/architectures.png {tmp}/architectures.md": [
        "python -m benchmarks.architectures_page --figure docs/figures/architectures.png docs/generated/architectures.md"],
    "python -m benchmarks.dynamo_table {tmp}": [
        "python -m benchmarks.dynamo_table out/dynamo", "python -m benchmarks.dynamo_table FOLDER > table.md"],
    "python -m benchmarks.targets_page --out {tmp}/targets.md": ["python -m benchmarks.targets_page"],
    "python -m benchmarks.xla_zoo --page {tmp}/out.json": [
        "python -m benchmarks.xla_zoo --page out.json",
        "python -m benchmarks.xla_zoo --page out.json > docs/generated/xla_zoo.md"],
    "python -m benchmarks.saved_for_backward": ["python -m benchmarks.saved_for_backward"],
    "python -m benchmarks.compile_time --one megacpp --model plain --layers 1": [
        "python -m benchmarks.compile_time", "python -m benchmarks.compile_time --model plain --warm",
        "python -m benchmarks.compile_time --layers 24 --repeat 3",
        "python -m benchmarks.compile_time --model plain --layers 2 --repeat 1",
        "OMP_NUM_THREADS=1 python -m benchmarks.compile_time --model mamba2 --layers 2"],
    "python -m benchmarks.rounding_loss --steps 2 --seeds 1": [
        "python -m benchmarks.rounding_loss", "python -m benchmarks.rounding_loss --seeds 8",
        "python -m benchmarks.rounding_loss --steps 20 --seeds 2"],
    "python -m benchmarks.compression_loss --steps 2 --seeds 1": [
        "python -m benchmarks.compression_loss", "python -m benchmarks.compression_loss --steps 20 --seeds 1",
        "python -m benchmarks.compression_loss --feed-forward gelu"],
    "python -m benchmarks.hybrid_lm --backends eager --steps 2 --batch 1 --length 32 --no-plot": [
        "python -m benchmarks.hybrid_lm"],
    "python examples/train_mla.py --steps 2 --batch 1 --length 16 --dim 32 --layers 1 --no-plot --json {tmp}/cpu.json": [
        "python examples/train_mla.py", "python examples/train_mla.py --backend inductor --steps 50 --no-plot",
        "python examples/train_mla.py --steps 100 --json out/cpu.json",
        "python examples/train_mla.py --steps 100 --no-plot --json cpu.json"],
    "python examples/fp8_dispatch.py": ["python examples/fp8_dispatch.py"],
    "python examples/generate.py --steps 2 --new 4 --batch 1 --length 16 --prompt 4 --dim 32 --layers 1 --backend eager": [
        "python examples/generate.py --load out/model.pt --backend eager"],
    "python examples/generate.py --steps 2 --new 4 --batch 1 --length 16 --prompt 4 --dim 32 --layers 1 --caches latents --save {tmp}/a.pt": [
        "python examples/generate.py", "python examples/generate.py --steps 300 --save out/model.pt"],
    "python examples/train_layer_spec.py --steps 3 --no-plot --backends native+eager:float32 native+eager": [
        "python examples/train_layer_spec.py --backends native+eager:float32 native+eager native+megacpp",
        "python examples/train_layer_spec.py --size large --json te.json"],
    "python examples/overlay.py {tmp}/one.json {tmp}/one.json --plot {tmp}/overlay.png --tolerance 1e-4": [
        "python examples/overlay.py A.json B.json --plot FILE.png",
        "python examples/overlay.py cpu.json xla.json --plot overlay.png --tolerance 1e-4",
        "python examples/overlay.py out/cpu.json out/xla.json --plot out/overlay.png --tolerance 1e-4"],
    "python examples/train_hybrid.py --dtype bfloat16 --backends eager:float32 eager --steps 2 --batch 1 --length 32 --no-plot": [
        "python examples/train_hybrid.py --dtype bfloat16 --steps 200 --backends eager:float32 eager megacpp"],
    "make help": ["make help"],
    "python -m tests.statements": ["python -m tests.statements"],
    # What these would run is printed, and every file and module in it is there.
    **{f"make -n {what}": [f"make {what}"] for what in TARGETS}, "make -n test-repeat N=20": ["make test-repeat N=20"],
    "make -n test-repeat N=20 TIER=unit": ["make test-repeat N=20 TIER=unit"],
    "python -m tests.repeat 1 --co -n 0 tests/test_targets.py": ["python -m tests.repeat 5 tests/lowerings"],
    "make -n test TORCH=torch==2.11.0": ['make test TORCH="..."'],
    "make -n test-xla XLA_TESTS=tests/passes": ["make test-xla XLA_TESTS=tests/passes"],
}

# A test that runs it -> commands.
ELSEWHERE = {
    "tests/evidence/test_evidence.py": ["megacpp evidence gate", "megacpp evidence run PROFILE --environment ID"],
    "tests/test_compile_cache.py": [
        "megacpp compile module:callable -o FILE", "megacpp compile module:callable -o model.code --option policy=selective"],
    "tests/test_cli.py": [
        "megacpp explain module:callable --html report.html", "megacpp plan module:callable --device h100"],
    "tests/memory/test_estimate.py": ["megacpp estimate module:callable", "megacpp estimate examples.explain_hf:build"],
    "tests/memory/test_fit.py": [
        "megacpp plan module:callable --plot plan.png", "megacpp plan package.module:callable --plot plan.png"],
    "tests/_torch/test_missing.py": ["python -m tests._torch.without fakes.is_fake ops.grouped_mm+ops.scaled_mm"],
    "tests/lowerings/test_fuzz.py": [
        "python -m tests.lowerings.fuzz", "python -m tests.lowerings.fuzz --cases 300 --device cpu"],
    "tests/passes/test_rope_qk.py": [".venv/bin/python -m pytest tests/passes/test_rope_qk.py"],
    "tests/test_suite.py": ["python -m pytest -n 2 -p tests.durations"],
    "tests/passes/test_spellings.py": [
        "TEST_EVERY_SPELLING=1 .venv/bin/python -m pytest -n 2 tests/passes/test_spellings.py"],
    "tests/test_train_parallel.py": ["python examples/train_parallel.py --compare inductor"],
    ".ci/run": [
        "python examples/explain_hf.py", "python examples/train_hybrid.py",
        "python examples/train_hybrid.py --mixer delta", "python examples/train_fp8.py --size tiny --steps 20 --blocks",
    ],
    "tests/xla/test_spmd.py": [
        "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 PYTHONPATH=. python tests/xla/spmd_program.py tensor"],
}

# What a command needs, as a pattern that the text beside it must match -> commands.
NEEDS = {
    r"GPU|H200": [
        "python -m benchmarks", "python -m benchmarks --subject block", "python -m benchmarks --out DIR",
        "python -m benchmarks --subject remat", "python -m benchmarks --subject remat_peaks",
        "python -m benchmarks --subject sparse_mla", "python -m benchmarks --subject dsa",
        "python -m benchmarks --subject head", "python -m benchmarks --subject moe",
        "python -m benchmarks --subject mla_decode", "python -m benchmarks.fp8_gate",
        "python -m benchmarks.fp8_gate --compiled", "python -m benchmarks.fp8_gate --compiled --recipe fp8_current",
        "python -m benchmarks.fp8_gate --shape 16384,8192,512 --recipe fp8_current",
        "python -m benchmarks.compile_time --device cuda", "python -m benchmarks.hybrid_lm",
        "python -m benchmarks.logits_dropped", "python -m benchmarks.logits_dropped --rows dropped --layers 4",
        "python -m benchmarks.logits_dropped --out docs/h200/logits_dropped.json",
        "python -m benchmarks.hybrid_lm --size large --dtype bfloat16 --length 4096 --batch 4 --steps 200 "
        "--backends eager inductor megacpp hugging_face+eager hugging_face+inductor",
        "python -m benchmarks.qwen3_next --rows float32 eager inductor megacpp --steps 100",
        "python -m benchmarks.qwen3_next --rows float32 eager megacpp --tokens 4096 --steps 100",
        "python -m benchmarks.decode_model --layers 16 --batch 16 --context 16384", "python -m benchmarks.rope_in_block",
        "python -m tests.lowerings.fuzz --cases 10000 --device cuda --seed 1",
        "compute-sanitizer --tool memcheck python -m tests.lowerings.in_place_runs",
        "compute-sanitizer --tool racecheck python -m tests.lowerings.in_place_runs",
        "python examples/train_hybrid.py --size large --dtype bfloat16 --length 4096 --batch 4 --steps 200",
        "python examples/train_fp8.py", "python examples/train_fp8.py --backends inductor megacpp:fp8_current",
        "python examples/train_fp8.py --backends eager inductor megacpp megacpp:fp8_current --json fp8.json",
        "python examples/train_fp8.py --seeds 6 --backends inductor megacpp:fp8_current",
        "python -m benchmarks.architectures", "python -m benchmarks.architectures --out docs/h200/architectures.json",
        "python -m benchmarks.architectures llama qwen3_moe --rows inductor megacpp",
        *(f"python benchmarks/dynamo/huggingface.py {kind} --training --bfloat16 --disable-cudagraphs --backend={backend} "
          "--output-directory=out/dynamo" for kind in ("--performance", "--accuracy") for backend in ("inductor", "megacpp")),
        "python benchmarks/dynamo/huggingface.py --performance --training --bfloat16 --disable-cudagraphs "
        "--backend=megacpp --only=path:$PWD/model.py,class:Model",
        "pytest -m cuda tests/precision"],
    r"Transformer\s+Engine": [
        "python -m benchmarks --subject fp8_gemms --with-te", "python -m benchmarks.fp8_gate"],
    r"torch_xla": [
        "make test-xla", "make test-xla XLA_TESTS=tests/passes",
        "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 PYTHONPATH=. python tests/xla/spmd_program.py tensor",
        "python -m benchmarks.xla_programs", "PJRT_DEVICE=CPU python -m benchmarks.xla_programs",
        "PJRT_DEVICE=CPU python -m benchmarks.xla_programs --tokens 1024 --dim 1024 --heads 8 --dtype bf16",
        "python -m benchmarks.xla_sparse_mla", "PJRT_DEVICE=CPU python -m benchmarks.xla_sparse_mla",
        "PJRT_DEVICE=CPU python -m benchmarks.xla_sparse_mla --tokens 512 --rows 512 --topk 128 --channels 192 --values 128",
        "PJRT_DEVICE=CPU python -m benchmarks.xla_zoo ZOO --json out.json",
        "PJRT_DEVICE=CPU python -m benchmarks.xla_zoo ZOO --only hf_mamba2,litgpt_mla",
        "PJRT_DEVICE=CPU python examples/train_mla.py --device xla --steps 50 --json out.json",
        "PJRT_DEVICE=CPU python examples/train_mla.py --steps 100 --device xla --json out/xla.json",
        "PJRT_DEVICE=CPU python examples/train_mla.py --steps 100 --no-plot --device xla --json xla.json"],
    r"torchtitan": [
        "python -m benchmarks.titan --rows Inductor megacpp --ep 2",
        "python -m benchmarks.titan --rows Inductor megacpp --ranks 2 --ep 2",
        "python examples/inside_trainers.py torchtitan --ranks 2 --ep 2 --checkpoint selective",
        "python examples/inside_trainers.py graph_trainer --ranks 2"],
    r"Megatron": [
        "python examples/train_megatron.py", "python examples/train_megatron.py --te --size large --steps 30"],
    r"trl": ["python examples/inside_trainers.py trl --lora"],
    r"transformers": [
        "python -m benchmarks.coverage --out docs/recall/architectures.json",
        "python -m benchmarks.coverage llama qwen3_moe --tokens 512", "python -m benchmarks.compile_time", "OMP_NUM_THREADS=1 python -m benchmarks.compile_time --model mamba2 --layers 2",
        "python examples/explain_hf.py", "megacpp explain examples.explain_hf:build",
        "megacpp estimate examples.explain_hf:build"],
    r"matplotlib": [
        "megacpp plan package.module:callable --plot plan.png", "megacpp plan module:callable --plot plan.png",
        "python examples/overlay.py A.json B.json --plot FILE.png",
        "python -m benchmarks.figures --out docs/figures docs/h200/block.json",
        "python -m benchmarks.performance_page --figures docs/figures docs/h200/*.json > docs/generated/performance.md",
        "python -m benchmarks.recall_table --figure docs/figures/recall.png docs/generated/recall.md"],
    r"not in (the|this) repository": [
        "python -m benchmarks.xla_zoo --page out.json", "python -m benchmarks.xla_zoo --page out.json > docs/generated/xla_zoo.md",
        "PJRT_DEVICE=CPU python -m benchmarks.xla_zoo ZOO --json out.json"],
    r"minute": [
        "make test", "python -m tests.planted --tier unit", "python -m tests.repeat 5 tests/lowerings",
        "TEST_EVERY_SPELLING=1 .venv/bin/python -m pytest -n 2 tests/passes/test_spellings.py",
        "python -m benchmarks.compile_time --layers 24 --repeat 3", "python -m benchmarks.rounding_loss",
        "python -m benchmarks.compression_loss", "python -m benchmarks.compression_loss --feed-forward gelu",
        "python -m tests.lowerings.fuzz", "python examples/explain_hf.py", "python examples/train_mla.py", "python examples/generate.py",
        "python examples/train_hybrid.py", "python examples/train_hybrid.py --mixer delta",
        "python examples/train_fp8.py --size tiny --steps 20 --blocks",
        "python examples/train_hybrid.py --dtype bfloat16 --backends eager:float32 eager megacpp --steps 200"],
    r"(?i)network|install": ["pip install .", 'pip install "git+$URL"', "pip install tilelang", "pip install flash-attn-4",
                            "pip install megatron-core einops"],
}  # fmt: skip


@functools.cache
def helps() -> dict[str, tuple[int, str, str]]:
    """How something is started -> exit status, output and errors of its `--help`."""
    return {how: started(program, ["--help"]) for how, program in programs().items()}


@functools.cache
def printed() -> list[Printed]:
    pages = [found for page in PAGES for found in commands_of(page.read_text(), str(page.relative_to(ROOT)))]
    return pages + [found for how, (_, text, _) in helps().items() for found in commands_of(text, f"{how} --help", True)]


def listed() -> set[str]:
    return {command for table in (RUNS, ELSEWHERE, NEEDS) for commands in table.values() for command in commands}


def without_variables(command: str) -> list[str]:
    words = shlex.split(command.partition(" > ")[0])
    words = words[next(i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)) :]
    return words[words.index("python") :] if words[0] == "compute-sanitizer" else words


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """(what `started` takes, arguments); None for what is no program of this repository."""
    known = programs()
    for length in (1, 2, 3):
        if (how := " ".join(words[:length])) in known and (length > 1 or words[0] == "megacpp"):
            return known[how], words[length:]
    return None


def test_every_command_runs_or_says_what_it_needs():
    unknown = sorted({f"{p.command}   ({p.place})" for p in printed() if p.command not in listed()})
    assert not unknown, "neither run nor said to need anything; see the tables of this file:\n" + "\n".join(unknown)
    assert not listed() - {p.command for p in printed()}, "nobody prints these any more"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("need", NEEDS)
def test_what_a_command_needs_stands_beside_it(need):
    """Once on a page will do."""
    asking = [p for p in printed() if p.command in NEEDS[need]]
    said = {(p.command, p.place) for p in asking if re.search(need, p.around)}
    silent = sorted({f"{p.command}   ({p.place})" for p in asking if (p.command, p.place) not in said})
    assert not silent, f"the text beside these does not say {need!r}:\n" + "\n".join(silent)


def test_tests_that_run_a_command_name_its_program():
    for test, commands in ELSEWHERE.items():
        for command in commands:
            words = without_variables(command)
            if "pytest" in words:
                assert words[-1] == test or words[-1].removeprefix("tests.") in (ROOT / test).read_text()
                continue
            program, _ = program_of(words) or pytest.fail(command)
            assert Path(program).stem.rpartition(".")[2] in (ROOT / test).read_text(), (test, command)


class _ParsedError(Exception):
    """Options are right; the program goes no further."""


def test_options_are_parsed_as_printed(monkeypatch):
    """Placeholders stand for names of files, which nobody opens here."""
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    checked = 0
    for command in sorted({p.command for p in printed()}):
        if (found := program_of(without_variables(command))) is None or "--help" in found[1]:
            continue
        checked += 1
        with pytest.raises(_ParsedError):
            code, _, errors = started(*found)
            pytest.fail(f"{command}: {code} {errors}")
    assert checked > 50


@pytest.mark.parametrize("how", programs())
def test_help_says_what_it_does_and_what_it_takes(how):
    code, text, errors = helps()[how]
    assert code == 0 and text.startswith("usage: "), errors
    usage, does, *rest = re.split(r"\n\n", text)
    assert len(does.split()) > 4 and rest, text
    options = re.findall(r"^  (-[-\w, ]+?)(?: [A-Z{\[].*?)?(?:  +(.*))?$", text, re.M)
    undescribed = [option for option, said in options if not said and not re.search(rf"^  {re.escape(option)}.*\n {{10,}}\S", text, re.M)]
    assert not undescribed, f"options without a word: {undescribed}"


def made(tmp: Path) -> None:
    """The files that commands read and the repository does not hold."""
    losses = [{"backend": name, "device": "cpu", "losses": [2.0, 1.0]} for name in ("eager", "megacpp")]
    (tmp / "one.json").write_text(json.dumps(losses))
    model = {"name": "a", "source": "s==1"}
    (tmp / "speedup_megacpp.csv").write_text("dev,name,batch_size,speedup,abs_latency\ncuda,a,8,1.5,10\n")
    sites = {"cpu sites": {"moe": 1}, "xla sites": {"moe": 1}}
    (tmp / "out.json").write_text(json.dumps([{**model, **sites, "megacpp": [1e-7, 1e-6]}]))


def files() -> dict[Path, int]:
    """What commands write unless they are told where, with the time of its last change."""
    found = [path for folder in ("docs", "examples", "benchmarks/out") for path in (ROOT / folder).rglob("*")]
    return {path: path.stat().st_mtime_ns for path in found if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.end_to_end
@pytest.mark.parametrize("cheap", [cheap for cheap in RUNS if not cheap.startswith("make")])
def test_it_runs(cheap, tmp_path, no_kernels, few_objects, monkeypatch):
    """In this process and from the repository's root, without code generation, which is not what these are about."""
    monkeypatch.chdir(ROOT)
    made(tmp_path)
    before, words = files(), shlex.split(cheap.format(tmp=tmp_path))
    torch._dynamo.reset()
    settings = ("recompile_limit", "fail_on_recompile_limit_hit")  # the suite sets them for its process
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in settings}):
        code, out, errors = started(*program_of(words))
    assert code == 0, out[-2000:] + errors[-2000:]
    assert out, "it says something"
    for path in re.findall(rf"{re.escape(str(tmp_path))}\S*\.png", cheap.format(tmp=tmp_path)):
        assert Path(path).stat().st_size > 1000
    assert files() == before, "the cheap form writes into its own folder"


@pytest.mark.end_to_end
@pytest.mark.parametrize("cheap", [cheap for cheap in RUNS if cheap.startswith("make")])
def test_a_target_of_make_names_what_is_there(cheap):
    done = subprocess.run(shlex.split(cheap), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout, done.stderr
    paths = re.findall(r"(?<![\w./-])((?:examples|tests|docs)/[\w/.]+\.py|tests/\w+)(?![\w/.])", done.stdout)
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = re.findall(r"-m (benchmarks[\w.]*)", done.stdout)
    assert not [module for module in modules if importlib.util.find_spec(module) is None]


def test_targets_that_are_printed_are_there(monkeypatch):
    """`examples.explain_hf:build` and its like, from the root of a checkout."""
    monkeypatch.syspath_prepend(str(ROOT))
    words = {word for p in printed() for word in p.command.split() if re.fullmatch(r"[\w.]+:\w+", word)}
    names = words - {"module:callable", "package.module:callable", "eager:float32", "megacpp:fp8_current"}
    assert names
    for module, _, name in (word.partition(":") for word in names):
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("command", NEEDS[r"GPU|H200"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which these take long")
def test_without_a_gpu_it_says_so(command):
    """Those that only a GPU can do leave with one sentence and exit status 2; examples train on CPU, slowly."""
    found = program_of(without_variables(command))
    if found is None or found[0].startswith(("examples", "benchmarks.hybrid_lm")):
        return
    code, out, errors = started(*found)
    assert (code, out) == (2, "") and re.search("GPU|CUDA", errors) and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize("command", [c for c in NEEDS["torch_xla"] if "make" not in c and "examples" not in c])
def test_without_torch_xla_it_says_so(command, monkeypatch):
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch_xla" else spec(name, *more))
    code, out, errors = started(*program_of(without_variables(command)))
    assert (code, out) == (2, "") and "needs torch_xla" in errors and len(errors.splitlines()) == 1, errors


def test_without_an_interpreter_fuzzing_starts_one(monkeypatch):
    """Triton reads the variable when it is imported, so the command is run again with it."""
    seen = []

    def run(command, env):
        seen.append((command, env["TRITON_INTERPRET"]))
        return types.SimpleNamespace(returncode=0)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    given = ["--device", "cpu", "--cases", "3"]
    assert started("tests.lowerings.fuzz", given)[0] == 0
    assert seen == [([sys.executable, "-m", "tests.lowerings.fuzz", *given], "1")]


def test_commands_are_found_wherever_they_are_printed():
    text = """
Run `python -m a.b
--c` or `model.train()`, then:

    FOO=1 python x.py --y  # why
    code = python(3)

```bash
$ make it
```

```python
make = 3
```
"""
    found = [p.command for p in commands_of(text, "page")]
    assert found == ["python -m a.b --c", "FOO=1 python x.py --y", "make it"]
