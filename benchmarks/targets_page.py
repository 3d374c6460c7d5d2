"""docs/targets.md: which lowering of every op serves on which target, read off the package.

    python -m benchmarks.targets_page

Nothing is imported that a target would need: what a lowering does is the first sentence of its file.
"""

from __future__ import annotations

import ast
from pathlib import Path

from megacpp_compile.lowerings import _registry

PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
TARGETS = {"cuda": "CUDA", "tpu": "XLA (TPU)", "cpu": "CPU"}
TEXT = """# Targets

Written by `python -m benchmarks.targets_page`.

The same plain model goes through the same capture and the same passes wherever its tensors are, and a report names the
same sites. What differs is the lowering of each op and who compiles the result: Inductor for CPU and CUDA, openxla for
XLA devices. `target="auto"` goes by the device of a frame's inputs.

## Lowerings, in order of preference

{table}

Where the first one cannot serve a call, or would not gain, the next one does, and the report says why. `reference` is
the op in plain PyTorch: its meaning, and what every other lowering is tested against.

## What an XLA lowering does differently

{differences}

## On an XLA device

    import torch_xla
    model = model.to(torch_xla.device())
    model = torch.compile(model, backend="megacpp")   # target="tpu" by itself

- Ops are lowered after autograd, in the forward's and in the backward's graph, each of which becomes one XLA program.
  An op that were left would be an error. Once gradients and an optimizer's state exist, a step compiles nothing.
- Backward computes views again instead of reading saved ones, which XLA would have to write as tensors of their own:
  a transposed weight, an unsqueezed table.
- `down_norm_up` keeps its latent for backward (`keep_latents` is "auto"), so that there are as many products as under
  plain openxla; `keep_latents=False` computes it again, one more product a site, as on the other targets. The report
  names what "auto" came to.
- A frame in which nothing fires is compiled as `backend="openxla"` would. Settings of Inductor have no effect
  there, which is logged.
- `moe` is exact: no choice of an expert is dropped, whatever the routing. It copies an expert's weights for each block
  of its rows; there is no capacity to set.
- Results that are copies of one another are told apart before torch_xla sees them: its bridge to Dynamo (2.9) takes
  them for one, and mixes up those behind. That holds for frames in which nothing fires, too.
- `make test-xla` runs the tests for XLA on its CPU device, with torch 2.9.0 and torch_xla 2.9.0 in a venv of their own.
- [xla_zoo.md](xla_zoo.md) has third-party models on XLA, [measurements.md](measurements.md) counts and times.
- `python -m benchmarks.xla_programs` counts what XLA is given and what it makes of it, beside plain openxla.

Not tried: a TPU itself, torch_tpu, several devices.
"""


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def page() -> str:
    home = Path(_registry.package.__path__[0])
    ops = sorted(folder.name for folder in home.iterdir() if (folder / "reference.py").exists())
    table = ["| op | " + " | ".join(TARGETS.values()) + " |", "|---|" + "---|" * len(TARGETS)]
    for op in ops:
        there = [[name for name in _registry.preference(op, t) if (home / op / f"{name}.py").exists()] for t in TARGETS]
        table.append(f"| `{op}` | " + " | ".join(", ".join(names) for names in there) + " |")
    files = [home / op / "tpu_xla.py" for op in ops]
    differences = [f"- {first_sentence(path)}." for path in files if path.exists()]
    return TEXT.format(table="\n".join(table), differences="\n".join(differences))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
