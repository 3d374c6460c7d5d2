"""Cases of the ops around a mixer's scan: the convolution before it, the gated norm behind it."""

from __future__ import annotations

import itertools

import torch

from .agreement import reference_of
from .cases import case, each_case


def _convolution(rand, dtype, batch=2, steps=9, channels=24, taps=4, bias=True, activation="silu", part=None, wide=False):
    """x may be some channels of a wider buffer, `part` before them; with `wide` the weights are float32 or better."""
    x = rand(batch, steps, channels, dtype=dtype)
    if part is not None:
        x = rand(batch, steps, part + channels + 8, dtype=dtype)[..., part : part + channels]
    dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    return x, rand(channels, taps, dtype=dtype), rand(channels, dtype=dtype) if bias else None, activation


CONVOLUTIONS = {**{f"taps_{k}": {"taps": k} for k in (1, 2, 3, 5)},
                **{f"taps_{k}_no_bias": {"taps": k, "bias": False, "activation": ""} for k in (2, 3, 4)},
                "no_activation": {"activation": ""}, "channels_of_a_projection": {"part": 16},
                "channels_out_of_line": {"part": 3, "channels": 21}, "float32_weights": {"wide": True},
                "one_step": {"steps": 1}, "fewer_steps_than_taps": {"steps": 2},
                "two_segments": {"batch": 1, "steps": 131, "channels": 5},
                "many_channels": {"batch": 1, "steps": 3, "channels": 300}, "one_channel": {"channels": 1},
                "no_batch": {"batch": 0}}


@each_case("causal_conv1d", CONVOLUTIONS)
def forward(rand, dtype, **options):
    return *_convolution(rand, dtype, **options), dtype


@each_case("causal_conv1d_backward", CONVOLUTIONS)
def backward(rand, dtype, **options):
    x, *others = _convolution(rand, dtype, **options)
    return rand(*x.shape, dtype=dtype), x, *others


def _time_adjacent(rand, dtype):
    _, *others = _convolution(rand, dtype)
    return rand(2, 24, 9, dtype=dtype).transpose(1, 2), *others


@case("causal_conv1d", "time_adjacent")
def _(rand, dtype):
    return *_time_adjacent(rand, dtype), dtype


@case("causal_conv1d", "higher_out_dtype")
def _(rand, dtype):
    return *_convolution(rand, dtype), torch.promote_types(dtype, torch.float32)


@case("causal_conv1d_backward", "time_adjacent")
def _(rand, dtype):
    return rand(2, 9, 24, dtype=dtype), *_time_adjacent(rand, dtype)


@case("causal_conv1d_backward", "gradient_of_a_sum")
def _(rand, dtype):
    return rand(1, 1, 1, dtype=dtype).expand(2, 9, 24), *_convolution(rand, dtype)


@case("causal_conv1d_backward", "gradient_out_of_line")
def _(rand, dtype):
    return rand(2, 9, 29, dtype=dtype)[..., 5:], *_convolution(rand, dtype)


DOCUMENTS = {"documents": {}, "documents_two_taps": {"taps": 2},
             "documents_three_taps_no_bias": {"taps": 3, "bias": False}, "documents_no_activation": {"activation": ""},
             "documents_five_taps": {"taps": 5},
             "documents_over_two_segments": {"batch": 1, "steps": 133, "channels": 5},
             "documents_in_a_projection": {"part": 16, "wide": True}}


def _documents(x):
    """Documents of one to five steps, others in each row of the batch, and a last one that comes back: what counts is
    which document a step is of, not where it begins."""
    rows, steps = x.shape[:2]
    at = torch.arange(steps) + torch.arange(rows)[:, None]
    found = ((at % 5 == 0) | (at % 3 == 1)).cumsum(-1).to(torch.int32)
    found[:, -1] = found[:, 0]
    return found


@each_case("causal_conv1d", DOCUMENTS)
def forward_of_documents(rand, dtype, **options):
    made = forward(rand, dtype, **options)
    return *made, _documents(made[0])


@each_case("causal_conv1d_backward", DOCUMENTS)
def backward_of_documents(rand, dtype, **options):
    made = backward(rand, dtype, **options)
    return *made, _documents(made[1])


def _gated(rand, dtype, outer=(2, 5), channels=24, group=24, weight=True, part=None, wide=False):
    y, z = rand(*outer, channels, dtype=torch.promote_types(dtype, torch.float32) if wide else dtype), None
    if part is None:
        z = rand(*outer, channels, dtype=dtype)
    else:
        z = rand(*outer, part + channels + 8, dtype=dtype)[..., part : part + channels]
    return y, z, 1 + rand(channels, dtype=dtype) / 4 if weight else None, 1e-3, group


NORMS = {"one_group": {}, "groups": {"group": 8}, "odd_groups": {"channels": 39, "group": 13},
         "groups_of_one": {"channels": 5, "group": 1}, "no_weight": {"weight": False},
         "gate_in_a_projection": {"part": 16}, "float32_from_the_scan": {"wide": True, "group": 8},
         "flat": {"outer": (17,)}, "one_row": {"outer": ()},
         "many_rows": {"outer": (3, 5, 3), "channels": 3, "group": 3},
         "wide": {"outer": (3,), "channels": 1100, "group": 1100}, "no_rows": {"outer": (0, 3)}}
FORMS = {}
SIGMOIDS = ("groups", "float32_from_the_scan")
for label, first, act in (*itertools.product(NORMS, (False, True), ("silu",)),
                          *itertools.product(SIGMOIDS, (False, True), ("sigmoid",))):  # fmt: skip
    name = label + "_norm_first" * first + "_sigmoid" * (act == "sigmoid")
    FORMS[name] = {**NORMS[label], "first": first, "act": act}


@each_case("gated_rms_norm", FORMS)
def norm(rand, dtype, first, act, **options):
    return *_gated(rand, dtype, **options), first, dtype, act


@each_case("gated_rms_norm_backward", FORMS)
def norm_backward(rand, dtype, first, act, **options):
    y, z, weight, eps, group = _gated(rand, dtype, **options)
    _, rrms = reference_of("gated_rms_norm")(y, z, weight, eps, group, first, dtype, act)
    return rand(*y.shape, dtype=dtype), y, z, weight, rrms, group, first, act


@case("gated_rms_norm_backward", "gradient_of_a_sum")
def _(rand, dtype):
    y, z, weight, eps, group = _gated(rand, dtype)
    _, rrms = reference_of("gated_rms_norm")(y, z, weight, eps, group, False, dtype)
    return rand(1, dtype=dtype).expand(y.shape), y, z, weight, rrms, group, False
