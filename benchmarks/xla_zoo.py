"""Third-party models on XLA: the sites that fire there beside those on CPU, results and gradients beside eager CPU.

    PJRT_DEVICE=CPU python -m benchmarks.xla_zoo ZOO --json out.json
    PJRT_DEVICE=CPU python -m benchmarks.xla_zoo ZOO --only hf_mamba2,litgpt_mla
    python -m benchmarks.xla_zoo --page out.json > docs/generated/xla_zoo.md

ZOO: a folder of models with `models.py`, which fills the `REGISTRY` of `common.py` with entries; `common.build(entry)`
gives (model, arguments, keyword arguments), `common.eager_step(entry, model, arguments, keywords, fn=callable)` runs a
step, and `run.py` has `flat(step)`, its (outputs, gradients), and `rel(tensors, wanted)`, the relative error of the
worst. Each model runs in a process of its own, two steps with different weights: eagerly on CPU, compiled for CPU as
far as the passes and all that surrounds them (code generation is left out), and on XLA; there without this package,
too, if it is not equal with it. Needs torch_xla, the models' own packages, and some minutes a model; the page is made
of results without either. Models and results are not in this repository: docs/generated/xla_zoo.md is.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments

BOUND = 1e-5  # relative, of the worst tensor, float32


def one(name: str, zoo: Path) -> dict[str, Any]:
    """All that is measured of one entry."""
    sys.path.insert(0, str(zoo))
    import common  # type: ignore[import-not-found]
    import models  # type: ignore[import-not-found]  # noqa: F401  fills the registry
    import run as judge  # type: ignore[import-not-found]
    import torch

    entry = common.REGISTRY[name]
    row: dict[str, Any] = {"name": name, "source": entry.source}
    try:
        # Before torch_xla, which puts its own in the place of the functions that set up process groups.
        built = [common.build(entry) for _ in range(4)]
    except Exception as error:
        return {**row, "build fails": f"{type(error).__name__}: {error}"[:300]}

    import torch_xla
    import torch_xla.debug.metrics as metrics

    import megacpp_compile
    from megacpp_compile.backend import compile_with
    from megacpp_compile.backends.inductor import without_codegen
    from megacpp_compile.config.options import Config

    torch.set_num_threads(1)
    there = torch_xla.device()

    def each(change: Any, values: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, values)

    def steps(device: Any, backend: Any) -> Any:
        """Two of them, the second with other weights and the rows of a batch in the other order."""
        model, args, kwargs = built.pop()
        tied = [name for name, _ in model.named_parameters()]
        slots = [(m, key, p) for m in model.modules() for key, p in m._parameters.items() if p is not None]
        model = model.to(device).train()
        first: dict[int, Any] = {}
        for module, key, before in slots:  # to an XLA device a parameter goes anew from each place it is tied to
            module._parameters[key] = first.setdefault(id(before), module._parameters[key])
        for module in model.modules():  # tables that are no buffers: Megatron moves its own, to CUDA only
            vars(module).update({key: t.to(device) for key, t in vars(module).items() if isinstance(t, torch.Tensor)})
        assert [name for name, _ in model.named_parameters()] == tied
        torch._dynamo.reset()
        call = model if backend is None else torch.compile(model, backend=backend)
        outputs, gradients = [], []
        for _ in range(2):
            torch.manual_seed(1)
            there = each(lambda t: t.to(device), (args, kwargs))
            found = judge.flat(common.eager_step(entry, model, *there, fn=call))
            outputs += [t.cpu() for t in found[0]]
            gradients += [t.cpu() for t in found[1]]
            args, kwargs = each(lambda t: t.flip(0) if t.dim() and t.shape[0] == 2 else t, (args, kwargs))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
        return outputs, gradients

    def errors(got: Any) -> list[float]:
        return [judge.rel(got[0], want[0]), judge.rel(got[1], want[1])]

    def attempt(what: str, call: Any) -> None:
        began = time.perf_counter()
        try:
            call()
        except Exception as error:
            row[f"{what} fails"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        row[f"{what} s"] = round(time.perf_counter() - began, 1)

    def host_ops() -> list[str]:
        return sorted(n for n in metrics.counter_names() if n.startswith("aten::"))

    def on_cpu() -> None:
        backend = functools.partial(compile_with, config=Config(), inner_compile=without_codegen)
        with megacpp_compile.record() as report:
            steps("cpu", backend)
        row["cpu sites"] = dict(report.counts)

    def on_xla(what: str, backend: str) -> None:
        metrics.clear_all()
        with megacpp_compile.record() as report:
            row[what] = errors(steps(there, backend))
        row[f"{what} host"] = host_ops()
        if backend == "megacpp":
            row["xla sites"] = dict(report.counts)
            row["lowerings"] = sorted({f"{s.op.removeprefix('megacpp::')}: {s.effective}" for s in report.sites})
            row["targets"] = sorted({frame.target for frame in report.frames})
            row["plain frames"] = sorted({frame.reason for frame in report.frames if not frame.captured})

    want = steps("cpu", None)
    attempt("cpu", on_cpu)
    attempt("megacpp", lambda: on_xla("megacpp", "megacpp"))
    if judged(row) not in ("yes", "OTHER SITES"):
        attempt("openxla", lambda: on_xla("openxla", "openxla"))
    return row


def names(zoo: Path) -> list[str]:
    sys.path.insert(0, str(zoo))
    import common
    import models  # noqa: F401

    return list(common.REGISTRY)


def judged(row: dict[str, Any]) -> str:
    """ "yes", or what is wrong. Where plain openxla is off itself, no worse than that is asked."""
    if "build fails" in row:
        return "not with this torch"
    if "megacpp" not in row:
        return "fails without this package, too" if "openxla" not in row else "FAILS"
    if row["xla sites"] != row.get("cpu sites"):
        return "OTHER SITES"
    if all(got <= BOUND for got in row["megacpp"]):
        return "yes"
    pairs = zip(row["megacpp"], row.get("openxla", (0, 0)), strict=True)
    return "as openxla" if all(got <= max(BOUND, 1.5 * plain) < float("inf") for got, plain in pairs) else "NO"


HEAD = """# Third-party models on XLA

