"""The corpus is right in itself: everything runs and trains in eager, and every spelling computes what it claims."""

from __future__ import annotations

import inspect

import pytest
import torch

from . import allowed_counts, jitter_gains
from .gallery import GALLERY
from .near_misses import NEAR_MISSES
from .spellings import ATTENTIONS, CONCATS, NORMS, ROPES, SPLITS, PlainGQA, PlainMLA, angles, tables

LAYOUTS = {"bhsd": 1, "bshd": 2}
TINY_GRADIENT = 1e-12

# one axis at a time beside the default, then a few blocks with everything changed at once
MLA_OPTIONS = [
    *({"rope_spelling": name, "layout": layout} for name in ROPES for layout in LAYOUTS),
    *({"norm": name} for name in NORMS),
    *({"concat": name, "layout": layout} for name in CONCATS for layout in LAYOUTS),
    *({"split": name} for name in SPLITS),
    *({"down": name} for name in ("separate", "merged_rope_first")),
    *({"up": "two_linears", "norm_to_up": view} for view in ("direct", "four_dim", "flattened")),
    *({"up": "split_over_heads", "norm_to_up": view} for view in ("direct", "four_dim", "flattened")),
    *({"attention": name, "layout": layout} for name in ATTENTIONS for layout in LAYOUTS),
    *({"norm_to_up": name} for name in ("four_dim", "flattened")),
    *({"table_source": source, "rope_spelling": name} for source in ("buffer", "computed") for name in ROPES),
    {"q_lora": None},
    {
        "q_lora": None, "norm": "divide_by_sqrt", "rope_spelling": "even_odd_written_into_empty", "layout": "bshd",
        "concat": "assign_into_zeros", "split": "narrow", "down": "merged_rope_first", "up": "split_over_heads",
        "attention": "einsum", "norm_to_up": "flattened", "table_source": "computed",
    },
]  # fmt: skip
GQA_OPTIONS = [
    *({"rope_spelling": name, "layout": layout} for name in ROPES for layout in LAYOUTS),
    *({"projections": "fused", "qk_norm": norm} for norm in (None, "cast_before_gain", "nn_rms_norm")),
    *({"attention": name} for name in ATTENTIONS),
    *({"table_source": source} for source in ("buffer", "computed")),
]


def first_result(module, args):
    """The first output, and the gradient of its square sum for every parameter and argument that has one."""
    torch.manual_seed(3)  # a near miss has dropout
    out = module(*args)
    out = out[0] if isinstance(out, tuple) else out
    out.float().square().sum().backward()
    leaves = {f"argument {i}": t for i, t in enumerate(args)} | dict(module.named_parameters())
    return out.detach(), {name: t.grad.clone() for name, t in leaves.items() if t.grad is not None}


def assert_trains(module, args):
    """Finite results and gradients, and gradients that are not all zero."""
    out, grads = first_result(module, args)
    assert out.isfinite().all()
    assert len(grads) > 1
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        assert grad.abs().max() > TINY_GRADIENT, name
    return out, grads


def show(options):
    return "-".join(str(value) for value in options.values()) or "default"


@pytest.mark.parametrize("options", MLA_OPTIONS, ids=show)
def test_plain_mla_trains(options):
    module = PlainMLA(**options)
    _, grads = assert_trains(module, module.example_inputs())
    assert len(grads) == 1 + len(list(module.parameters())), "a parameter has no part in the result"
    assert set(PlainMLA.expected(**options)) == {"down_norm_up", "mla_rope_q", "mla_rope_kv"}


@pytest.mark.parametrize("options", GQA_OPTIONS, ids=show)
def test_plain_gqa_trains(options):
    module = PlainGQA(**options)
    _, grads = assert_trains(module, module.example_inputs())
    assert len(grads) == 1 + len(list(module.parameters())), "a parameter has no part in the result"


