"""The benchmark suite at toy sizes on CPU: its whole path, what it writes, and that it marks what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import benchmarks.parallel as parallel
import benchmarks.rates as rates
import benchmarks.rates_models as rates_models
import benchmarks.xla_zoo as xla_zoo
from benchmarks import __main__ as suite
from benchmarks import (
    architectures,
    architectures_page,
    compression_loss,
    coverage,
    dynamo_table,
    harness,
    kernels,
    performance_page,
    recall_table,
    rounding_loss,
    variants,
)
from benchmarks.ceilings import Work
from benchmarks.conditions import conditions, version
from benchmarks.peers import transformer_engine
from benchmarks.subjects import fp8_gemms, remat_peaks, rope

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, no_kernels, few_objects):
    """Runs the suite in this process; gives its exit code, what it wrote about each subject, and what it printed."""
    # `no_kernels` has no C++ for our rows, and the row of Inductor stops short too.
    monkeypatch.setattr(variants, "VARIANTS", {})
    monkeypatch.setattr(variants, "inductor", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(rope, "LAYOUTS", rope.LAYOUTS[:1])

    def run(*subjects: str) -> tuple[int, dict[str, dict], str]:
        chosen = [arg for name in subjects for arg in ("--subject", name)]
        code = suite.main(["--device", "cpu", "--quick", "--turns", "2", "--plain", "--out", str(tmp_path), *chosen])
        return code, {s: json.loads((tmp_path / f"{s}.json").read_text()) for s in subjects}, capsys.readouterr().out

    settings = ("recompile_limit", "fail_on_recompile_limit_hit")
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in settings}):
        yield run


@pytest.mark.exhaustive
def test_predicted_peaks_stand_beside_measured_ones(run, monkeypatch):
    """Of graphs that run as they are, so by how much they differ says nothing here."""
    monkeypatch.setattr(remat_peaks, "BUDGETS", [0.5])
    monkeypatch.setattr(remat_peaks, "LIMITS", 2)
    monkeypatch.setattr(remat_peaks, "inductor", lambda model: model)  # a row without a prediction
    _, documents, printed = run("remat_peaks")
    assert not [r["missing"] for r in documents["remat_peaks"]["tables"][0]["rows"] if "missing" in r]
    budget, *limits = (row(documents["remat_peaks"], name) for name in ("budget 0.5", "limit 1 of 2", "limit 2 of 2"))
    assert budget["predicted_mib"] > 0 and budget["peak_mib"] > 0 and "limit_mib" not in budget
    first, last = limits
    assert first["limit_mib"] >= last["limit_mib"] and first["predicted_mib"] >= last["predicted_mib"]
    assert all(isinstance(r["met"], bool) and r["device_mib"] > r["peak_mib"] for r in limits)
    assert "MiB measured" in printed and "on the device" in printed


@pytest.mark.end_to_end
def test_whole_path(run, tmp_path):
    code, documents, printed = run("rope", "block")
    assert code == 0, printed
    for subject, document in documents.items():
        assert document["format"] == suite.FORMAT and document["subject"] == subject and document["quick"]
        assert {"date", "commit", "device", "torch", "triton", "cuda", "cudnn", "seed"} <= set(document["conditions"])
        assert document["ceilings"]["copy_TB_per_s"] > 0 and document["ceilings"]["bf16_matmul_TFLOP_per_s"] > 0
        assert [t["measure"] for t in document["tables"]] == [harness.FORWARD, harness.STEP]
        for table in document["tables"]:
            check_table(table)
        assert (tmp_path / f"{subject}.png").exists()
    ours = row(documents["block"], "megacpp")
    assert {s["pass"] for s in ours["sites"]} == {"down_norm_up", "mla_rope_q", "mla_rope_kv"}
    assert all(s["effective"] == "reference" for s in ours["sites"])
    assert ours["saved_mib"] < row(documents["block"], "Inductor")["saved_mib"]
    assert any("scaled_dot_product" in name for name in row(documents["block"], "eager")["attention"])
    assert "missing" in row(documents["rope"], "Megatron's kernels")
    assert "TRITON_INTERPRET" in row(documents["rope"], "our kernels, in place").get("missing", "TRITON_INTERPRET")
    check_page(documents, tmp_path)


class Wrapped:
    """Transformer Engine's tensor: bytes, and the bytes of the transpose."""

    def __init__(self, *, data, data_transpose, fp8_dtype, fp8_scale_inv, **_) -> None:
        assert fp8_dtype == torch.float8_e4m3fn, "what the recipe multiplies, gradients too"
        self.rowwise, self.columnwise = data.view(fp8_dtype), data_transpose.view(fp8_dtype)
        self.scale = fp8_scale_inv


