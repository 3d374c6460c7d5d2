"""The launch record: what a run was about to do, and that evidence names it only where it is its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megacpp_compile import Config, LaunchRecord, estimate, launch_record
from megacpp_compile.errors import BadOptionError, EvidenceError, NotAModuleError, UnknownOptionError
from megacpp_compile.evidence import binding, run
from megacpp_compile.evidence.record import Record, read

ROOT = Path(__file__).parents[1]
PASSED = "<testsuites><testsuite tests='1' failures='0' errors='0' skipped='0'/></testsuites>"


def launched(path, model=None, x=None, **how):
    record = launch_record(Model() if model is None else model, torch.randn(6, 8) if x is None else x, path=path, **how)
    return record, json.loads(path.read_text())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(8, 4), nn.Linear(8, 8)
        self.up.bias.requires_grad_(False)

    def forward(self, x, scale=None):
        gates, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.up(x) * gates.sum(-1, keepdim=True) * (1 if scale is None else scale)


OPTIONS = {"policy": {"ablock": "full", "recompute": ("moe",)}, "disable": "moe", "block_kinds": {"up": "eblock"}}


def test_one_file_says_it_all(tmp_path):
    model = Model()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found, data = launched(tmp_path / "a", model, options=OPTIONS, folder=ROOT, scale=torch.ones(1))
    assert isinstance(found, LaunchRecord)
    assert data == json.loads(found.to_json()) and data["format"] == 1
    assert data["model"] == {"class": "Model", "parameters": 8 * 4 + 4 + 8 * 8 + 8, "trainable": 8 * 4 + 4 + 8 * 8}
    assert data["inputs"] == [{"shape": [6, 8], "dtype": "float32"}, {"shape": [1], "dtype": "float32"}]
    own = estimate(model, torch.randn(6, 8), compiled=False, scale=torch.ones(1))
    assert data["estimate"]["fields"] == dict(own.fields) and data["estimate"]["eager"] == own.eager
    assert data["policy"] == data["options"]["policy"] and data["policy"]["recompute"] == ["moe"]
    assert data["precision"] is None and data["options"]["disable"] and "verify" in data["options"], "defaults, too"
    machine = data["machine"]
    assert machine == json.loads(json.dumps(binding.machine_binding(ROOT))) and machine["label"] and machine["torch"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_plan_and_what_is_no_plain_data_are_in_it(tmp_path):
    _, data = launched(tmp_path / "a", options=Config(precision="fp8_current"))
    assert data["precision"]["roles"]["experts"] == "fp8_current" and data["policy"] == "auto"

    class Pass:
        def __repr__(self):
            return "<a pass>"

        def __call__(self, graph):
            pass

    _, data = launched(tmp_path / "a", options={"inductor": {"post_grad_custom_post_pass": Pass()}})
    assert data["options"]["inductor"] == {"post_grad_custom_post_pass": "<a pass>"}


def test_a_model_that_reads_values_is_launched_all_the_same(tmp_path):
    class Reads(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    found, _ = launched(tmp_path / "a", Reads(), torch.randn(3))
    assert "cannot run on shapes alone" in found.estimate["refused"]


def test_what_cannot_be_launched(tmp_path):
    for model, options, error in (({}, {}, NotAModuleError), (Model(), {"polcy": 1}, UnknownOptionError),
                                  (Model(), {"policy": "fulll"}, BadOptionError)):  # fmt: skip
        with pytest.raises(error):
            launched(tmp_path / "a", model, options=options)
    assert not list(tmp_path.iterdir())


def evidence(tmp_path, **launch):
    return run.run("dense_fa4_contract", "ci", tmp_path / "records", ROOT, lambda *_: PASSED, **launch)[0]


def test_evidence_names_its_launch(tmp_path):
    record, _ = launched(tmp_path / "a", folder=ROOT)
    found = evidence(tmp_path, launch=tmp_path / "a")
    assert found[0].launch == record.digest and read(tmp_path / "records") == found
    assert Record.of(json.loads(found[0].to_json())) == found[0]
    assert evidence(tmp_path)[0].launch is None


@pytest.mark.parametrize(("key", "other"), [("host", "elsewhere"), ("commit", "0" * 12), ("label", "sm_121a")])
def test_a_launch_of_another_machine_or_code_is_none_of_its(tmp_path, key, other):
    _, data = launched(tmp_path / "a", folder=ROOT)
    data["machine"][key] = other
    (tmp_path / "a").write_text(json.dumps(data))
    with pytest.raises(EvidenceError, match=f"its {key} is {other!r}"):
        evidence(tmp_path, launch=tmp_path / "a")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"machine": {}}'])
def test_what_is_no_launch_record(tmp_path, text):
    (tmp_path / "a").write_text(text)
    for path in (tmp_path / "a", tmp_path / "nowhere"):
        with pytest.raises(EvidenceError, match="launch record .* it is none"):
            binding.launched(path, {})
