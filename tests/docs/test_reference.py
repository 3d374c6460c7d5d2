"""The API reference has every public name, each where it is defined."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import megacpp_compile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference():
    spec = importlib.util.spec_from_file_location("_reference", ROOT / "docs" / "_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_for_every_public_name(reference):
    homes = reference.public_names()
    assert set(homes) == set(megacpp_compile.__all__)
    for name, path in homes.items():
        module, _, attribute = path.rpartition(".")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        defined = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert attribute in defined, f"{name}: {path}"
    text = "\n".join(reference.pages().values())
    assert all(f"::: {path}\n" in text and f"heading: megacpp_compile.{name}\n" in text for name, path in homes.items())


def test_a_name_without_a_topic_is_an_error(reference, monkeypatch):
    monkeypatch.setitem(reference.TOPICS, "Sharding", ())
    with pytest.raises(ValueError, match="ShardingPlan"):
        reference.public_names()


def test_every_command_says_what_it_does(reference):
    text = reference.command_line()
    listed = text[text.index("{") + 1 : text.index("}")].split(",")
    assert tuple(listed) == reference.COMMANDS
    assert all(f"usage: megacpp {command}" in text for command in listed)
