"""Names that users wrote in earlier releases and that keep working for one more, each with a FutureWarning that says
what to write instead.

To be emptied at the next release: RENAMED_OPTIONS, the methods of plans that call `moved`, and
`star_across_segments`.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from megacpp_compile.errors import BadOptionError

# Field of `Config` by its old name -> its name.
RENAMED_OPTIONS = {"merge_down": "fuse_shared_input_gemms", "tune_products": "autotune_gemms"}

Class = TypeVar("Class")


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with every old name of a field replaced by its name.

    Emits a FutureWarning for each old name, on behalf of the caller's caller. Raises BadOptionError where the old and
    the new name are both given.
    """
    found = dict(options)
    for old in [name for name in RENAMED_OPTIONS if name in found]:
        new, value = RENAMED_OPTIONS[old], found.pop(old)
        if new in found:
            raise BadOptionError(old, value, f"one value: {new!r} is given too, and is the name of this option now")
        message = f"the option {old!r} is now called {new!r}; the old name goes with the next release"
        warnings.warn(message, FutureWarning, stacklevel=3)
        found[new] = value
    return found


def accepts_old_names(cls: type[Class]) -> type[Class]:
    """`cls`, a dataclass whose constructor also takes the old names of its fields, as keywords."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: Class, *args: Any, **kwargs: Any) -> None:
        generated(self, *args, **renamed(kwargs))

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


def moved(method: str, home: str, name: str) -> Any:
    """The function `name` of the package's module `home`, which replaces a plan's method ("ShardingPlan.apply").

    Emits a FutureWarning on behalf of whoever called the method. Plans are data and import nothing that walks a model,
    so the module is looked up by its name.
    """
    path = f"megacpp_compile.{home}"
    message = f"{method}(...) goes with the next release; call {path}.{name}(plan, ...)"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return getattr(importlib.import_module(path), name)


def star_across_segments(option: str, pattern: str, fqn: str) -> bool:
    """Whether `pattern` hits `fqn` if a star inside a segment also stands for dots, as it did for some options.

    Emits a FutureWarning where it does. To be asked after `globs.hits` has said no.
    """
    if not fnmatch.fnmatchcase(fqn, pattern):
        return False
    warnings.warn(
        f"{option}: {pattern!r} hits {fqn!r} only because its star crosses a dot, which ends with the next release: a "
        "star inside a segment stays within it, and one that is a segment stands for one or more ('*.mixer')",
        FutureWarning,
        stacklevel=2,
    )
    return True
