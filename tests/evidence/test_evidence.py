"""Evidence that can't be talked into being: every illegal combination, every guard, each stop rule at its edge, the gate."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_compile import cli
from megacpp_compile.errors import EvidenceError
from megacpp_compile.evidence import binding, catalog, gate, status
from megacpp_compile.evidence import run as runs
from megacpp_compile.evidence.catalog import PROFILES, SURFACES, check
from megacpp_compile.evidence.kinds import ARTIFACTS, Profile
from megacpp_compile.evidence.record import CHECKS, LEGACY_METRICS, TRUTH, Record, counting, read, verdict
from megacpp_compile.evidence.rollout import BASELINES, DETACHED_SHAPE, ENVIRONMENTS, MATRIX, RUNGS, standings, stops
from tests.nn import fa4_evidence
from tests.nn.standing_in import hopper_on_cpu

ROOT = Path(__file__).parents[2]
CANONICAL, DETACHED = ENVIRONMENTS
HOSTS = {CANONICAL: "aaaa", DETACHED: "bbbb"}
METRICS = {"median_tok_per_sec": 1000.0, "peak_memory_mib": 100.0, "max_abs_diff": 0.001}


def machine(environment=CANONICAL, **changed):
    return {"host": HOSTS.get(environment, "cccc"), "kind": "cuda", "device": "NVIDIA H200", "capability": "9.0",
            "driver": "570", "torch": "2.11.0", "packages": {}, "commit": "123456789abc", "clean": True, **changed}  # fmt: skip


def record(profile="dense_fa4_forward", environment=CANONICAL, bound=None, **changed):
    """One that counts."""
    fields = {
        "line": "dense_full_fa4", "machine": machine(environment, **(bound or {})), "date": "2026-01-01 00:00 UTC",
        "shape": DETACHED_SHAPE, "dtype": "bfloat16", "requested_backend": "fa4", "actual_backend": "fa4",
        "fallback_reason": "", "phase": "prefill", "kernel_family": "fa4", "difference_against": "float32",
        "checks": dict.fromkeys(CHECKS, True), "metrics": METRICS,
    }  # fmt: skip
    return Record(profile, environment=environment, **{**fields, **changed})


def test_the_catalog_hangs_together():
    check()
    assert {p.line for p in PROFILES} <= {s.line for s in SURFACES}


@pytest.mark.parametrize("grade", [*ARTIFACTS, "hearsay"])
@pytest.mark.parametrize("proof_class", [*ARTIFACTS, "hearsay"])
def test_every_combination_of_the_four_fields(proof_class, grade):
    kinds = [*itertools.chain(*ARTIFACTS.values()), "promise"]
    for artifact_kind, counts, truth in itertools.product(kinds, [False, True], [False, True]):
        legal = (
            proof_class in ARTIFACTS and grade == proof_class and artifact_kind in ARTIFACTS[proof_class]
            and (not counts or proof_class == "execute" and truth)
        )  # fmt: skip
        fields = (proof_class, artifact_kind, grade, counts, truth)
        arguments = ("id", "dense_fa4", "dense_full_fa4", ("tests",), 2, *fields)
        if legal:
            assert Profile(*arguments).command == "python -m pytest tests"
            continue
        try:
            Profile(*arguments)
        except EvidenceError:
            continue
        pytest.fail(f"no error for {fields}")


@pytest.mark.parametrize(("changed", "says"), [
    ({"line": "dense"}, "line 'dense' is none of"), ({"line": "non_applicable"}, "where nothing applies"),
    ({"tier": 4}, "wanted 1, 2 or 3"),
])
def test_profiles_that_are_none(changed, says):
    with pytest.raises(EvidenceError, match=says):
        dataclasses.replace(catalog.profile_of("dense_fa4_forward"), **changed)


def surface(**changed):
    return dataclasses.replace(catalog.surface_of("dense_fa4"), **changed)


@pytest.mark.parametrize(("surfaces", "profiles", "says"), [
    ((*SURFACES, surface()), PROFILES, "its id is there twice"),
    (SURFACES, (*PROFILES, PROFILES[0]), "its id is there twice"),
    (SURFACES[1:], PROFILES, "there is no surface 'dense_fa4'"),
    ((surface(line="exact_token_dsa"), *SURFACES[1:]), PROFILES, "its line is not that of surface"),
    ((surface(line="dense"), *SURFACES[1:]), PROFILES, "line 'dense' is none of"),
    ((surface(constraints=("dense_fa4_no_luck",)), *SURFACES[1:]), PROFILES, "no eligibility has the tag"),
    ((surface(fit="non_applicable", relation="other"), *SURFACES[1:]), PROFILES, "a surface that does not apply"),
    ((surface(fit="non_applicable"), *SURFACES[1:]), PROFILES, "applies to nothing"),
    (SURFACES, [p for p in PROFILES if p.proof_class != "execute"], "no profile executes it"),
])  # fmt: skip
def test_catalogs_that_do_not_hang_together(surfaces, profiles, says):
    with pytest.raises(EvidenceError, match=says):
        check(surfaces, profiles)


@pytest.mark.parametrize("profile", PROFILES, ids=[p.id for p in PROFILES])
def test_what_a_profile_runs_is_there(profile):
    assert (ROOT / profile.arguments[0]).exists()
    if "-k" in profile.arguments:
        word = profile.arguments[profile.arguments.index("-k") + 1]
        sources = ROOT / profile.arguments[0]
        text = "".join(p.read_text() for p in ([sources] if sources.is_file() else sources.glob("test_*.py")))
        assert any(word in line for line in text.splitlines() if line.startswith("def test_"))


def test_a_record_that_counts():
    assert verdict(record()) == verdict(record(metrics={})) and verdict(record()).counts and verdict(record()).why == ""


@pytest.mark.parametrize(("changed", "says"), [
    ({"line": "exact_token_dsa"}, "does not cross"),
    ({"profile": "dense_fa4_contract"}, "only what was executed counts"),
    ({"profile": "dense_fa4_matrix"}, "only what was executed counts"),
    ({"profile": "dense_fa4_hybrid_prefill"}, "only what was executed counts"),
    ({"profile": "mamba3_guard", "line": "non_applicable"}, "has no attention backend"),
    ({"profile": "gated_deltanet_guard", "line": "non_applicable"}, "has no attention backend"),
    ({"profile": "tpu_pallas_guard", "line": "non_applicable"}, "has no attention backend"),
    ({"profile": "dense_fa4_fp4_refused"}, "has no attention backend"),
    *[({name: None}, f"it is a manifest: {name} absent") for name in TRUTH],
    ({"shadow": True}, "a shadow run never counts"), ({"donor": True}, "donor's side"),
    ({"bound": {"kind": "tpu"}}, "never one of FlashAttention-4"), ({"bound": {"clean": False}}, "the tree was dirty"),
    ({"bound": {"commit": None}}, "'commit' is absent"), ({"bound": {"host": ""}}, "'host' is absent"),
    ({"actual_backend": "sdpa"}, "actual backend is 'sdpa'"), ({"kernel_family": "cudnn"}, "a name is no proof"),
    ({"kernel_family": None}, "a name is no proof"), ({"dtype": None}, "its dtype is not named"),
    ({"metrics": {"median_tok_per_sec": float("nan")}}, "no finite number"),
    *[({"checks": {**dict.fromkeys(CHECKS, True), name: False}}, f"'{name}' failed") for name in CHECKS],
    ({"checks": {}}, "'imported' is absent"),
])
def test_guards(changed, says):
    found = verdict(record(**changed))
    assert not found.counts and says in found.why and not found.stale


def test_guard_a_profile_that_is_gone_is_stale():
    found = verdict(record(profile="dense_fa4_old"))
    assert not found.counts and found.stale and "no profile 'dense_fa4_old'" in found.why


def executed(id, surface, line):
    return (*PROFILES, Profile(id, surface, line, ("tests",), 2, "execute", "validated_remote_execution", "execute", True, True))


@pytest.mark.parametrize(("changed", "says"), [
    ({}, ""), ({"mode": None}, "requested backend or mode is absent"),
    ({"requested_backend": None}, "requested backend or mode is absent"), ({"fallback_reason": None}, "manifest"),
    ({"actual_backend": "gather"}, "actual backend is 'gather'"),
])
def test_guards_of_the_sparse_line(changed, says):
    fields = {"line": "blockized_sparse_cuda", "actual_backend": "blockized", "mode": "replace", **changed}
    found = verdict(record("blocks", **fields), executed("blocks", "blockized_sparse", "blockized_sparse_cuda"))
    assert found.counts == (not says) and says in found.why


@pytest.mark.parametrize(("changed", "says"), [
    ({}, ""), ({"fallback_reason": "no kernel"}, "it fell back"), ({"actual_backend": "fa4"}, "actual backend"),
])  # fmt: skip
def test_guards_of_the_exact_token_line(changed, says):
    found = verdict(record("exact_token_gather", **{"line": "exact_token_dsa", "actual_backend": "gather", **changed}))
    assert found.counts == (not says) and says in found.why


@pytest.mark.parametrize(("kind", "counts"), [
    ("paged-KV run", True), ("config acceptance", False), ("contiguous-KV smoke", False), (None, False),
])  # fmt: skip
def test_guards_of_the_serving_line(kind, counts):
    profiles = executed("paged", "serving", "serving_decode")
    row = record("paged", line="serving_decode", actual_backend="paged", phase="decode", serving_kind=kind)
    assert verdict(row, profiles).counts == counts and counting([row], profiles) == ([row] if counts else [])


def test_round_trip(tmp_path):
    row = record()
    assert Record.of(json.loads(row.to_json())) == row
    (tmp_path / "b.json").write_text(row.to_json())
    (tmp_path / "a.json").write_text(dataclasses.replace(row, shadow=True).to_json())
    assert [r.shadow for r in read(tmp_path)] == [True, False]


@pytest.mark.parametrize(("text", "says"), [
    ("[]", "it is list"), ("{", "Expecting"), ('{"profile": "x", "line": "y"}', "'environment' is absent"),
    ('{"profile": "x", "line": "y", "environment": "z", "counts": true}', "there is no key 'counts'"),
])  # fmt: skip
def test_files_that_hold_no_record(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(EvidenceError, match=f"x.json.*{says}"):
        read(tmp_path)


@pytest.mark.parametrize(("at", "beyond", "says"), [
    ({"metrics": {"max_abs_diff": 0.01}}, {"metrics": {"max_abs_diff": 0.010001}}, "max_abs_diff"),
    ({"metrics": {"loss_ratio": 1.05}}, {"metrics": {"loss_ratio": 1.0501}}, "loss ratio"),
    ({"metrics": {"median_tok_per_sec": 900.0}}, {"metrics": {"median_tok_per_sec": 899.9}}, "below the reference's 1000"),
    ({"metrics": {"peak_memory_mib": 105.0}}, {"metrics": {"peak_memory_mib": 105.1}}, "above the reference's 100"),
    ({"metrics": {"loss": 3e38}}, {"metrics": {"loss": float("inf")}}, "loss is no finite number"),
    ({"metrics": {}}, {"metrics": {"max_abs_diff": float("nan")}}, "no finite number"),
    ({"checks": {"finite": True}}, {"checks": {"finite": False}}, "NaN or Inf"),
    ({"profile": "dense_fa4_train_2"}, {"profile": "dense_fa4_train_2", "checks": {"passed": False}}, "two steps failed"),
    ({"claims": ("decode",), "phase": "decode"}, {"claims": ("decode",)}, "claims decode"),
    ({"claims": ()}, {"claims": ("kv_cache", "decode")}, "claims decode and kv_cache"),
    ({"claims": ("decode",), "phase": "decode"}, {"claims": ("decode",), "phase": "decode", "shadow": True}, "executed none"),
])  # fmt: skip
def test_stop_rules_at_their_edge(at, beyond, says):
    reference = record(configuration=BASELINES[0], actual_backend="sdpa")
    assert stops(record(**at), reference) == []
    assert len(found := stops(record(**beyond), reference)) == 1 and says in found[0]


def ladder(without=(), **changed):
    """Records that pass every rung but R7, which is planned."""
    checks = {"passed": True}
    rows = [record(p, "ci", checks=checks) for p in ("dense_fa4_contract", "attention_sites_contract", "evidence_contract")]
    for environment in ENVIRONMENTS:
        rows.append(record(environment=environment))
        rows += [record(f"dense_fa4_train_{n}", environment, metrics={**METRICS, "loss_ratio": 1.0}) for n in (2, 100)]
    rows += [record("dense_fa4_matrix", configuration=c) for c in MATRIX]
    baseline = {"actual_backend": "sdpa", "kernel_family": "cudnn"}
    rows += [record("dense_fa4_matrix", configuration=c, **baseline) for c in BASELINES]
    rows.append(record("dense_fa4_profile"))
    return [r for r in rows if r.profile not in without]


def state_of(records):
    return {s.rung.id: s.state for s in standings(records)}


def test_rungs_from_the_lowest():
    assert set(state_of([]).values()) == {"not started"}
    assert state_of(ladder()) == {**dict.fromkeys(["L0", "L1", "R1", "R2", "R3", "R4", "R5", "R6"], "passed"), "R7": "not started"}
    assert all(set(rung.needs) <= {r.id for r in RUNGS[:i]} for i, rung in enumerate(RUNGS))
    without = state_of(ladder(without=["evidence_contract"]))
    assert without["L0"] == "passed" and without["L1"] == "not started" and without["R1"] == "pending"
    planned = standings([*ladder(), record("dense_fa4_hybrid_prefill")])[-1]
    assert planned.state == "pending" and any("nothing ran" in line for line in planned.missing)


@pytest.mark.parametrize(("profile", "changed", "rung", "says"), [
    ("dense_fa4_matrix", {"actual_backend": "sdpa"}, "R4", "its actual backend is 'sdpa'"),
    ("dense_fa4_matrix", {"metrics": {"throughput_toks": 1.0, "peak_memory_gb": 1.0}}, "R4", "it has no median_tok_per_sec"),
    ("dense_fa4_matrix", {"shape": None}, "R4", "it is a manifest"),
    ("dense_fa4_matrix", {"difference_against": "cudnn"}, "R4", "not against float32"),
    ("dense_fa4_profile", {"bound": {"clean": False}}, "R5", "the tree was dirty"),
    ("dense_fa4_train_100", {"metrics": METRICS}, "R6", "it has no loss_ratio"),
    ("dense_fa4_forward", {"actual_backend": "sdpa"}, "R1", "actual backend is 'sdpa'"),
])  # fmt: skip
def test_rows_that_do_not_do(profile, changed, rung, says):
    rows = [r for r in ladder() if r.profile != profile]
    spoilt = [record(profile, r.environment, configuration=r.configuration, **changed) for r in ladder() if r.profile == profile]
    standing = next(s for s in standings([*rows, *spoilt]) if s.rung.id == rung)
    assert standing.state == "pending" and any(says in line for line in standing.missing), standing


def test_the_second_environment_and_each_configuration_have_shapes_of_their_own():
    rows = [r if r.environment != DETACHED else dataclasses.replace(r, shape=(2, 8, 128, 128, 64, 64)) for r in ladder()]
    standing = next(s for s in standings(rows) if s.rung.id == "R3")
    assert standing.state == "pending" and "not (1, 8, 128, 128, 64, 64) in bfloat16" in standing.missing[0]
    # Torch's attention over 4096 tokens says nothing of the speed and memory that 16384 tokens may have.
    slow = {**METRICS, "median_tok_per_sec": 1.0, "peak_memory_mib": 1e6}
    alike = (MATRIX[1], BASELINES[1])
    rows = [r if r.configuration not in alike else dataclasses.replace(r, metrics=slow) for r in ladder()]
    assert state_of(rows)["R4"] == "passed"


def test_a_tripped_rule_stops_its_rung_and_what_is_above():
    rows = [r if r.configuration != MATRIX[0] else dataclasses.replace(r, metrics={**METRICS, "median_tok_per_sec": 1.0}) for r in ladder()]
    (why,) = next(s for s in standings(rows) if s.rung.id == "R4").stopped
    assert why.startswith(f"dense_fa4_matrix {MATRIX[0]}: 1 tokens a second are more than 10 % below")
    states = state_of(rows)
    assert states["R4"] == "stopped" and states["R6"] == "pending" and states["R3"] == "passed"


def of(promotion, records, environments=ENVIRONMENTS):
    return next(d for d in gate.decide(records, environments) if d.promotion == promotion)


@pytest.fixture
def unblocked(monkeypatch):
    """As if a decode path had its records."""
    monkeypatch.setattr(gate, "_blocks", lambda *_: ())


def test_the_gate_is_blocked_without_records_whatever_the_rows_say_and_by_claims():
    for decision in gate.decide([]):
        assert not decision.ready and decision.blocks == ("no_kv_cache_support",)
        assert sum("an execute proof of dense_fa4_forward" in line for line in decision.missing) == 2
    assert of("full_train_promotion", ladder()).blocks == ("no_kv_cache_support",)
    assert not of("full_train_promotion", ladder()).ready and of("full_train_promotion", ladder()).missing == ()
    rows = [*ladder(), record(claims=("kv_cache",))]
    assert f"stop rule tripped by dense_fa4_forward in {CANONICAL}" in of("prefill_promotion", rows).blocks


def test_a_gate_that_opens_but_not_by_comparisons_alone(unblocked):
    """Training, of which every row is there; the block alone keeps it shut otherwise."""
    assert of("full_train_promotion", ladder()).ready
    assert of("prefill_promotion", ladder()).missing == ("rung R7: not started",)
    green = ladder(without=["dense_fa4_forward", "dense_fa4_train_2", "dense_fa4_train_100"])
    decision = of("full_train_promotion", green)
    assert not decision.ready and f"an execute proof of dense_fa4_forward in {CANONICAL}" in decision.missing


@pytest.mark.parametrize("there", ENVIRONMENTS)
def test_one_environment_is_not_two(unblocked, there):
    other = DETACHED if there == CANONICAL else CANONICAL
    decision = of("full_train_promotion", [r for r in ladder() if r.environment != other])
    assert not decision.ready and f"an execute proof of dense_fa4_forward in {other}" in decision.missing


def test_one_machine_under_two_names_is_one(unblocked):
    rows = [dataclasses.replace(r, machine={**r.machine, "host": "aaaa"}) for r in ladder()]
    assert any("are one machine" in line for line in of("full_train_promotion", rows).missing)
    old = {**dict.fromkeys(LEGACY_METRICS, 1.0), "max_abs_diff": 0.0, "loss_ratio": 1.0}
    rows = [dataclasses.replace(r, metrics=old) if r.profile.startswith("dense_fa4_forward") else r for r in ladder()]
    assert any("other names are no evidence" in line for line in of("full_train_promotion", rows).missing)


@pytest.mark.parametrize("environments", [(), (CANONICAL,), (CANONICAL, CANONICAL), (CANONICAL, DETACHED, "third")])
def test_two_distinct_environments_are_wanted(environments):
    with pytest.raises(EvidenceError, match="wanted two distinct ones"):
        gate.decide([], environments)


def test_the_page_is_what_the_records_make_in_any_order():
    text = status.page(read(ROOT / "docs" / "evidence"))
    assert (ROOT / "docs" / "generated" / "evidence.md").read_text() == text, "make pages"
    rows = [*ladder(), record(profile="dense_fa4_old")]
    assert status.page(rows) == status.page(rows[::-1])
    assert "stale: the catalog has no profile 'dense_fa4_old'" in status.page(rows)
    assert json.loads(json.dumps(status.as_data(rows)))["rungs"]["R1"]["state"] == "passed"
    assert "| `dense_fa4` |" in status.page(rows) and f"{CANONICAL}, {DETACHED}" in status.page(rows)


XML = """<testsuites><testsuite tests="{tests}" skipped="{skipped}" failures="{failures}" errors="0">
<testcase name="a">{skip}<properties>{properties}</properties></testcase></testsuite></testsuites>"""


def xml(tests=1, skipped=0, failures=0, evidence=(), skip=""):
    properties = "".join(f"<property name='evidence' value='{json.dumps(e)}'/>" for e in evidence)
    return lambda *_: XML.format(tests=tests, skipped=skipped, failures=failures, properties=properties, skip=skip)


def test_a_run_writes_its_record_and_says_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(binding, "commit", lambda folder, apart=None: ("abc", True))
    found, line = runs.run("dense_fa4_contract", "ci", tmp_path, ROOT, xml())
    assert line == "dense_fa4_contract: actual -, it is validation, and only what was executed counts"
    assert read(tmp_path) == found and found[0].checks == {"passed": True} and found[0].is_manifest
    found, _ = runs.run("dense_fa4_contract", "ci", tmp_path, ROOT, xml(failures=1))
    assert found[0].checks == {"passed": False}
    two = [{"configuration": c, "actual_backend": "fa4"} for c in MATRIX[:2]]
    found, _ = runs.run("dense_fa4_matrix", "ci", tmp_path, ROOT, xml(evidence=two))
    assert [r.configuration for r in found] == list(MATRIX[:2]) and len(read(tmp_path)) == 3


@pytest.mark.parametrize(("profile", "environment", "result", "says"), [
    ("dense_fa4_forward", "ci", xml(skipped=1, skip="<skipped message='needs a CUDA device'/>"), "needs a CUDA device"),
    ("dense_fa4_forwards", "ci", xml(), "Did you mean 'dense_fa4_forward'"),
    ("dense_fa4_forward", "a/b", xml(), "letters, digits"),
    ("dense_fa4_forward", "ci", xml(evidence=[{"machine": {}}]), "not theirs to say"),
    ("dense_fa4_forward", "ci", xml(evidence=[{"counts": True}]), "there is no key 'counts'"),
])  # fmt: skip
def test_runs_that_leave_nothing(tmp_path, profile, environment, result, says):
    with pytest.raises(EvidenceError, match=says):
        runs.run(profile, environment, tmp_path, ROOT, result)
    assert not list(tmp_path.iterdir())


def test_what_the_runs_on_a_gpu_leave_makes_records(monkeypatch, tmp_path):
    """With a stand-in for the kernel: the evidence is complete, right against float32, and a CPU of this name counts for
    nothing but itself."""
    with hopper_on_cpu(monkeypatch):
        sizes = {"batch": 1, "heads": 2, "tokens": 32, "keys": 64, "values": 64, "times": 1}
        ahead = fa4_evidence.forward("cpu", **sizes)
        trained = fa4_evidence.train("cpu", 2, dim=64, heads=1, width=64, tokens=16, layers=1)
        plain = fa4_evidence.forward("cpu", **sizes, backend="sdpa")
    for profile, evidence in (("dense_fa4_forward", ahead), ("dense_fa4_train_2", trained)):
        monkeypatch.setattr(binding, "commit", lambda folder, apart=None: ("abc", True))
        [row], line = runs.run(profile, "ci", tmp_path, ROOT, xml(evidence=[evidence]))
        assert line == f"{profile}: actual fa4, counts" and stops(row) == [] and row.machine["kind"] in ("cpu", "cuda")
    assert ahead["metrics"]["max_abs_diff"] < 0.01 and trained["metrics"]["loss_ratio"] < 1.05
    assert plain["actual_backend"] == "sdpa" and plain["kernel_family"] == "flash"


def test_the_binding_is_of_this_checkout(tmp_path, monkeypatch):
    found = binding.machine_binding(ROOT)
    assert len(found["host"]) == 12 and found["torch"] and found["packages"]["torch"]
    monkeypatch.setattr(binding, "_gpu", lambda: "GPU-1")
    assert binding.machine_binding(ROOT)["host"] != found["host"], "two machines of one name"
    assert binding.commit(tmp_path) == (None, False)


@pytest.mark.end_to_end
def test_records_of_other_runs_make_no_checkout_dirty(tmp_path):
    def git(*args):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    records, code = tmp_path / "docs" / "evidence", tmp_path / "code.py"
    records.mkdir(parents=True)
    for file in (records / "one.json", code):
        file.write_text("before")
    git("init"), git("add", "."), git("commit", "-m", "one")
    (records / "one.json").write_text("after")
    assert binding.commit(tmp_path, records)[1] and not binding.commit(tmp_path)[1]
    assert binding.commit(tmp_path, tmp_path.parent)[1] is False, "records elsewhere hide nothing of this one"
    code.write_text("after")
    assert not binding.commit(tmp_path, records)[1]


def test_exit_statuses(tmp_path, capsys, monkeypatch):
    folder = ["--records", str(tmp_path)]
    assert cli.main(["evidence", "gate", *folder]) == 1 and "full_train_promotion: blocked" in capsys.readouterr().out
    assert cli.main(["evidence", "gate", "--json", *folder]) == 1
    assert json.loads(capsys.readouterr().out)[0]["blocks"] == ["no_kv_cache_support"]
    assert cli.main(["evidence", "gate", "--environments", "one", *folder]) == 2
    assert "wanted two distinct ones" in capsys.readouterr().err
    assert cli.main(["evidence", "status", *folder]) == 0 and "L0 not started" in capsys.readouterr().out
    assert cli.main(["evidence", "status", "--json", *folder]) == 0
    assert cli.main(["evidence", "status", "--page", str(tmp_path / "page.md"), *folder]) == 0
    assert (tmp_path / "page.md").read_text() == status.page([])
    for i, row in enumerate(ladder()):
        (tmp_path / f"{i:02}.json").write_text(row.to_json())
    monkeypatch.setattr(gate, "_blocks", lambda *_: ())
    monkeypatch.setattr(gate, "PROMOTIONS", {"full_train_promotion": gate.PROMOTIONS["full_train_promotion"]})
    assert cli.main(["evidence", "gate", *folder]) == 0 and capsys.readouterr().out.endswith("full_train_promotion: ready\n")
    for failures, expected in ((0, 0), (1, 1)):
        monkeypatch.setattr(runs, "_pytest", xml(failures=failures))
        assert cli.main(["evidence", "run", "dense_fa4_contract", "--environment", "ci", *folder]) == expected
    assert cli.main(["evidence", "run", "dense_contract", "--environment", "ci", *folder]) == 2


@pytest.mark.end_to_end
def test_the_package_loads_none_of_it():
    text = "import sys, megacpp_compile; print([n for n in sys.modules if n.startswith('megacpp_compile.')])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


