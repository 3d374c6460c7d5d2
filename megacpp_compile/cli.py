"""`megacpp`: the command line.

megacpp explain package.module:callable [--html FILE]  report of the model that the callable builds
megacpp compile package.module:callable -o FILE        code of that model in a file, for other processes
megacpp estimate package.module:callable [--json]      memory of its training step, on fake tensors
megacpp plan package.module:callable [--plot FILE]     policies: the time of each against the peak of memory
megacpp passes                                         the passes, in the order they run
megacpp tags [TAG ...]                                 what tags of a report mean, and what to write instead
megacpp doctor [--json]                                what this machine has, who serves attention on it, known traps
megacpp evidence run|status|gate                       what is proved of attention, where, and what a promotion lacks
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import platform
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_TARGET = """\
module:callable names a callable that needs no arguments and returns the model and its inputs: (model, args),
(model, args, kwargs), or (model, kwargs) with kwargs a dict. The module is found as Python finds it from the current
directory; the example is one of a checkout and needs transformers.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, the command's own (1: the doctor found a trap, the gate is
    blocked, a run failed), or 2 where a sentence on stderr says what is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help()
        return 0
    from megacpp_compile.errors import MegacppError
    from megacpp_compile.report.user_code import first_line

    try:
        with _quiet(given.verbose):
            return given.run(given) or 0
    except Exception as error:
        if given.verbose:
            traceback.print_exc()
        if isinstance(error, MegacppError):
            text = str(error)
        elif isinstance(error, OSError) and error.filename:  # a file to write
            text = f"{error.strerror}: {error.filename!r}"
        else:
            text = f"internal error: {first_line(error)}. `--verbose` shows where: please report it."
        print(f"megacpp {given.command}: {text}", file=sys.stderr)
        return 2


