"""The report of a frame cut into pieces is that of the whole: each block's sites under its own name, and their sums."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from megacpp_compile import errors, record
from megacpp_compile.backends import automatic, stitched
from megacpp_compile.report.auto_plan import SMALL
from megacpp_compile.report.report import Report
from megacpp_compile.report.summary import headline, saved_bytes
from megacpp_compile.report.text import plain
from tests.backends.test_stitched import compiled, step
from tests.frontend.test_repeated_blocks import Layer, Stack
from tests.frontend.test_repeated_blocks import ids as token_ids
from tests.memory.layered import Model, ids

# Of equal layers these differ from the whole's: names in another graph.
OWN = ("frame", "node", "graph")


def rows(found):
    return sorted(sorted((k, str(v)) for k, v in (o if isinstance(o, dict) else plain(o)).items() if k not in OWN)
                  for o in found)  # fmt: skip


def reports(run, dear=3, **options):
    """What is reported of a model whole, and of it in pieces. run: is given what runs it, and the model. dear: how many
    layers with experts are one code."""
    found = []
    for cut in (False, True):
        torch._dynamo.reset()
        model = Model(5, dense=2)
        with record() as report:
            run(compiled(model, {"repeated_blocks": cut, **options}, dynamic=False), model)
        found.append(report)
    assert {(f.block, f.calls) for f in found[1].frames if f.block} == {("layers.0", 2), ("layers.2", dear)}
    return found


def frames(report, name):
    return [row for frame in report.frames for row in getattr(frame, name)]


def once(call, model):
    eager = copy.deepcopy(model)
    for a, b in zip(step(call, model, ids()), step(eager, eager, ids()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def two_lengths(call, model):
    model.eval().requires_grad_(False)
    for tokens in (ids(), ids()[:, :4]):
        torch.testing.assert_close(call(tokens), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("run", "lengths"), [(once, 1), (two_lengths, 2)], ids=["training", "inference"])
def test_sites_misses_and_bytes(no_kernels, run, lengths):
    whole, cut = reports(run)
    assert cut.counts == whole.counts and cut.counts["down_norm_up"] == lengths * 2 * 5
    assert rows(cut.sites) == rows(whole.sites) and rows(cut.misses) == rows(whole.misses)
    assert saved_bytes(cut) == saved_bytes(whole) and (saved_bytes(cut)[2] > 0) == (run is once)
    for name in ("attention", "recognised"):
        assert rows(frames(cut, name)) == rows(frames(whole, name))
    known = {name: kind for frame in cut.frames for name, kind in frame.modules.items()}
    assert known.items() <= whole.frames[0].modules.items() and "layers.4.mlp.experts.2.up" in known
    tiles = re.compile(r"sites fused|near misses|saved for backward")
    text = re.sub(r"\d+ of \d+ frames? captured, ", "", headline(cut))
    assert text == re.sub(r"\d+ of \d+ frames? captured, ", "", headline(whole)) and tiles.search(text)
    assert f"layers.{{0..4}}.attention ×{5 * lengths}" in cut.render(500), "of each length five layers"
    assert "layers.2, one of 3 equal blocks ×3" in cut.render(500)
    assert cut.to_html().count("layers.{0..4}.attention") == whole.to_html().count("layers.{0..4}.attention") > 0
    assert Report.from_json(cut.to_json()) == cut


@pytest.mark.end_to_end
def test_what_a_policy_keeps_and_the_precision_of_every_linear(no_kernels):
    """Sums over the blocks; between them the whole has values that pieces have as their inputs. The last layer, which is
    a piece of another kind, recomputes nothing of weight."""
    whole, cut = reports(once, 2, policy={"ablock": "full", "eblock": "full"}, precision={"*.mlp.up": "fp8_current"})
    for kind in ("ablock", "eblock"):
        (one,) = (frame.remat[kind] for frame in whole.frames)
        parts = [frame.remat[kind] for frame in cut.frames if kind in (frame.remat or {})]
        for name in ("blocks", "recomputed"):
            assert sum(part[name] for part in parts) == one[name] > 0
    assert rows(frames(cut, "precision")) == rows(frames(whole, "precision"))
    assert {row["fqn"] for row in frames(cut, "precision")} >= {f"layers.{i}.mlp.up" for i in range(2)}


def required(wanted):
    """The error of a model that has not what is `wanted`."""
    torch._dynamo.reset()
    with record() as report, pytest.raises(errors.RequirementError) as caught:
        compiled(Model(4, dense=2), {"require": wanted})(ids())
    assert not report.frames
    return caught.value


def test_what_is_required_is_known_before_anything_runs(no_kernels, monkeypatch):
    monkeypatch.setattr(stitched._Stitched, "__call__", lambda *_: pytest.fail("it ran"))
    assert [required({"down_norm_up": wanted}).fired for wanted in (7, 9)] == [8, 8]
    misses = required({"moe": 2}).misses
    assert {miss.fqn for miss in misses} == {f"layers.{i}.mlp.experts.0" for i in range(2, 4)}


@pytest.mark.end_to_end
def test_equal_blocks_are_large_enough_for_a_plan_together(no_kernels, monkeypatch):
    monkeypatch.setattr(automatic, "LEAST_READ", 20)
    monkeypatch.setattr(automatic, "read_by_backward", lambda needed: 10)
    torch._dynamo.reset()
    model = Model(5, dense=2)
    with record() as report:
        step(compiled(model, dynamic=False), model, ids())
    small = {frame.block: frame.auto["reason"].startswith(SMALL) for frame in report.frames if frame.block}
    assert small == {"layers.0": False, "layers.2": False}
    (dense,) = (frame.auto for frame in report.frames if frame.block == "layers.0")
    assert dense["latents"]["recomputed"] == 2 * 2, "of each layer two"


class Broken(Stack):
    def forward(self, ids):
        hidden = super().forward(ids)
        torch._dynamo.graph_break()
        return hidden.exp()


def test_a_graph_break_and_what_recompiled_are_told_once(no_kernels):
    torch._dynamo.reset()
    model = Broken([Layer(i) for i in range(4)])
    eager = copy.deepcopy(model)
    with record() as report:
        call = torch.compile(model, backend="megacpp", options={"repeated_blocks": True}, dynamic=False)
        for tokens in (token_ids(), token_ids()[:, :4]):
            torch.testing.assert_close(call(tokens), eager(tokens), rtol=1e-4, atol=1e-5)
    assert [frame.calls for frame in report.frames if frame.block] == [4, 4]
    assert len([frame for frame in report.frames if frame.graph_break]) == 2
    assert len([frame for frame in report.frames if frame.recompiled]) == 2, "before the break, and behind it"