Written by `python -m benchmarks.xla_zoo --page out.json`, of results that are not in the repository. The models of
[recall.md](recall.md), tiny and in float32, on XLA's CPU device with torch and torch_xla 2.9.0, two steps with
different weights. *sites*: those that fire on XLA. *output*, *gradient*: relative error of the worst tensor beside
eager CPU, of this package / of plain openxla (`-` where that was not needed, or fails). *equal*: the sites that fire on
CPU with the same torch, and both errors within {bound:.0e}; *as openxla*: beyond, and no worse than 1.5 times plain
openxla's. *on the host*: ATen ops that XLA handed back.
"""


def page(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD.format(bound=BOUND)]
    lines.append("| model | source | equal | sites | output | gradient | on the host |\n|---|---|---|---|---|---|---|")
    for row in rows:
        sites = ", ".join(f"{name} {n}" for name, n in row.get("xla sites", {}).items() if n) or "-"
        cells = []
        for i in range(2):
            both = [f"{row[what][i]:.0e}" if what in row else "-" for what in ("megacpp", "openxla")]
            cells.append(" / ".join(both))
        fallen = [row.get(f"{what} host") for what in ("megacpp", "openxla")]
        host = " / ".join("-" if names is None else ", ".join(names) or "none" for names in fallen)
        lines.append(f"| {row['name']} | {row['source']} | {judged(row)} | {sites} | {' | '.join(cells)} | {host} |")
    good = [sum(judged(row) == verdict for row in rows) for verdict in ("yes", "as openxla")]
    lines.append(f"\nOf {len(rows)} models {good[0]} are equal, {good[1]} as far off as under plain openxla. " + TIES)
    steps = ("build", "megacpp", "openxla", "cpu")
    failures = [(row, what) for row in rows for what in steps if f"{what} fails" in row]
    lines += ["", *(f"- {row['name']}, {what}: {row[f'{what} fails']}" for row, what in failures)] if failures else []
    return "\n".join(lines)


TIES = """A sparse
attention that picks keys by scores with a relu, such as DeepSeek-V3.2's, has ties at 0: where one falls on the last
place (in 8 of 64 rows of the model here), XLA's top-k takes another key than ATen's.
torchtitan 0.3.0 imports, by way of spmd_types, parts of torch.distributed that torch 2.9 has not: `_local_tensor`,
`_mesh_layout`, `ExplicitRedistributionContext`. torch_xla ends at 2.9."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.xla_zoo", __doc__)
    parser.add_argument("zoo", nargs="?", type=Path, metavar="ZOO", help="folder of the models")
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--page", type=Path, metavar="JSON", help="print the page of such results")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for a model")
    parser.add_argument("--one", help="measure this one here, and print it as JSON")
    a = parser.parse_args(argv)
    if a.page:
        print(page(json.loads(a.page.read_text())))
        return
    if a.zoo is None:
        parser.error("give it a folder of models (ZOO), or --page a file of results")
    arguments.need_torch_xla(parser)
    if not (a.zoo / "models.py").exists():
        parser.error(f"{a.zoo} is no folder of models: it has no models.py")
    if a.one:
        print(json.dumps(one(a.one, a.zoo)))
        return
    rows = []
    for name in [n for n in names(a.zoo) if not a.only or n in a.only.split(",")]:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.xla_zoo", str(a.zoo), "--one", name]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=a.timeout, env=environment)
            row = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            row = {"name": name, "source": "", "megacpp fails": f"no answer in {a.timeout} s"}
        except (IndexError, json.JSONDecodeError):
            row = {"name": name, "source": "", "megacpp fails": done.stderr[-400:]}
        rows.append(row)
        print(name, judged(row), {k: v for k, v in row.items() if k not in ("name", "source")}, flush=True)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(judged(row) in ("NO", "FAILS", "OTHER SITES") for row in rows))


if __name__ == "__main__":
    main()
