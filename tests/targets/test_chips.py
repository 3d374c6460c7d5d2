"""Labels below "cuda": pins, refusals, and that nothing of one label is merged with another's. Capabilities are faked."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import megacpp_compile
from benchmarks import performance_page
from benchmarks.conditions import conditions
from megacpp_compile import PrecisionPlan, replace_linears
from megacpp_compile.config import rules
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BadOptionError, TargetMismatchError, TargetRecipeError
from megacpp_compile.evidence import gate
from megacpp_compile.evidence.record import verdict
from megacpp_compile.evidence.rollout import standings
from megacpp_compile.report.records import Frame
from megacpp_compile.targets import chips
from tests.evidence.test_evidence import CANONICAL, DETACHED, record
from tests.precision import fake_te

NVFP4 = PrecisionPlan({"*": "nvfp4"}, gate=False)


def on(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def model():
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


@pytest.mark.parametrize(("capability", "label"), [((9, 0), "sm_90"), ((10, 0), "sm_100a"), ((12, 1), "sm_121a")])
def test_a_capability_has_a_label(monkeypatch, capability, label):
    on(monkeypatch, capability)
    assert chips.current().label == chips.label("cuda") == label
    assert chips.label("cpu") == "cpu" and chips.label("tpu") == "tpu"


def test_the_table_hangs_together():
    assert len({c.label for c in chips.CHIPS}) == len({c.capability for c in chips.CHIPS}) == len(chips.CHIPS)
    for chip in chips.CHIPS:
        assert chip.features <= set(chips.FEATURES) and chip.pins.keys() == chip.why_pinned.keys()
        assert not chip.utilisation_of or chip.utilisation_of in chip.peaks
        assert chips.of_capability(*chip.capability) is chip and chip.label in chip.describe()


def test_an_unknown_capability_has_nothing_optional(monkeypatch, caplog):
    on(monkeypatch, (10, 3))
    chip = chips.current()
    assert chip.label == "sm_103" and not chip.features and not chip.known and not chip.pins
    assert chip.lacks("nvfp4") == "sm_103 has no fp4" and chip.utilisation(100.0) is None
    rules.announce_chip.cache_clear()
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        for _ in range(2):
            rules.announce_chip(chips.current())
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "target cuda, sm_103: not in the table of devices: no optional feature is assumed; no pins"


def test_without_cuda_there_is_no_chip(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chips.current() is None and chips.label("cuda") == "cuda"


def test_utilisation_is_of_one_peak_a_label_and_the_log_has_the_pins():
    assert chips.of_capability(12, 1).utilisation(250.0) == 0.5, "of NVFP4's"
    assert chips.of_capability(9, 0).utilisation(989.0) == 1.0, "of bf16's"
    said = chips.of_capability(12, 1).describe()
    assert "sm_121a" in said and "disable_rht=True pinned" in said and "not stable on that target" in said
    assert chips.of_capability(9, 0).describe().endswith("no pins")


@pytest.mark.parametrize(("capability", "asked", "runs_with"), [
    ((12, 1), None, True), ((12, 1), True, True), ((10, 0), None, False), ((10, 0), True, True),
    ((10, 0), False, False),
])
def test_the_transform_as_pinned_or_asked(monkeypatch, te, capability, asked, runs_with):
    on(monkeypatch, capability)
    made, ran = model(), []
    plan = PrecisionPlan({"*": "nvfp4"}, gate=False, disable_rht=asked)
    table = replace_linears(made, plan, target="cuda")
    assert table.done == ("0", "2") and [m.recipe for m in made if hasattr(m, "recipe")] == ["nvfp4"] * 2
    linear = fake_te.Linear.forward

    def forward(self, *args, **kwargs):
        ran.append(fake_te.STATE.recipe)
        return linear(self, *args, **kwargs)

    monkeypatch.setattr(fake_te.Linear, "forward", forward)
    made(torch.randn(16, 32))
    assert [type(r).__name__ for r in ran] == ["NVFP4BlockScaling"] * 2
    assert {r.disable_rht for r in ran} == {runs_with}


def test_a_plan_that_asks_for_the_transform_on_gb10_is_refused(monkeypatch, te):
    on(monkeypatch, (12, 1))
    made, plan = model(), PrecisionPlan({"*": "nvfp4"}, gate=False, disable_rht=False)
    with pytest.raises(TargetRecipeError, match="'nvfp4' on sm_121a.*not stable.*set it to True") as caught:
        replace_linears(made, plan, target="cuda")
    assert caught.value.target == "sm_121a" and type(made[0]) is nn.Linear
    # A plan for a device that is not here is carried out nowhere, and refused nowhere.
    assert not replace_linears(made, plan, target="cpu").done


def test_a_device_or_an_engine_without_fp4_keeps_its_linears(monkeypatch, te):
    on(monkeypatch, (9, 0))
    table = replace_linears(model(), NVFP4, target="cuda")
    assert not table.done and table.reason == "sm_90 has no fp4"
    on(monkeypatch, (10, 0))
    monkeypatch.delattr(te, "is_nvfp4_available")
    table = replace_linears(model(), NVFP4, target="cuda")
    assert not table.done and "no is_nvfp4_available" in table.reason


def test_what_a_plan_says_of_nvfp4():
    assert PrecisionPlan.from_manifest(NVFP4.manifest()) == NVFP4
    asks = PrecisionPlan({"*": "nvfp4"}, disable_rht=True)
    assert PrecisionPlan.from_manifest(asks.manifest()) == asks == PrecisionPlan.of(asks.to_dict())
    assert asks.traceable().recipe_for("mlp") == "bf16" and asks.traceable().disable_rht is None
    for make, words in (
        (lambda: PrecisionPlan({"*": "fp8_current"}, disable_rht=True), "disable_rht.*no Hadamard transform"),
        (lambda: PrecisionPlan({"*": "nvfp4"}, disable_rht="no"), "precision.disable_rht"),
        (lambda: Config(precision=NVFP4), "nvfp4"),
    ):
        with pytest.raises(BadOptionError, match=words):
            make()


@pytest.mark.parametrize(("where", "label"), [
    ({"label": "sm_121a"}, "sm_121a"), ({"capability": "9.0"}, "sm_90"), ({"capability": "12.1"}, "sm_121a"),
    ({"capability": "12.0"}, "sm_120"), ({"kind": "cpu", "capability": None}, "cpu"), ({}, ""),
    ({"capability": "nine"}, ""),
])
def test_where_a_measurement_is_from(where, label):
    assert chips.label_of(where) == label


def test_rows_of_two_labels_are_not_merged_nor_a_label_and_another_capability():
    h200, gb10 = {"capability": "9.0"}, {"label": "sm_121a"}
    assert chips.one_label("rows", [h200, h200, {}]) == "sm_90" and chips.one_label("rows", []) == ""
    with pytest.raises(TargetMismatchError, match="rows would merge rows of sm_121a and sm_90"):
        chips.one_label("rows", [h200, gb10])
    found = verdict(record(bound={"label": "sm_121a"}))
    assert not found.counts and "'sm_121a'" in found.why and "'sm_90'" in found.why


def test_evidence_of_two_labels_is_not_merged():
    """Of the same profile in the two environments of a rollout, or of two profiles in one."""
    h200 = record()
    for other in (record(environment=DETACHED, bound={"capability": "12.1", "label": "sm_121a", "device": "GB10"}),
                  record("dense_fa4_train_2", bound={"capability": "10.0", "device": "B200"})):  # fmt: skip
        assert verdict(h200).counts and verdict(other).counts
        for merge in (standings, gate.decide):
            with pytest.raises(TargetMismatchError, match="a rollout would merge rows of"):
                merge([h200, other])
    elsewhere = record(environment="gb10_canonical", bound={"capability": "12.1", "device": "GB10"})
    standings([h200, elsewhere])  # no environment of this rollout
    assert CANONICAL != elsewhere.environment


def test_a_page_of_benchmarks_is_of_one_label(tmp_path):
    source = Path(performance_page.RESULTS) / "ssd.json"
    document = json.loads(source.read_text())
    document["conditions"] = {**document["conditions"], "capability": "12.1", "label": "sm_121a"}
    (other := tmp_path / "gb10.json").write_text(json.dumps(document))
    with pytest.raises(TargetMismatchError, match="one page of benchmarks"):
        performance_page.page([source, other], None, tmp_path)
    assert "label sm_121a" in performance_page.page([other], None, tmp_path)


def test_frames_and_conditions_have_the_label(no_kernels, monkeypatch):
    with megacpp_compile.record() as report:
        torch.compile(model(), backend="megacpp")(torch.randn(4, 32))
    assert [f.label for f in report.frames] == ["cpu"] and report.to_dict()["frames"][0]["label"] == "cpu"
    on(monkeypatch, (12, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA GB10")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: type("P", (), {"total_memory": 2**37}))
    found = conditions(torch.device("cuda"), 0)
    assert found["label"] == "sm_121a" and found["stated_peak"] == {"nvfp4": 500.0} and Frame().label == ""
