"""What pages claim of runs is what the records say (`tests/docs/claims.py`)."""

from __future__ import annotations

import re

import pytest

from tests.docs.claims import PAGES, ROOT, ClaimError, check, check_query, claims_of, queries_of

IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_claims_agree_with_the_records_they_cite(page):
    wrong = []
    for claim in claims_of(page):
        try:
            check(claim)
        except ClaimError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_whatever_else_is_cited_is_there(page):
    others = set(queries_of(page)) - {(claim.target, claim.query) for claim in claims_of(page)}
    problems = [f"{query}: {said}" for target, query in sorted(others) if (said := check_query(page, target, query))]
    assert not problems


@pytest.mark.parametrize(("claim", "says"), [
    ("FlashAttention-4 has not run on a GPU.", "cites no record"),
    ('It has not run ([none](docs/generated/evidence.md "no row: actual_backend=fa4")).', "there is a record"),
    ('FlashAttention-4: no hardware ([none](docs/evidence/x.json "no row: fa4")).', "there is no docs/evidence/x.json"),
    ("Not timed, never\nrun.", "cites no record"),
    ('The loop was never timed ([none](docs/kernels.md "no row: loop over the experts that have tokens")).', "there is a record"),
    ('Heads are untimed ([none](docs/generated/performance.md "no row: linear_cross_entropy")).', "there is a record"),
    ('`rope_qk` packed is not timed ([none](docs/kernels.md "no row: packed & by token")).', "there is a record"),
    ('This is not timed ([none](docs/kernels.md "no row: a thing of no name")).', "nothing is called"),
    ('This is not timed ([row](docs/h200/moe.json "row: subject=moe")).', "is shown by no row"),
    ("R5 has passed.", "cites no record"), ("| R5 | passed | R6 |", "cites no record"),
    ("R5 has passed on one H200, torch 2.11.", "cites no record"), ("It hasn't been timed.", "cites no record"),
    ("Nobody has run it, on any card.", "cites no record"), ("The head has yet to be timed.", "cites no record"),
    ("On one H200 (torch 2.11) it is within 1 percent.", "cites no record"),
    ('| R5 | [passed](docs/generated/evidence.md "rungs: R1 passed") |', "R5 said to have passed"),
    ('R1 and R6 have passed ([r](docs/generated/evidence.md "rungs: R1 R6 passed")).', "R6 is 'pending', not 'passed'"),
    ('R1 and R6 have passed ([r](docs/generated/evidence.md "rungs: R1 passed, R6 pending")).', "R6 said to have passed"),
    ('megacpp is [within 3 %](docs/h200/block.json "ratio: megacpp / GEMMs and attention alone, forward + backward").',
     "up to 6.91 %, so within 7 %"),
    ('[within 9 %](docs/h200/block.json "ratio: megacpp / GEMMs and attention alone, forward + backward")', "within 7 %"),
    ('[within 3 %](docs/h200/block.json "ratio: megacpp / no such row, forward")', "no such number"),
    ('[within 3 %](docs/kernels.md#moe "says: 14.36 ms")', "does not say"),
    ("| a | within 4 % | b | [within 9 %](docs/h200/block.json \"ratio: Inductor / GEMMs and attention alone, forward + "
     'backward") |', "'within 4 %' cites no record"),
])  # fmt: skip
def test_a_false_claim_is_seen(claim, says):
    found = claims_of(ROOT / "README.md", claim)
    with pytest.raises(ClaimError, match=re.escape(says)):
        for one in found:
            check(one)


def test_what_is_no_claim_of_a_run_needs_no_record():
    for text in ("The forward compiles a backward that does not run.", "It was passed over in silence.",
                 'Options passed through; "not run" means that.', "Within three percent.", "```text\nnot run\n```"):  # fmt: skip
        assert not claims_of(ROOT / "README.md", text), text
