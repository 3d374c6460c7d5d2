"""`Report`: collection, numbering, saved bytes, counts, JSON, tables."""

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import threading

import pytest

from megacpp_compile.errors import ReportFormatError
from megacpp_compile.report.attention import AttentionCall, AttentionSite
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.report.collector import active, emit_frame, record
from megacpp_compile.report.columns import COLUMNS
from megacpp_compile.report.pieces import STAGES
from megacpp_compile.report.records import CompiledRegion, Frame, MissedFusion, Pinned, Precision, Site
from megacpp_compile.report.report import Report
from megacpp_compile.report.text import bytes_text, plain

SOURCE = "modeling.py:123, in forward: `k = self.kv_b(self.norm(x[:, [0]]))`"


def site(fqn="layers.0.self_attn", pass_name="down_norm_up", requested="reference", effective="reference", **more):
    return Site(pass_name, "megacpp::down_norm_up", fqn, SOURCE, requested, effective, **more)


def reported(*sites):
    report = Report()
    report.add(Frame(), sites)
    return report


def miss(fqn="layers.0.self_attn", node="cat_3"):
    return MissedFusion("mla_rope_q", fqn, "modeling.py:9", node, "intermediate_escapes", "the rotated query is also returned")


@pytest.fixture(params=["rich", "plain"])
def renderer(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich", None)  # makes `import rich` raise ImportError
    else:
        pytest.importorskip("rich")
    return request.param


def test_nothing_is_collected_outside_also_when_the_body_raises():
    assert not active()
    emit_frame(Frame(), [site()])
    with record() as report:
        assert active()
    assert not active() and report.frames == report.sites == report.misses == []
    with pytest.raises(RuntimeError), record():
        raise RuntimeError
    assert not active()


def test_nested_reports_both_collect_and_number_their_own_frames():
    with record() as outer:
        emit_frame(Frame(name="first"), [site()])
        with record() as inner:
            emit_frame(Frame(name="second"), [site("layers.1.self_attn")], [miss()])
        emit_frame(Frame(name="third"))
    assert [(f.index, f.name) for f in outer.frames] == [(0, "first"), (1, "second"), (2, "third")]
    assert [(f.index, f.name) for f in inner.frames] == [(0, "second")] and [s.frame for s in outer.sites] == [0, 1]
    assert [s.frame for s in inner.sites] == [0] and (outer.misses[0].frame, inner.misses[0].frame) == (1, 0)
    with record() as outer:
        with record():
            pass
        emit_frame(Frame())
    assert len(outer.frames) == 1


def test_saved_bytes_arrive_in_every_report_also_after_it_closed():
    placed = site()
    with record() as outer, record() as inner:
        emit_frame(Frame(), [placed])
        placed.set_saved(2048, None)
        assert (outer.sites[0].saved_before, outer.sites[0].saved_after) == (2048, None)
    placed.set_saved(2048, 1024)
    for report in (outer, inner):
        assert (report.sites[0].saved_before, report.sites[0].saved_after) == (2048, 1024)


def test_what_is_emitted_is_not_changed_nor_followed():
    frame, placed = Frame(passes={"down_norm_up": 1}), site()
    with record() as report:
        emit_frame(Frame())
        emit_frame(frame, [placed])
    frame.passes["down_norm_up"] = 9
    assert (frame.index, placed.frame) == (0, 0) and report.frames[1].passes == {"down_norm_up": 1}


def test_other_threads_are_collected():
    def emit():
        for _ in range(50):
            emit_frame(Frame(), [site()])

    with record() as report:
        threads = [threading.Thread(target=emit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [f.index for f in report.frames] == [s.frame for s in report.sites] == list(range(200))


def test_counts_hold_every_known_pass():
    with record(["mla_rope_q", "down_norm_up", "moe"]) as report:
        emit_frame(Frame(passes={"down_norm_up": 2, "mla_rope_q": 0}), [site(), site("layers.1.self_attn")])
        emit_frame(Frame(passes={"down_norm_up": 1}), [site()])
        emit_frame(Frame(), [site(pass_name="late_pass")])
    assert dict(report.counts) == {"mla_rope_q": 0, "down_norm_up": 3, "moe": 0, "late_pass": 1}
    assert list(report.counts)[:3] == ["mla_rope_q", "down_norm_up", "moe"]
    with record() as report:
        emit_frame(Frame(passes={"cast": 4}))
    assert report.counts == {"cast": 4}


def filled():
    with record(["down_norm_up", "mla_rope_q"]) as report:
        placed = [site(f"model.layers.{i}.self_attn", node=f"op_{i}") for i in range(24)]
        frame = Frame(name="Model.forward", nodes=1203, target="cpu", passes={"down_norm_up": 24})
        frame.seconds["capture"] = 1.5
        emit_frame(frame, placed, [miss(f"model.layers.{i}.self_attn", f"cat_{i}") for i in (0, 1, 5)])
        for each in placed:
            each.set_saved(780 * 2**20, 652 * 2**20)
        emit_frame(Frame(captured=False, reason="autograd.Function in the graph", name="helper", grad=True))
    return report


@pytest.mark.parametrize("indent", [None, 2])
def test_json_round_trip(indent):
    report = filled()
    again = Report.from_json(report.to_json(indent))
    assert again == report and str(again) == str(report) and ("\n" in report.to_json(indent)) == (indent is not None)


def test_json_keys():
    data = json.loads(filled().to_json())
    assert data == filled().to_dict() and data["counts"] == {"down_norm_up": 24, "mla_rope_q": 0}
    assert data["sites"][3] == {
        "pass": "down_norm_up", "op": "megacpp::down_norm_up", "fqn": "model.layers.3.self_attn", "source": SOURCE,
        "requested": "reference", "effective": "reference", "reason": "", "saved_before": 780 * 2**20,
        "saved_after": 652 * 2**20, "saved_reason": "", "frame": 0, "node": "op_3", "note": "", "graph": None,
    }
    assert set(data["misses"][0]) == {"pass", "fqn", "source", "node", "tag", "reason", "frame"}


@pytest.mark.parametrize(("text", "problem"), [
    ("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError: 'format'"),
    ('{"format": 99}', "format 99, this version reads 1 to 2"),
    ('{"format": 2, "known_passes": [], "frames": [{"no": 1}], "sites": [], "misses": []}', "TypeError"),
])
def test_other_json_is_refused(text, problem):
    with pytest.raises(ReportFormatError, match="not a megacpp report") as caught:
        Report.from_json(text)
    assert problem in str(caught.value)


def test_copies_are_equal_and_independent():
    report = filled()
    other = copy.deepcopy(report)
    assert other == pickle.loads(pickle.dumps(report)) == report
    other.sites[0].set_saved(1, 1)
    assert report.sites[0].saved_before == 780 * 2**20


def test_text_has_every_section(renderer):
    text = filled().render(width=200)
    assert "model.layers.{0..23}.self_attn ×24" in text and "780 MiB → 652 MiB" in text
    assert "model.layers.{0..1,5}.self_attn ×3" in text
    assert "the rotated query is also returned [intermediate_escapes]" in text
    assert "fell back: autograd.Function in the graph" in text
    assert "modeling.py:123" in text  # where; the code itself is in the JSON
    tables = ["fused", "nearest misses", "frames"]
    assert [line for line in text.splitlines() if line in tables] == tables
    last = "megacpp: 1 of 2 frames captured, 24 sites fused, 3 near misses, saved for backward 18.3 GiB → 15.3 GiB"
    assert text.splitlines()[-1] == last
    assert all(line == line.rstrip() for line in text.splitlines())


def test_renderers_differ_only_in_looks(renderer):
    assert ("─" in str(filled())) == (renderer == "rich")
    assert str(Report()) == "megacpp: 0 of 0 frames captured, 0 sites fused, 0 near misses"


def test_rich_folds_to_the_width_without_losing_text():
    pytest.importorskip("rich")
    text = filled().render(width=110)
    assert all(len(line) <= 110 for line in text.splitlines()) and "model.layers.{0..23}.self_attn ×24" in text
    assert "…" not in text


def test_lowerings_that_fell_back_and_unknown_saved_bytes(renderer):
    report = reported(site(requested="cuda_triton", effective="reference", reason="no CUDA device"))
    assert "cuda_triton → reference (no CUDA device)" in report.render(width=200)
    text = reported(site(saved_before=2048, saved_after=0), site("a"), site("b", saved_after=5)).render(width=200)
    assert "2 KiB → 0 B" in text and "? → 5 B" in text
    assert text.endswith("saved for backward 2 KiB → 0 B over the 1 site where known")


def modules(*fqns):
    """The module column for sites at `fqns`."""
    text = reported(*map(site, fqns)).render(width=240)
    rows = [line for line in text.splitlines() if "down_norm_up" in line]
    return [line.split("down_norm_up", 1)[1].split("modeling.py")[0].strip() for line in rows]


@pytest.mark.parametrize(("fqns", "shown"), [
    (["layers.7.attn"], ["layers.7.attn"]), (["layers.7.attn", "layers.7.attn"], ["layers.7.attn ×2"]),
    (["layers.10.attn", "layers.9.attn", "layers.2.attn"], ["layers.{2,9..10}.attn ×3"]),
    (["layers.0.attn", "layers.1.mlp"], ["layers.0.attn", "layers.1.mlp"]),
    ([f"l.{i}.e.{j}" for i in (0, 1) for j in (0, 1, 2)], ["l.{0..1}.e.{0..2} ×6"]),
    (["l.0.e.0", "l.0.e.1", "l.1.e.1"], ["l.0.e.{0..1} ×2", "l.1.e.1"]), (["", ""], ["(the frame itself) ×2"]),
])
def test_grouping_claims_no_module_that_is_not_there(renderer, fqns, shown):
    assert modules(*fqns) == shown


def test_sites_that_differ_in_their_graphs_alone_are_grouped(renderer):
    """The graphs of equal layers differ in the names of their nodes."""
    graphs = ({"before": {"nodes": [{"name": f"mm_{i}"}], "left_out": 0}} for i in range(2))
    assert "layers.{0..1} ×2" in str(reported(*(site(f"layers.{i}", graph=graph) for i, graph in enumerate(graphs))))


def test_frames_of_equal_regions_are_grouped_and_sites_that_differ_are_not(renderer):
    different = site("l.0", saved_before=1, saved_after=1), site("l.1", saved_before=2, saved_after=1)
    assert "×" not in str(reported(*different))
    report = Report()
    for i in range(3):
        report.add(Frame(name=f"block {i}"), [site(f"layers.{i}")])
    assert "layers.{0..2} ×3" in str(report)


@pytest.mark.parametrize(("n", "text"), [
    (None, "?"), (0, "0 B"), (512, "512 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (12_600, "12.3 KiB"),
    (2**20 - 1, "1 MiB"), (780 * 2**20, "780 MiB"), (-(2**21), "-2 MiB"), (24 * 2**30, "24 GiB"),
    (5000 * 2**40, "5000 TiB"),
])
def test_bytes_text(n, text):
    assert bytes_text(n) == text


# What `remat.tagging` says of a kind of block, and of the peak.
REMAT = {"entries": ["selective"], "blocks": 2, "saved": 48, "offloaded": 0, "again": 8, "recomputed": 3, "seconds": 0.0}
PEAK = {"before": 4608, "step": 6656, "predicted": 11264, "transient": 4608, "limit": None}


def everything():
    """A report with a row in every table."""
    report = filled()
    report.regions.append(CompiledRegion(("layers.0", "layers.1"), "Layer", 12, "compiled"))
    linear = Precision("mlp.up", "linear", "8x6", SOURCE, "fp8_current", "bf16", "*.up", "no gain")
    report.frames[0].precision = [dataclasses.asdict(linear)]
    report.frames[0].recognised = [{"kind": "lightning attention", "fqn": "mixer", "source": SOURCE}]
    report.frames[0].remat, report.frames[0].peak = {"ablock": REMAT}, PEAK
    worst = {"difference": 2e-7, "tolerance": 1e-5, "tensor": "output mul", "pass_name": "down_norm_up", "fqn": "layers.0"}
    report.frames[0].verified = {"sites": 24, **worst}
    report.frames[0].seconds = dict.fromkeys(STAGES, 1.5)
    report.frames[0].recompiled = "x has size 5 in dimension 1, and had 3"
    pinned = Pinned("q.weight", (8, 4), "data, -", "q.*", "down_norm_up")
    report.frames[0].auto = dataclasses.asdict(AutoPlan(True, "", 4, 10, 20, 30, 40, 1e-6, 1e-3, {"kept": 0}, "sm_90"))
    report.frames[0].sharding = {"mesh": {"data": 2}, "pinned": [pinned.to_dict()]}
    report.measured = {"before": 10, "step": 20, "peak": 30}
    report.frames[0].attention = [dataclasses.asdict(AttentionSite("mla", SOURCE, "sdpa", "fa4", "sdpa", "cudnn", "t", "why", "flash"))]
    shape = (1, 2, 2, 8, 8, 64, 64)
    report.attention.append(AttentionCall("auto", False, "sdpa", (), shape, "bfloat16", "cuda", True, "absent", "prefill"))
    return report


def shown_by(report):
    """Section -> what its rows show, as the columns name it."""
    frame = report.frames[0]
    return {
        "regions": report.regions[0], "fused": report.sites[0], "recognised, without a lowering": frame.recognised[0],
        "precision": Precision(**frame.precision[0]), "nearest misses": report.misses[0], "frames": frame,
        "compile time": frame.seconds, "costliest pieces of compiling": report.costs()[0],
        "compiled again": frame, "verified on the first call": frame.verified,
        "policy auto": AutoPlan(**frame.auto), "remat": frame.remat["ablock"], "predicted memory at the peak of a step": frame.peak,
        "measured memory at the peak of a step": {**report.measured, "predicted_step": report.predicted_step},
        "sharding": Pinned(**frame.sharding["pinned"][0]),
        "attention": AttentionSite(**frame.attention[0]), "attention, eager calls": report.attention[0],
    }  # fmt: skip


def test_a_column_is_called_what_it_shows(renderer):
    """Who has read a table knows the attribute, or the key of the JSON."""
    report = everything()
    text, records = report.render(width=300), shown_by(report)
    assert set(COLUMNS) == set(records)
    for name, columns in COLUMNS.items():
        header = next(line for line in text.partition(name)[2].splitlines() if line.strip().startswith(next(iter(columns))))
        assert re.split(r" {2,}", header.strip()) == list(columns)
        for shown, attributes in columns.items():
            for attribute in attributes:
                record = records[name]
                assert attribute in record if isinstance(record, dict) else hasattr(record, attribute), (name, shown)
                words = {"pass"} if attribute == "pass_name" else set(attribute.split("_"))
                assert words <= set(re.findall(r"\w+", shown)), (name, shown)


def test_the_lowering_of_a_site_reads_as_in_the_table():
    assert site().lowering == "reference"
    other = site(requested="cuda_triton", reason="no CUDA device")
    assert other.lowering == "cuda_triton → reference (no CUDA device)"
    assert "lowering" not in json.loads(json.dumps(plain(other)))  # the JSON has what it is made of


def test_code_from_a_cache_says_so_in_the_place_of_what_nobody_decided(renderer):
    report, policy = Report(), {"ablock": "selective"}
    report.add(Frame(grad=True, cached=True, policy=policy))
    report.add(Frame(grad=True, policy=policy, remat={"ablock": REMAT}, peak=PEAK))
    report.add(Frame(grad=False, cached=True, policy=policy))  # inference: a policy has nothing to decide
    report.add(Frame(grad=True, cached=True))
    text = report.render(width=240)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if "from cache" in line]
    assert [row for row in rows if row[1] == "from cache"] == [["0", "from cache", *["-"] * 6], ["0", "from cache", *["-"] * 3]]
    assert sum("captured, from cache" in row for row in rows) == 3 and Report.from_json(report.to_json()) == report


def test_predicted_and_measured_are_one_quantity(renderer):
    """What a step allocates beyond what was there; where frames break a step, no single one is the step."""
    report = Report(measured={"before": 100 * 2**20, "step": 20 * 2**20, "peak": 120 * 2**20})
    report.add(Frame(grad=True, peak={**PEAK, "step": 19 * 2**20}))
    report.add(Frame())
    assert report.predicted_step == 19 * 2**20
    row = next(line for line in report.render(width=200).splitlines() if "100 MiB" in line)
    assert re.split(r" {2,}", row.strip()) == ["100 MiB", "20 MiB", "120 MiB", "19 MiB"]
    report.add(Frame(grad=True, peak=PEAK))
    assert report.predicted_step is None


@pytest.mark.parametrize(("target", "key"), [("cpu", "step"), ("cuda", "peak")])
def test_the_last_release_s_reports_are_read(target, key):
    """It had one number for the measured peak: the step's own, and on CUDA all that was allocated."""
    old = json.loads(Report(frames=[Frame(target=target)]).to_json())
    del old["measured"]
    for gone in ("cached", "policy"):
        del old["frames"][0][gone]
    report = Report.from_json(json.dumps({**old, "format": 1, "measured_peak": 7}))
    assert report.measured == {"before": None, "step": None, "peak": None} | {key: 7}
    with pytest.warns(FutureWarning, match="measured"):
        assert report.measured_peak == 7
    assert Report.from_json(json.dumps({**old, "format": 1, "measured_peak": None})).measured is None


@pytest.mark.end_to_end
def test_nothing_heavy_is_imported():
    # A bare package, so that what the package's own __init__ imports does not count here.
    code = (
        "import sys, types, importlib.machinery\n"
        "spec = importlib.machinery.PathFinder.find_spec('megacpp_compile')\n"
        "package = types.ModuleType('megacpp_compile')\n"
        "package.__path__ = list(spec.submodule_search_locations)\n"
        "sys.modules['megacpp_compile'] = package\n"
        "import megacpp_compile.config.options, megacpp_compile.report.collector, megacpp_compile.errors\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'rich', 'numpy', 'triton'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
