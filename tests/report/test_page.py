"""The report as a page: everything is in it, nothing of the user's is markup, and a browser shows it and can be clicked."""

import dataclasses
import html
import itertools
import re
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import fx, nn

import megacpp_compile
from megacpp_compile.fx.subgraph import SHOWN, Part, described
from megacpp_compile.report.attention import AttentionCall, AttentionSite
from megacpp_compile.report.page import graphs
from megacpp_compile.report.page.modules import FUSED, MISSED, tree, walk
from megacpp_compile.report.records import CompiledRegion, Frame, MissedFusion, Site
from megacpp_compile.report.report import Report
from tests.report.chromium import BROWSER, Chromium

HOSTILE = "<script>alert(1)</script>\"'&amp;`"
SOURCE = "modeling.py:{}, in forward: k = self.kv_b(x)  # a < b && c"
OPEN = {"meta", "link", "input", "br"}


class Parsed(HTMLParser):
    """The elements of a page, which have to be nested as they should, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.scripts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in OPEN:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] in (["script"], ["style"]) else self.texts).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def having(self, name, value):
        """The attributes of the elements one of whose words in the attribute `name` is `value`."""
        return [attrs for _, attrs in self.elements if value in (attrs.get(name) or "").split()]


def node(name, op, inputs=(), role="call"):
    return {"name": name, "role": role, "op": op, "inputs": list(inputs), "value": "bfloat16[2, 8]"}


GRAPH = {
    "before": {"nodes": [node("arg0_1", "q_a.weight", role="input"), node("x", "aten.relu.default", role="input"),
                         node("mm", "aten.mm.default", ["x", "arg0_1"]), node("out", "aten.add.Tensor", ["mm", "x"], "output"),
                         node("view", "aten.view.default", ["out"], "reader")], "left_out": 3},
    "after": {"nodes": [node("x", "aten.relu.default", role="input"), node("op", "megacpp.down_norm_up.default", ["x"], "output"),
                        node("view", "aten.view.default", ["op"], "reader")], "left_out": 0},
}  # fmt: skip


def site(fqn, line=1, pass_name="down_norm_up", **more):
    return Site(pass_name, f"megacpp::{pass_name}", fqn, SOURCE.format(line), "cuda_triton", "reference", "no CUDA device", **more)


def miss(fqn, number):
    reason = f"tanh_{number} stands between"
    return MissedFusion("moe", fqn, SOURCE.format(9), f"tanh_{number}", "no-up", reason)


def filled():
    """24 layers that are alike but for one near miss, a frame that fell back, and attention."""
    sites = [site(f"layers.{i}.attn", saved_before=2048, saved_after=512, graph=GRAPH) for i in range(24)]
    sites += [site(f"layers.{i}.attn", 2, "mla_rope_q", saved_before=0, saved_after=0) for i in range(24)]
    frame = Frame(name="forward (modeling.py:1)", grad=True, modules={"layers.0.norm": "RMSNorm", "head": "Linear"})
    frame.seconds = {"dynamo": 0.5, "capture": 1.0, "moe": 0.25, "code": 2.0}
    sdpa = AttentionSite("head", SOURCE.format(7), "sdpa", "fa4", "sdpa", "unfused", "no-fa4", "flash-attn-4 is not installed")
    frame.attention = [dataclasses.asdict(sdpa)]
    frame.recognised = [{"kind": "lightning attention", "fqn": "mixer", "source": SOURCE.format(8)}]
    frame.peak = {"before": 2**20, "step": 3 * 2**20, "predicted": 4 * 2**20, "transient": 1, "limit": 5 * 2**20,
                  "over_time": {"forward": [0, 2**20], "backward": [3 * 2**20, 2**19]}}  # fmt: skip
    report = Report()
    report.add(frame, sites, [miss("layers.3.mlp", 1), miss("layers.4.mlp", 7)])
    report.add(Frame(captured=False, reason="autograd.Function in the graph", name="helper", left_to="backend"))
    return report


def expanded(path):
    """The modules that a path with ranges names."""
    parts = []
    for part in re.split(r"\.(?![^{]*\})", path):
        ranges = [r.split("..") for r in part.strip("{}").split(",")] if part.startswith("{") else [[part]]
        parts.append([str(n) for r in ranges for n in range(int(r[0]), int(r[-1]) + 1)] if part.startswith("{") else [part])
    return [".".join(one) for one in itertools.product(*parts)]


def test_every_site_and_near_miss_is_there():
    report = filled()
    entries, page = list(walk(tree(report))), Parsed(report.to_html())
    for kind, records in ((FUSED, report.sites), (MISSED, report.misses)):
        shown = [(fqn, e.title, e.source) for e in entries if e.kind == kind for fqn in expanded(e.path)]
        assert sorted(shown) == sorted((r.fqn, r.pass_name, r.source) for r in records)
        assert sum(e.total for e in entries if e.kind == kind) == len(records)
    assert [page.having("id", e.anchor) != [] for e in entries] == [True] * len(entries)
    assert {f"#{e.anchor}" for e in entries} <= {a.get("href") for _, a in page.elements}
    for said in ("layers.{1..2,5..23}.attn", "modeling.py:9", "k = self.kv_b(x) # a < b && c", "tanh_1 stands between", "no-up",
                 "cuda_triton → reference (no CUDA device)", "2 KiB → 512 B each", "flash-attn-4 is not installed",
                 "lightning attention"):  # fmt: skip
        assert said in page.text, said


def test_layers_that_are_alike_are_one_and_others_are_not():
    layers = tree(filled()).children["layers"]
    assert [child.label for child in layers.children.values()] == ["0", "{1..2,5..23}", "{3..4}"]


def test_a_module_has_the_class_that_the_report_knows():
    report = filled()
    report.regions.append(CompiledRegion(("layers.3", "layers.4"), "Decoder", 12, "compiled"))
    root = tree(report)
    assert (root.children["layers"].children["{3..4}"].kind, root.children["head"].kind) == ("Decoder", "Linear")


def test_frames_that_compiled_the_same_code_count_their_sites():
    report = Report()
    for _ in range(2):
        report.add(Frame(), [site("mlp")])
    (entry,) = walk(tree(report))
    assert (entry.count, entry.total) == (2, 2) and "×2" in Parsed(report.to_html()).text


def hostile(item):
    """A record each of whose texts is markup, where text is what it may hold."""
    if isinstance(item, str):
        return HOSTILE
    if isinstance(item, dict):
        return {key: value if key == "role" else hostile(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(map(hostile, item))
    return item


def test_nothing_of_the_user_s_is_markup():
    """Names of modules, code, reasons, nodes: all that a model can put into a report."""
    report = filled()
    report.attention.append(AttentionCall(HOSTILE, False, "sdpa", ((HOSTILE,) * 3,), (1,) * 7, "bf16", "cpu", True, "absent", HOSTILE))
    report.regions.append(CompiledRegion((HOSTILE,), HOSTILE, 12, HOSTILE, HOSTILE))
    for record in (*report.sites, *report.misses, *report.frames):
        for f in dataclasses.fields(record):
            if not f.name.startswith("_") and f.name not in ("left_to", "auto", "seconds", "passes", "peak"):
                setattr(record, f.name, hostile(getattr(record, f.name)))
    report.sites[0].source = f"{HOSTILE}.py:3, in forward: {HOSTILE}"
    report.frames[0].modules, report.frames[0].seconds = {f"a.{HOSTILE}": HOSTILE}, {HOSTILE: 1.0}
    text = report.to_html()
    page = Parsed(text)
    assert sum(tag == "script" for tag, _ in page.elements) == 1 and len(page.scripts) == 2
    assert "alert(1)" not in "".join(page.scripts) and page.text.count(" ".join(HOSTILE.split())) > 20
    assert not [name for _, attrs in page.elements for name in attrs if not re.fullmatch(r"[a-zA-Z-]+", name) or name.startswith("on")]
    (frame,) = [attrs for tag, attrs in Parsed(report._repr_html_()).elements]
    assert frame["srcdoc"] == text


def test_a_page_needs_nothing_else():
    for report in (Report(), filled()):
        page = Parsed(text := report.to_html())
        for _, attrs in page.elements:
            for name in ("src", "href", "action", "data"):
                assert (attrs.get(name) or "#").startswith(("#", "data:,")), attrs
        assert not re.search(r"url\(|@import|https?:|import\(|fetch", text)
        assert len([attrs for tag, attrs in page.elements if attrs.get("id")]) == len({a["id"] for _, a in page.elements if a.get("id")})


def test_an_empty_report():
    page = Parsed(Report().to_html())
    assert "Nothing was compiled while this report was open." in page.text and "0 of 0" in page.text
    assert not [1 for tag, _ in page.elements if tag in ("section", "svg", "table")]


def test_a_frame_that_fell_back_is_said_first():
    text = filled().to_html()
    said = [text.index(part) for part in ("1 frame not captured", "frame 1: helper", "fell back: autograd.Function", 'id="modules"')]
    assert said == sorted(said)


def test_figures_are_the_report_s():
    page = Parsed(filled().to_html())
    assert "48 KiB → 12 KiB" in page.text  # all sites
    widths = [float(re.search(r"width: ([\d.]+)%", a["style"])[1]) for a in page.having("class", "bar") if "after" in a["class"]]
    assert max(widths) == 25.0
    bars = [a["style"] for a in page.having("class", "bar") if "left" in a["style"]]
    assert bars == [f"left: {left:.2f}%; width: {width:.2f}%" for left, width in
                    ((0, 50 / 3.75), (50 / 3.75, 100 / 3.75), (150 / 3.75, 25 / 3.75), (175 / 3.75, 200 / 3.75))]  # fmt: skip
    assert "The step's peak of 3 MiB is in backward, on top of 1 MiB that was there before: 4 MiB predicted, under a limit of 5 MiB." in page.text
    assert [a["height"] for a in page.having("class", "backward")] == ["100.00", "16.67"]


def test_saved_bytes_that_nobody_counted_are_no_bars():
    report = Report()
    report.add(Frame(), [site("a"), site("b", saved_after=5)])
    page = Parsed(report.to_html())
    assert not page.having("id", "saved") and "not counted" in page.text and "? → 5 B" in page.text


def test_reports_of_the_last_release_have_no_graphs():
    data = filled().to_dict()
    for record in data["sites"]:
        del record["graph"]
    for frame in data["frames"]:
        del frame["modules"]
    del data["frames"][0]["peak"]["over_time"]
    page = Parsed(Report(frames=[Frame(**f) for f in data["frames"]]).to_html())
    assert not page.having("id", "memory")


def test_the_page_is_written_and_the_same_from_json(tmp_path):
    report, path = filled(), tmp_path / "page.html"
    text = report.to_html(path)
    assert path.read_text(encoding="utf-8") == text == Report.from_json(report.to_json()).to_html()
    assert html.unescape(report._repr_html_()).startswith('<iframe srcdoc="<!doctype html>')


def boxes_of(layers):
    places, width, height = graphs._places(layers)
    return places, [(x, y, x + w, y + h) for x, y, w, h in places.values()], width, height


def test_boxes_do_not_overlap_and_edges_go_down():
    edges = {"a": [], "b": [], "c": ["a"], "d": ["a", "c"], "e": ["a", "d", "b"], "f": ["e"], "late": [], "g": ["f", "late"]}
    layers, chains = graphs._laid_out(list(edges), edges)
    places, corners, width, height = boxes_of(layers)
    for one, other in itertools.combinations(corners, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert all(0 <= x and right <= width and bottom <= height for x, _, right, bottom in corners)
    assert sorted((chain[0], chain[-1]) for chain in chains) == sorted((s, d) for d, given in edges.items() for s in given)
    for chain in chains:
        tops = [places[point][1] for point in chain]
        assert tops == sorted(set(tops)) and len({b - a for a, b in itertools.pairwise(tops)}) == 1, "one layer after the other"
    assert places["late"][1] == places["f"][1], "what reads nothing stands right above its reader"


def test_a_part_with_many_calls_is_cut_in_the_middle():
    graph = fx.Graph()
    x = first = graph.placeholder("x")
    calls = [x := graph.call_function(torch.relu, (x,)) for _ in range(SHOWN + 10)]
    reader = graph.call_function(torch.sin, (x,))
    found = described(Part([first], calls, [x]), {reader: [x]})
    names, kept = [n["name"] for n in found["nodes"]], [calls[0], calls[-1]]
    assert found["left_out"] == 10 and len(names) == SHOWN + 2 and {n.name for n in kept} <= set(names)
    assert all(i in names for n in found["nodes"] for i in n["inputs"])
    roles = [n["role"] for n in found["nodes"]]
    assert (roles[0], roles[1], roles[-2:]) == ("input", "call", ["output", "reader"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up, self.act = nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False), nn.Tanh()

    def forward(self, x):
        return self.act(self.up(self.norm(self.down(x))))


class Missed(Block):
    def forward(self, x):
        return self.up(self.act(self.norm(self.down(x))))


@pytest.fixture(scope="module")
def explained():
    model = nn.Sequential(Block(), Block(), Missed())
    return megacpp_compile.explain(model, torch.randn(3, 8))


def test_a_site_s_graph_before_and_after(explained):
    first, second = explained.sites
    assert first.fqn == "0.up" and explained.misses[0].fqn.startswith("2")
    before, after = (first.graph[when]["nodes"] for when in ("before", "after"))
    assert [n["op"] for n in before if n["role"] in ("call", "output")] == [
        "aten.linear.default", "aten.rms_norm.default", "aten.linear.default"]  # fmt: skip
    assert {n["op"] for n in before if n["role"] == "input"} == {"args.0", "0.down.weight", "0.down.bias", "0.norm.weight", "0.up.weight"}
    assert "megacpp.down_norm_up.default" in [n["op"] for n in after] and before[-1]["value"] == "float32[3, 8]"
    readers = [[(n["op"], len(n["inputs"])) for n in nodes if n["role"] == "reader"] for nodes in (before, after)]
    assert readers == [[("aten.tanh.default", 1)]] * 2
    for nodes in (before, after):
        names = {n["name"] for n in nodes}
        assert all(set(n["inputs"]) <= names for n in nodes)
    assert second.graph != first.graph


def test_the_modules_of_a_frame(explained):
    modules = explained.frames[0].modules
    assert list(modules)[:5] == ["", "0", "0.down", "0.norm", "0.up"] and modules["2"] == "Missed" and modules["1.act"] == "Tanh"
    page = Parsed(explained.to_html())
    assert "{0..1}" in page.text and "Missed" in page.text and "Nothing found in down Linear, norm RMSNorm, act Tanh." in page.text


@pytest.mark.end_to_end
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH")
def test_a_browser_shows_it_and_can_be_clicked(explained, tmp_path):
    report, path = filled(), tmp_path / "page.html"
    report.frames += explained.frames
    report.sites += [dataclasses.replace(s, fqn=f"real.{s.fqn}") for s in explained.sites]
    report.to_html(path)
    entry = "document.querySelector('.entry.fused:has(svg)')"
    with Chromium(tmp_path / "profile") as page:
        page.open(path)
        assert page.run("document.title") == "megacpp report"
        shown = f"({entry}).querySelector('svg').checkVisibility()"
        assert not page.run(shown)
        page.click(f"{entry}.querySelector('summary')")
        assert page.until(shown) and page.run(f"({entry}).querySelectorAll('.box').length") >= 6
        page.press("Enter", 13)  # what was clicked has the focus
        assert page.until(f"!({shown})")
        # Bars, by module and by site.
        by = "['.by-module', '.by-site'].filter(s => document.querySelector(s).checkVisibility()).join()"
        assert page.run(by) == ".by-module"
        page.click("document.querySelector('[value=site]')")
        assert page.until(f"{by} === '.by-site'")
        # A line's mark leads to the entry, and opens it.
        page.click("document.querySelector('.lines .near-miss')")
        assert page.until("document.querySelector('.entry.near-miss:target')?.open")
        left = "[...document.querySelectorAll('.tree .entry')].filter(e => e.checkVisibility()).map(e => e.querySelector('b').textContent)"
        everything = page.run(left)
        page.run("document.getElementById('filter').focus()")
        page.call("Input.insertText", text="MOE")
        assert page.until(f"{left}.every(title => title === 'moe')") and len(set(everything)) > 2
        page.run("document.getElementById('filter').select()")
        page.press("Delete", 46)
        assert page.until(f"{left}.length === {len(everything)}")
        page.click("document.getElementById('open')")
        assert page.until("[...document.querySelectorAll('.entry')].every(e => e.open)")
        for width in (390, 1440):
            for dark in (False, True):
                page.open(path, width, dark=dark)
                page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
                assert page.run("document.documentElement.scrollWidth") == width
        assert page.errors == []


@pytest.mark.end_to_end
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH")
def test_links_of_a_notebook_s_frame_stay_in_it(tmp_path):
    """Its document has the notebook's address for a base, where "#lines" would lead to otherwise."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title>{filled()._repr_html_()}", encoding="utf-8")
    with Chromium(tmp_path / "profile") as page:
        page.open(path)

        def frame():
            (inner,) = page.call("Page.getFrameTree")["frameTree"]["childFrames"]
            context = page.call("Page.createIsolatedWorld", frameId=inner["frame"]["id"])["executionContextId"]
            script = "[document.title, location.protocol, document.activeElement?.textContent, Math.round(document.querySelector('#lines')?.getBoundingClientRect().y)]"
            return page.call("Runtime.evaluate", expression=script, contextId=context, returnByValue=True)["result"]["value"]

        title, protocol, _, top = frame()
        assert (title, protocol) == ("megacpp report", "about:") and top > 200
        focused = []
        while "Source lines" not in focused:
            page.press("Tab", 9)
            focused.append(frame()[2])
            assert len(focused) < 10, focused
        page.press("Enter", 13)
        end = time.monotonic() + 30
        while (found := frame())[3] == top and time.monotonic() < end:
            time.sleep(0.02)
        assert found[:2] == ["megacpp report", "about:"] and 0 <= found[3] < 200 and page.errors == []
