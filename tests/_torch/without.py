"""A step of a small model on a torch that lacks one private symbol: what each lack does, as JSON.

    python -m tests._torch.without fakes.is_fake ops.grouped_mm+ops.scaled_mm

KEY: one of SYMBOLS, several at once joined by "+", "none", or "all", which is without any step: every module of the
package is imported. Each runs in a fork of a process that has torch loaded and
has compiled by it, and that has of the package only the table. Inductor goes up to and with
its post-grad passes; what they leave runs in eager.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence

import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import nn
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx as inductor
from torch._inductor.virtualized import V

from megacpp_compile._torch import _registry
from megacpp_compile._torch.symbols import SYMBOLS


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 8, bias=False), nn.Tanh())


def code(gm, example_inputs, *, is_inference=False, **_):
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        inductor.view_to_reshape(gm)
        inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
    assert not any("megacpp" in str(n.target) for n in gm.graph.nodes), "left without a lowering"
    return make_boxed_func(gm.forward)


def outcome(hidden: set[str]) -> dict[str, object]:
    real, paths = _registry.find, {SYMBOLS[key].path for key in hidden}

    asked = set()

    def find(path, default=None):
        asked.add(path)
        return default if any(path == p or path.startswith(f"{p}.") for p in paths) else real(path, default)

    _registry.find = find
    inductor.compile_fx = functools.partial(inductor.compile_fx, inner_compile=code)
    import megacpp_compile
    from megacpp_compile.backend import megacpp

    eager, x = model(), torch.randn(3, 8)
    with megacpp_compile.record() as report, torch._functorch.config.patch(enable_autograd_cache=False):
        got, want = (
            torch.autograd.grad(call(x).sum(), list(eager.parameters()))
            for call in (torch.compile(eager, backend=megacpp), eager)
        )
    torch.testing.assert_close(got, want)
    return {
        "fused": len(report.sites), "reasons": [f.reason for f in report.frames], "asked": sorted(asked),
        "uncounted": [s.saved_reason for s in report.sites],
    }  # fmt: skip


def warm() -> None:
    """What torch imports and sets up at its first compilation, once for all forks: nothing of it is the package's."""
    compile_fx = functools.partial(inductor.compile_fx, inner_compile=code)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model(), backend=compile_fx)(torch.randn(3, 8)).sum().backward()
    torch._dynamo.reset()


def imported() -> dict[str, object]:
    """How many modules the package has where torch lacks all symbols of the table: none of them may need one."""
    real, paths = _registry.find, {symbol.path for symbol in SYMBOLS.values()}
    _registry.find = lambda path, default=None: default if path in paths else real(path, default)
    import megacpp_compile

    count = 0
    for module in pkgutil.walk_packages(megacpp_compile.__path__, "megacpp_compile."):
        try:
            importlib.import_module(module.name)
            count += 1
        except ModuleNotFoundError as error:  # an optional package
            if (error.name or "").split(".")[0] in ("torch", "megacpp_compile"):
                raise
    return {"imported": count}


def forked(result_of: Callable[[], dict[str, object]]) -> dict[str, object]:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            result = result_of()
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        os.write(write, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests._torch.without", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="+", metavar="KEY", help="what this torch is to lack, in turns")
    keys = parser.parse_args(argv).keys
    if unknown := {part for key in keys for part in key.split("+")} - {*SYMBOLS, "none", "all"}:
        parser.error(f"no symbol of the table: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    warm()
    assert not {"megacpp_compile.backend", "megacpp_compile.pipeline"} & sys.modules.keys()
    steps = {key: functools.partial(outcome, set(key.split("+")) - {"none"}) for key in keys}
    print(json.dumps({key: forked(imported if key == "all" else steps[key]) for key in keys}))


if __name__ == "__main__":
    main()
