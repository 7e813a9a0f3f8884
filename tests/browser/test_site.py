"""The site: built without a warning, readable by all, complete without a network, and on a phone."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import LIMIT, fresh_page
from tests.support.needs import missing, require

pytestmark = [pytest.mark.browser]
ROOT = Path(__file__).parents[2]
MOST_BYTES = 300_000  # of a page, without its pictures
PHONE = 390  # CSS pixels
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("sphinx") is None:
        missing("sphinx is not installed: `make setup` brings it")
    command = [sys.executable, ROOT / ".ci" / "site" / "build.py", *options, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, built for these tests."""
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def address(pages: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=pages)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def names(pages: Path) -> list[str]:
    return sorted(str(path.relative_to(pages)) for path in pages.rglob("*.html"))


def test_each_notebook_has_a_page_that_is_not_too_long(pages: Path) -> None:
    for folder in ("lessons", "exercises"):
        for path in (ROOT / folder).glob("*.ipynb"):
            page = pages / folder / f"{path.stem}.html"
            assert page.stat().st_size < MOST_BYTES, path.stem
            assert "data:image/png" not in page.read_text()
    assert not list(pages.rglob("*solution*"))


def test_every_page_is_readable_by_all(pages: Path, address: str, tmp_path: Path) -> None:
    """Axe finds nothing in light and dark, nothing is fetched from elsewhere, and a phone is wide enough."""
    from axe_playwright_python.sync_playwright import Axe

    axe, wrong, asked = Axe(), [], set()
    with fresh_page(require("chromium", "it shows the site"), tmp_path / "profile") as page:
        page.on("request", lambda request: asked.add(request.url))
        for name in names(pages):
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(address + name, timeout=LIMIT)
            for scheme in ("light", "dark"):
                page.evaluate(f"document.documentElement.dataset.theme = '{scheme}'")
                found = axe.run(page, options={"runOnly": RULES, "resultTypes": ["violations"]})
                if found.violations_count:
                    wrong.append(f"{name} {scheme}: {found.generate_report()}")
            page.set_viewport_size({"width": PHONE, "height": 844})
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > PHONE:
                wrong.append(f"{name} is {wide} wide on a phone")
            hidden = page.evaluate(
                "[...document.images].filter(each => !each.alt || !each.naturalWidth).length"
            )
            if hidden:
                wrong.append(f"{name}: {hidden} pictures are missing, or have no alternative")
    assert wrong == []
    elsewhere = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert elsewhere == []


def test_the_search_finds_a_word_of_a_lesson(address: str, tmp_path: Path) -> None:
    with fresh_page(require("chromium", "it shows the site"), tmp_path / "profile") as page:
        page.goto(f"{address}search.html?q=accumulation", timeout=LIMIT)
        first = page.locator(".search li a").first
        first.wait_for(timeout=LIMIT)
        assert "ccumulation" in page.locator(".search").inner_text()


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "index.md").write_text("# Home\n\n[gone](gone.md) and {term}`no such word`\n")
    built = build(tmp_path, "--as-it-is")
    assert built.returncode == 1
    assert "cross-reference target not found: 'gone.md'" in built.stderr
    assert "term not in glossary: 'no such word'" in built.stderr