def general_gemm(a, b, out_dtype, layout, use_split_accumulator):
    """As Hopper has it: the payload of an operand that is summed along its rows, else the transposed one."""
    assert use_split_accumulator == (layout != "TN"), "its recipe's"
    left, right = b.columnwise if layout[1] == "T" else b.rowwise, a.rowwise if layout[0] == "T" else a.columnwise
    return (left.float() @ right.float().t() * a.scale * b.scale).to(out_dtype), None, None, None


@pytest.mark.exhaustive  # the harness's branches are `test_whole_path`'s
@pytest.mark.end_to_end
def test_gemms_in_float8(run, monkeypatch):
    """Each multiplies the same payloads; Transformer Engine's by a stand-in that has its layouts."""
    names = {"bfloat16, cuBLAS", "torch._scaled_mm", "Transformer Engine's general_gemm"}
    code, documents, printed = run("fp8_gemms")
    assert code == 0 and "not here: asked for with --with-te" in printed
    dtypes = types.SimpleNamespace(kFloat8E4M3=torch.float8_e4m3fn, kFloat8E5M2=torch.float8_e5m2)
    te = types.SimpleNamespace(DType=dtypes, Float8Tensor=Wrapped, Float8CurrentScalingQuantizer=lambda *_: None)
    monkeypatch.setattr(transformer_engine, "load", lambda wanted=True: te)
    extensions = types.SimpleNamespace(general_gemm=general_gemm)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpp_extensions", extensions)
    code, documents, printed = run("fp8_gemms")
    assert code == 0, printed
    for table in documents["fp8_gemms"]["tables"]:
        assert {r["name"] for r in table["rows"]} == names and all(r["ok"] and "ms" in r for r in table["rows"])
    assert len(documents["fp8_gemms"]["tables"]) == 3
    assert len([*fp8_gemms.sizes()]) == 16 and all(s.n % 16 == s.k % 16 == 0 for s in fp8_gemms.sizes())


@pytest.mark.exhaustive  # the harness's branches are `test_whole_path`'s
@pytest.mark.end_to_end
def test_head(run):
    """The op by itself and in a frame, beside what else keeps no logits; on a CPU the kernels' rows say what they need."""
    code, documents, printed = run("head")
    assert code == 0, printed
    (table,) = documents["head"]["tables"]
    check_table(table)
    found = {r["name"] for r in table["rows"] if "ms" in r}
    assert {"its GEMMs alone", "eager", "Inductor", "megacpp", "our op", "our op, compiled"} <= found
    assert all(r["ok"] for r in table["rows"] if r["name"] in found and r["kind"] not in ("limit", "peer"))
    op = row(documents["head"], "our op")
    assert op["saved_mib"] < row(documents["head"], "eager")["saved_mib"]
    assert "need CUDA" in row(documents["head"], "Liger's kernel")["missing"]


def row(document: dict, name: str) -> dict:
    return next(r for r in document["tables"][-1]["rows"] if r["name"] == name)


def check_table(table: dict) -> None:
    assert table["floor_ms"] > 0 and table["dtype"] == "bfloat16" and table["sizes"]
    names = [r["name"] for r in table["rows"]]
    assert {"eager", "Inductor", "megacpp"} <= set(names) and len(set(names)) == len(names)
    for r in table["rows"]:
        assert r["kind"] in ("limit", "eager", "inductor", "ours", "kernels", "peer", "control")
        if "missing" in r:
            assert "ms" not in r and not r.get("failed"), r
            continue
        ms = r["ms"]
        assert len(ms["turns"]) == 2 and ms["min"] <= ms["median"] <= ms["max"]
        assert r["x_floor"] == pytest.approx(ms["median"] / table["floor_ms"])
        if r["kind"] in ("eager", "inductor", "ours"):
            assert r["ok"] and r["error"] <= r["bound"] and r["errors"]["grad x" if "grad x" in r["errors"] else "grad q"] > 0


def wrong(*args):
    raise RuntimeError("no such luck")


@pytest.mark.end_to_end
@pytest.mark.parametrize(("ours", "code", "says", "missing"), [
    (lambda model: lambda *args: model(*args) * 1.01, 1, "WRONG", None),
    (wrong, 1, "FAILED: RuntimeError: no such luck", "no such luck"),
    (variants.ours({"no_such_option": True}), 0, "no_such_option", "no_such_option"),
], ids=["wrong", "raises", "an option this version lacks"])  # fmt: skip
def test_a_bad_row_is_marked_and_costs_no_other(run, monkeypatch, ours, code, says, missing):
    rows = {"eager": ("eager", lambda model: model), "megacpp": ("ours", ours)}
    monkeypatch.setattr(variants, "compilers", lambda subject: rows)
    left, documents, printed = run("down_norm_up")
    eager, bad = (row(documents["down_norm_up"], name) for name in rows)
    assert left == code and says in printed and eager["ok"] and "ms" in eager
    assert missing in bad["missing"] if missing else bad["ok"] is False and bad["error"] > bad["bound"]
    assert bad.get("failed", False) == ("FAILED" in says)


