"""What reads other tokens of a sequence of which each rank has a part takes the state of the part before; what cannot is an
error, or a warning and a line in the report. What two ranks compute is test_sequences.py."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import megacpp_compile
from megacpp_compile import Config
from megacpp_compile._torch import context_parallel as context_parallel_module
from megacpp_compile._torch.context_parallel import in_force
from megacpp_compile.errors import BadOptionError, OtherPartsError, SequenceShardedError
from megacpp_compile.passes._frame.sequence_shards import TAG
from megacpp_compile.sharding.sequences import parts_in_force, sharded_sequences
from tests.frames import Function, run
from tests.passes import test_attention, test_gated_delta_rule, test_ssd_scan, test_token_loop

DIM, TOKENS = 16, 16


class Convolving(nn.Module):
    """A convolution among other things; `out` is what is made of it, [b, c, t] padded at both ends, and of x."""

    def __init__(self, out, taps=4, padding=None, **how):
        super().__init__()
        self.before, self.out = nn.Linear(DIM, DIM), out
        self.conv = nn.Conv1d(DIM, DIM, taps, padding=taps - 1 if padding is None else padding, **how)

    def forward(self, x):
        h = self.before(x)
        return self.out(self.conv(h.transpose(1, 2)), x) * h.mean()


def causal(h, x):
    return F.silu(h[..., : x.shape[1]]).transpose(1, 2)


def whole(h, x):
    return F.silu(h)


def convolving(*args, **kwargs):
    torch.manual_seed(0)
    return Convolving(*args, **kwargs), (torch.randn(2, TOKENS, DIM),)


def state_of_another_kind():
    """RWKV's numerator and denominator, token by token: known, and no pass's."""

    def mixing(k, v, decay):
        num = den = torch.zeros_like(v[:, 0])
        out = []
        for i in range(4):
            weight = torch.exp(k[:, i])
            num, den = num * decay + weight * v[:, i], den * decay + weight
            out.append(num / den)
        return torch.stack(out, 1)

    k, v = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    return Function(mixing), (k, v, torch.rand(8).requires_grad_())


# Name -> (the model and its inputs, what is told of it).
READS = {
    "depthwise, causal": (lambda: convolving(causal, groups=DIM), "causal_conv1d"),
    "not depthwise": (lambda: convolving(causal), "conv1d"),
    "cut at neither end": (lambda: convolving(whole, padding="same", taps=3, groups=DIM), "conv1d"),
    "every other step": (lambda: convolving(whole, stride=2), "conv1d"),
    "a scan": (lambda: test_ssd_scan.block(length=8), "ssd_scan"),
    "a delta rule": (test_gated_delta_rule.block, "gated_delta_rule"),
    "a loop over tokens": (test_token_loop.block, "token_loop"),
    "nearly a delta rule": (lambda: test_gated_delta_rule.near(test_gated_delta_rule.NEAR_DELTA_RULES["state_clamped"]), "gated_delta_rule"),
    "another recurrence": (state_of_another_kind, "RWKV's time mixing"),
    "attention by hand": (lambda: test_attention.block(test_attention.plain), "attention"),
}
# What takes the state of the part before, and the op that does.
HANDED = {
    "depthwise, causal": "causal_conv1d", "a scan": "ssd_scan", "a delta rule": "gated_delta_rule",
    "a loop over tokens": "gated_delta_rule",
}  # fmt: skip
# What reads no other token.
APART = {
    "steps by themselves": lambda: convolving(whole, taps=1),
    "patches": lambda: convolving(whole, taps=4, padding=0, stride=4),
    "feed-forward": lambda: (nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM)), (torch.randn(2, 8, DIM),)),
}


@contextlib.contextmanager
def in_parts(mesh):
    """Torch's context, which wants something to shard."""
    with context_parallel(mesh, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
        yield


def told(frames):
    return [(m.pass_name, m.fqn) for a in frames.analyses for m in a.near_misses() if m.tag == TAG]


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "megacpp_compile" and "tokens" in r.getMessage()]


def strictly(model, inputs, text):
    torch._dynamo.reset()
    with pytest.raises(SequenceShardedError) as caught:
        torch.compile(model, backend="megacpp", options={"strict": True})(*inputs)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.end_to_end] * n.startswith("nearly")) for n in READS if n not in HANDED]
)
def test_what_reads_other_tokens(name, two_ranks, caplog):
    """It stays as it is written, one warning names it, and under `strict` it is an error that names it."""
    (model, inputs), op = READS[name][0](), READS[name][1]
    with in_parts(two_ranks):
        frames = run(model, inputs, Config())
        assert not any(frames.counts.values()), "and nothing else of these models fires"
        assert op in [what for what, _ in told(frames)] and len({fqn for _, fqn in told(frames)}) == 1
        (said,) = warned(caplog)
        assert f"({op})" in said and "Gather the sequence" in said
        strictly(model, inputs, said)