class _Version(argparse.Action):
    """Prints releases; torch is imported for it alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        import megacpp_compile

        ours = f"megacpp_compile {megacpp_compile.__version__}"
        print(f"{ours}, torch {torch.__version__}, Python {platform.python_version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megacpp", description="What megacpp_compile makes of a model.")
    parser.add_argument("--version", action=_Version, nargs=0, help="this package's, torch's and Python's")
    commands = parser.add_subparsers(dest="command")

    def command(name: str, run: Any, help: str, example: str) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        about = f"{help[0].upper()}{help[1:]}.\n\n{_TARGET if run in _OF_MODELS else ''}"
        made = commands.add_parser(name, help=help, description=about, epilog=f"example:\n  {example}",
                                   formatter_class=form)  # fmt: skip
        made.set_defaults(run=run)
        made.add_argument("--verbose", action="store_true", help="torch's warnings, and tracebacks of errors")
        if run in _OF_MODELS:
            made.add_argument("target", metavar="module:callable")
            made.add_argument("--json", action="store_true", help="print JSON")
            made.add_argument("--option", action="append", default=[], metavar="KEY=VALUE",
                              help="a Config field, repeatable; VALUE is a Python or JSON literal, else text: "
                                   "strict=true, disable=moe, require='{\"moe\": 2}', inductor.max_autotune=true"
                              )  # fmt: skip
        return made

    explain = command("explain", _explain, "what would be fused in a model, what not, and why, without running it",
                      "megacpp explain examples.explain_hf:build --option strict=true")  # fmt: skip
    explain.add_argument("--html", metavar="FILE", help="write it as one page for a browser, too: modules, source "
                                                        "lines, each site's graph before and after")  # fmt: skip
    ahead = command("compile", _compile, "compile a model without running it, and write its code for other processes",
                    "megacpp compile examples.explain_hf:build -o model.code --inference")  # fmt: skip
    ahead.add_argument("-o", "--output", metavar="FILE", required=True, help="what `load_compiled` reads")
    ahead.add_argument("--inference", action="store_true", help="without a backward, for calls under torch.no_grad()")
    ahead.add_argument("--dynamic", action="store_true", help="for inputs of other sizes, too")
    estimate = command("estimate", _estimate, "memory of a model's training step, without allocating any",
                       "megacpp estimate examples.explain_hf:build --optimizer adamw_master")  # fmt: skip
    estimate.add_argument("--optimizer", default="adamw", type=_number_or_text, metavar="NAME",
                          help="adamw, adamw_bf16, adamw_8bit, adamw_master, momentum, sgd, or bytes a parameter "
                               "(default: %(default)s)")  # fmt: skip
    estimate.add_argument("--eager", action="store_true", help="skip what the compiler's graphs keep")
    plan = command("plan", _plan, "checkpointing policies: what each costs in time and leaves at the peak of memory",
                   "megacpp plan examples.explain_hf:build --plot plan.png")  # fmt: skip
    plan.add_argument("--plot", metavar="FILE", help="draw them too (needs matplotlib)")
    for made in (estimate, plan):
        made.add_argument("--device", help="device to estimate for, or a GPU that need not be here: a100, "
                                             "h100, h200, b200 (default: the model's own)")  # fmt: skip
    command("passes", _passes, "list the passes in the order they run", "megacpp passes")
    tags = command("tags", _tags, "what tags of a report mean, and what to write instead", "megacpp tags escapes dtype")
    tags.add_argument("tags", nargs="*", metavar="TAG", help="a near miss's or an attention's (default: all)")
    tags.add_argument("--page", metavar="FILE", help="rewrite the table of docs/troubleshooting.md instead")
    doctor = command("doctor", _doctor, "what this machine has, who serves attention on it, and traps that it is in",
                     "megacpp doctor")  # fmt: skip
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="where to try attention (default: the GPU's, if any)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    evidence = command("evidence", _evidence, "what is proved of attention, and where: run a profile, status, gate",
                       "megacpp evidence gate")  # fmt: skip
    actions = evidence.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a profile's tests and write its record")
    run.add_argument("profile", help="a profile of the catalog, which docs/generated/evidence.md lists")
    run.add_argument("--environment", required=True, metavar="ID", help="where this is: h200_canonical")
    run.add_argument("--launch", metavar="FILE", help="the launch record that was written at its start")
    status = actions.add_parser("status", help="what is proved, and where each rung of the rollout stands")
    status.add_argument("--page", metavar="FILE", help="write the page docs/generated/evidence.md is")
    gate = actions.add_parser("gate", help="what each promotion lacks; exit status 1 where one is blocked")
    for made in (status, gate):
        made.add_argument("--environments", metavar="ID,ID", help="the two that a promotion needs")
        made.add_argument("--json", action="store_true", help="print JSON")
    for made in (run, status, gate):
        made.add_argument("--records", metavar="DIR", default="docs/evidence", help="default: %(default)s")
    return parser


def _explain(given: argparse.Namespace) -> None:
    from megacpp_compile.explainer import explain

    options = _options(given.option)
    model, args, kwargs = _load(given.target)
    report = explain(model, *args, options=options, **kwargs)
    if given.html:
        report.to_html(given.html)
    print(report.to_json(indent=1) if given.json else report)


def _compile(given: argparse.Namespace) -> None:
    import torch

    from megacpp_compile.compile_cache import save_compiled
    from megacpp_compile.report import collector, tables

    options, (model, args, kwargs) = _options(given.option), _load(given.target)
    with collector.record() as report, torch.set_grad_enabled(not given.inference):
        made = save_compiled(given.output, model, *args, options=options, dynamic=given.dynamic or None, **kwargs)
    if given.json:
        costs = {"costs": [dataclasses.asdict(cost) for cost in report.costs()]}
        print(json.dumps({"file": given.output, **dataclasses.asdict(made), **costs}, indent=1))
        return
    print(f"{given.output}: {made.bytes} bytes, code for")
    for name, value in {**made.made_by, **made.holds_for}.items():
        print(f"  {name:16} {value}")
    print(f"\n{tables.costs_text(report)}", end="")


def _estimate(given: argparse.Namespace) -> None:
    from megacpp_compile.memory.estimate import estimate

    settings = {"optimizer": given.optimizer, "device": given.device, "compiled": not given.eager}
    options = _options(given.option)
    model, args, kwargs = _load(given.target)
    found = estimate(model, *args, **settings, options=options, **kwargs)
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)


def _plan(given: argparse.Namespace) -> None:
    from megacpp_compile.memory import pareto, plot

    if given.plot:
        plot.check(given.plot)  # at once, not after the minutes that the policies take
    options = _options(given.option)
    model, args, kwargs = _load(given.target)
    found = pareto.points(model, *args, device=given.device, options=options, **kwargs)
    print(json.dumps([p.to_dict() for p in found], indent=1) if given.json else pareto.text(found, given.device))
    if given.plot:
        plot.plot(found, given.plot)


def _passes(_: argparse.Namespace) -> None:
    from megacpp_compile.config.options import Config
    from megacpp_compile.passes._driver import all_passes, enabled_passes

    passes, on = all_passes(), {p.name for p in enabled_passes(Config())}
    width = max(len(p.name) for p in passes)
    for p in passes:
        about = (getattr(p, "doc", None) or p.__doc__ or "").partition("\n\n")[0]
        off = "" if p.name in on else " Off by default."
        for i, line in enumerate(textwrap.wrap(" ".join(about.split()) + off, 96)):
            print(f"{'' if i else p.name:{width}}  {line}")


def _tags(given: argparse.Namespace) -> None:
    from megacpp_compile.report.tags import tags_text, with_table

    if given.page is None:
        print(tags_text(given.tags), end="")
        return
    page = Path(given.page)
    page.write_text(with_table(page.read_text()))


def _doctor(given: argparse.Namespace) -> int:
    from megacpp_compile.doctor.examine import examine

    found = examine(given.device)
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)
    return 1 if found.traps else 0


def _evidence(given: argparse.Namespace) -> int:
    from megacpp_compile.evidence.command import evidence

    return evidence(given)


_OF_MODELS = (_explain, _compile, _estimate, _plan)


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Fields of `Config` from KEY=VALUE; `inductor.max_autotune=true` is an entry of the mapping `inductor`."""
    from megacpp_compile.errors import BadOptionError

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadOptionError("--option", pair, "KEY=VALUE, for instance strict=true")
        name, dot, entry = key.strip().partition(".")
        if dot:
            if not isinstance(found.setdefault(name, {}), dict):
                raise BadOptionError("--option", pair, f"{name!r} either as a whole or by its entries")
            found[name][entry] = _literal(text)
        else:
            found[name] = _literal(text)
    return found