def check_page(documents: dict[str, dict], folder: Path) -> None:
    text = performance_page.page([folder / f"{s}.json" for s in documents], folder / "docs/figures", folder / "docs")
    for subject, document in documents.items():
        assert f"![{subject}](figures/{subject}.png)" in text and (folder / f"docs/figures/{subject}.png").exists()
        assert str(document["conditions"]["seed"]) in text
        for table in document["tables"]:
            for r in table["rows"]:
                assert f"| {r['name']} | {r['ms']['median']:.3f} |" in text if "ms" in r else r["missing"] in text
    assert "Toy sizes" in text


def test_errors_of_other_shapes_and_of_what_is_no_number_are_infinite():
    one = torch.ones(2, 3)
    for got in ([one.t()], [one, one], [one * float("nan")]):
        assert harness.relative_errors(got, [one]) == [float("inf")]
    assert harness.relative_errors([one], [one]) == [0.0]


SETTINGS = harness.Settings(torch.device("cpu"), True, 1, 1.0, 0, None)  # type: ignore[arg-type]


def test_rows_and_subjects_that_are_asked_for():
    names = [("eager", "eager"), ("Inductor", "inductor"), ("megacpp", "ours"), ("megacpp, float8", "ours"), ("GEMMs", "limit")]
    rows = [harness.Contestant(name, kind, harness.Runner) for name, kind in names]  # type: ignore[arg-type]
    assert list(filter(SETTINGS.measured, rows)) == rows
    asked = dataclasses.replace(SETTINGS, rows=("float8",))
    assert [row.name for row in filter(asked.measured, rows)] == ["eager", "Inductor", "megacpp, float8", "GEMMs"]
    with pytest.warns(FutureWarning, match="fp8_products is now called fp8_gemms"):
        assert suite.parse(["--subject", "fp8_products"]).subject == ["fp8_gemms"]


def test_floor_of_rope():
    """The bytes, counted by hand for one token of one head: q's 64 lanes both ways, 128 + 64 lanes read, 192 written."""
    p = rope.problem(rope.Layout("one", heads=1), 1, 1, SETTINGS)
    tables = 2 * 64 * 2
    forward = 2 * (64 + 64 + 128 + 64 + 192) + tables
    assert rope.work(p)[harness.FORWARD] == Work(bytes=forward)
    assert rope.work(p)[harness.STEP] == Work(bytes=forward + 2 * (64 + 64 + 192 + 128 + 256 + 64) + tables)


INTERPRETED = """
from benchmarks import harness, kernels
from benchmarks.subjects import rope
from tests.test_benchmarks import SETTINGS
for layout in rope.LAYOUTS:
    layout = rope.dataclasses.replace(layout, heads=min(layout.heads, 3))
    p = rope.problem(layout, 1, 5, SETTINGS)
    eager = harness.training(p.model, p.inputs, p.leaves, p.grads).results()
    got = kernels.mla_rope(layout, p.inputs, p.grads, rope.NOPE, rope.ROPE, False).results()
    errors = harness.relative_errors(got, p.reference())
    bounds = [2.5 * e + 4e-4 for e in harness.relative_errors(eager, p.reference())]
    assert all(e <= b for e, b in zip(errors, bounds)), (layout.name, errors, bounds)
"""


@pytest.mark.end_to_end
def test_kernels_are_called_rightly_in_every_layout():
    pytest.importorskip("triton")
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environ = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    for args, said in (([], "no CUDA GPU"), (["--device", "cpu"], "needs --quick")):
        assert suite.main(args) == 2
        printed = capsys.readouterr()
        assert said in printed.err and not printed.out
    with pytest.raises(harness.Missing, match="TRITON_INTERPRET|no Triton"):
        kernels.lowering("mla_rope_q", torch.device("cpu"))


@pytest.mark.parametrize(("module", "says"), [
    ("__main__", "--subject"), ("__main__", "benchmarks.compile_time"),
    *((module, "python -m benchmarks") for module in [
        "performance_page", "compile_time", "saved_for_backward", "recall_table", "coverage", "rounding_loss", "xla_programs",
        "xla_sparse_mla", "xla_zoo", "compression_loss", "parallel", "rates", "titan",
    ]),
])  # fmt: skip
def test_measurements_have_help(module, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"benchmarks.{module}").main()
    assert says in capsys.readouterr().out + str(left.value)


