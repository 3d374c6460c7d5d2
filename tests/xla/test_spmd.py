"""A sharding plan on four virtual devices: the numbers of one device, every pinned parameter's spec in what XLA is given,
and the collectives that were planned in what it makes of it, no more and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from megacpp_compile import ShardingPlan, sharding
from megacpp_compile.errors import ShardingError

HERE = Path(__file__).parent
TOLERANCE = 1e-5
WEIGHTS = {"q_a": (20, 40), "q_b": (96, 20), "kv_a": (32, 40), "kv_b": (112, 24), "o": (40, 48)}
NORMS = {"q_norm": (20,), "kv_norm": (24,)}
ROWS, COLUMNS, WHOLE = "{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}", "{replicated}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[dict, list[str], list[str]]]:
    """By plan, what the program says, and the HLO of its programs with a product, before and after XLA's optimisations.
    Both in one process: to import torch_xla takes longer than either. The first has two programs, forward and backward."""
    found, given, made = run(["data", "tensor"], tmp_path_factory.mktemp("programs"))
    return {"data": (found["data"], given[:2], made[:2]), "tensor": (found["tensor"], given[2:], made[2:])}


def run(names: list[str], folder: Path) -> tuple[dict, list[str], list[str]]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
    path = os.pathsep.join((str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": flags, "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "spmd_program.py"), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    given = [p.read_text() for p in sorted(folder.glob("*before_optimizations.txt"))]
    made = [p.read_text() for p in sorted(folder.glob("*after_optimizations.txt"))]
    wanted = [i for i, text in enumerate(given) if " dot(" in text]
    return json.loads(done.stdout.splitlines()[-1]), [given[i] for i in wanted], [made[i] for i in wanted]


def collectives(program: str) -> Counter[tuple[str, str]]:
    """(kind, shape of the result) of every collective."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\S+?)(?:{{\S*}})? ({kinds})(?:-start)?\(", program)
    return Counter((kind, shape) for shape, kind in found)


def hlo(shape: tuple[int, ...]) -> str:
    return f"f32[{','.join(map(str, shape))}]"


def check(block: dict, given: list[str], specs: dict[str, str]) -> None:
    assert block["sites"] == 4
    assert max(block["differences"].values()) < TOLERANCE, block["differences"]
    first, *later = block["compiled"]
    assert first > 0 and not any(later[1:]), "a step compiles anew"
    assert block["specs"] == {f"{name}.weight": spec for name, spec in specs.items()}
    for name, shape in (WEIGHTS | NORMS).items():  # all shapes differ
        holders = re.findall(rf"{re.escape(hlo(shape))}\S* parameter\(\d+\), sharding=({{\S*}})", given[0])
        assert holders == [specs[name]], (name, holders)
    pinned = {row["fqn"]: row for row in block["pinned"]}
    assert set(pinned) == {f"{name}.weight" for name in WEIGHTS | NORMS}
    assert {row["by"] for name, row in pinned.items() if name != "o.weight"} == {"down_norm_up"}
    assert all(name in block["report"] for name in pinned)


def test_tensor_parallel(runs):
    """The output projection adds up what the devices' heads contribute. Backward adds up the gradients of what all heads
    read: two latents and the rotated row. What no rule means is pinned whole."""
    found, given, made = runs["tensor"]
    specs = {**dict.fromkeys(WEIGHTS | NORMS, WHOLE), "q_b": ROWS, "kv_b": ROWS, "o": COLUMNS}
    check(found["block"], given, {name: specs[name] for name in ("q_a", "q_norm", "q_b", "kv_a", "kv_norm", "kv_b", "o")})
    forward, backward, *_ = map(collectives, made)
    assert forward == {("all-reduce", "f32[32,40]"): 1}
    assert backward == {
        ("all-reduce", "f32[32,20]"): 1, ("all-reduce", "f32[32,24]"): 1, ("all-reduce", "f32[4,8,8]"): 1,
    }  # fmt: skip
    assert "sharding over model 4" in found["block"]["report"] and "*.o.weight" in found["block"]["report"]

    # One artifact serves equal blocks; a frame with and one without a gradient for its input.
    blocks = found["blocks"]
    assert max(blocks["differences"].values()) < TOLERANCE and blocks["frames"] == 2
    assert blocks["specs"] == {
        f"{i}.{name}.weight": ROWS if name == "up" else WHOLE for i in range(4) for name in ("down", "norm", "up")
    }
    assert "{0..3}.up.weight" in blocks["report"]

    native = found["native"]
    assert native["specs"] == {
        "fc1.layer_norm_weight": WHOLE, "fc1.weight": ROWS, "fc1.bias": WHOLE, "fc2.weight": COLUMNS, "fc2.bias": WHOLE,
    }  # fmt: skip
    assert "6 elements, not divisible by the 4 devices of 'model'" in native["refused"]["indivisible"]
    assert "the mesh has 2 devices and the runtime 4" in native["refused"]["too few"]


def test_data_parallel_with_parameters_in_parts(runs):
    """A weight is gathered once for forward and once for backward, and its gradient added up once (a reduce-scatter where
    XLA's backend has one; the CPU's adds up and cuts). No activation travels."""
    found, given, made = runs["data"]
    order = ("q_a", "q_norm", "q_b", "kv_a", "kv_norm", "kv_b", "o")
    check(found["block"], given, {name: ROWS if name in WEIGHTS else WHOLE for name in order})
    forward, backward = map(collectives, made)
    gathers = Counter(("all-gather", hlo(shape)) for shape in WEIGHTS.values())
    assert forward == gathers
    assert backward == gathers + Counter(("all-reduce", hlo(shape)) for shape in (WEIGHTS | NORMS).values())


def test_without_spmd_mode_it_says_so(xla):
    with pytest.raises(ShardingError, match="use_spmd"):
        sharding.pin(ShardingPlan(mesh={"model": 1}), torch.zeros(2, 2, device=xla), None, "w")
