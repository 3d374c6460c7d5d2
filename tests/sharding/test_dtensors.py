"""Frames with DTensors: what is local in them is rewritten, and results, gradients and collectives are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from megacpp_compile import record
from megacpp_compile.errors import NotCapturedError
from tests.sharding import ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo"),
    pytest.mark.xdist_group("dtensors"),  # one worker starts the ranks
]

MLA_SITES = {"mla_rope_q": 1, "mla_rope_kv": 1}
PAIRS = {"down_norm_up": 2}
EXPERTS = {"moe": 1}
WRITTEN = "writes to a DTensor or to memory that one shares"


@pytest.fixture(scope="module")
def seen():
    return ranks.outcomes()


def compiled(seen, case):
    """What each rank saw."""
    for rank in seen[case]:
        assert "failed" not in rank, rank["failed"]
    return seen[case]


def fired(rank):
    return {name: n for name, n in rank["sites"].items() if n}


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(ranks.CASES))
def test_results_gradients_and_collectives_are_those_of_eager(seen, case):
    for rank in compiled(seen, case):
        assert rank["error"] < ranks.CASES[case].tolerance, rank["worst"]
        assert rank["kinds"][0] == rank["kinds"][1]
        assert rank["compiled"] == rank["eager"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sites"),
    [
        *((name, MLA_SITES) for name in ranks.CASES if name.startswith("tensor_parallel") and "no_grad" not in name),
        ("tensor_parallel_no_grad", {name: 2 * n for name, n in MLA_SITES.items()}),  # two graphs: dynamic sizes
        ("checkpointed", MLA_SITES),
        ("checkpointed_selectively", MLA_SITES),
        ("sequence_parallel", MLA_SITES),
        *((name, MLA_SITES | PAIRS) for name in ("gathered_gain", "frozen_region", "dtensor_out")),
        *((name, MLA_SITES | PAIRS | EXPERTS) for name in ("experts", "sharded_experts")),
        *((name, EXPERTS) for name in ("local_experts", "experts_in_parts")),
        ("sharded_tensor_parallel", MLA_SITES),
        ("written", {}),
    ],
)
def test_what_is_local_fires_on_every_rank(seen, case, sites):
    assert [fired(rank) for rank in compiled(seen, case)] == [sites] * ranks.RANKS


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor_parallel", "tensor_parallel_inference"])
def test_tensor_parallel_mla_sums_once_in_forward(seen, case):
    """At the output projection; backward sums the gradients of both latents."""
    for rank in seen[case]:
        forward, *backward = rank["compiled"]
        assert forward == {"all_reduce": 1}
        assert backward == ([] if case.endswith("inference") else [{"all_reduce": 2}])


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ranks.CASES if "experts" in name])
def test_rows_go_to_experts_and_back_by_all_to_all(seen, case):
    """Their counts, then the rows, then the results; backward sends gradients of both the other way, and recomputes none
    of it under a policy: ranks whose plans differ still meet."""
    for rank in compiled(seen, case):
        assert rank["compiled"] == [{"all_to_all_single": 3}, {"all_to_all_single": 2}]
        assert set(rank["ops"]) >= {"megacpp::moe_sorted"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, case in ranks.CASES.items() if case.count_graphs])
def test_no_more_graphs_than_inductor(seen, case):
    for rank in compiled(seen, case):
        assert rank["graphs"]["megacpp"] == rank["graphs"]["inductor"] > 0


@pytest.mark.slow
def test_a_dispatch_that_breaks_the_graph_says_how_not_to(seen):
    for rank in seen["experts_in_parts"]:
        assert {name for name, _ in rank["misses"]} == {"moe"}
        for _, reason in rank["misses"]:
            assert "rows go to each rank" in reason and "capture_scalar_outputs = True" in reason


@pytest.mark.slow
def test_an_up_projection_of_dtensors_is_a_near_miss_with_its_cause(seen):
    for rank in seen["tensor_parallel"]:
        reasons = [reason for name, reason in rank["misses"] if name == "down_norm_up"]
        assert len(reasons) == 2
        for reason in reasons:
            assert "a DTensor's linear of tensors placed (R), (S(0))" in reason and "summed over ranks" in reason


@pytest.mark.slow
def test_a_frame_that_writes_to_a_dtensor_warns_once_with_the_line_and_what_to_do(seen):
    for rank in seen["written"]:
        (said,) = rank["said"]
        assert "compiled by Inductor alone" in said and WRITTEN in said and "add_" in said
        assert "ranks.py" in said and "compute a new tensor" in said
        assert [captured for captured, _ in rank["frames"]] == [False]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def tables():
    angles = torch.outer(torch.arange(6).float(), torch.tensor([1.0, 0.1])).repeat(1, 2)
    return angles.cos(), angles.sin()


def test_a_model_without_dtensors_has_the_same_rope_sites(eager_backend):
    with record() as report:
        torch.compile(ranks.MLA(), backend="megacpp")(torch.randn(2, 6, 32), *tables())
    assert {name: n for name, n in report.counts.items() if n} == MLA_SITES | PAIRS


def test_such_a_frame_is_an_error_under_strict(no_kernels, mesh):
    model = torch.compile(ranks.CASES["written"].make(mesh), backend="megacpp", options={"strict": True})
    with pytest.raises(NotCapturedError, match=WRITTEN):
        model(torch.randn(2, 6, 32), *tables())


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
def test_writes_fall_back_and_are_seen_as_in_eager(no_kernels, mesh, write):
    def make():
        return distribute_tensor(torch.linspace(-1.0, 1.0, 32), mesh, [Replicate()])

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


def test_a_precision_plan_names_products_on_dtensors(no_kernels, mesh):
    model = ranks.tensor_parallel(mesh)
    with record() as report, torch.no_grad():
        torch.compile(model, backend="megacpp", options={"precision": "fp8_current"})(torch.randn(2, 6, 32), *tables())
    rows = {row["fqn"]: row for row in report.frames[0].precision if row["kind"] == "linear"}
    assert set(rows) == {"q_down", "q_up", "kv_down", "kv_up", "o"}
    for name in ("q_up", "kv_up", "o"):
        assert rows[name]["effective"] == "as written"
    asked = [row for name in ("q_up", "kv_up", "o") if (row := rows[name])["requested"] != "bf16"]
    assert asked and all("DTensors" in row["reason"] for row in asked)
