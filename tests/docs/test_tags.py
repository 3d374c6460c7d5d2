"""Every tag that a report can show is explained, in `megacpp tags` and in docs/troubleshooting.md."""

from __future__ import annotations

import ast
import functools
import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_compile import cli
from megacpp_compile.nn.attention import bodies, eligibility
from megacpp_compile.report.attention import AttentionSite
from megacpp_compile.report.page import page
from megacpp_compile.report.records import Frame, MissedFusion
from megacpp_compile.report.report import Report
from megacpp_compile.report.tags import TAGS, meaning, with_table
from tests import sources
from tests.docs.commands import ROOT
from tests.sources import ON_ONE_WORKER, PACKAGE, SOURCES

# Where refusals are written as (tag, reason), whatever they are handed to.
REFUSING = ("matchers", "passes", "frontend")
# Words beside a sentence there that are no tags, with what they are.
NO_TAGS = {"attention": "a pass", "spelled out": "a call", "data-dependent": "torch's word", "unbacked": "torch's word"}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: sources.tree(path) for path in SOURCES if path.name != "tags.py"}


@ON_ONE_WORKER
def test_every_tag_of_the_code_is_explained_and_no_other():
    tags = {tag for path, tree in trees().items() for tag in tags_of(path, tree)} - set(NO_TAGS)
    tags.update(bodies.TAGS, eligibility.TAGS)
    assert len(tags) > 150 and not [tag for tag in sorted(tags) if meaning(tag) is None]
    words = {n.value for tree in trees().values() for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not set(TAGS) - words, "explained, and nowhere in the code"
    assert [*TAGS] == sorted(TAGS)
    assert all(one.endswith(".") and "|" not in one for said in TAGS.values() for one in said)


def test_tags_that_tests_of_passes_expect_are_explained():
    """What is put together where it is raised, and not written beside its reason, shows in a test."""
    calls = (n for path in ROOT.glob("tests/passes/test_*.py") for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    told = [n.args[1] for n in calls if getattr(n.func, "id", "") == "assert_refused" and len(n.args) > 1]
    expected = {tag.value for tag in told if isinstance(tag, ast.Constant)}
    assert len(expected) > 20 and not [tag for tag in sorted(expected) if meaning(tag) is None]


def test_the_page_has_the_table():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert with_table(text) == text, "megacpp tags --page docs/troubleshooting.md"


def test_a_report_names_the_command_that_explains_its_tags(capsys):
    report = Report()
    assert "megacpp tags" not in report.render() + report.summary()
    report.misses.append(MissedFusion("moe", "layers.0.mlp", "", "add", "low-rank", "a low-rank path beside it"))
    row = AttentionSite("", "", "sdpa", "fa4", "sdpa", "unfused", "dense_fa4_dtype", "not in float32")
    report.frames.append(Frame(captured=True, attention=[plain(row)]))
    for text in (report.render(), report.summary()):
        assert "\nmegacpp tags dense_fa4_dtype low-rank: " in text
    assert all(said in html.unescape(page(report)) for said in TAGS["low-rank"])
    assert cli.main(["tags", "dense_fa4_dtype", "low-rank"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "LoRA stands beside an expert's projection." in printed and "FlashAttention-4 cannot serve" in printed
    assert cli.main(["tags", "low-rnk"]) == 2 and "Did you mean 'low-rank'?" in capsys.readouterr().err


def plain(row: AttentionSite) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


@ON_ONE_WORKER
def test_a_tag_without_a_row_is_seen():
    planted = ast.parse('from a import MatchFailure\nTAG = "new-one"\nMatchFailure(n, TAG, why)\nself.fail(n, "other-one", f"{n} is odd")')
    assert set(tags_of(PACKAGE / "passes" / "planted.py", planted)) == {"new-one", "other-one"}
    with pytest.raises(ValueError, match="substring not found"):
        with_table("a page without the table")


def tags_of(path: Path, tree: ast.Module) -> Iterator[str]:
    """The tags that a module gives to the classes with such a field, or writes beside a reason."""
    refusing = path.relative_to(PACKAGE).parts[0] in REFUSING
    own = constants(tree)
    for node in ast.walk(tree):
        items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        for tag, reason in zip(items, items[1:], strict=False):
            if refusing and is_sentence(reason) and isinstance(tag, ast.Constant) and is_tag(tag.value):
                yield tag.value
        if refusing and isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and is_sentence(node.value.elts[-1]):
            keys = (target.slice for target in node.targets if isinstance(target, ast.Subscript))
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and is_tag(key.value))
        if isinstance(node, ast.Call) and (place := places().get(getattr(node.func, "id", ""))) is not None:
            given = node.args[place : place + 1] or [k.value for k in node.keywords if k.arg == "tag"]
            for one in ast.walk(given[0]) if given else ():
                named = own.get(one.id, named_constants().get(one.id)) if isinstance(one, ast.Name) else getattr(one, "value", None)
                if is_tag(named):
                    yield named


def is_tag(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", value) is not None


def is_sentence(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_sentence(node.left)
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and len(str(node.value).split()) > 2


def constants(tree: ast.Module) -> dict[str, object]:
    """The strings that a module gives names to."""
    pairs = [(target, one.value) for one in tree.body if isinstance(one, ast.Assign) for target in one.targets]
    for target, value in list(pairs):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs += zip(target.elts, value.elts, strict=True)
    return {t.id: v.value for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}


@functools.cache
def places() -> dict[str, int]:
    """Class with a field `tag` -> the field's place."""
    found = {}
    for one in (n for path, tree in trees().items() if path.parent.name != "doctor" for n in ast.walk(tree)):
        if isinstance(one, ast.ClassDef):
            fields = [s.target.id for s in one.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            if "tag" in fields:
                found[one.name] = fields.index("tag")
    return found


@functools.cache
def named_constants() -> dict[str, object]:
    """Those of all modules."""
    return {name: value for tree in trees().values() for name, value in constants(tree).items() if not name.startswith("_")}
