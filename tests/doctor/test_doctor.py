"""`megacpp doctor`: what it reads, which traps it names in planted environments, and what it says of this machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json

import pytest
import torch

from megacpp_compile import cli
from megacpp_compile.doctor import examine as home
from megacpp_compile.doctor import machine as machines
from megacpp_compile.doctor import trials as tried
from megacpp_compile.doctor.machine import Machine, cudnn_packages, installed, loaded_cudnn
from megacpp_compile.doctor.traps import traps
from megacpp_compile.doctor.trials import WIDTHS, Trial
from megacpp_compile.nn.attention import BACKENDS

MAPS = """\
7f00-7f01 r-xp 0 00:00 1   /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f01-7f02 r--p 0 00:00 1   /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f02-7f03 r-xp 0 00:00 2   /venv/lib/nvidia/cudnn/lib/libcudnn_graph.so.9.10.2
7f03-7f04 r-xp 0 00:00 3   /usr/lib/libc.so.6
7f04-7f05 rw-p 0 00:00 0   [heap]
"""
SECOND = "7f05-7f06 r-xp 0 00:00 4   /usr/lib/x86_64-linux-gnu/libcudnn.so.9 (deleted)\n"
SOUND = Machine(
    {"torch": "2.11.0+cu128", "triton": "3.6.0", "flash-attn-4": "4.0.0b36"}, {"nvidia-cudnn-cu12": "9.10.2.21"},
    {"/venv/lib/nvidia/cudnn/lib": ("libcudnn.so.9",)}, "91002", "", ("NVIDIA H200, sm_90",), "12.8", "3.11.9",
)  # fmt: skip
SERVED = [Trial(b, w, f, (), 1.0, 500.0) for w in WIDTHS for b, f in (("sdpa", "cudnn"), ("fa4", "fa4"))]


def test_what_is_read_off_the_memory_map_and_metadata():
    assert loaded_cudnn(MAPS) == {"/venv/lib/nvidia/cudnn/lib": ("libcudnn.so.9", "libcudnn_graph.so.9.10.2")}
    assert list(loaded_cudnn(MAPS + SECOND)) == ["/usr/lib/x86_64-linux-gnu", "/venv/lib/nvidia/cudnn/lib"]
    assert loaded_cudnn("") == {}
    found = cudnn_packages([("torch", "2.11"), ("nvidia-cudnn-cu13", "9.14"), ("nvidia_cudnn_cu12", "9.10")])
    assert found == {"nvidia-cudnn-cu13": "9.14", "nvidia_cudnn_cu12": "9.10"}
    assert installed(["torch", "no-such-package-anywhere"]) == {"torch": importlib.metadata.version("torch")}


@pytest.mark.parametrize(("name", "changed", "trials"), [
    ("two-cudnns", {"cudnn_loaded": loaded_cudnn(MAPS + SECOND)}, SERVED),
    ("two-cudnn-packages", {"cudnn_packages": {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cudnn-cu13": "9.14.0.64"}}, SERVED),
    ("cudnn-of-another", {"cudnn": "", "refusal": "RuntimeError: cuDNN version incompatibility"}, SERVED),
    ("cudnn-not-the-installed", {"cudnn": "90501"}, SERVED),
    ("cudnn-not-the-installed", {"cudnn": "8907"}, SERVED),
    ("no-triton", {"packages": {"torch": "2.11.0"}}, SERVED),
    ("torch-xla-of-another-torch", {"packages": {**SOUND.packages, "torch_xla": "2.9.0"}}, SERVED),
    ("fa4-does-not-run", {}, [Trial("fa4", WIDTHS[0], tag="dense_fa4_runtime", reason="no cutlass")]),
    ("unfused-attention", {}, [Trial("sdpa", WIDTHS[0], "unfused", (), 9.0, 5.0)]),
    ("unfused-attention", {}, [Trial("te", WIDTHS[0], "unfused", (), 9.0, 5.0)]),
    ("slow-attention", {}, [Trial("sdpa", WIDTHS[0], "flash", (), 3.4, 5.0), Trial("flex", WIDTHS[0], "flex", (), 1.0, 9.0)]),
])  # fmt: skip
def test_traps_by_name(name, changed, trials):
    found = traps(dataclasses.replace(SOUND, **changed), trials)
    assert [trap.name for trap in found] == [name]
    assert found[0].found and not found[0].found.endswith(".") and found[0].remedy.endswith(".")


def test_no_trap_at_its_edge_and_without_one():
    """Twice as long is not yet slow; another patch number that is equal is none; a CPU has no fused kernel to miss."""
    at = [Trial("sdpa", WIDTHS[0], "cudnn", (), 2.0, 5.0), Trial("flex", WIDTHS[0], "flex", (), 1.0, 9.0)]
    assert traps(SOUND, at) == []
    assert traps(dataclasses.replace(SOUND, packages={**SOUND.packages, "torch_xla": "2.11.1"}), SERVED) == []
    cpu = dataclasses.replace(SOUND, devices=())
    assert traps(cpu, [Trial("sdpa", WIDTHS[0], "unfused", (), 9.0, 5.0)]) == []
    assert traps(SOUND, SERVED) == [] and traps(Machine()) == []


def test_each_backend_is_tried_once_at_both_widths(monkeypatch):
    found = {(t.backend, t.widths): t for t in tried.trials("cpu")}
    assert set(found) == {(b, w) for b in BACKENDS for w in WIDTHS}
    served = {key: t for key, t in found.items() if not t.tag}
    assert {b for b, _ in served} >= {"sdpa", "plain", "flex"}
    assert all(t.milliseconds > 0 and t.rate > 0 and t.kernels for t in served.values())
    assert [served["sdpa", w].family for w in WIDTHS] == ["unfused", "flash"]
    assert found["fa4", WIDTHS[0]].tag == "dense_fa4_cuda_only" and found["te", WIDTHS[0]].tag == "device"
    flops, one = 2 * 128 * 128 * (192 + 128), served["sdpa", WIDTHS[0]]
    assert one.rate == pytest.approx(flops / (one.milliseconds / 1e3) / 1e12)


def test_what_a_backend_raises_or_torch_refuses_is_a_result(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no workspace")

    monkeypatch.setattr(tried, "attention", broken)
    found = tried.trial("sdpa", WIDTHS[0], "cpu")
    assert (found.tag, found.milliseconds) == ("raised", None) and "no workspace" in found.reason
    def refuse():
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 10, 2), found (9, 5, 1)")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    found = machines.machine()
    assert found.cudnn == "" and "found (9, 5, 1)" in found.refusal


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(home, "trials", lambda device: [dataclasses.replace(t, backend=t.backend) for t in SERVED])
    monkeypatch.setattr(machines, "_memory_map", lambda: MAPS)
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert importlib.metadata.version("torch") in out and "no known trap" in out and "/venv/lib/nvidia/cudnn/lib" in out
    monkeypatch.setattr(machines, "_memory_map", lambda: MAPS + SECOND)
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    assert "trap two-cudnns: cuDNN is loaded from /usr/lib/x86_64-linux-gnu and from" in capsys.readouterr().out
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["traps"][0]["name"] == "two-cudnns" and found["trials"][0]["family"] == "cudnn"
