"""Writes docs/generated/targets.md: the lowerings of every op and the classes of a layer spec, by target.

    python -m benchmarks.targets_page

Read off the package. Nothing is imported that a target would need: what a lowering does is the first sentence of its
file, and what Transformer Engine has is told by name.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arguments
from megacpp_compile import NativeLayerSpec, PrecisionPlan
from megacpp_compile.lowerings import _registry
from megacpp_compile.nn.attention import bodies
from megacpp_compile.precision.layer_spec import CLASSES
from megacpp_compile.targets import CPU, TPU, chips

PAGE = Path(__file__).parents[1] / "docs" / "generated" / "targets.md"
TARGETS = {"cuda": "CUDA", "tpu": "XLA (TPU)", "cpu": "CPU"}
SIZES = {"norm": (8,), "layernorm_mlp": (8, 16), "attention": (1, 8)}  # to construct one of each; (8, 8) for linears
TEXT = """# Targets

Written by `python -m benchmarks.targets_page`.

[xla.md](../xla.md) says how to run on XLA devices.

## Lowerings, in order of preference

{table}

Where the first one cannot serve a call, or would not gain, the next one does, and the report says why. `reference` is
the op in plain PyTorch: its meaning, and what every other lowering is tested against.

## What an XLA lowering does differently

{differences}

Where there is none, the reference is what XLA wants:

{references}

## CUDA devices

Read off `megacpp_compile/targets/chips.py`. [Targets](../targets.md) says what a label is for, and what of this has
run. Peaks and bandwidths are the makers', dense; none was measured.

{chips}

## Classes of a layer spec

What `te_layer_spec().or_native()` has on each target. Where Transformer Engine can't be imported, CUDA has what CPU
has, and `spec.reasons` says why.

{keys}

The last column is what a module makes, and pins where a sharding plan is in force. `attention` names the ways
`megacpp_compile.attention` takes on that target, most wanted first; what one of them cannot is a tag of
`attention_capability`: {tags}.

`replace_linears` puts Transformer Engine's modules in place on CUDA alone; elsewhere it leaves the model as it is, with
a line in the log. So does `precision="fp8_current"` in the graph:

{precision}
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
    reasons = {op: _registry.reference_serves(op, "tpu") for op in ops}
    return TEXT.format(
        table="\n".join(table), differences="\n".join(differences), keys=keys(),
        references="\n".join(f"- `{op}`: {reason}." for op, reason in reasons.items() if reason),
        tags=", ".join(f"`{tag}`" for tag in bodies.TAGS), precision=precision(), chips=devices(),
    )  # fmt: skip


def devices() -> str:
    """The table of CUDA devices."""
    names = ("label", "devices", *chips.FEATURES, "shared memory of a block", "pinned", "peak, TFLOP/s", "GB/s")
    rows = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for chip in chips.CHIPS:
        has = ["yes" if feature in chip.features else "" for feature in chips.FEATURES]
        pins = [f"`{recipe}`: `{n}={v}`" for recipe, values in chip.pins.items() for n, v in values.items()]
        peaks = [f"{name} {rate:g}" + (" (of utilisation)" if name == chip.utilisation_of else "")
                 for name, rate in chip.peaks.items()]  # fmt: skip
        cells = [f"`{chip.label}`", chip.devices, *has, f"{chip.shared_memory // 1024} KiB", ", ".join(pins),
                 ", ".join(peaks), f"{chip.memory_gb_per_s:g}" if chip.memory_gb_per_s else ""]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    rows.append("| `sm_<mm>` | any other | " + " | ".join([""] * (len(chips.FEATURES) + 4)) + " |")
    return "\n".join(rows)


def keys() -> str:
    """The seven keys by target."""
    rows = ["| key | " + " | ".join(TARGETS.values()) + " | parameters |", "|---|" + "---|" * len(TARGETS) + "---|"]
    native = NativeLayerSpec()
    for key, name in CLASSES.items():
        device = {} if key == "attention" else {"device": "meta"}
        made = native[key](*SIZES.get(key, (8, 8)), **device)
        cells = []
        for target in TARGETS:
            home = type(made).__module__.rpartition(".")[2]
            cell = f"`te.{name}`" if target == "cuda" else f"`{home}.{name}`"
            if key == "attention" and target == "cpu":
                cell += f": {', '.join(CPU.devices[0].attention)}"
            if key == "attention" and target == "tpu":
                ways = (f"{', '.join(d.attention)} ({d.package})" for d in TPU.devices)
                cell += f": {'; '.join(ways)}"
            cells.append(cell)
        parameters = ", ".join(f"`{p}`" for p, _ in made.named_parameters()) or "none"
        rows.append(f"| `{key}` | " + " | ".join(cells) + f" | {parameters} |")
    return "\n".join(rows)


def precision() -> str:
    """What a plan in fp8 comes to on each target, in its own words."""
    plan = PrecisionPlan.of("fp8_current")
    assert plan is not None
    said = {title: plan.describe(target).replace(":\n", ":").split("\n") for target, title in TARGETS.items()}
    return "\n".join(f"- {title}: {'; '.join(' '.join(line.split()) for line in said[title])}." for title in said)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.targets_page", __doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="where to write the page")
    a = parser.parse_args(argv)
    a.out.write_text(page())
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
