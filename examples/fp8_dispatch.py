"""Dispatch by what is in memory: a tensor that says bfloat16 and holds one byte an element, given to the ops that have
an fp8 path and, by mistake, to one that has none.

    python examples/fp8_dispatch.py

`Fp8` stands for the wrapper of a library, as Transformer Engine's `Float8Tensor` is one, and widens itself for whatever
op it is given to. It is registered once; from there on `storage_dtype` tells it, `linear` and `sparse_mla` take its
payload and scale, and the sentinel names the code that widens it. Runs on CPU, without Transformer Engine.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import megacpp_compile
from megacpp_compile.frontend.tensor_subclasses import linear
from megacpp_compile.nn import fp8_wrappers
from megacpp_compile.precision.sentinel import Sentinel


class Fp8(torch.Tensor):
    """A payload in e4m3 and one scale, which says that it is bfloat16 and has no address."""

    payload: Tensor
    scale: Tensor

    def __new__(cls, values: Tensor) -> "Fp8":
        made: Fp8 = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)  # type: ignore[assignment]
        made.scale = values.abs().amax().float() / 448
        made.payload = (values.float() / made.scale).to(torch.float8_e4m3fn)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        wide = tree_map_only(cls, lambda t: (t.payload.float() * t.scale).bfloat16(), (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def main(argv: list[str] | None = None) -> int:
    """The number of calls that went another way than they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (default: %(default)s)")
    torch.manual_seed(parser.parse_args(argv).seed)
    fp8_wrappers.register(Fp8, lambda t: (t.payload, t.scale))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    weight, rows = torch.randn(32, 64), torch.randn(1, 128, 1, 64)
    held, cache = Fp8(weight), Fp8(rows)
    print(f"address {held.data_ptr()}, to dispatch by {fp8_wrappers.storage_dtype(held)}: {fp8_wrappers.split(held)}")

    q = torch.randn(1, 8, 4, 64, dtype=torch.bfloat16)
    indices = torch.randint(0, 128, (1, 8, 1, 16), dtype=torch.int32)
    attend: Any = {"d_v": 48, "causal": False}
    calls: dict[str, Any] = {
        "linear, on the payload": (lambda: linear(x, held), x.float() @ weight.t()),
        "sparse_mla, on the payload": (
            lambda: megacpp_compile.sparse_mla(q, cache, indices, **attend)[0],
            megacpp_compile.sparse_mla(q.float(), rows, indices, **attend)[0],
        ),
        "torch's matmul, by mistake": (lambda: x @ held.t(), x.float() @ weight.t()),
    }  # fmt: skip
    wrong = 0
    for index, (name, (call, wanted)) in enumerate(calls.items()):
        with Sentinel(torch.nn.Module()) as sentinel:
            off = error(call(), wanted)
        seen = "; ".join(map(str, sentinel.findings)) or "nothing is widened"
        print(f"{name}: {off:.1%} off the numbers that were rounded; {seen}")
        wrong += off > 0.1 or bool(sentinel.findings) != (index == 2)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