def test_models_on_xla_are_judged_by_sites_and_errors(tmp_path, monkeypatch, capsys):
    fine = {"name": "a", "source": "s==1", "cpu sites": {"moe": 1}, "xla sites": {"moe": 1}, "megacpp": [1e-7, 1e-6]}
    rows = [
        fine,
        {**fine, "cpu sites": {"moe": 2}},
        {**fine, "megacpp": [1e-7, 1e-3]},
        {**fine, "megacpp": [1e-7, 1e-3], "openxla": [1e-7, 1e-3]},
        {"name": "b", "source": "", "openxla": [0.0, 0.0], "megacpp fails": "Oh"},
        {"name": "c", "source": "", "megacpp fails": "Oh", "openxla fails": "Oh"},
        {"name": "d", "source": "", "build fails": "Oh"},
    ]
    verdicts = ["yes", "OTHER SITES", "NO", "as openxla", "FAILS", "fails without this package, too", "not with this torch"]
    assert [xla_zoo.judged(row) for row in rows] == verdicts
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["xla_zoo", "--page", str(tmp_path / "rows.json")])
    xla_zoo.main()
    page = capsys.readouterr().out
    assert "Of 7 models 1 are equal, 1 as far off" in page and "| a | s==1 | yes | moe 1 | 1e-07 / - | 1e-06 / - |" in page


@pytest.mark.end_to_end
def test_coverage_is_what_explain_says_of_the_model(few_objects):
    """One of its rows again, on the releases that it was made with."""
    document = json.loads(coverage.RESULTS.read_text())
    where, wanted = document["conditions"], {model["name"]: model for model in document["models"]}
    pytest.importorskip("transformers")
    if (torch.__version__, version("transformers")) != (where["torch"], where["packages"]["transformers"]):
        pytest.skip("other releases than the page's")
    assert coverage.explained("flex_olmo") == wanted["flex_olmo"] and wanted["flex_olmo"]["sites"]["moe"] == 2


def test_a_row_of_the_coverage_page():
    refused = [["moe", "escapes", "why", 2], ["attention", "escapes", "why", 1]]
    model = {"name": "a", "million_parameters": 7, "sites": {"moe": 1}, "refused": refused, "graphs": 2, "eager": ["why"]}
    rows = {"inductor": {"least_ms": 4.0, "peak_mib": 2}, "megacpp": {"least_ms": 3.0, "peak_mib": 1, "sites": {"moe": 2}}}
    assert coverage._row(model, None) == "| a | 7 | 1 moe | escapes 3 | 2, 1 in eager |  |  |"
    assert coverage._row(model, rows) == "| a | 7 | 2 moe | escapes 3 | 2, 1 in eager | 0.75 | 0.50 |"
    assert coverage._row({"name": "b", "error": "ForwardError: x|y"}, None) == r"| b |  | ForwardError: x\|y |  |  |  |  |"
    failed = {"inductor": {"error": "no"}, "megacpp": {"least_ms": 3.0}}
    assert coverage._row(model, failed).endswith("| Inductor fails |  |")


def recalled(name, same=True, **counts):
    return {"name": name, "source": "s==1", "same": same, "out": 1e-7, "grad": 1e-6, "graphs": 1, "graphs0": 1, "breaks": 0,
            "breaks0": 0, "rows": {"mla_rope_q": [2, 2, counts.get("mla_rope_q", 0)]}, "counts": counts}  # fmt: skip