@pytest.mark.parametrize("name", ROPES)
def test_blocks_keep_bfloat16(name):
    for layout in LAYOUTS:
        module = PlainMLA(rope_spelling=name, layout=layout).bfloat16()
        assert_trains(module, module.example_inputs(dtype=torch.bfloat16))
        assert module(*module.example_inputs(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_block_choices_leave_the_function_alone():
    """Concat, split, layout, attention and table source are spellings: one result."""
    plain = PlainMLA()
    want = plain(*plain.example_inputs())
    for options in MLA_OPTIONS:
        if set(options) <= {"concat", "split", "layout", "attention", "norm_to_up", "table_source"}:
            other = PlainMLA(**options)
            other.load_state_dict(plain.state_dict())
            torch.testing.assert_close(other(*other.example_inputs()), want, rtol=1e-5, atol=1e-5, msg=str(options))


def test_default_sizes_differ():
    sizes = {name: p.default for name, p in inspect.signature(PlainMLA).parameters.items() if type(p.default) is int}
    heads, nope, rope, v = (sizes[n] for n in ("heads", "nope", "rope", "v"))
    derived = [
        nope + rope,
        nope + v,
        sizes["kv_lora"] + rope,
        heads * (nope + rope),
        heads * (nope + v),
        heads * v,
        heads * nope,
    ]
    every = [*sizes.values(), *derived, rope // 2, 2, 5]
    assert len(set(every)) == len(every)


def reference_rope(x, spelling, seq_dim):
    """RoPE by its definition, one lane pair at a time."""
    dim, seq = x.size(-1), x.size(seq_dim)
    theta = angles(seq, dim, torch.float64)
    lanes = []
    for i in range(dim // 2):
        first, second = (i, i + dim // 2) if spelling.pairs == "halves" else (2 * i, 2 * i + 1)
        shape = [1, 1, 1]
        shape[seq_dim] = seq
        cos, sin = theta[:, i].cos().view(shape), theta[:, i].sin().view(shape)
        a, b = x[..., first], x[..., second]
        lanes.append((a * cos - b * sin, a * sin + b * cos))
    if spelling.output == "halves":
        return torch.stack([a for a, _ in lanes] + [b for _, b in lanes], dim=-1)
    return torch.stack([t for pair in lanes for t in pair], dim=-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [3, 1])
@pytest.mark.parametrize("name", ROPES)
def test_rope_is_a_rotation_by_position(name, heads, layout):
    spelling, heads_dim = ROPES[name], LAYOUTS[layout]
    x = torch.randn(2, 5, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.transpose(1, 2) if heads_dim == 1 else x
    want = reference_rope(x, spelling, 3 - heads_dim)
    # as in a block: the rope slice of a wider tensor
    wide = torch.cat((torch.zeros_like(x), x), dim=-1).float().requires_grad_()
    got = spelling.rotate(wide[..., 8:], tables(spelling.table, 5, 8), heads_dim)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    low = spelling.rotate(
        x.bfloat16(),
        tables(spelling.table, 5, 8, torch.float32 if spelling.restores_dtype else torch.bfloat16),
        heads_dim,
    )
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", NORMS)
def test_norm_is_rms_norm(name):
    eps = 0.05
    norm = jitter_gains(NORMS[name](26, eps=eps))
    x = torch.randn(2, 5, 34, generator=torch.Generator().manual_seed(0))[..., :26]
    gain = norm.weight.detach().double() + (1.0 if name == "one_plus_gain" else 0.0)
    assert (gain - 1).abs().max() > 0.1
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain
    torch.testing.assert_close(norm(x).double(), want, rtol=2e-6, atol=2e-6)
    low = norm.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", CONCATS)
def test_concat_is_cat(name):
    for heads_dim in (1, 2):
        shape = [2, 5, 5, 16]
        shape[heads_dim] = 3
        one_head = [*shape[:3], 8]
        one_head[heads_dim] = 1
        nope, pe, shared = torch.randn(shape), torch.randn(*shape[:3], 8), torch.randn(one_head)
        assert torch.equal(CONCATS[name].query(nope, pe), torch.cat((nope, pe), -1))
        assert torch.equal(CONCATS[name].key(nope, shared, heads_dim), torch.cat((nope, shared.expand_as(pe)), -1))


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda n: n.name)
def test_near_miss(near_miss):
    module, args = near_miss.build()
    out, grads = assert_trains(module, args)
    if near_miss.control is None:
        return
    control, control_args = near_miss.control()
    control.load_state_dict(module.state_dict())
    control_out, control_grads = assert_trains(control, control_args)
    for ours, theirs in zip(args, control_args, strict=True):
        assert torch.equal(ours, theirs)
    if near_miss.differs:
        differences = [relative_difference(out, control_out)]
        differences += [relative_difference(grads[n], control_grads[n]) for n in grads.keys() & control_grads.keys()]
        assert max(differences) > 1e-4


def relative_difference(a, b):
    """Largest deviation by the largest value; unequal shapes are as unequal as can be."""
    return float((a - b).abs().max() / b.abs().max()) if a.shape == b.shape else float("inf")


@pytest.mark.parametrize("name", GALLERY)
def test_gallery_trains(name):
    entry = GALLERY[name]
    module, args = entry.build()
    out, _ = assert_trains(module, args)
    again, args_again = entry.build()
    assert torch.equal(again(*args_again).detach(), out), "build() gives another model at every call"
    assert all(len(allowed_counts(count)) for count in entry.expected.values())


def test_names_are_unique():
    names = [n.name for n in NEAR_MISSES]
    assert len(names) == len(set(names))


def test_allowed_counts():
    assert [list(allowed_counts(e)) for e in (0, 2, "2?", "1..2")] == [[0], [2], [0, 1, 2], [1, 2]]
