"""Cold compile time of a deep model, each in a process of its own: `benchmarks.compile_time` with fewer layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import compile_time
from benchmarks.harness import Settings, progress, summary, with_ratios

KINDS = {
    "inductor": ("Inductor", "inductor"), "megacpp": ("megacpp", "ours"),
    "megacpp-by-blocks": ("megacpp_compile.compile, by blocks", "ours"),
}  # fmt: skip
# 24 layers are what a repeated block is worth; the whole model takes Inductor minutes there on a CPU.
LAYERS = {"cuda": 24, "cpu": 4}


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    layers, turns = (1, 1) if settings.quick else (LAYERS[settings.device.type], min(settings.turns, 2))
    model = "plain" if settings.quick else compile_time.model_for(settings.device.type)
    rows: dict[str, dict[str, Any]] = {b: {"name": name, "kind": kind} for b, (name, kind) in KINDS.items()}
    seconds: dict[str, list[dict[str, Any]]] = {backend: [] for backend in rows}
    for turn in range(turns):
        for backend, row in rows.items():
            if "missing" in row:
                continue
            try:
                seconds[backend].append(compile_time.measure(backend, layers, model, settings.device.type))
            except compile_time.CompileFailed as error:
                row["missing"], row["failed"] = str(error)[:300], True
        progress(f"compile_time: turn {turn + 1} of {turns}")
    for backend, row in rows.items():
        if "missing" not in row:
            row["ms"] = summary([1e3 * s["total_s"] for s in seconds[backend]])
            row["graphs"] = seconds[backend][0]["graphs"]
            row["step_ms"] = summary([s["step_ms"] for s in seconds[backend]])["median"]
    yield {"subject": "compile_time", "case": f"{layers} layers of {model}", "measure": "first step, cold",
           "sizes": {"layers": layers, "model": model}, "dtype": "bfloat16" if model == "mla" else "float32",
           "work": {}, "floor_ms": None, "last_of_case": True,
           "rows": with_ratios(list(rows.values()), None)}  # fmt: skip
