"""What the suite can be relied on for: the same inputs in any order, and failures that are counted."""

from __future__ import annotations

import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from xdist.scheduler import LoadGroupScheduling

from tests import conftest, durations, seeds, tiers
from tests.adapters import megatron_ranks, test_megatron_ranks
from tests.repeat import failed_in, table
from tests.scheduling import Scheduling
from tests.sharding import delayed, heads, ranks, test_delayed_scaling, test_dtensors, test_heads

DRAWS = """
import pytest, torch

@pytest.fixture(scope="module")
def shared():
    return torch.randn(3).tolist()

@pytest.mark.parametrize("which", [1, 2, 3])
def test_draws(which, request):
    alone = torch.randn(2).tolist()
    print("DRAWN", which, alone, request.getfixturevalue("shared"), torch.randn(2).tolist())
"""


def suite(folder: Path, source: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What pytest says of a test file under the suite's own conftest, in this process."""
    (folder / f"test_{folder.name}.py").write_text(source)
    options = ["-q", "-s", "-n0", "-pno:cacheprovider", "--rootdir", str(folder), str(folder)]
    capsys.readouterr()
    pytest.main(options, plugins=[conftest])
    return capsys.readouterr().out


def drawn(output: str) -> list[str]:
    return [line[line.index("DRAWN") :] for line in output.splitlines() if "DRAWN" in line]


def test_inputs_do_not_depend_on_the_order(tmp_path, capsys, monkeypatch):
    """Neither a test's own nor those of a fixture that several share, whichever of them makes it."""
    plain = drawn(suite(tmp_path, DRAWS, capsys))
    assert len(plain) == 3
    orders = set()
    for order in "1234":
        monkeypatch.setenv("TEST_ORDER", order)
        found = drawn(suite(tmp_path, DRAWS, capsys))
        orders.add(tuple(found))
        assert sorted(found) == sorted(plain)
    assert len(orders) > 1


def test_another_seed_moves_written_ones_too(monkeypatch):
    monkeypatch.setattr(seeds, "MOVED_BY", 0)  # also in a run that is moved itself
    for place in (torch, torch.random):
        monkeypatch.setattr(place, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(torch, "Generator", torch.Generator)

    def draws():
        torch.manual_seed(3)
        return [torch.randn(2).tolist(), torch.randn(2, generator=torch.Generator().manual_seed(3)).tolist()]

    before = draws()
    monkeypatch.setattr(seeds, "MOVED_BY", 5)
    seeds.move_written_seeds()
    assert all(a != b for a, b in zip(before, draws(), strict=True))
    assert isinstance(torch.default_generator, torch.Generator)


@pytest.mark.parametrize("drawing", ["torch.randn(3)", "torch.nn.Linear(2, 2)"])
def test_a_module_that_draws_while_imported_is_an_error(tmp_path, capsys, drawing):
    output = suite(tmp_path, f"import torch\nX = {drawing}\ndef test_nothing(): assert True", capsys)
    assert "draws random numbers while it is imported" in output and "1 error" in output


@pytest.mark.skipif(not hasattr(torch._ops, "cached_ops"), reason="this torch has no such list")
def test_operators_keep_nothing_for_what_is_entered_before_dispatch():
    """So that `tests/quicker.py` may leave out the search for it."""
    traced = make_fx(lambda x: x.relu() + 1, tracing_mode="fake", pre_dispatch=True)(torch.ones(2))
    assert any("relu" in str(node.target) for node in traced.graph.nodes) and torch._ops.cached_ops
    before_dispatch = torch._C.DispatchKey.PreDispatch
    assert not any(before_dispatch in op._dispatch_cache for op in torch._ops.cached_ops)


def test_failures_are_counted_by_test():
    output = "FAILED tests/a.py::test_x[a b] - AssertionError: 1 - 2\n12 passed\nERROR tests/b.py\n"
    assert failed_in(output) == ["tests/a.py::test_x[a b]", "tests/b.py"]
    lines = table(Counter({"tests/b.py": 1, "tests/a.py": 12}), 20).splitlines()
    assert lines == ["20 runs, failures by test:", "  12  tests/a.py", "   1  tests/b.py"]
    assert table(Counter(), 20) == "20 runs, none failed"


def test_seconds_are_counted_for_what_takes_them(monkeypatch):
    """What runs within another kind's function is not that kind's."""
    monkeypatch.setattr(durations, "spent", Counter())
    ticks = iter(range(100))
    monkeypatch.setattr(durations, "clock", lambda: float(next(ticks)))
    inner = durations.counted("C++", lambda: None)
    durations.counted("Dynamo", inner)()
    assert durations.spent == {"Dynamo": 2.0, "C++": 1.0}
    lines = durations.table({"tests/fx/test_a.py::x": {"whole": 9.0, **durations.spent}, "tests/test_b.py::y": {"whole": 1.0}})
    assert [line.split(" | ")[:4] for line in lines.splitlines()[2:]] == [
        ["| all", "2", "10", "2"], ["| fx", "1", "9", "2"], ["| (top)", "1", "1", "0"],
    ]  # fmt: skip


def item(name="test_x", *marks, case=None):
    """A test, as pytest has it."""
    found = types.SimpleNamespace(path=Path(f"{name}.py"), originalname=name, name=f"{name}[a]")
    found.callspec = types.SimpleNamespace(params={"case": case} if case else {})
    found.iter_markers = lambda kind: (mark.mark for mark in marks if mark.name == kind)
    found.get_closest_marker = lambda kind: next(found.iter_markers(kind), None)
    return found


class Asked:
    """A run that asks for the whole suite."""

    invocation_params = types.SimpleNamespace(dir=Path(tiers.__file__).parents[1])
    args, tier = ("tests",), None

    @classmethod
    def getoption(cls, name):
        return {"--tier": cls.tier}[name]


def test_whoever_names_tests_gets_all_of_them(monkeypatch):
    assert tiers.tier_of(Asked) == "test"
    monkeypatch.setattr(Asked, "args", ("tests/passes",))
    assert tiers.tier_of(Asked) == "all"
    monkeypatch.setattr(Asked, "tier", "unit")
    assert tiers.tier_of(Asked) == "unit"


MARKS = pytest.mark


@pytest.mark.parametrize(
    ("tier", "names"),
    [("unit", {"plain"}), ("test", {"plain", "compiled", "ranks"}), ("all", {"plain", "compiled", "ranks", "others", "te"})],
)
def test_a_tier_runs_what_its_markers_say(tier, names):
    items = [item("plain"), item("compiled", MARKS.end_to_end), item("ranks", MARKS.xdist_group("ranks"))]
    items += [item("others", MARKS.exhaustive), item("te", MARKS.rare("te", "x"), case="te")]
    left = tiers.left_out(tier, items)
    assert {i.originalname for i in items if i not in left} == names


SAMPLED = """
import pytest

@pytest.mark.sampled(3, unit=7)
@pytest.mark.parametrize(("a", "b"), [(i, str(i)) for i in range(10)])
def test_of_ten(a, b):
    print("DRAWN", f"ten {a}")

@pytest.mark.sampled(3)
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", range(3))
def test_of_grid(a, b):
    print("DRAWN", f"grid {a}{b}")

@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
@pytest.mark.parametrize("blocks", [True, False])
def test_of_square(wrap, blocks):
    print("DRAWN", f"square {wrap} {blocks}")
"""
IN_UNIT = ["ten 0", "ten 7", "grid x0", "square DDP True"]
IN_TEST = ["ten 0", "ten 3", "ten 6", "ten 9", "grid x0", "grid y1", "grid z2", "square DDP True", "square FSDP2 False"]


@pytest.mark.parametrize(("tier", "kept"), [("unit", IN_UNIT), ("test", IN_TEST)])
def test_a_sample_of_a_grid_has_all_values(tmp_path, capsys, monkeypatch, tier, kept):
    """Where there are as many sets as values; of a list, every nth."""
    monkeypatch.setattr(tiers, "tier_of", lambda config: tier)
    found = drawn(suite(tmp_path, SAMPLED, capsys))
    assert sorted(found) == sorted(f"DRAWN {name}" for name in kept)


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        (test_dtensors, ranks.CASES),
        (test_heads, heads.CASES),
        (test_delayed_scaling, delayed.CASES),
        (test_megatron_ranks, megatron_ranks.CASES),
    ],
    ids=["dtensors", "heads", "delayed", "megatron"],
)
def test_rare_cases_are_there_and_no_test_reads_them_otherwise(tests, cases):
    (rare,) = [mark.args for mark in tests.pytestmark if mark.name == "rare"]
    assert set(rare) <= cases.keys() and not set(rare) & set(tests.READ)


