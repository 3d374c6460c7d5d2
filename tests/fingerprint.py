"""What a module computes, as one number: its source, and every value that its code can read.

Two objects with the same fingerprint trace to the same graph. An object of which that cannot be told has none: Unkeyed.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
OWN = ("tests", "megacpp_compile")


class Unkeyed(Exception):
    """Nothing is known of what this object computes."""


def fingerprint(module: Any, inputs: tuple[Any, ...] = ()) -> str:
    """Of tensors among `inputs` all but their numbers. Raises Unkeyed."""
    reader = _Reader()
    reader.read(module)
    reader.read(inputs, constant=False)
    return reader.hash.hexdigest()


def digest_of_sources(root: Path, names: Iterable[str]) -> str:
    """A number for all Python files of these files and folders."""
    return _digest_of_sources(root, tuple(names))


@functools.cache
def _digest_of_sources(root: Path, names: tuple[str, ...]) -> str:
    whole = hashlib.sha256()
    for name in names:
        place = root / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            whole.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise Unkeyed(f"{package} has no version") from None


@functools.cache
def _sources_of(name: str) -> str:
    """A number for the module `name` of this repository and all test modules that it imports, anywhere in its code."""
    if name.split(".")[0] == "megacpp_compile":
        return digest_of_sources(ROOT, ["megacpp_compile"])
    found, left = dict[str, Path](), [name]
    while left:
        if (name := left.pop()) not in found and (file := _file(name)) is not None:
            found[name] = file
            left += _imported(name, file)
    return hashlib.sha256(b"\0".join(found[name].read_bytes() for name in sorted(found))).hexdigest()


def _file(name: str) -> Path | None:
    place = ROOT / name.replace(".", "/")
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.exists()), None)


@functools.cache
def _imported(name: str, file: Path) -> tuple[str, ...]:
    found = list[str]()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(n for n in found if n.split(".")[0] == "tests")


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout,
          torch.memory_format, torch.Size, range, slice)  # fmt: skip
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
             torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)  # fmt: skip


class _Reader:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no id is another object's

    def say(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def read(self, x: Any, constant: bool = True) -> None:
        """constant: whether a tensor's numbers count, as those of inputs do not."""
        if isinstance(x, _PLAIN) and not isinstance(x, enum.Enum):
            return self.say(type(x).__name__, x)
        if id(x) in self.seen:
            return self.say("again", self.seen[id(x)])
        self.seen[id(x)] = len(self.seen)
        self.alive.append(x)
        if isinstance(x, Tensor):
            self.tensor(x, constant)
        elif isinstance(x, enum.Enum):
            self.say("enum", type(x).__qualname__, x.name)
        elif isinstance(x, tuple | list):
            self.say(type(x).__qualname__, len(x))
            for part in x:
                self.read(part, constant)
        elif isinstance(x, set | frozenset):
            self.say("set", sorted(map(repr, x)))
        elif isinstance(x, dict | types.MappingProxyType):
            self.say(type(x).__qualname__, len(x))
            for name, value in x.items():
                self.read(name)
                self.read(value, constant)
        elif isinstance(x, types.ModuleType):
            self.module(x)
        elif isinstance(x, type):
            self.type(x)
        elif isinstance(x, types.FunctionType):
            self.function(x)
        elif isinstance(x, types.MethodType):
            self.read(x.__func__)
            self.read(x.__self__)
        elif isinstance(x, functools.partial):
            self.read((x.func, x.args, x.keywords))
        elif isinstance(x, staticmethod | classmethod):
            self.read(x.__func__)
        elif isinstance(x, property | functools.cached_property):
            self.read([f for f in (getattr(x, "fget", None), getattr(x, "func", None)) if f])
        elif isinstance(x, _BUILT_IN):
            self.say("built in", str(x) if isinstance(x, _BUILT_IN[4:]) else (x.__qualname__, str(getattr(x, "__module__", None))))
        elif isinstance(x, nn.Module):
            self.nn_module(x)
        elif isinstance(x, torch.Generator):  # what it has drawn by now is in no graph: tensors are fake there
            self.say("generator", str(x.device), x.initial_seed())
        elif self.holds_its_attributes(x):
            self.read(type(x))
            self.read(vars(x))
        else:
            raise Unkeyed(f"{type(x).__module__}.{type(x).__qualname__}")

    def tensor(self, x: Tensor, constant: bool) -> None:
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided:
            raise Unkeyed(f"a tensor of class {type(x).__name__}")
        self.say("tensor", type(x).__name__, x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.requires_grad, str(x.device))
        self.say(x.is_leaf, x.is_conj(), x.is_neg(), x.is_inference())
        if constant:
            if x.numel() > 65536 or x.is_meta:
                raise Unkeyed("a large tensor among the constants")
            self.hash.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")

    def module(self, x: types.ModuleType) -> None:
        own = x.__name__.split(".")[0]
        self.say("module", x.__name__, _sources_of(x.__name__) if own in OWN else "")
        if own not in OWN and own not in sys.stdlib_module_names:
            self.say(_version(own))

    def type(self, x: type) -> None:
        own = x.__module__.split(".")[0]
        self.say("class", x.__module__, x.__qualname__)
        if own in OWN:
            self.say(_sources_of(x.__module__))
            for base in x.__bases__:
                self.read(base)
            for name, value in vars(x).items():
                if not name.startswith("__") or inspect.isfunction(value):
                    self.say(name)
                    self.read(value)
        elif own not in sys.stdlib_module_names:
            self.say(_version(own))

    def function(self, x: types.FunctionType) -> None:
        own = x.__module__.split(".")[0] if x.__module__ else ""
        code = x.__code__
        plain = [c for c in code.co_consts if isinstance(c, (*_PLAIN, tuple))]
        self.say("function", x.__module__, x.__qualname__, code.co_code, code.co_names, code.co_firstlineno, plain)
        if own not in OWN:
            if not own or own not in sys.stdlib_module_names:
                self.say(_version(own))
        else:
            self.say(_sources_of(x.__module__))
            names = set(_names(code))
            for name in sorted(names & x.__globals__.keys()):
                self.say(name)
                self.read(value := x.__globals__[name])
                if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "tests":
                    for attribute in sorted(names & vars(value).keys()):  # whatever a test has put there
                        self.read(vars(value)[attribute])
        for cell in x.__closure__ or ():
            self.read(cell.cell_contents)
        self.read((x.__defaults__, x.__kwdefaults__))

    def nn_module(self, x: nn.Module) -> None:
        self.read(type(x))
        for name, value in vars(x).items():
            self.say(name)
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                if value:
                    raise Unkeyed("a module with hooks")
            elif name in ("_parameters", "_buffers"):
                self.read(value, constant=False)
            else:
                self.read(value)

    @staticmethod
    def holds_its_attributes(x: Any) -> bool:
        """An object of Python's own making, whose attributes are all that it is."""
        packages = {base.__module__.split(".")[0] for base in type(x).__mro__ if base is not object}
        return hasattr(x, "__dict__") and packages <= {*OWN, "transformers", "torch"} and not hasattr(type(x), "__slots__")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
