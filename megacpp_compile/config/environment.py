"""Settings that environment variables give: the only reader of `MEGACPP_*`, and of torch's TORCH_LOGS."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_compile.config import checks
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import BadOptionError, closest

# A field -> what its variable's text stands for, given the variable's name and the text.
Readers = Mapping[str, Callable[[str, str], Any]]


def read(environ: Mapping[str, str] | None, given: Mapping[str, Any], readers: Readers) -> dict[str, Any]:
    """Field name -> value of every variable that is set, not empty, and not overruled by `given`.

    environ: `os.environ` when None. A variable of another name, and one that is overruled, is warned of once a process.
    """
    environ, found = os.environ if environ is None else environ, dict[str, Any]()
    fields_of = {f"MEGACPP_{name.upper()}": name for name in readers}
    for variable in [v for v in environ if v.startswith("MEGACPP_")]:
        text, name = environ[variable].strip(), fields_of.get(variable)
        if name is None:
            near = closest(variable.removeprefix("MEGACPP_"), readers)
            hint = f" Did you mean MEGACPP_{near.upper()}?" if near else ""
            warn_once(f"environment variable {variable} is none of this package's and has no effect.{hint} "
                      f"Those are {', '.join(fields_of)}.")  # fmt: skip
        elif text and name not in given:
            found[name] = readers[name](variable, text)
        elif text and not _says(readers[name], variable, text, name, given[name]):
            warn_once(f"environment variable {variable}={text} has no effect: the option {name!r} is given, and code "
                      "wins over the environment.")  # fmt: skip
    return found


def _says(reader: Callable[[str, str], Any], variable: str, text: str, name: str, value: Any) -> bool:
    """Whether the text of a variable stands for `value`, of names in whatever order."""
    try:
        said = reader(variable, text)
        return sorted(said) == sorted(checks.names(name, value)) if isinstance(said, list) else said == value
    except BadOptionError:
        return False


def quiet_profiler() -> None:
    """Keep torch's profiler from writing each start and stop to stderr, which its library does at a level of 5."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def torch_logs() -> bool:
    """Whether torch's own logs were asked for, by TORCH_LOGS."""
    return bool(os.environ.get("TORCH_LOGS"))
