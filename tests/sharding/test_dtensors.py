"""Frames with DTensors: what is local in them is rewritten, and results, gradients and collectives are eager's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

from megacpp_compile import record
from megacpp_compile._torch._registry import release
from megacpp_compile.errors import NotCapturedError
from tests.sharding import ranks
from tests.sharding.seen import ON_RANKS

pytestmark = [
    *ON_RANKS,
    pytest.mark.rare(
        "tensor_parallel_no_grad", "tensor_parallel_dynamic", "checkpointed", "gathered_gain", "dtensor_out",
        "local_experts", "on_dtensors_sequence", "frozen_region", "decoding",
        "experts", "sharded_tensor_parallel",  # "sharded_experts" is of both
        "tensor_parallel_policy",  # "planned" is of a policy and strict, "compressed" of both and verified
    ),
]  # fmt: skip
CASES_OF = ranks

SITES = {"mla_rope_q": 1, "mla_rope_kv": 1, "down_norm_up": 2}
TWICE = {name: 2 * n for name, n in SITES.items()}
EXPERTS = {"moe": 1}
TORCH = release(torch.__version__)
OLD = TORCH < (2, 12)  # 2.9 and 2.11 were seen
# Models whose compiled collectives are others than eager's. What two linears read, as gate and up do, is one tensor whose
# gradient is summed once. Where models compute on DTensors throughout, eager carries partial sums of gradients on, down
# to the parameters, which it leaves as such; a local graph sums what ranks share where they part: both latents and the
# rope key.
ELSEWHERE = {
    "on_dtensors": [{"all_reduce": 1}, {"all_reduce": 3}],
    "on_dtensors_sequence": [
        {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
        {"all_gather_into_tensor": 1, "all_reduce": 3},
    ],
    "assorted": [
        {"all_gather_into_tensor": 4, "all_reduce": 2, "reduce_scatter_tensor": 1},
        {"all_gather_into_tensor": 3, "all_reduce": 3 if OLD else 2},
    ],
    "compressed": [{"all_reduce": 1}, {"all_reduce": 1}],
    "planned": [{"all_reduce": 4}, {"all_reduce": 6}],
}
OTHER_SITES = {
    "tensor_parallel": TWICE,
    # Later, Dynamo knows the first batch's size in a frame with DTensors, and compiles for the second anew.
    "tensor_parallel_dynamic": SITES if OLD else TWICE,
    "written_out": SITES | {"attention": 1},
    "decoding": {"mla_decode": 1, "down_norm_up": 1},
    "sparse": {"sparse_mla": 1, "down_norm_up": 1},
    "compressed": {"compressed_linear": 2},
    "planned": TWICE,
    "uneven": {"down_norm_up": 1},
    **dict.fromkeys(("written", "tokens_by_hand"), {}),
    **dict.fromkeys(("experts", "sharded_experts"), SITES | EXPERTS),
    **dict.fromkeys(("local_experts", "experts_in_parts"), EXPERTS),
}
# Cases of which an old torch runs a part without a graph, where collectives are not counted.
UNCOUNTED = ("sharded_experts", *(("experts_in_parts",) if TORCH >= (2, 11) else ())) if OLD else ()
WRITTEN = "writes to a DTensor or to memory that one shares"


# Cases that tests here read without a parameter of that name.
READ = ("tensor_parallel", "tensor_parallel_inference", "planned", "on_dtensors", "uneven", "written",
        "experts_in_parts")  # fmt: skip


@pytest.mark.parametrize("case", sorted(ranks.CASES))
def test_results_gradients_and_collectives_are_those_of_eager(seen, case):
    """And what is local fires on every rank."""
    for rank in seen(case):
        assert rank["error"] < ranks.CASES[case].tolerance, rank["worst"]
        assert rank["kinds"][0] == rank["kinds"][1]
        if case in ELSEWHERE:
            assert rank["compiled"] == ELSEWHERE[case]
        elif case not in UNCOUNTED:
            assert rank["compiled"] == rank["eager"]
        assert {name: n for name, n in rank["sites"].items() if n} == OTHER_SITES.get(case, SITES)


@pytest.mark.parametrize("case", ["tensor_parallel", "tensor_parallel_inference"])
def test_tensor_parallel_mla_sums_once_in_forward(seen, case):
    """At the output projection; backward sums the gradients of both latents."""
    for rank in seen(case):
        forward, *backward = rank["compiled"]
        assert forward == {"all_reduce": 1}
        assert backward == ([] if case.endswith("inference") else [{"all_reduce": 2}])


@pytest.mark.parametrize("case", [name for name in ranks.CASES if "experts" in name and name not in UNCOUNTED])
def test_rows_go_to_experts_and_back_by_all_to_all(seen, case):
    """Their counts, then the rows, then the results; backward sends gradients of both the other way, and recomputes none
    of it under a policy: ranks whose plans differ still meet."""
    for rank in seen(case):
        assert rank["compiled"] == [{"all_to_all_single": 3}, {"all_to_all_single": 2}]
        assert set(rank["ops"]) >= {"megacpp::moe_sorted"}


@pytest.mark.parametrize("case", [name for name, case in ranks.CASES.items() if case.count_graphs])
def test_no_more_graphs_than_dynamo_alone_makes(seen, case):
    for rank in seen(case):
        assert rank["graphs"]["megacpp"] == rank["graphs"]["eager"] > 0


@pytest.mark.skipif(TORCH < (2, 10), reason="torch 2.9 reads these numbers within the graph")
def test_a_dispatch_that_breaks_the_graph_says_how_not_to(seen):
    for rank in seen("experts_in_parts"):
        assert {name for name, _ in rank["misses"]} == {"moe"}
        for _, reason in rank["misses"]:
            assert "rows go to each rank" in reason and "capture_scalar_outputs = True" in reason


def test_auto_plans_a_frame_with_dtensors_alike_on_all_ranks(seen):
    """And sums over ranks run no second time."""
    one, *others = seen("planned")
    assert [found["taken"] for found in one["auto"]] == [True]
    assert all(other["auto"] == one["auto"] for other in others)


def test_gradients_of_replicated_weights_are_whole(seen):
    """Where eager leaves partial sums for the optimizer, or FSDP2, to add up."""
    shared = ("q_down.weight", "q_norm.weight", "kv_down.weight", "kv_norm.weight")
    for rank in seen("on_dtensors"):
        eager, ours = rank["placed"]
        assert {eager[name] for name in shared} == {"(Partial(sum),)"}
        assert {ours[name] for name in shared} == {"(Replicate(),)"}
        assert {name: p for name, p in eager.items() if name not in shared}.items() <= ours.items()


def test_an_up_projection_of_uneven_shards_is_a_near_miss_with_its_cause(seen):
    for rank in seen("uneven"):
        (reason,) = (reason for name, reason in rank["misses"] if name == "down_norm_up")
        assert "a DTensor's linear of tensors placed (R), (S(0))" in reason and "summed over ranks" in reason


def test_a_frame_that_writes_to_a_dtensor_warns_once_with_the_line_and_what_to_do(seen):
    for rank in seen("written"):
        (said,) = rank["said"]
        assert "compiled by Inductor alone" in said and WRITTEN in said and "add_" in said
        assert "ranks.py" in said and "compute a new tensor" in said
        assert [captured for captured, _ in rank["frames"]] == [False]


@pytest.mark.end_to_end
@pytest.mark.parametrize("case", ["tokens_by_hand"])
def test_a_convolution_over_the_tokens_of_a_rank_is_told_of_and_left_alone(seen, case):
    for rank in seen(case):
        (said,) = rank["said"]
        assert "mixer (causal_conv1d)" in said and "Gather the sequence" in said
        (reason,) = (reason for name, reason in rank["misses"] if name == "causal_conv1d")
        assert "reads other tokens" in reason


def test_a_model_without_dtensors_has_the_same_rope_sites(eager_backend):
    with record() as report:
        torch.compile(ranks.MLA(), backend="megacpp")(torch.randn(2, 6, 32), *ranks.tables())
    assert {name: n for name, n in report.counts.items() if n} == SITES


def test_such_a_frame_is_an_error_under_strict(no_kernels, one_rank):
    model = torch.compile(ranks.CASES["written"].make(one_rank), backend="megacpp", options={"strict": True})
    with pytest.raises(NotCapturedError, match=WRITTEN):
        model(torch.randn(2, 6, 32), *ranks.tables())


@pytest.mark.parametrize(
    "write",
    [
        lambda gain, x: gain.mul_(2.0).to_local() + x,
        lambda gain, x: x + gain.to_local().add_(1.0),
        lambda gain, x: x + torch.add(gain.to_local(), 1.0, out=gain.to_local()),
        lambda gain, x: x + torch.relu_(gain.to_local().view(4, 8)).view(32),
        lambda gain, x: x + torch.nn.functional.elu(gain.to_local(), 1.0, True),
    ],
    ids=["dtensor", "local", "out", "view", "inplace"],
)
def test_writes_fall_back_and_are_seen_as_in_eager(no_kernels, one_rank, write):
    def make():
        return distribute_tensor(torch.linspace(-1.0, 1.0, 32), one_rank, [Replicate()])

    def function(gain, x):
        x = x.sin().cos() * 2.0
        return write(gain, x) * gain.to_local()

    x, mine, theirs = torch.randn(4, 32), make(), make()
    with record() as report, torch.no_grad():
        got = torch.compile(function, backend="megacpp")(mine, x)
        want = function(theirs, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine.to_local(), theirs.to_local())
    assert WRITTEN in report.frames[0].reason


def test_what_is_copied_from_a_rank_s_part_is_no_write_to_it(no_kernels, one_rank):
    """Into a buffer of its own, as keys are of two parts."""
    def function(gain, x):
        both = x.new_empty(4, 64)
        both[:, :32].copy_(gain.to_local() * x)
        both[:, 32:] = gain.to_local()
        return both

    x, gain = torch.randn(4, 32), distribute_tensor(torch.linspace(-1.0, 1.0, 32), one_rank, [Replicate()])
    with record() as report, torch.no_grad():
        got = torch.compile(function, backend="megacpp", options={"strict": True})(gain, x)
    torch.testing.assert_close(got, function(gain, x))
    assert report.frames[0].captured


def test_a_precision_plan_names_products_on_dtensors(no_kernels, one_rank):
    model = ranks.MLA()
    model.o = torch.nn.Linear(32, 32)  # its bias is added once, behind the sum over ranks
    model = ranks.tensor_parallel(one_rank, model)
    with record() as report, torch.no_grad():
        run = torch.compile(model, backend="megacpp", options={"precision": "fp8_current"})
        run(torch.randn(2, 6, 32), *ranks.tables())
    rows = {row["fqn"]: row for row in report.frames[0].precision if row["kind"] == "linear"}
    assert set(rows) == {"q_down", "q_up", "kv_down", "kv_up", "o"}
    assert rows["o"]["effective"] == "as written" and rows["o"]["requested"] != "bf16"
    assert "DTensors" in rows["o"]["reason"]
    for name in ("q_up", "kv_up"):  # each rank's part is a linear like any other
        assert rows[name]["effective"] == rows["q_down"]["effective"] == "fp32"


@pytest.mark.parametrize(
    ("norm", "names", "why"),
    [(torch.nn.LayerNorm(32), ("*.up",), "the linear layers.0.gate reads"),
     (torch.nn.ReLU(), ("*.up", "*.gate"), "relu, which made")],
    ids=["another reader", "its maker"],
)  # fmt: skip
def test_what_is_summed_over_ranks_is_the_value_itself_to_compress(no_kernels, one_rank, norm, names, why):
    """A linear by column reads a value through a sum of its gradient, which holds no memory of its own."""
    model = ranks.feed_forwards(one_rank)
    model.layers[0].norm = norm
    options = {"compress": {"names": names}, "require": {"compressed_linear": 0}}
    with record() as report:
        torch.compile(model, backend="megacpp", options=options)(torch.randn(2, 6, 32, requires_grad=True), None, None)
    (miss,) = (m for m in report.misses if m.pass_name == "compressed_linear")
    assert miss.tag == "alive" and why in miss.reason
