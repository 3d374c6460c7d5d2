"""README and docs/: code that can be pasted, links that lead somewhere, pages and pictures that their data still make."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import statistics
from pathlib import Path

import pytest

import megacpp_compile
from benchmarks import coverage, performance_page, recall_table
from benchmarks.architectures import ratio
from benchmarks.figures import remat
from megacpp_compile import Config
from megacpp_compile.passes._driver import enabled_passes, pass_names

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ids(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_code_can_be_pasted(page):
    for block in blocks(page):
        unfinished = [n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Constant) and n.value is ...]
        assert not unfinished, f"... stands for code in\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_readme_is_a_quickstart_and_its_options_are_options():
    first, *_ = blocks(ROOT / "README.md")
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len(first.splitlines()) <= 5 and 'backend="megacpp"' in first
    for page in (ROOT / "README.md", ROOT / "docs" / "options.md"):  # the last has them all
        found = next(block for block in blocks(page) if block.startswith("options = {"))
        options = ast.literal_eval(found[len("options = ") : found.index("\n}") + 2])
        Config.from_options(options, pass_names(), environ={})
    assert set(options) == {field.name for field in dataclasses.fields(Config)}, "docs/options.md has them all"


def test_releases_have_a_date_and_fit_a_screen():
    """What is not released yet may be a little longer; that heading is there between releases alone (`make release`)."""
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    version, development, _ = megacpp_compile.__version__.partition(".dev0")
    assert bool(development) == releases[0].startswith("Unreleased\n")
    if development:
        assert len(releases.pop(0).splitlines()) <= 50
    titles = [release.partition("\n")[0] for release in releases]
    dated = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", title) for title in titles]
    assert all(dated) and (order := [(*map(int, m.groups()[:3]), m[4]) for m in dated]) == sorted(order, reverse=True)
    assert all(len(release.splitlines()) <= 40 for release in releases)
    newest, own = (*map(int, dated[0].groups()[:3]),), (*map(int, version.split(".")),)
    assert own > newest if development else own == newest, "the version is the newest release's, or the next one's"


# Pages in the navigation's last part, for whoever changes the code; all others are users'.
DEVELOPERS = {"architecture.md", "kernels.md", "measurements.md", "targets.md"}
WORDS = 38_000


def test_users_read_little_and_developers_pages_are_apart():
    """Tables that are generated are no reading: they are looked up."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    last = navigation[navigation.index("For developers:") :]
    assert {*re.findall(r"([\w/]+\.md)", last)} == DEVELOPERS | {"generated/evidence.md"}
    texts = [page.read_text() for page in ROOT.glob("docs/*.md") if page.name not in DEVELOPERS]
    texts += [(ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")]
    assert sum(len(text.partition("\n| tag |")[0].split()) for text in texts) <= WORDS


def test_no_sentence_of_readme_is_long():
    text = re.sub(r"^```.*?^```|^ {4}.*?$|^#.*?$", "", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)\"]*(?:\"[^\"]*\")?\)", r"\1", text)
    parts = (cell for part in re.split(r"\n\s*\n|^- ", text, flags=re.M) for cell in re.split(r"\||·|(?<=[.!?])\s", part))
    assert not [part for part in parts if len(part.split()) > 30]


@pytest.mark.parametrize("module", ["figures.__main__", "recall_table", "coverage", "performance_page", "targets_page"])
def test_generators_say_how_they_are_run(module, capsys):
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"benchmarks.{module}").main(["--help"])
    assert left.value.code == 0 and "python -m benchmarks." in capsys.readouterr().out


def test_every_picture_is_shown_and_every_pass_has_a_column():
    shown = {name for page in PAGES for name in re.findall(r"figures/([\w.]+\.png)", page.read_text())}
    assert {path.name for path in ROOT.glob("docs/figures/*")} == shown
    # Linears that an option names; attention that is written out, which the page's models leave to torch's own op; and
    # what has come since its results.
    wanted = {"gated_linear_attention", "index_scores", "selective_scan", "linear", "compressed_linear", "attention"}
    assert {p.name for p in enabled_passes(Config())} - wanted == set(recall_table.PASSES)


def test_the_performance_page_is_what_its_data_make(monkeypatch):
    drawn = {"remat_peaks"}
    monkeypatch.setattr(performance_page, "draw", lambda document, path: document["subject"] not in drawn)
    folder = ROOT / "docs" / "generated"
    text = performance_page.page(sorted(ROOT.glob("docs/h200/*.json")), ROOT / "docs" / "figures", folder)
    assert (folder / "performance.md").read_text() == text, "make pages"


SHOWN = {"gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3", "nemotron_h": "Nemotron-H", "qwen3_moe": "Qwen3-MoE", "llama": "Llama"}
NUMBERS = {2: "two", 3: "three", 4: "four", 9: "nine"}


def test_readme_s_architectures_are_those_of_their_data():
    models = json.loads((ROOT / "docs" / "h200" / "architectures.json").read_text())["architectures"]
    text = " ".join((ROOT / "README.md").read_text().split())
    for model in models:
        if (shown := SHOWN.get(model["name"])) is not None:
            ours, theirs = (f"{r['ms']:.1f} ms, {r['peak_mib'] / 1024:.1f} GiB" for r in (model["megacpp"], model["inductor"]))
            of = f"{NUMBERS[model['layers']]} layers, {' x '.join(map(str, model['tokens']))} tokens"
            assert f"| {shown}, {of} | H200; default | {theirs} | {ours} |" in text
    of = {key: [r for m in models if (r := ratio(m, "megacpp", key))] for key in ("least_ms", "peak_mib", "first_s")}
    time, peak, first = (f"{statistics.geometric_mean(found):.2f}" for found in of.values())
    assert f"None is slower by more than {100 * (max(of['least_ms']) - 1):.1f} %" in text
    assert f"The picture has {len(of['least_ms'])} architectures" in text
    assert f"takes {time} of Inductor's time and {peak} of its peak, the first one {first} of its time" in text
    failed = [m["name"] for m in models if "error" in m.get("inductor", {})]
    assert f"on {NUMBERS[len(failed)]} more Inductor fails" in text
    assert not any("error" in m["megacpp"] for m in models)


@pytest.mark.parametrize("module, arguments, name", [(recall_table, (), "recall"), (coverage, ("--page",), "coverage")])
def test_pages_of_recall_are_what_their_data_make(module, arguments, name, capsys):
    module.main(arguments)
    assert (ROOT / "docs" / "generated" / f"{name}.md").read_text() == capsys.readouterr().out, "make pages"


def test_the_recall_page_is_read_back_whole():
    text = (ROOT / "docs" / "generated" / "recall.md").read_text()
    models = recall_table.read_page(text)
    cells = [cell for _, cells in models for cell in cells or ()]
    must, hit = sum(m for m, _, _ in cells), sum(min(m, fired) for m, _, fired in cells)
    assert f"{len(models)} models: {hit} of {must} sites that must fire did" in text
    assert f"{must} sites in {len(models)} models" in " ".join((ROOT / "README.md").read_text().split())


def test_fronts_and_the_other_run_s_figures():
    points = [(2.0, 80.0), (4.0, 68.0), (5.0, 68.0), (3.0, 90.0), (7.0, 67.0)]
    assert remat.front(points) == [(2.0, 80.0), (4.0, 68.0), (7.0, 67.0)]
    other = json.loads((ROOT / "docs" / "h200" / "block_other_run.json").read_text())
    for row in other["rows"]:
        for size, ms in row["ms"].items():
            assert row["ratio"][size] == pytest.approx(ms / other["limit_ms"][size], abs=1e-4)
