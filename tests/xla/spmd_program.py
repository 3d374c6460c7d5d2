"""An MLA block on four virtual devices, in a process of its own: XLA reads its flags, and the runtime its number of
devices, once. Prints what `test_spmd.py` asks about as JSON.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 PYTHONPATH=. python tests/xla/spmd_program.py tensor

Needs torch_xla.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json

import torch
from torch import nn

import megacpp_compile
from megacpp_compile import NativeLayerSpec, ShardingPlan, sharding
from megacpp_compile.errors import ShardingError
from tests.corpus.spellings import PlainMLA, tables
from tests.xla.test_plain_models import compilations, difference

if importlib.util.find_spec("torch_xla") is not None:  # --help needs none
    import torch_xla
    import torch_xla.runtime

SIZES = {"heads": 4, "q_lora": 20, "kv_lora": 24, "nope": 16, "rope": 8, "v": 12}
UP, OUT = "*.*_b.weight", "*.o.weight"
PLANS = {
    # Heads over the devices: queries, keys and values by rows, the output by columns.
    "tensor": ShardingPlan(mesh={"model": 4}, rules={UP: ("model", None), OUT: (None, "model")}),
    # Rows of every weight, and the batch, over the devices.
    "data": ShardingPlan({"data": 4}, {"*.*_norm.weight": None, "*.weight": ("data", None)}, batch=("data",)),
}


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(16, 8, bias=False), nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 16, bias=False)

    def forward(self, x):
        return x + self.up(self.norm(self.down(x))).tanh()


def spec(t: torch.Tensor) -> str:
    return torch_xla._XLAC._get_xla_sharding_spec(t)


def differences(there: nn.Module, module: nn.Module) -> dict[str, float]:
    pairs = zip(there.named_parameters(), module.parameters(), strict=True)
    return {name: difference(p.grad, q.grad) for (name, p), q in pairs}


def block_of(plan: ShardingPlan, device: torch.device) -> dict:
    """The block compiled under the plan, against eager on CPU."""
    block, x = PlainMLA(40, **SIZES), torch.randn(4, 8, 40, requires_grad=True)
    angles, grad = tables(block.rope.table, 8, 8), torch.randn(4, 8, 40)
    there = copy.deepcopy(block).to(device)
    moved, back = x.detach().to(device).requires_grad_(), grad.to(device)
    if plan.batch:
        for name, t in (("x", moved), ("grad", back)):
            sharding.pin(plan, t, (plan.batch, None, None), name)
    torch_xla.sync(wait=True)
    with megacpp_compile.record() as report:
        call = torch.compile(there, backend="megacpp", options={"strict": True, "sharding": plan})
        result = call(moved, *(t.to(device) for t in angles))
        result.backward(back)
    torch_xla.sync(wait=True)
    out = block(x, *angles)
    out.backward(grad)
    wrong = {"out": difference(result, out), "x": difference(moved.grad, x.grad), **differences(there, block)}
    compiled = [compilations()]
    for _ in range(4):
        before = compilations()
        moved.grad = None
        there.zero_grad()
        call(moved, *(t.to(device) for t in angles)).backward(back)
        torch_xla.sync(wait=True)
        compiled.append(compilations() - before)
    return {
        "differences": wrong, "compiled": compiled, "specs": {name: spec(p) for name, p in there.named_parameters()},
        "report": str(report), "pinned": report.frames[0].sharding["pinned"], "sites": len(report.sites),
    }


def blocks_of(device: torch.device) -> dict:
    """Equal blocks with one artifact: it is compiled for the first, and pins what the others run it on."""
    plan = ShardingPlan(mesh={"model": 4}, rules={"*.up.weight": ("model", None)})
    model, x = nn.Sequential(*(LowRank() for _ in range(4))), torch.randn(2, 3, 16)
    there = copy.deepcopy(model).to(device)
    with megacpp_compile.record() as report:
        megacpp_compile.compile(there, sharding=plan, strict=True)
        result = there(x.to(device))
        result.sum().backward()
    model(x).sum().backward()
    return {
        "differences": {"out": difference(result, model(x)), **differences(there, model)},
        "specs": {name: spec(p) for name, p in there.named_parameters()}, "frames": len(report.frames),
        "report": str(report),
    }


def native_of(device: torch.device) -> dict:
    """What modules of NativeLayerSpec pin as they are constructed, and where they cannot."""
    plan = ShardingPlan(mesh={"model": 4}, rules={"mlp.fc1.weight": ("model", None), "mlp.fc2.weight": (None, "model")})
    spec_of = NativeLayerSpec()
    with sharding.constructing(plan, "mlp"):
        with sharding.constructing(plan, "fc1"):
            fc1 = spec_of["linear_fc1"](8, 12, normalization="RMSNorm", device=device)
        with sharding.constructing(plan, "fc2"):
            fc2 = spec_of["linear_fc2"](12, 8, device=device)
    refused = {}
    for name, mesh, fits in (("indivisible", {"model": 4}, ("model", None)), ("too few", {"model": 2}, (None, None))):
        try:
            sharding.pin(ShardingPlan(mesh=mesh), torch.zeros(6, 8, device=device), fits, "w")
        except ShardingError as error:
            refused[name] = str(error)
    named = [*fc1.named_parameters(prefix="fc1"), *fc2.named_parameters(prefix="fc2")]
    return {"specs": {name: spec(p) for name, p in named}, "refused": refused}


def main(names: list[str]) -> None:
    torch_xla.runtime.use_spmd()
    device, found = torch_xla.device(), {}
    for name in names:
        torch.manual_seed(0)
        torch._dynamo.reset()
        found[name] = {"block": block_of(PLANS[name], device)}
        if name == "tensor":
            found[name] |= {"blocks": blocks_of(device), "native": native_of(device)}
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", choices=PLANS, nargs="+", help="what is sharded, one after the other")
    plans = parser.parse_args().plans
    if importlib.util.find_spec("torch_xla") is None:
        parser.exit(2, "tests/xla/spmd_program.py needs torch_xla, which is not installed: make test-xla\n")
    main(plans)