def _literal(text: str) -> Any:
    """A JSON or Python literal; any other text is itself."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text.strip())
    return text


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) of "module:callable". Raises BuilderError for whatever else comes of it."""
    from megacpp_compile.errors import BuilderError, closest
    from megacpp_compile.report.user_code import first_line, place_of, user_frame

    name, colon, attribute = target.partition(":")
    if not colon or not attribute or not name:
        raise BuilderError(target, "it is not of the form module:callable", "For instance mymodels:build.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)

    def raised(what: str, error: BaseException, remedy: str) -> BuilderError:
        at = place_of(user_frame(error)) if not isinstance(error, SyntaxError) else f"line {error.lineno}"
        return BuilderError(target, f"{what} {first_line(error)}{f' (at {at})' if at else ''}", remedy)

    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            problem = f"there is no module {error.name!r}"
            raise BuilderError(target, problem, f"It is looked for in {here} and on PYTHONPATH.") from error
        raise raised("importing it raised", error, "Install what is missing, or import it elsewhere.") from error
    except (Exception, SystemExit) as error:
        raise raised("importing it raised", error, "Mend the module first.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = closest(part, vars(found)) if hasattr(found, "__dict__") else None
            hint = f"Did you mean {near!r}?" if near else "Give the name of a function there."
            raise BuilderError(target, f"{name} has no {part!r}", hint)
        found = getattr(found, part)
    if not callable(found):
        raise BuilderError(target, f"{attribute} is no callable but {type(found).__name__}", "Name a function.")
    try:
        result = found()
    except (Exception, SystemExit) as error:
        raise raised("it raised", error, "The callable has to work without arguments.") from error
    if not isinstance(result, tuple) or not 2 <= len(result) <= 3 or not callable(result[0]):
        got = f"({', '.join(type(r).__name__ for r in result)})" if isinstance(result, tuple) else type(result).__name__
        wanted = "Return (model, args), (model, args, kwargs) or (model, kwargs)."
        raise BuilderError(target, f"it returned {got}", wanted)
    model, args, kwargs = result if len(result) == 3 else (*result, {})
    if isinstance(args, dict):
        args, kwargs = (), args
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        got = f"inputs of {type(args).__name__} and {type(kwargs).__name__}"
        raise BuilderError(target, f"it returned {got}", "Inputs are a tuple or list, then a dict.")
    return model, tuple(args), dict(kwargs)


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Without what torch logs and warns of while it compiles, as none of it is about the user's model and what matters
    is in the report. Errors are raised, not logged. TORCH_LOGS, where it is set, decides instead."""
    from megacpp_compile.config.environment import quiet_profiler, torch_logs

    if verbose or torch_logs():
        yield
        return
    quiet_profiler()
    import torch

    assert torch  # has made its loggers, with levels of their own, by now
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.")]
    kept = {name: logging.getLogger(name).level for name in ("torch", *names)}
    try:
        for name in kept:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            yield
    finally:
        for name, level in kept.items():
            logging.getLogger(name).setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