@pytest.mark.parametrize("name", HANDED)
def test_what_takes_the_state_of_the_part_before(name, two_ranks, caplog):
    """One op more that communicates, and nothing is told of, where torch's context or the user's says in which order parts
    are."""
    (model, inputs), name_of_pass = READS[name][0](), READS[name][1]
    with sharded_sequences(two_ranks):
        frames = run(model, inputs, Config(strict=True))
        assert frames.counts[name_of_pass] == 1 and not told(frames) and not warned(caplog)
        calls = [str(n.target).split(".")[1] for n in frames.graph.graph.nodes if "megacpp." in str(n.target)]
        assert calls[-1] == HANDED[name] and calls.count("entering_states") == 1
    if inputs[0].shape[1] % 2 == 0:
        with in_parts(two_ranks):
            assert run(model, inputs, Config(strict=True)).counts[name_of_pass] == 1


@contextlib.contextmanager
def of_unknown_order(mesh):
    with in_parts(mesh), mock.patch.object(context_parallel_module, "mesh_in_force", lambda: None):
        yield


# Name -> (what is to be handed a state, where, why it is not).
LEFT = {
    "order": (lambda: convolving(causal, groups=DIM), of_unknown_order, "the order of its parts is not known"),
    "odd": (lambda: test_token_loop.block(length=3), in_parts, "3 tokens are no 2 pieces"),
    "state in": (lambda: test_ssd_scan.block(length=8, given=True), sharded_sequences, "it is given a state"),
    "state out": (lambda: test_ssd_scan.block(length=8, state=True), sharded_sequences, "its final state is read"),
    "short": (lambda: convolving(causal, groups=DIM, taps=10), in_parts, "a piece has fewer steps"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_take_the_state_of_the_part_before(name, two_ranks, caplog):
    make, context, why = LEFT[name]
    model, inputs = make()
    with context(two_ranks):
        frames = run(model, inputs, Config())
        assert not any(frames.counts.values()) and len(warned(caplog)) == 1
        assert any(why in m.reason for a in frames.analyses for m in a.near_misses() if m.tag == TAG)
        strictly(model, inputs, "read those of one rank's part alone")


@pytest.mark.usefixtures("eager_backend")
def test_code_for_parts_is_not_run_on_others(two_ranks):
    """Dynamo's guards do not see in which parts sequences are."""
    model, (x,) = convolving(causal, groups=DIM)
    compiled = torch.compile(model, backend="megacpp")
    with sharded_sequences(two_ranks):
        compiled(x)
    with pytest.raises(OtherPartsError, match="sequences are whole"):
        compiled(x)
    with sharded_sequences(two_ranks, "head_tail"), pytest.raises(OtherPartsError, match="compiler.reset"):
        compiled(x)


def test_what_the_user_says_of_parts(two_ranks):
    with pytest.raises(BadOptionError, match="head_tail"), sharded_sequences(two_ranks, "zigzag"):
        pass
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(BadOptionError, match="one dimension"), sharded_sequences(grid):
        pass
    with sharded_sequences(grid["b"]):
        assert parts_in_force() is None
    with sharded_sequences(two_ranks, "head_tail"):
        assert (parts_in_force().places, parts_in_force().mine) == ((0, 3, 1, 2), (0, 3))
    assert parts_in_force() is None


def test_torchs_context_says_in_which_order_parts_are(two_ranks):
    with in_parts(two_ranks):
        assert parts_in_force().places == (0, 3, 1, 2)
    with mock.patch.object(experimental._cp_options, "enable_load_balance", False), in_parts(two_ranks):
        assert parts_in_force().places == (0, 1)


@pytest.mark.parametrize("name", APART)
def test_what_reads_no_other_token(name, two_ranks, caplog):
    model, inputs = APART[name]()
    with in_parts(two_ranks):
        assert not told(run(model, inputs, Config(strict=True)))
    assert not warned(caplog)


def test_frames_that_are_not_captured(two_ranks):
    """Too small to hold an idiom, or left to Inductor: a convolution is seen all the same."""
    small = nn.Conv1d(DIM, DIM, 3, padding=1)
    with in_parts(two_ranks):
        assert told(run(small, (torch.randn(2, DIM, TOKENS),), Config(), captured=False)) == [("conv1d", "")]
        strictly(small, (torch.randn(2, DIM, TOKENS),), "the frame itself (conv1d)")


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("strict", [False, True])
def test_code_for_any_length_that_was_compiled_before(strict, two_ranks, caplog):
    """No guard of Dynamo's sees that its sequences have become parts."""
    model, _ = convolving(causal, groups=DIM)
    compiled = torch.compile(model, backend="megacpp", dynamic=True, options={"strict": strict})
    compiled(torch.randn(2, 12, DIM))  # no other size is 12, which would make them one symbol
    assert not warned(caplog)
    with in_parts(two_ranks), pytest.raises(SequenceShardedError) if strict else contextlib.nullcontext():
        compiled(torch.randn(2, 6, DIM))
    assert len(warned(caplog)) == (not strict)


def test_blocks_have_their_names(two_ranks):
    """In `explain`, as in what is compiled."""
    model = nn.Sequential(*(convolving(causal, groups=DIM)[0] for _ in range(2)))
    with of_unknown_order(two_ranks):
        report = megacpp_compile.explain(model, torch.randn(2, TOKENS, DIM))
        assert [m.fqn for m in report.misses if m.tag == TAG] == ["0", "1"]


def test_when_context_parallelism_is_in_force(two_ranks):
    model, inputs = convolving(causal, groups=DIM)
    assert in_force() == "" and not told(run(model, inputs, Config(strict=True)))
    with in_parts(two_ranks):
        assert in_force() == "torch's context_parallel is in force"
    assert in_force() == ""
    if not hasattr(experimental, "_enable_context_parallel_dispatcher"):
        return  # torch 2.9 has the context manager alone
    experimental._enable_context_parallel_dispatcher()
    try:
        assert in_force() == "torch's context parallel attention is enabled"
    finally:
        experimental._disable_context_parallel_dispatcher()
    assert in_force() == ""


def test_of_one_rank_a_sequence_is_whole(two_ranks):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tokens"))["tokens"]
    with in_parts(alone):
        assert in_force() == ""


@pytest.mark.parametrize(("placed", "sharded"), [(Shard(1), True), (Shard(2), False), (Replicate(), False)], ids=str)
def test_a_sequence_that_is_sharded_by_hand(placed, sharded, two_ranks):
    model, (x,) = convolving(causal, groups=DIM)

    def forward(x):
        held = DTensor.from_local(x.sin(), two_ranks, [placed], run_check=False)
        return model(held.to_local())

    frames = run(Function(forward), (x,), Config())
    assert [what for what, _ in told(frames)] == ["causal_conv1d"] * sharded
    assert frames.counts["causal_conv1d"] == (not sharded)
    if sharded:
        strictly(Function(forward), (x,), "a DTensor of this frame")


class Layer(nn.Module):
    """A norm and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def tensor_parallel(mesh, by_tokens):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if by_tokens:
        enter = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {"norm": SequenceParallel(), "up": enter, "up.inner": ColwiseParallel(),
                "down": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    layer = Layer()
    if by_tokens:
        layer.up = nn.Sequential(OrderedDict({"inner": layer.up}))
    return parallelize_module(layer, mesh, plan)


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize(("by_tokens", "grad"), [(False, True), (True, True), (False, False)])
def test_tensor_parallelism_without_sequence_parallelism(by_tokens, grad, two_ranks, caplog):
    """One line a frame, and one warning, which name what is whole on each rank; nothing of inference."""
    model, x = nn.Sequential(*(tensor_parallel(two_ranks, by_tokens) for _ in range(2))), torch.randn(2, TOKENS, DIM)
    with torch.set_grad_enabled(grad), megacpp_compile.record() as report:
        torch.compile(model, backend="megacpp", options={"strict": True})(x)
    rows = [m for m in report.misses if m.tag == "replicated-activations"]
    said = [r.getMessage() for r in caplog.records if "sequence parallelism" in r.getMessage()]
    assert len(rows) == len(said) == (grad and not by_tokens)
    for row in rows:
        assert row.fqn.startswith("0") and "2 ranks keeps 2 sums of this frame whole, 4 KiB" in row.reason
        assert row.reason in said[0] and "RowwiseParallel to Shard(1)" in said[0]


def test_a_sequence_that_is_gathered_in_front_of_the_block(two_ranks):
    model, (x,) = convolving(causal, groups=DIM)

    def forward(x):
        held = DTensor.from_local(x.sin(), two_ranks, [Shard(1)], run_check=False)
        return model(held.redistribute(placements=[Replicate()]).to_local())

    assert not told(run(Function(forward), (x,), Config(strict=True)))
