"""`python -m benchmarks.parallel`: its whole path on one rank, and what it calls wrong."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from benchmarks import parallel


def measured():
    """As `measure` leaves it: a layer fires two sites, and two layers were compiled."""

    def row(name, ms, losses, peak, sites):
        of_ranks = [{"peak_mib": peak, "sites": sites, "fell": [], "misses": []}] * 2
        return {"name": name, "ms": {"median": ms}, "losses": losses, "graphs": 2, "of_ranks": of_ranks, "first_s": 1.0}

    rows = [
        row("eager", 20.0, [1.0, 0.5], 300.0, {}),
        row("Inductor", 10.0, [1.0, 0.5001], 200.0, {}),
        row("megacpp", 9.0, [1.0, 0.5002], 100.0, {"down_norm_up": 4, "mla_rope_q": 2}),
    ]
    alone = {"down_norm_up": 2, "mla_rope_q": 1}
    return {"what": "tensor parallel", "ranks": 2, "sites_of_one_device": alone, "rows": rows}


def judged(change):
    found = copy.deepcopy(measured())
    change(found["rows"][2])
    parallel.judge(found)
    return found


def test_ratios_and_distances():
    found = judged(lambda row: None)
    ours = found["rows"][2]
    assert ours["wrong"] == []
    assert (ours["per_inductor"], ours["peak_per_inductor"]) == (0.9, 0.5)
    assert ours["off"] == pytest.approx(4e-4)
    assert "tensor parallel, 2 ranks; one device fires down_norm_up 2, mla_rope_q 1" in parallel.shown(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row["losses"].__setitem__(1, 0.51), "losses are 2.0e-02 from eager's, Inductor's 2.0e-04"),
        (lambda row: row["of_ranks"].__setitem__(1, row["of_ranks"][0] | {"sites": {"down_norm_up": 4}}), "every rank"),
        (lambda row: row["of_ranks"][0]["sites"].update(mla_rope_q=1), "every rank"),
        (lambda row: row.update(graphs=3), "3 graphs, where Inductor has 2"),
    ],
    ids=["losses", "a rank", "a layer", "graphs"],
)
def test_what_is_wrong(change, says):
    found = judged(change)
    (wrong,) = found["rows"][2]["wrong"]
    assert says in wrong and f"WRONG: {wrong}" in parallel.shown(found)


@pytest.mark.slow
def test_whole_path_on_one_rank(no_kernels, tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    settings = ("recompile_limit", "capture_scalar_outputs")
    out = tmp_path / "parallel.json"
    asked = ["--device", "cpu", "--quick", "--layers", "1", "--steps", "2", "--turns", "1", "--calls", "1"]
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in settings}):
        code = parallel.main([*asked, "--how", "tensor", "--rows", "eager", "megacpp", "--out", str(out)])
    (found,) = json.loads(out.read_text())["measured"]
    assert code == 0 and found["ranks"] == 1
    eager, ours = found["rows"]
    assert found["sites_of_one_device"] == ours["of_ranks"][0]["sites"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-2)  # bfloat16, two steps
    assert "down_norm_up" in capsys.readouterr().out
