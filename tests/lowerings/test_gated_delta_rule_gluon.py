"""`gated_delta_rule`'s kernels in Gluon: that they compile for Hopper, whom they serve, and on a GPU their numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from .agreement import DoesNotCompile, faults, on, poisoned_memory, reference_of
from .delta_cases import final_gradient, rule
from .gluon_kernels import HALF, LEAST_CHUNKS, ON_HOPPER, assemble, hopper, needs_triton, on_hopper, replays, tile, told

SIZES = {"C": 64, "K": 128, "V": 128}
KERNELS = {"walk": {**SIZES, "BV": 64, "EVERY": 8, "FIRST": 0, "A_STAGES": 3, "B_STAGES": 2, "OUTPUT_REGISTERS": 112,
                    "COPY_REGISTERS": 40}, "walk_from_a_state": {},
           "reverse_walk": {**SIZES, "BV": 64, "CHANNELS": 0, "LAST": 0, "STAGES": 3, "COPY_REGISTERS": 40},
           "reverse_walk_channels": {**SIZES, "BV": 64, "CHANNELS": 1, "LAST": 1, "STAGES": 2, "COPY_REGISTERS": 40},
           "states": {**SIZES, "BV": 64, "EVERY": 8, "STAGES": 2}, "query_grad": {**SIZES, "HB": 2, "NORM": 1},
           "query_grad_bare": {**SIZES, "HB": 1, "NORM": 0},
           "key_grad": {**SIZES, "HB": 2, "GATED": 1, "BETA": 1, "NORM": 1},
           "key_grad_bare": {**SIZES, "HB": 1, "GATED": 0, "BETA": 0, "NORM": 0},
           "small_decay_chunks": {"C": 64, "K": 128, "GATE": "float32", "NORM": 1},
           "small_decay_chunks_bare": {"C": 64, "K": 128, "GATE": "bfloat16", "NORM": 0},
           "channel_grads": {**SIZES, "GATE": "float32", "WHOLE": 1, "BETA": 1, "NORM": 1},
           "channel_grads_bare": {**SIZES, "GATE": "bfloat16", "WHOLE": 0, "BETA": 0, "NORM": 0}}  # fmt: skip
KERNELS["walk_from_a_state"] = KERNELS["walk"] | {"FIRST": 1}
TILES = {"q": (1, 64, 128), "k": (1, 64, 128), "do": (1, 64, 128), "dq": (1, 64, 128), "dk": (1, 64, 128),
         "dv": (1, 64, 128), "errors": (64, 128), "d_rows": (64, 128), "states": (128, 128), "d_states": (128, 128),
         "d_scores": (64, 64), **dict.fromkeys(("queries", "keys", "out_keys"), (1, 64, 128))}  # fmt: skip
# By 64 of V's channels, where the state is in registers.
NARROW_TILES = TILES | dict.fromkeys(("v", "inverse", "mixed", "o"), (1, 64, 64)) | {
    **dict.fromkeys(("solve", "scores_t", "errors", "d_rows"), (64, 64)), "do": (1, 64, 64),
    **dict.fromkeys(("states", "d_states"), (128, 64))}  # fmt: skip
LAUNCH = {"channel_grads": {"num_warps": 8}}
FLOATS = ("decay", "steps", "norms", "d_decay", "dg", "dbeta", "factors", "ends", "dots", "last", "d_initial")


def compiled(label: str) -> Any:
    from megacpp_compile.lowerings._kernels.gluon_launch import numbers

    gluon = hopper("gated_delta_rule")
    which = re.match("walk|reverse_walk|states|query_grad|key_grad|channel_grads|small_decay_chunks", label)[0]
    kernel = getattr(gluon, "delta_small_decay_chunks_hopper" if which == "small_decay_chunks" else f"delta_{which}")
    constants = dict(KERNELS[label])
    types = {"scale": "fp32", "eps": "fp32", "small_decay": "*i32", "d_between": "*bf16"} | dict.fromkeys(FLOATS, "*fp32")
    tiles = NARROW_TILES if which in ("walk", "reverse_walk", "states") else TILES
    types |= {name: tile(shape) for name, shape in tiles.items()}
    if which == "walk":
        types |= dict.fromkeys(("first_state", "states", "last"), tile((128, 64), torch.float32))
    elif which == "states":
        types["kept"] = tile((128, 64), torch.float32)
    if which in ("channel_grads", "small_decay_chunks"):
        dtype = getattr(torch, constants["GATE"])
        constants["GATE"] = numbers(dtype)
        types |= dict.fromkeys(("g", "dg"), tile((1, 64, 128), dtype))
        if not constants.get("WHOLE", 1):
            types |= dict.fromkeys(("dq", "dk"), "*fp32")
    return assemble(kernel, types, constants, **LAUNCH.get(which, {}))


@pytest.mark.end_to_end
@pytest.mark.rare("walk_from_a_state", "reverse_walk_channels", "query_grad_bare", "key_grad", "small_decay_chunks_bare",
                  "channel_grads_bare")
@needs_triton
@pytest.mark.parametrize("case", KERNELS)
def test_compiles_for_hopper(case):
    made = compiled(case)
    text, shared = made.asm["ptx"], made.metadata.shared
    assert shared <= (227 * 1024 if re.search("walk|channel", case) else HALF)
    # All tiles of operands come by TMA, and GEMMs read them where they are.
    assert "cp.async.bulk.tensor.3d.shared" in text and "wgmma.mma_async" in text and "ld.global.v4" not in text


class Call:
    """Of 128 chunks of 32 value heads, which Gluon takes."""

    batch, chunks, heads, key_heads, K, V = 1, 128, 32, 16, 128, 128
    wide = per_channel = False
    g = v = torch.empty(0, device="meta")


@needs_triton
@pytest.mark.parametrize("change, served",
                         [({}, True), ({"key_heads": 8}, True), ({"key_heads": 4}, False), ({"K": 64}, False),
                          ({"V": 256}, False), ({"wide": True}, False), ({"per_channel": True}, False),
                          ({"chunks": 127}, False), ({"chunks": 64, "batch": 2}, True), ({"chunk": 32}, False),
                          ({"packed": True}, False), ({"hopper": False}, False), ({"missing": "a name"}, False),
                          ({"channels": True}, False), ({"channels": True, "per_channel": True}, True),
                          ({"channels": True, "per_channel": True, "key_heads": 4}, True)])  # fmt: skip
def test_whom_it_serves(monkeypatch, change, served):
    gluon = hopper("gated_delta_rule")
    call, given = Call(), {"chunk": 64, "packed": False, "channels": False, "hopper": True, "missing": "", **change}
    for name in change.keys() & vars(Call).keys():
        setattr(call, name, change[name])
    monkeypatch.setattr(ON_HOPPER, lambda device: given["hopper"])
    monkeypatch.setattr(gluon.kernels, "missing", given["missing"])
    assert gluon.serve(call, given["chunk"], given["packed"], per_channel=given["channels"]) is served


@needs_triton
@pytest.mark.parametrize("op", ["walk", "small_decay_chunks", "backward", "backward_channels"])
def test_what_does_not_compile_is_served_otherwise(monkeypatch, caplog, op):
    from megacpp_compile.lowerings.gated_delta_rule import _after_prepare, _small_decay_chunks, _walks

    gluon, ops = hopper("gated_delta_rule"), torch.ops.megacpp_delta
    monkeypatch.setattr(gluon.kernels, "missing", "")
    for kernel in ("delta_walk", "delta_reverse_walk", "delta_small_decay_chunks_hopper"):
        monkeypatch.setattr(gluon, kernel, DoesNotCompile())
    asked = []
    module, name = {"walk": (_walks, "_in_triton"), "backward": (_after_prepare, "_heads_in_triton"),
                    "backward_channels": (_after_prepare, "_channels_in_triton"),
                    "small_decay_chunks": (_small_decay_chunks, "_in_triton")}[op]  # fmt: skip
    monkeypatch.setattr(module, name, lambda *args: asked.append(args) or promised)
    q, k, v = (torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16) for _ in range(3))
    square, kept, rows = torch.zeros(1, 64, 1, 64, dtype=q.dtype), torch.zeros(1, 1, 1, 128, 128), torch.zeros(1, 1, 1, 64)
    if op == "walk":
        args = q, k, v, square, square, torch.zeros(5, 1, 1, 64), None, 0.1
        promised = _walks.promised(q, k, v)
    elif op == "small_decay_chunks":
        args, promised = (q, k, q.float(), None), _small_decay_chunks.promised(q)
    elif op == "backward":
        args = v, None, q, k, v, None, None, kept, square, rows, rows, torch.zeros(1, 1, 1, 2, 64), square, square, 0.1, None
        promised = _after_prepare.fake_outputs((v, q, k, v, None, None), 0.1, None)
    else:
        small_decay, ends, g = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 3, 128), q.float()
        args = v, None, q, k, v, g, None, kept, square, q, k, k, small_decay, ends, rows, square, square, 0.1, None
        promised = _after_prepare.channels_promised((v, q, k, v, g, None), 0.1, None)
    for _ in range(2):
        got = getattr(ops, op)(*args)
    assert [t.shape for t in got] == [t.shape for t in promised]
    assert len(asked) == 2 and caplog.text.count("no attribute 'barrier'") == 1 and "Triton's own" in caplog.text


@pytest.mark.end_to_end
def test_ops_are_there_with_the_rule():
    """A graph from a cache calls them in a process that has lowered nothing."""
    code = """
