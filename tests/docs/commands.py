"""Every command that the documentation prints: on its pages, and in the help of whatever can be started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])

FOLDERS = ("benchmarks", "examples", "megacpp_compile", "tests")
# Files of packages that are started by path all the same, in the environment that a test makes for them.
SCRIPTS = ("spmd_program",)

# What a command begins with, behind the variables it is given; alone a word is the name of the tool.
_STARTS = r"(?:[A-Z_]+=\S* )*(?:\.venv\S*/bin/)?(?:python3?|pytest|megacpp|make|pip|compute-sanitizer|git|mkdocs)"
_COMMAND = re.compile(rf"{_STARTS} [-\w./].*")
_SHELLS = ("bash", "sh", "shell", "console")


@dataclasses.dataclass(frozen=True)
class Printed:
    """A command as it is printed. place: file or module and line. around: its paragraph and the two beside it."""

    command: str
    place: str
    around: str


def commands_of(text: str, place: str, whole: bool = False) -> list[Printed]:
    """The commands in fenced blocks of a shell's, in indented lines, and between backticks of anything else. whole: `around` is all of
    the text."""
    paragraphs, found = [p for p in re.split(r"\n[ \t]*\n", _unfenced(text)) if p.strip()], []
    for index, paragraph in enumerate(paragraphs):
        around = text if whole else "\n".join(paragraphs[max(index - 1, 0) : index + 2])
        lines = paragraph.replace("\\\n", " ").split("\n")
        if all(line.startswith("    ") for line in lines if line.strip()):
            spans = [re.split(r"\s#\s", line.strip())[0] for line in lines]
        else:
            spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", paragraph)]
        for span in (" ".join(s.removeprefix("$ ").split()) for s in spans):
            if _COMMAND.fullmatch(span):
                found.append(Printed(span, place, around))
    return found


def _unfenced(text: str) -> str:
    """Blocks of a shell's as indented ones; blocks of other languages left out."""

    def block(match: re.Match[str]) -> str:
        return re.sub(r"^", "    ", match[2], flags=re.M) if match[1] in _SHELLS else ""

    return re.sub(r"^```(\w*)\n(.*?)^```$", block, text, flags=re.M | re.S)


@functools.cache
def programs() -> dict[str, str]:
    """How to start each file with a main part -> what to run: a module's name, or a path under the root."""
    found = {"megacpp": "megacpp_compile.cli"}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if not re.search(r"^if __name__ == .__main__.:", path.read_text(), re.M):
            continue
        name = str(path.relative_to(ROOT))
        if (path.parent / "__init__.py").exists() and path.stem not in SCRIPTS:
            module = name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            found[f"python -m {module}"] = module
        else:
            found[f"python {name}"] = name
    return found


def started(program: str, arguments: list[str]) -> tuple[int, str, str]:
    """A module, or a script under the root, run as from the command line, in this process: exit status, output, errors."""
    out, errors = io.StringIO(), io.StringIO()
    script = program.endswith(".py")
    paths = [str((ROOT / program).parent)] if script else []
    code: object = 0
    with (
        mock.patch.object(sys, "argv", [program, *arguments]), mock.patch.object(sys, "path", [*paths, str(ROOT), *sys.path]),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors),
    ):  # fmt: skip
        try:
            if script:
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as left:
            code = left.code
    if isinstance(code, str):
        errors.write(code)
    return (code or 0) if isinstance(code, int | None) else 1, out.getvalue(), errors.getvalue()
