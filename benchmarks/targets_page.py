"""docs/targets.md: which lowering of every op, and which class of every key of a layer spec, serves on which target.

    python -m benchmarks.targets_page

Read off the package. Nothing is imported that a target would need: what a lowering does is the first sentence of its
file, and what Transformer Engine has is told by name.
"""

from __future__ import annotations

import ast
from pathlib import Path

from megacpp_compile import NativeLayerSpec, PrecisionPlan
from megacpp_compile.lowerings import _registry
from megacpp_compile.nn.attention import PREFERENCE, bodies
from megacpp_compile.precision.layer_spec import CLASSES
from megacpp_compile.targets import XLA_DEVICES

PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
TARGETS = {"cuda": "CUDA", "tpu": "XLA (TPU)", "cpu": "CPU"}
SIZES = {"norm": (8,), "layernorm_mlp": (8, 16), "attention": (1, 8)}  # to construct one of each; (8, 8) for linears
TEXT = """# Targets

Written by `python -m benchmarks.targets_page`.

The same plain model goes through the same capture and the same passes wherever its tensors are, and a report names the
same sites. What differs is the lowering of each op and who compiles the result: Inductor for CPU and CUDA, openxla for
XLA devices under torch_xla, torch_tpu's own compiler for its devices. `target="auto"` goes by the device of a frame's
inputs.

## Lowerings, in order of preference

{table}

Where the first one cannot serve a call, or would not gain, the next one does, and the report says why. `reference` is
the op in plain PyTorch: its meaning, and what every other lowering is tested against.

## What an XLA lowering does differently

{differences}

Where there is none, the reference is what XLA wants:

{references}

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
- An op that a model calls itself, such as `megacpp_compile.sparse_mla`, is lowered the same way outside of any compiled
  frame. A linear with a payload in float8 works there, too, and keeps it in float8.
- A frame in which nothing fires is compiled as `backend="openxla"` would. Settings of Inductor have no effect
  there, which is logged.
- `moe` is exact: no choice of an expert is dropped, whatever the routing. It copies an expert's weights for each block
  of its rows. `megacpp_compile.equal_split(indices, experts, factor)`, called by the model between its top-k and its
  experts, gives them a capacity on every target, and counts what it drops.
- Results that are copies of one another are told apart before torch_xla sees them: its bridge to Dynamo (2.9) takes
  them for one, and mixes up those behind. Reductions over no dimension by name, such as `x.amax()`, are given all: it
  reduces none of them. Both hold for frames in which nothing fires, too.
- `make test-xla` runs the tests for XLA on its CPU device, with torch 2.9.0 and torch_xla 2.9.0 in a venv of their own.
- [xla_zoo.md](xla_zoo.md) has third-party models on XLA, [measurements.md](measurements.md) counts and times.
- `python -m benchmarks.xla_programs` counts what XLA is given and what it makes of it, beside plain openxla.

## Several XLA devices

    import torch_xla.runtime
    from megacpp_compile import sharding
    torch_xla.runtime.use_spmd()                        # before any tensor is on the device
    plan = megacpp_compile.ShardingPlan(
        mesh={{"data": 2, "model": 4}},
        rules={{"*.*_b.weight": ("model", "data"), "*.o.weight": ("data", "model")}},
        batch="data",
    )
    sharding.pin(plan, x, ("data", None, None))         # the batch
    model = torch.compile(model, backend="megacpp", options={{"sharding": plan}})

- The first rule that matches a parameter's whole name gives its partition spec; a rule that matches none is an error,
  as are an axis the mesh has not, a dimension that is not divisible, and a tensor that is on no XLA device.
- Pinned (`mark_sharding`) are the parameters that a rule means, and all that are fused into an op: those without a rule
  to a whole copy on every device. That happens when the frame is compiled, for all blocks that will run its artifact;
  modules of `NativeLayerSpec` pin theirs as they are made, inside `with sharding.constructing(plan, name)`;
  `sharding.apply(plan, model)` pins a whole model. The report has a table of what was pinned, to what, by which rule.
- A parameter cut over an axis of the batch is gathered in front of its readers, once for forward and once for backward.
- Products over a batch and heads keep both dimensions in HLO; merged, as ATen has them, XLA would gather queries, keys
  and values first.
- Measured on four virtual CPU devices (`tests/xla/test_spmd.py`), an MLA block. Heads over the devices: one all-reduce
  in forward, at the output projection, three in backward, for the two latents and the rotated row. Batch and rows of
  weights over the devices: an all-gather a weight in forward and again in backward, an all-reduce a gradient (XLA's CPU
  backend makes no reduce-scatter); no activation travels. With both at once (2 x 2) numbers agree, too, and backward
  has two collective permutes that nobody asked for.

## torch_tpu

Its device type is "tpu", and it registers a Dynamo backend of that name when it is imported (release 0.2, torch 2.11 to
2.15; torch_xla ends at torch 2.9). A frame on its device goes through the lowerings for XLA, and both halves of it to
that backend. Compile with `dynamic=False`, which `megacpp_compile.compile` does by itself: a frame with sizes that are
not known is left to torch_tpu, with the reason in the report. An input at another storage offset compiles anew, as it
does under torch_tpu alone. Sharding plans are for torch_xla.

## Not tried, for want of a TPU

- Whatever needs the device itself: times, memory, bfloat16 products as a TPU rounds them. XLA ran on CPU.
- torch_tpu: the path was run with a stand-in that differentiates as it does; its names are those of the 0.2 wheel.
- The Pallas kernel of `attention`: it agreed with the plain body in JAX's interpreter (jax 0.7.1; documents, cap, with
  and without a causal mask; forward and gradients), and what it is given was tested with plain PyTorch in its place.
  The call between the two, through torch_xla, was not.
- More than one real device: collectives were counted on virtual ones. Reduce-scatter, overlap and their time were not.
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
        tags=", ".join(f"`{tag}`" for tag in bodies.TAGS), precision=precision(),
    )  # fmt: skip


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
                cell += f": {', '.join(PREFERENCE[target])}"
            if key == "attention" and target == "tpu":
                ways = (f"{', '.join(PREFERENCE[kind])} ({package})" for kind, package in XLA_DEVICES.items())
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


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