import sys, torch, megacpp_compile.lowerings.gated_delta_rule
assert not [name for name in sys.modules if name.startswith("megacpp_compile") and name.endswith("cuda_triton")]
print(*[getattr(torch.ops.megacpp_delta, op).default for op in sys.argv[1:]])
"""
    ops = "walk", "small_decay_chunks", "backward", "backward_channels"
    out = subprocess.run([sys.executable, "-c", code, *ops], capture_output=True, text=True)
    assert out.stdout.split() == [f"megacpp_delta.{op}.default" for op in ops], out


NUMBERS = {"as_in_a_model": {}, "ragged": {"t": 200, "b": 2}, "one_head_a_key": {"hk": 4},
           "four_heads_a_key": {"hk": 1}, "no_gate": {"gate": "none"},
           "bare": {"gate": "none", "beta": False, "initial": False}, "keys_as_they_are": {"eps": None},
           "no_state": {"initial": False}, "strong_gates": {"decay": "strong", "t": 640},
           "sudden_gates": {"decay": "sudden"}, "many_segments": {"t": 1100}, "rows_side_by_side": {},
           "heads_before_tokens": {"b": 2}}
CHANNELS = {"channels": {"hk": 4}, "channels_ragged": {"hk": 4, "t": 200, "b": 2},
            "channels_two_heads_a_key_ragged": {"t": 200, "b": 2}, "channels_gates_in_16_bits": {"hk": 4, "t": 200},
            "channels_two_heads_a_key": {}, "channels_bare": {"hk": 4, "beta": False, "initial": False},
            "channels_keys_as_they_are": {"eps": None}, "channels_all_large_decay": {"hk": 4, "decay": "strong", "t": 640},
            "channels_of_both_kinds": {"hk": 4, "t": 320}}
NUMBERS |= {label: {"gate": "channel", **options} for label, options in CHANNELS.items()}
# q, k and v are slices of rows that begin at odd multiples of 8 numbers, which are copied; these are not.
ROWS = {"rows_side_by_side": True, "heads_before_tokens": False}


@on_hopper
@pytest.mark.parametrize("label", NUMBERS)
def test_numbers(rand, monkeypatch, label):
    from megacpp_compile.lowerings.gated_delta_rule import cuda_triton

    gluon = hopper("gated_delta_rule")
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    launched = []
    of_heads = ["delta_walk", "delta_reverse_walk", "delta_states", "delta_query_grad", "delta_key_grad"]
    small_decay = "delta_small_decay_chunks_hopper"
    of_channels = [small_decay, small_decay, "delta_reverse_walk", "delta_channel_grads"]
    for kernel in {*of_heads, *of_channels}:
        monkeypatch.setattr(gluon, kernel, told(getattr(gluon, kernel), launched))
    options = {"b": 1, "t": 256, "hk": 2, "hv": 4, "k": 128, "v": 128, **NUMBERS[label]}
    *given, scale, eps, chunk, out = rule(rand, torch.bfloat16, chunk=64, **options)
    if label in ROWS:
        given[:3] = (t.contiguous() if ROWS[label] else transposed(t) for t in given[:3])
    if label == "channels_gates_in_16_bits":
        given[3] = given[3].bfloat16()
    if label == "channels_of_both_kinds":
        given[3][:, 64:128] *= 40
    if given[4] is not None:
        given[4] = given[4].clone()
        given[4][:, 5::7] = 0
    given = on("cuda", given)
    with poisoned_memory():
        o, final, states, inverse = cuda_triton.gated_delta_rule(*given, scale, eps, chunk, out)
    exact = on("cuda", given, torch.float64)
    want = reference_of("gated_delta_rule")(*exact, scale, eps, chunk, torch.float64)
    eps_16 = torch.finfo(torch.bfloat16).eps
    assert not faults((o, final, states), want[:3], 2 * eps_16)
    (do,) = on("cuda", (rand(*o.shape, dtype=out),))
    dfinal = final_gradient(rand, final.cpu(), options)
    dfinal = dfinal if dfinal is None else dfinal.cuda()
    with poisoned_memory():
        got = cuda_triton.gated_delta_rule_backward(do, dfinal, *given, states, inverse, scale, eps, chunk)
    want = reference_of("gated_delta_rule_backward")(
        do.double(), None if dfinal is None else dfinal.double(), *exact, *want[2:], scale, eps, chunk
    )
    assert not faults(got, want, 3 * eps_16)
    assert launched == (of_channels if label in CHANNELS else of_heads)


@on_hopper
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_in_a_cuda_graph(rand, monkeypatch, gate):
    from megacpp_compile.lowerings.gated_delta_rule import cuda_triton

    hopper("gated_delta_rule")
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    options = {"b": 2, "t": 2048, "hk": 4, "hv": 4, "k": 128, "v": 128, "gate": gate}
    *given, scale, eps, chunk, out = rule(rand, torch.bfloat16, chunk=64, **options)
    given = on("cuda", given)

    def made():
        o, last, states, inverse = cuda_triton.gated_delta_rule(*given, scale, eps, chunk, out)
        args = o, last, *given, states, inverse, scale, eps, chunk
        return [o, last, *cuda_triton.gated_delta_rule_backward(*args)]

    replays(made)


def transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)
