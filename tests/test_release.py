"""`make release` tags a tree that says everywhere which release it is, and no other."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.docs.commands import ROOT

NOTES = "# Changelog\n\n## 0.7.0 (2030-01-02)\n\n- **What is new**.\n\n## 0.6.0 (2029-01-02)\n\n- Old.\n"
NAME = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A committed tree of release 0.7.0 with the program in it."""
    for variable in NAME:
        monkeypatch.setenv(variable, "somebody@example.com")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for folder in (".ci", "megacpp_compile"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    shutil.copy(ROOT / "Makefile", tmp_path)
    write(tmp_path, version="0.7.0", notes=NOTES)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def write(tree, version, notes):
    (tree / "megacpp_compile" / "__init__.py").write_text(f'"""A package."""\n\n__version__ = "{version}"\n')
    (tree / "CHANGELOG.md").write_text(notes)


def git(tree, *arguments):
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout


def commit(tree):
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "A tree")


def release(tree, *tag):
    done = subprocess.run([tree / ".ci" / "release", *tag], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_release_is_tagged_once_with_its_notes(tree):
    subprocess.run(["make", "release"], cwd=tree, check=True, capture_output=True)
    assert git(tree, "rev-parse", "v0.7.0^{commit}") == git(tree, "rev-parse", "HEAD")
    assert git(tree, "tag", "--list", "--format=%(objecttype) %(contents)").strip() == "tag 0.7.0 (2030-01-02)\n\n- **What is new**."
    assert release(tree) == (1, "no release: v0.7.0 is there already\n")


@pytest.mark.parametrize(("version", "notes", "says"), [
    ("0.7.0.dev0", NOTES, "is '0.7.0.dev0', and a release is three numbers"),
    ("0.7.1", NOTES, "has no '## 0.7.1 (date)'"), ("0.7", NOTES, "three numbers"),
    ("0.7.0", NOTES.replace("## 0.7.0", "## Unreleased\n\n- New.\n\n## 0.7.0"), "begins with 'Unreleased'"),
])  # fmt: skip
def test_a_tree_that_is_no_release_is_refused(tree, version, notes, says):
    write(tree, version, notes)
    commit(tree)
    for tag in ((), (f"v{version}",)):
        status, said = release(tree, *tag)
        assert status == 1 and says in said
    assert not git(tree, "tag", "--list")


def test_a_tree_with_changes_is_refused(tree):
    (tree / "more.py").touch()
    assert release(tree) == (1, "no release: there are changes that are not committed\n")


def test_a_pushed_tag_is_checked_without_tags_or_history(tree, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    commit(tree)
    git(tree, "clone", "--quiet", "--depth=1", "--no-tags", f"file://{tree}", str(clone))
    assert release(clone, "v0.7.0") == (0, "")
    assert release(clone, "v0.8.0") == (1, "no release: the tag is v0.8.0, and the tree is of v0.7.0\n")