def test_recall_under_other_conditions(tmp_path, capsys):
    """A cell for each condition; what differs from the first is named, and gains do not make up for losses."""
    failed = {"name": "d", "error": "Oh"}
    runs = {
        "fp32": [recalled("a", mla_rope_q=2, rope_qk=1), recalled("b", moe=2), recalled("c"), failed, recalled("e", moe=1)],
        "bf16": [recalled("a", mla_rope_q=2, rope_qk=1), recalled("b", same=False, moe=2), recalled("c"), failed, failed],
        "dynamic": [recalled("b", moe=1, rope_qk=1), recalled("a", mla_rope_q=1, rope_qk=1), recalled("c", moe=1),
                    {**failed, "name": "e"}],
    }  # fmt: skip
    for name, results in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    files = [f"{name}={tmp_path / name}.json" for name in runs]
    recall_table.main(files)
    page = capsys.readouterr().out
    for line in (
        "| a | 3 | 3 / 3 | 2 / 3: mla_rope_q 1 for 2 |",
        "| b | 2 | 2 / 2: results off | 1 / 2: moe 1 for 2, rope_qk 1 for 0 |",
        "| c | 0 | 0 / 0 | 0 / 0: moe 1 for 0 |",
        "| d | fails |  |  |",
        "| e | 1 | not run | fails |",
        "Sites of fp32 that do not fire: 0 under bf16 (1 without a result), 2 under dynamic (1 without a result).",
    ):
        assert line in page, page
    assert len(recall_table.read_page(page)) == 5 and "5 models: 2 of 8 sites" in page
    names, under = recall_table.read_conditions(page)
    assert names == ["bf16", "dynamic"] and under["a"] == [(3, 3, 3), (3, 3, 2)] and under["e"] == under["d"] == [None, None]
    recall_table.main(files[:1])
    assert recall_table.read_conditions(capsys.readouterr().out) == ([], {})
    with pytest.raises(SystemExit):
        recall_table.main([*files, str(tmp_path / "fp32.json")])
    drawn = pytest.importorskip("benchmarks.figures.recall")
    pytest.importorskip("matplotlib")
    drawn.draw(recall_table.PASSES, recall_table.read_page(page), tmp_path / "recall.png", names, under)
    assert (tmp_path / "recall.png").stat().st_size > 1000


@pytest.mark.exhaustive  # both commands run in tests/docs/test_commands.py
@pytest.mark.end_to_end
def test_rounding_and_projections_change_a_loss_a_little():
    """The figures are of hundreds, and of several seeds (docs/compression.md)."""
    text = rounding_loss.standard_library_text()
    plain = rounding_loss.final_loss(text, 1, 3)
    assert plain == rounding_loss.final_loss(text, 1, 3) == compression_loss.final_loss(text, 1, 3), "the same runs"
    for change in ({"noise": 1e-3}, {"gradients": "e4m3"}, {"gradients": "e5m2"}):
        assert 0 < abs(rounding_loss.final_loss(text, 1, 3, **change) / plain - 1) < 1e-2
    for redraw in (False, True):
        loss = compression_loss.final_loss(text, 1, 3, "*.down_proj", redraw)
        assert loss == compression_loss.final_loss(text, 1, 3, "*.down_proj", redraw)
        assert 0 < abs(loss / plain - 1) < 1e-2
    of_gelu = compression_loss.final_loss(text, 1, 3, feed_forward="gelu")
    loss = compression_loss.final_loss(text, 1, 3, "*.mlp.*", feed_forward="gelu")
    assert of_gelu != plain and 0 < abs(loss / of_gelu - 1) < 1e-2


@pytest.mark.parametrize(("other", "code"), [([2.0, 1.00005], 0), ([2.0, 1.001], 1), ([2.0, float("nan")], 1)])
def test_losses_over_each_other(tmp_path, monkeypatch, capsys, other, code):
    files = [tmp_path / "cpu.json", tmp_path / "xla.json"]
    for file, losses in zip(files, ([2.0, 1.0], other), strict=True):
        runs = [{"backend": name, "device": file.stem, "losses": losses} for name in ("eager", "megacpp")]
        file.write_text(json.dumps(runs))
    monkeypatch.setattr(sys, "argv", ["overlay.py", *map(str, files), "--tolerance", "1e-4"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "examples/overlay.py"), run_name="__main__")
    assert (left.value.code or 0) == code
    assert "megacpp on xla beside megacpp on cpu: largest relative difference" in capsys.readouterr().out


def test_losses_of_one_run_over_each_other(tmp_path, monkeypatch, capsys):
    """As `train_fp8.py` writes them, with what all runs have in common beside them."""
    runs = [{"backend": name, "losses": [2.0, 1.0 + i]} for i, name in enumerate(("eager", "inductor", "megacpp:fp8"))]
    (file := tmp_path / "fp8.json").write_text(json.dumps({"device": "H200", "runs": runs}))
    backends = ["--backend", "inductor", "--backend", "megacpp:fp8"]
    monkeypatch.setattr(sys, "argv", ["overlay.py", str(file), *backends])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples/overlay.py"), run_name="__main__")
    said = "megacpp:fp8 on H200 beside inductor on H200: largest relative difference 5.0e-01"
    assert said in capsys.readouterr().out


