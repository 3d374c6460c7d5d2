"""What the site adds to its theme: a search that works where pages are opened from a folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.docs.commands import ROOT
from tests.docs.test_promises import reference  # noqa: F401
from tests.report.chromium import BROWSER, Chromium

FETCHED = '<script src="https://unpkg.com/iframe-worker/shim"></script>'


def test_nothing_is_fetched_and_what_the_settings_name_is_there(reference):  # noqa: F811
    for url, path in (("index.html", "folder_search.js"), ("reference/index.html", "../folder_search.js")):
        assert reference.on_post_page(FETCHED, SimpleNamespace(url=url), None) == f'<script src="{path}"></script>'
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "extra_css: [site.css]" in settings and "  - offline " in settings
    assert (ROOT / "docs" / "site.css").exists() and (ROOT / "docs" / "folder_search.js").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.end_to_end
def test_a_worker_runs_from_a_folder(tmp_path):
    (tmp_path / "worker.js").write_text("addEventListener('message', e => postMessage([e.data * 2, __index]))")
    script = (ROOT / "docs" / "folder_search.js").read_text()
    body = "__index = 'all'; w = new Worker('worker.js'); w.addEventListener('message', e => got = e.data); got = 0; w.postMessage(21)"
    (tmp_path / "page.html").write_text(f"<body><script>{script}</script><script>{body}</script></body>")
    (tmp_path / "profile").mkdir()
    with Chromium(tmp_path / "profile") as page:
        page.open(tmp_path / "page.html")
        assert page.until("got && got[0] === 42 && got[1] === 'all'") and not page.errors