def test_no_vector_instructions_are_tried_out():
    """`tests/conftest.py` says so before torch is imported, which reads it once."""
    assert inductor_config.cpp.vec_isa_ok is not None


class Worker:
    """What a scheduler sees of one."""

    def __init__(self, name, collection):
        self.gateway, self.given, self.shutting_down = types.SimpleNamespace(id=name), [], False
        self.collection = collection

    def send_runtest_some(self, numbers):
        self.given += [self.collection[n] for n in numbers]

    def shutdown(self):
        self.shutting_down = True


def given_out(kind, names, crashes=False):
    """(what each of two workers was given, the test in which the second of them crashed)"""
    option = types.SimpleNamespace(loadscopereorder=True)
    config = types.SimpleNamespace(getvalue=lambda name: {"tx": ["popen"] * 2}[name], option=option)
    scheduler, workers, ended, crashed = kind(config), [Worker(str(i), names) for i in range(2)], Counter(), None
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, names)
    scheduler.schedule()
    for _ in names:
        for worker in scheduler.nodes:
            if crashes and worker is workers[1] and ended.total() > 9:
                crashed = scheduler.remove_node(worker)
            elif ended[worker] < len(worker.given):
                scheduler.mark_test_complete(worker, names.index(worker.given[ended[worker]]))
                ended[worker] += 1
    assert scheduler.tests_finished and not scheduler.has_pending
    return [worker.given for worker in workers], crashed


def test_tests_are_given_out_as_by_xdist():
    """Each once, and groups on one worker; what a worker that crashes leaves behind goes to the other."""
    names = [f"test_{i}.py::test" + ("@group" if i % 4 == 0 else "") for i in range(30)]
    (first, second), _ = given_out(Scheduling, names)
    assert [first, second] == given_out(LoadGroupScheduling, names)[0]
    assert sorted(first + second) == sorted(names) and {name for name in names if "@" in name} <= {*first}
    (first, second), crashed = given_out(Scheduling, names, crashes=True)
    assert crashed in second and {*first, *second} == {*names}
