"""Which target a frame is compiled for, and what is said of the lowerings of each."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from benchmarks.targets_page import PAGE, page
from megacpp_compile.backends import inductor, openxla, torch_tpu
from megacpp_compile.backends._protocol import Backend, backend_for
from megacpp_compile.errors import TargetUnavailableError
from megacpp_compile.lowerings import _registry
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.targets import CPU, CUDA, TPU, family, resolve_target


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m benchmarks.targets_page"


@pytest.mark.parametrize("op", sorted({folder for folder, _ in semantic_ops().values()}))
def test_an_op_suits_xla_or_says_why_it_does(op):
    """A lowering of its own, or a reason why it needs none; not both, and not neither."""
    own = (Path(_registry.package.__path__[0]) / op / "tpu_xla.py").exists()
    assert own != bool(_registry.reference_serves(op, "tpu"))
    assert _registry.preference(op, "tpu") == (("tpu_xla", "reference") if own else ("reference",))


@pytest.mark.parametrize("module", [inductor, openxla, torch_tpu])
def test_a_backend_defines_the_protocol(module):
    assert backend_for(TPU, []) is openxla
    assert backend_for(CPU, []) is backend_for(CUDA, []) is inductor
    for name in (n for n in vars(Backend) if not n.startswith("_")):
        wanted = list(inspect.signature(getattr(Backend, name)).parameters)[1:]
        assert list(inspect.signature(getattr(module, name)).parameters)[: len(wanted)] in (
            wanted, [w.replace("inputs", "example_inputs") for w in wanted],
        )  # fmt: skip


def test_tpu_asks_for_one_of_its_packages(monkeypatch):
    for there in ("torch_xla", "torch_tpu"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: pytest if name == there else None)
        assert resolve_target("tpu", []) is TPU
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailableError, match="torch_xla or torch_tpu"):
        resolve_target("tpu", [])


@pytest.mark.parametrize(("kinds", "wanted"), [
    (set(), "cpu"), ({"cpu"}, "cpu"), ({"cpu", "cuda"}, "cuda"), ({"cpu", "xla"}, "tpu"), ({"tpu"}, "tpu"),
])  # fmt: skip
def test_where_tensors_are(kinds, wanted):
    assert family(kinds).name == wanted
