"""`megacpp`: the command line.

megacpp explain package.module:callable [--json]    report of the model that the callable builds
megacpp estimate package.module:callable [--json]   memory of its training step, on fake tensors
megacpp plan package.module:callable [--plot FILE]  policies: the time of each against the memory of activations
megacpp passes                                      the passes, in the order they run
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="megacpp", description="What megacpp_compile makes of a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="what would be fused in a model, what not, and why, without running it",
        description="Explain a model. TARGET names a callable without required arguments that returns the model and "
        "its inputs: (model, args), (model, args, kwargs), or (model, kwargs) with kwargs a dict.",
    )
    explain.add_argument("target", metavar="module:callable", help="for instance examples.explain_hf:build")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a Config field, repeatable"
    )
    estimate = commands.add_parser(
        "estimate",
        help="memory of a model's training step, without allocating any",
        description="Estimate parameters, gradients, optimizer state and activations. TARGET as in `megacpp explain`.",
    )
    estimate.add_argument("target", metavar="module:callable")
    estimate.add_argument("--json", action="store_true", help="print it as JSON")
    estimate.add_argument("--optimizer", default="adamw", help="adamw, adamw_master, sgd, ... (default: %(default)s)")
    estimate.add_argument("--device", help="device to estimate for (default: the model's own)")
    estimate.add_argument("--eager", action="store_true", help="skip what the compiler's graphs keep")
    plan = commands.add_parser(
        "plan",
        help="checkpointing policies: what each costs in time and keeps in memory",
        description="Estimate policies on fake tensors, and mark the best. TARGET as in `megacpp explain`.",
    )
    plan.add_argument("target", metavar="module:callable")
    plan.add_argument("--json", action="store_true", help="print them as JSON")
    plan.add_argument("--plot", metavar="FILE", help="draw them, too, e.g. into plan.png (needs matplotlib)")
    plan.add_argument("--device", help="device to estimate for (default: the model's own)")
    commands.add_parser("passes", help="list the passes in the order they run")
    options = parser.parse_args(argv)
    if options.command == "passes":
        from megacpp_compile.passes._driver import all_passes

        for p in all_passes():
            print(f"{p.name:16s} {(sys.modules[p.__name__].__doc__ or '').splitlines()[0]}")  # type: ignore[attr-defined]
        return 0
    if options.command == "estimate":
        return _estimate(options)
    if options.command == "plan":
        return _plan(options)
    return _explain(options.target, options.option, options.json)


def _estimate(options: argparse.Namespace) -> int:
    from megacpp_compile.errors import MegacppError
    from megacpp_compile.memory.estimate import estimate

    try:
        model, args, kwargs = _load(options.target)
        settings = {"optimizer": options.optimizer, "device": options.device, "compiled": not options.eager}
        found = estimate(model, *args, **settings, **kwargs)
    except (ImportError, AttributeError, TypeError, ValueError, MegacppError) as error:
        print(f"megacpp estimate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from megacpp_compile.errors import MegacppError
    from megacpp_compile.memory import pareto

    try:
        model, args, kwargs = _load(options.target)
        found = pareto.points(model, *args, device=options.device, **kwargs)
        print(json.dumps([p.to_dict() for p in found], indent=1) if options.json else pareto.text(found))
        if options.plot:
            pareto.plot(found, options.plot)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, MegacppError) as error:
        print(f"megacpp plan: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(target: str, pairs: Sequence[str], as_json: bool) -> int:
    from megacpp_compile.errors import MegacppError
    from megacpp_compile.explainer import explain

    try:
        model, args, kwargs = _load(target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"megacpp explain: cannot build {target!r}: {error}", file=sys.stderr)
        return 2
    options = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    try:
        report = explain(model, *args, options=options, **kwargs)
    except MegacppError as error:
        print(f"megacpp explain: {error}", file=sys.stderr)
        return 2
    print(report.to_json(indent=1) if as_json else report)
    return 0


def _load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) of "module:callable". Raises ValueError for a target of another form or result."""
    name, colon, attribute = target.partition(":")
    if not colon or not attribute:
        raise ValueError("write it as module:callable")
    sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(name)
    for part in attribute.split("."):
        found = getattr(found, part)
    result = found()
    if not isinstance(result, tuple) or not 2 <= len(result) <= 3 or not callable(result[0]):
        raise ValueError("the callable must return (model, args), (model, args, kwargs) or (model, kwargs)")
    model, args, kwargs = result if len(result) == 3 else (*result, {})
    if isinstance(args, dict):
        args, kwargs = (), args
    return model, tuple(args), dict(kwargs)


if __name__ == "__main__":
    sys.exit(main())