def test_decoding_with_a_model(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from benchmarks import decode_model

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    out = tmp_path / "rows.json"
    assert decode_model.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    assert tuple(rows) == decode_model.ROWS
    # Of float32, and of rows in fewer bits, beside the logits' norm.
    assert rows["plain"]["off"] == 0 and rows["latents"]["off"] < 1e-6
    assert 1e-5 < rows["fp8"]["off"] < 0.02 and rows["fp8"]["off"] < rows["turboquant"]["off"] < 0.1
    assert rows["turboquant"]["bytes"] < rows["fp8"]["bytes"] < rows["latents"]["bytes"] == rows["plain"]["bytes"]


@pytest.mark.end_to_end
def test_rotations_in_a_block(capsys, tmp_path, no_kernels):
    from benchmarks import rope_in_block

    out = tmp_path / "rows.json"
    assert rope_in_block.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    assert "'mla_rope_q': 1, 'mla_rope_kv': 1" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["block"] == "toy"
    timed = {"block": "a", "ms": 1.0, "floor": 0.8, "x": 1.25, "rest_ms": 2.0, "all_ms": 9.0, "kernels": {"k": 1.0}}
    assert rope_in_block.table([timed]).splitlines()[1].split() == ["a", "1.000", "0.800", "1.25", "2.000", "9.00"]


def measured_on_ranks():
    """As `parallel.measure` leaves it: a layer fires two sites, and two layers were compiled."""

    def row(name, ms, losses, peak, sites):
        of_ranks = [{"peak_mib": peak, "sites": sites, "fell": [], "misses": []}] * 2
        return {"name": name, "ms": {"median": ms}, "losses": losses, "graphs": 2, "of_ranks": of_ranks, "first_s": 1.0}

    rows = [row("eager", 20.0, [1.0, 0.5], 300.0, {}), row("Inductor", 10.0, [1.0, 0.5001], 200.0, {}),
            row("megacpp", 9.0, [1.0, 0.5002], 100.0, {"down_norm_up": 4, "mla_rope_q": 2})]  # fmt: skip
    alone = {"down_norm_up": 2, "mla_rope_q": 1}
    return {"what": "tensor parallel", "ranks": 2, "sites_of_one_device": alone, "rows": rows}


def judged(change):
    found = measured_on_ranks()
    change(found["rows"][2])
    parallel.judge(found)
    return found


def test_ratios_and_distances_on_ranks():
    found = judged(lambda row: None)
    ours = found["rows"][2]
    assert (ours["wrong"], ours["per_inductor"], ours["peak_per_inductor"]) == ([], 0.9, 0.5)
    assert ours["off"] == pytest.approx(4e-4)
    assert "tensor parallel, 2 ranks; one device fires down_norm_up 2, mla_rope_q 1" in parallel.shown(found)


@pytest.mark.parametrize(("change", "says"), [
    (lambda row: row["losses"].__setitem__(1, 0.51), "losses are 2.0e-02 from eager's, Inductor's 2.0e-04"),
    (lambda row: row["of_ranks"].__setitem__(1, row["of_ranks"][0] | {"sites": {"down_norm_up": 4}}), "every rank"),
    (lambda row: row["of_ranks"][0]["sites"].update(mla_rope_q=1), "every rank"),
    (lambda row: row.update(graphs=3), "3 graphs, where Inductor has 2"),
], ids=["losses", "a rank", "a layer", "graphs"])  # fmt: skip
def test_what_is_wrong_on_ranks(change, says):
    found = judged(change)
    (wrong,) = found["rows"][2]["wrong"]
    assert says in wrong and f"WRONG: {wrong}" in parallel.shown(found)


def on_one_rank(monkeypatch):
    of_one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in of_one.items():
        monkeypatch.setenv(name, value)


@pytest.mark.end_to_end
def test_whole_path_of_parallel_on_one_rank(no_kernels, tmp_path, monkeypatch, capsys):
    on_one_rank(monkeypatch)
    settings = ("recompile_limit", "capture_scalar_outputs")
    out = tmp_path / "parallel.json"
    asked = ["--device", "cpu", "--quick", "--layers", "1", "--steps", "2", "--turns", "1", "--calls", "1"]
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in settings}):
        code = parallel.main([*asked, "--how", "tensor", "--rows", "eager", "megacpp", "--out", str(out)])
    (found,) = json.loads(out.read_text())["measured"]
    assert code == 0 and found["ranks"] == 1
    eager, ours = found["rows"]
    assert found["sites_of_one_device"] == ours["of_ranks"][0]["sites"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-2)  # bfloat16, two steps
    assert "down_norm_up" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "billions", "gflop"), [
    ("qwen3_moe", 30.5, 23.1), ("nemotron_h", 31.6, 20.0), ("gpt_oss", 20.9, 22.9)
])  # fmt: skip
def test_released_models_have_their_parameters(name, billions, gflop):
    """Those of all layers; published rates and tokens a second of Qwen3-30B-A3B are 23.0 GFLOP a token."""
    from transformers import AutoModelForCausalLM

    released = rates.MODELS[name]
    config = rates_models.configuration(released, len(released.pattern), quick=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kinds = [rates_models.KINDS[letter] for letter in released.pattern]
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    flops = rates_models.flops_a_token(model, kinds, 4096)
    assert flops["all"] == flops["layers"] + flops["head"] + flops["attention"]
    assert flops["all"] / 1e9 == pytest.approx(gflop, abs=0.05)


def test_rates_are_of_model_flops_and_of_the_slowest_row():
    own = {"sites": {"moe": 1}, "misses": [], "fell": ["a frame"], "peak_mib": 10.0}
    common = {"of_ranks": [own, own | {"peak_mib": 20.0}], "graphs": 5, "first_s": 1.0}
    rows = [{"name": "inductor", "ms": {"median": 20.0}, "losses": [2.0, 1.0], **common},
            {"name": "megacpp", "ms": {"median": 10.0}, "losses": [2.0, 1.01], **common}]  # fmt: skip
    flops = {"layers": 1e9, "head": 5e8, "attention": 5e8, "all": 2e9}
    found = {"name": "A", "published": 277, "of_layers": 48, "layers": 8, "ranks": 2, "parameters": 5e9, "accumulate": 2,
             "tokens": [2, 1000], "flops_a_token": flops, "load": [1.1, 1.3], "rows": rows, "failed": {"blocks": "Oh"},
             "attention_implementation": "sdpa", "experts_implementation": "grouped_mm"}  # fmt: skip
    theirs, ours = rates.judged(found)["rows"]
    assert (theirs["tflops_per_gpu"], ours["tflops_per_gpu"]) == (400.0, 800.0)
    assert (ours["tokens_per_s_and_gpu"], ours["per_first"], ours["peak_mib"]) == (4e5, 0.5, 20.0)
    assert not theirs["wrong"] and "losses are 1.0e-02 from inductor's" in ours["wrong"][0]
    said = rates.shown(found)
    assert "8 of 48 layers" in said and "in eager: a frame" in said and "blocks FAILED: Oh" in said


@pytest.mark.end_to_end
def test_whole_path_of_rates_on_one_rank(no_kernels, few_objects, tmp_path, monkeypatch, capsys):
    on_one_rank(monkeypatch)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    out = tmp_path / "rates.json"
    asked = ["--device", "cpu", "--quick", "--layers", "2", "--steps", "2", "--turns", "1", "--calls", "1"]
    rows = ["eager", "megacpp"]
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        code = rates.main(["qwen3_moe", *asked, "--rows", *rows, "--out", str(out)])
    (found,) = json.loads(out.read_text())["measured"]
    assert code == 0 and not found["failed"] and [row["name"] for row in found["rows"]] == rows
    ours = found["rows"][1]
    assert ours["of_ranks"][0]["sites"] == {"moe": 1, "rope_qk": 1}  # both layers are one graph
    assert "is_causal" in ours["of_ranks"][0]["fell"][0]
    assert "Qwen3-30B-A3B, 2 of 48 layers" in capsys.readouterr().out


class TestDynamoTable:
    """Files as PyTorch's harness writes them."""

    SPEEDUP = "dev,name,batch_size,speedup,abs_latency,compilation_latency,compression_ratio,eager_peak_mem,dynamo_peak_mem"

    @pytest.fixture
    def folder(self, tmp_path):
        for backend, rows in {
            "inductor": ["Bert,16,2.0,50,30,1,8,4", "T5,4,1.25,8,30,1,8,8", "Opt,2,1.5,8,30,1,8,8"],
            "megacpp": ["Bert,16,2.1,47,40,1,8,3", "T5,4,1.2,9,30,1,8,8", "Opt,0,0.0,0.0,0,0,0,0", "New,1,1.1,9,1,1,1,1"],
        }.items():
            lines = [self.SPEEDUP, *(f"cuda,{row}" for row in rows)]
            (tmp_path / f"speedup_{backend}.csv").write_text("\n".join(lines) + "\n")
        (tmp_path / "accuracy_inductor.csv").write_text(
            "dev,name,batch_size,accuracy\ncuda,Bert,1,pass\ncuda,T5,1,fail_accuracy\ncuda,Big,1,pass_due_to_skip\n"
        )
        (tmp_path / "speedup_megacpp_compilation_metrics.csv").write_text("dev,name,batch_size\ncuda,Bert,16\n")
        return tmp_path

    def test_a_line_for_each_model_and_one_for_all(self, folder, capsys):
        assert dynamo_table.main([str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "| model | eager, ms | inductor | megacpp | megacpp / inductor | peak megacpp / inductor |"
        assert "| Bert | 100.0 | 2.000 | 2.100 | 1.050 | 0.750 |" in lines
        assert "| T5 | 10.0 | 1.250 fail_accuracy | 1.200 | 0.960 | 1.000 |" in lines
        assert "| Opt | 12.0 | 1.500 | fails |  |  |" in lines, "a run that failed has a speed of 0 in the file"
        assert "| New | 9.9 |  | 1.100 |  |  |" in lines and "| Big |  | pass_due_to_skip |  |  |  |" in lines
        # Of Bert and T5, which both ran: sqrt(2 * 1.25), sqrt(2.1 * 1.2), sqrt(1.05 * 0.96), sqrt(0.75).
        assert "| mean of 2 |  | 1.581 | 1.587 | 1.004 | 0.866 |" in lines

    def test_what_does_not_pass_is_named(self, folder, capsys):
        dynamo_table.main([str(folder)])
        said = capsys.readouterr().out
        assert "\ninductor: 3 of 4 pass; not T5 (fail_accuracy)\n" in said
        assert "\nmegacpp: 3 of 4 pass; not Opt (does not run)\n" in said
        assert "\nmegacpp below 0.97 of inductor: T5 0.960\n" in said

    def test_a_backend_alone(self, folder, capsys):
        for path in folder.glob("*_inductor.csv"):
            path.unlink()
        assert dynamo_table.main([str(folder)]) == 0
        assert capsys.readouterr().out.startswith("| model | eager, ms | megacpp |\n")

    def test_a_folder_without_results(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as left:
            dynamo_table.main([str(tmp_path)])
        assert left.value.code == 2 and "no speedup_BACKEND.csv" in capsys.readouterr().err


class TestArchitectures:
    """On a CPU that stands in for a GPU, of a model that is no wider than it has to be."""

    @pytest.fixture(autouse=True)
    def on_cpu(self, monkeypatch, no_kernels):
        transformers = pytest.importorskip("transformers", reason="models of transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip
        monkeypatch.setattr(architectures, "configuration", lambda name: transformers.LlamaConfig(**sizes))
        monkeypatch.setattr(architectures, "DEVICE", "cpu")
        monkeypatch.setattr(architectures, "VOCABULARY", 64)
        monkeypatch.setattr(architectures, "TOKENS", 16)
        inductor = {"backend": "aot_eager_decomp_partition"}  # whose kernels take seconds
        monkeypatch.setattr(architectures, "ROWS", {**architectures.ROWS, "inductor": inductor})
        for name in ("set_per_process_memory_fraction", "empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 20)
        event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 6.0)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)

    def test_a_model(self, tmp_path):
        file = tmp_path / "llama.json"
        architectures.measure("llama", ["inductor", "megacpp"], file, turns=2)
        measured = json.loads(file.read_text())
        ours = measured["megacpp"]
        assert measured["done"] and ours["sites"]["attention"] == 1 and ours["graphs"] == 1
        assert ours["ms"] == 6 / 66 and ours["peak_mib"] == 3 and len(ours["turns_ms"]) == 2
        assert 0 < ours["error_of_gradients"] < 0.05 and measured["eager"]["reference"] == "float32"
        assert architectures.ratio(measured, "megacpp", "least_ms") == 1
        where, file = conditions(torch.device("cpu"), 0), tmp_path / "all.json"
        architectures.write(file, [{"name": "other", "inductor": {"error": "OutOfMemoryError"}}], where)
        architectures.write(file, [measured], {**where, "commit": "later"})
        architectures.write(file, [{"name": "llama", "failed": "its time was over"}], where)
        page, picture = tmp_path / "page.md", tmp_path / "picture.png"
        given = ["--results", str(tmp_path / "all.json"), "--figure", str(picture), str(page)]
        assert architectures_page.main(given) == 0
        text = page.read_text()
        assert "time over Inductor's: geometric mean 1.000 of 1" in text and "inductor failed: other" in text
        assert "commit later" in text and text.count(": 1 of 2") == 2
        assert "| llama* |" in text and picture.stat().st_size > 1000

    def test_a_backend_that_fails_is_a_row(self, monkeypatch, tmp_path):
        def fails(*_, **__):
            raise RuntimeError("nothing here")

        monkeypatch.setattr(torch, "compile", lambda model, **_: fails if isinstance(model, torch.nn.Module) else model)
        architectures.measure("llama", ["megacpp"], tmp_path / "one.json", turns=1)
        known = json.loads((tmp_path / "one.json").read_text())
        assert known["megacpp"] == {"error": "RuntimeError: nothing here"} and known["done"]
