"""What the command lines of this folder share: help that is the module's own text, with the defaults, and what to say
where torch_xla is missing."""

from __future__ import annotations

import argparse
import importlib.util


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        known = action.default not in (None, False, argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if known and "default" not in text else text


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m module`; about: the module's docstring."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=about, formatter_class=_Help)


def need_torch_xla(parser: argparse.ArgumentParser) -> None:
    """Leave with a sentence and exit status 2 where torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        parser.exit(2, f"{parser.prog} needs torch_xla, which is not installed; `make test-xla` makes a venv with it, "
                       ".venv-xla.\n")  # fmt: skip
