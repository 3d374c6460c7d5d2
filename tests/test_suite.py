"""What the suite can be relied on for: the same inputs in any order, and failures that are counted."""

from __future__ import annotations

import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests import conftest, seeds, thinned
from tests.adapters import megatron_ranks, test_megatron_ranks
from tests.repeat import failed_in, table
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


class Item:
    """One set of parameters of a test, as the plugin sees it."""

    def __init__(self, file, name, params=None, **indices):
        self.path, self.originalname, self.name = Path(thinned.__file__).parent / file, name, f"{name}[a]"
        self.callspec = types.SimpleNamespace(indices=indices, params=params or {})


class Asked:
    """A run that asks for the whole suite."""

    invocation_params = types.SimpleNamespace(dir=Path(thinned.__file__).parents[1])
    args = ("tests",)


@pytest.mark.parametrize("ratio", thinned.THINNED)
def test_the_whole_suite_is_thinned_and_what_is_named_is_not(monkeypatch, ratio):
    file, (name, *_) = next(iter(thinned.THINNED[ratio].items()))
    items = [
        *(Item(file, name, a=i, b=i) for i in range(2 * ratio + 1)),
        Item(file, "test_another"),
        Item("x.py", name),
    ]
    monkeypatch.delenv("TEST_ALL", raising=False)
    assert thinned.left_out(Asked, items) == [items[i] for i in range(2 * ratio) if i % ratio]
    grid = [Item(file, name, a=i, b=j) for i in range(ratio) for j in range(ratio)]
    left = thinned.left_out(Asked, grid)
    assert len(left) == ratio * (ratio - 1) and grid[0] not in left
    for parameter in "ab":
        assert len({item.callspec.indices[parameter] for item in grid if item not in left}) == ratio
    file, (name, *_) = next(iter(thinned.WHOLE.items()))
    assert len(thinned.left_out(Asked, [Item(file, name), Item(file, "test_another")])) == 1
    monkeypatch.setenv("TEST_ALL", "1")
    assert thinned.left_out(Asked, items) == []
    monkeypatch.delenv("TEST_ALL")
    monkeypatch.setattr(Asked, "args", (f"tests/{file}",))
    assert thinned.left_out(Asked, items) == []


def test_what_is_thinned_is_there():
    """And is thinned once."""
    seen = set()
    tables = (*thinned.THINNED.values(), thinned.WHOLE)
    for file, names in ((file, names) for of in tables for file, names in of.items()):
        source = (Path(thinned.__file__).parent / file).read_text()
        assert [name for name in names if f"def {name}(" not in source] == [], file
        assert not seen & {(file, name) for name in names}
        seen |= {(file, name) for name in names}


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
def test_rare_cases_are_left_out_and_no_test_reads_them_otherwise(monkeypatch, tests, cases):
    assert len(thinned.RARE) == 4
    file = Path(tests.__file__).relative_to(Path(thinned.__file__).parent).as_posix()
    rare = thinned.RARE[file]
    assert set(rare) <= cases.keys() and not set(rare) & set(tests.READ)
    items = [Item(file, "test_of_cases", {"case": case}) for case in cases]
    monkeypatch.delenv("TEST_ALL", raising=False)
    assert [thinned.case_of(item) for item in thinned.left_out(Asked, items)] == [c for c in cases if c in rare]
    monkeypatch.setenv("TEST_ALL", "1")
    assert thinned.left_out(Asked, items) == []
