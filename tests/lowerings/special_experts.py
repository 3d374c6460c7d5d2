"""Experts and the loss over words, in `special_values.ENTRIES`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .cases import CASES
from .loss_cases import IGNORED
from .special_values import ENTRIES, Args, Entry, filled, of_case, replaced
from .test_linear_cross_entropy import formula
from .test_moe import loop


def experts(x, indices, gates, w_gate, w_up, w_down, activation, layout, out_dtype, keep_hidden=True, precision="",
            b_gate=None, b_up=None, b_down=None):  # fmt: skip
    """One expert after the other, added up in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    biases = b_gate, b_up, b_down
    return [loop(x, indices, gates, w_gate, w_up, w_down, activation, layout, wide, True, "", *biases).to(out_dtype)]


def nowhere(args: Args, bad: float) -> Args:
    """The gates of choices of no expert, and a token all of whose choices are such."""
    x, indices, gates = args[:3]
    indices = filled(indices, 3, -1)
    indices = filled(indices, (4, 0), -1)
    return replaced(args, _0=filled(x, 3, bad), _1=indices, _2=filled(gates, indices < 0, bad))


def weightless(args: Args, bad: float) -> Args:
    """A token whose gates are zero; and of another one choice's is."""
    gates = filled(filled(args[2], 5, 0.0), (6, 0), 0.0)
    return replaced(args, _0=filled(args[0], 5, bad), _2=gates)


def of_one(weights: list[Tensor], bad: float) -> list[Tensor]:
    """Weights, of which those of expert 1 are `bad`."""
    if weights and weights[0].dim() == 3:
        return [filled(w, 1, bad) for w in weights]
    return [filled(w, ..., bad) if e == 1 else w for e, w in enumerate(weights)]


def unchosen(args: Args, bad: float) -> Args:
    """An expert that no token chose, its weights and biases."""
    x, indices, gates, *weights = args[:6]
    biases = [None if b is None else filled(b, 1, bad) for b in args[11:14]]
    indices = torch.where(indices == 1, 2, indices)
    return (x, indices, gates, *(of_one(ws, bad) for ws in weights), *args[6:11], *biases)


ENTRIES["moe"] = Entry(
    experts, (0, 2, 3, 4, 5, 11, 12, 13), "biases",
    left_out={"no expert": nowhere, "an unchosen expert": unchosen, "zero gates": weightless},
    empty={
        "no token": of_case("moe", "biases_of_no_token")["biases_of_no_token"],
        "no choice is an expert": lambda rand: replaced(
            a := CASES["moe"]["biases"](rand, torch.float32), _1=torch.full_like(a[1], -1)
        ),
        "one expert for all": lambda rand: replaced(
            a := CASES["moe"]["biases"](rand, torch.float32), _1=torch.full_like(a[1], 4)
        ),
    },
    token={0: 0, 2: 0},
    # A gate scales what an expert's output is multiplied by: without it that is beyond the range of float16.
    large=lambda args: replaced(
        args, _2=args[2] * 2**-9, _5=[w * 2**7 for w in args[5]], _13=args[13] * 2**7
    ),
)  # fmt: skip


ENTRIES["moe float8"] = dataclasses.replace(
    ENTRIES["moe"], prepare=lambda args: replaced(args, _10="fp8_current"), tolerance=0.12, empty={}
)


for label in ("as_gpt_oss", "bias_of_down", "biases_single", "clamped_swish_stacked", "gelu"):
    ENTRIES[f"moe {label}"] = dataclasses.replace(
        ENTRIES["moe"], case=label, large=None, empty={}, prepare=lambda args: (*args, *("", None, None, None)[len(args) - 10 :])
    )


def sorted_experts(x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden=True, precision="", *biases):
    ends = offsets.tolist()
    rows = torch.arange(x.shape[0], device=x.device)
    indices = torch.searchsorted(offsets.to(rows.dtype), rows, right=True)[:, None]
    x = torch.where((rows < ends[-1])[:, None], x, 0)
    ones = x.new_ones(x.shape[0], 1)
    return experts(x, indices, ones, w_gate, w_up, w_down, activation, layout, x.dtype, keep_hidden, "", *biases)


def padding(args: Args, bad: float) -> Args:
    return replaced(args, _0=filled(args[0], slice(int(args[1][-1]), None), bad))


def without_an_expert(args: Args, bad: float) -> Args:
    """Expert 1 has no rows, and weights that are no numbers."""
    ends = args[1].clone()
    ends[1] = ends[0]
    return (args[0].nan_to_num(1.0), ends, *(of_one(ws, bad) for ws in args[2:5]), *args[5:])


ENTRIES["moe_sorted"] = Entry(
    sorted_experts, (0, 2, 3, 4), "some_of_none", left_out={"padding": padding, "no rows": without_an_expert},
    promised=frozenset({"padding"}), empty=of_case("moe_sorted", "no_token", "biases_of_no_token", "to_one"),
    token={0: 0},
)  # fmt: skip

for label in ("bias_of_down", "as_gpt_oss"):
    ENTRIES[f"moe_sorted {label}"] = dataclasses.replace(ENTRIES["moe_sorted"], case=label, empty={})

# --- loss


def linear_cross_entropy(*args):
    return [formula(*args)[0]]


def ignored_rows(args: Args, bad: float) -> Args:
    """What stands in rows without a label."""
    return replaced(args, _0=filled(args[0], args[3] == IGNORED, bad))


def ignored_logits(args: Args, bad: float) -> Args:
    """Logits of rows without a label, beyond all numbers, and the weights of those rows."""
    out = args[3] == IGNORED
    rows = filled(args[0], out, 0.5 if bad == 0.5 else 3e38)
    return replaced(args, _0=rows, _4=None if args[4] is None else filled(args[4], out, bad))


def large_rows(args: Args) -> Args:
    """All rows with one label, and large in the same channels."""
    return replaced(args, _0=filled(args[0], (slice(None), 2), 3e4), _1=args[1] * 1e-4, _3=torch.full_like(args[3], 5))


for label in ("all", "all_of_each_row", "bias"):
    ENTRIES[f"linear_cross_entropy {label}"] = Entry(
        linear_cross_entropy, (0, 1, 2), label, left_out={"ignored rows": ignored_rows, "ignored logits": ignored_logits},
        promised=frozenset({"ignored logits"}), freed="rows that count for nothing stay zeros, whatever multiplies them",
        empty=of_case("linear_cross_entropy", *[e + label.removeprefix("all").removeprefix("bias")
                                                for e in ("no_token", "all_ignored")]),
        token={0: 0}, rows=(0,), large=large_rows,
    )  # fmt: skip
