"""The site: built without a warning, readable by all, complete without a network, and on a phone."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import course_lib
from course_lib.report.symptoms import symptoms
from tests.support.axe import PHONE, RULES, WIDTH, violations
from tests.support.lab import fresh_page
from tests.support.needs import missing, require

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
SITE = ROOT / ".ci" / "site"
MOST_BYTES = 300_000  # of a page, without its pictures


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


ONE_PAGE = """
import pathlib, sys
import build

def assemble(source):
    for site in (source, source / "zh"):
        site.mkdir()
        (site / "index.md").write_text(sys.argv[2])

build.assemble = assemble
sys.exit(build.main(pathlib.Path(sys.argv[1])))
"""


def build(folder: Path, page: str = "") -> subprocess.CompletedProcess[str]:
    """Build the site, or one with this page alone, in each language."""
    if importlib.util.find_spec("sphinx") is None:
        missing("sphinx is not installed: `make setup` brings it")
    command = ["-c", ONE_PAGE, folder, page] if page else ["build.py", folder]
    return subprocess.run([sys.executable, *command], cwd=SITE, capture_output=True, text=True, check=False)


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
    paths = (path.relative_to(pages) for path in pages.rglob("*.html"))
    return sorted(str(path) for path in paths if "_static" not in path.parts)  # where the theme keeps pieces


def test_each_notebook_has_a_page_that_is_not_too_long(pages: Path) -> None:
    for folder in ("lessons", "lessons/deeper", "exercises"):
        for path in (ROOT / folder).glob("*.ipynb"):
            page = pages / folder / f"{path.stem}.html"
            assert page.stat().st_size < MOST_BYTES, path.stem
            assert "data:image/" not in page.read_text(), path.stem


def test_what_a_notebook_folds_is_folded_on_its_page(pages: Path) -> None:
    page_of_00 = (pages / "lessons" / "00_start_here.html").read_text()
    cells = json.loads((ROOT / "lessons" / "00_start_here.ipynb").read_text())["cells"]
    for name, label in {"source_hidden": "Show the code", "outputs_hidden": "Show the output"}.items():
        folded = sum(bool(cell["metadata"].get("jupyter", {}).get(name)) for cell in cells)
        assert page_of_00.count(label) == folded > 0


def test_no_solution_is_published(pages: Path) -> None:
    assert not list(pages.rglob("*solution*"))
    for path in (ROOT / "exercises").glob("*.ipynb"):
        page = (pages / "exercises" / f"{path.stem}.html").read_text()
        assert "YOUR CODE HERE" in page
        assert "END SOLUTION" not in page


def test_a_chinese_page_and_its_english_one_lead_to_each_other(pages: Path) -> None:
    chinese = {
        path.relative_to(ROOT / "lessons" / "zh") for path in (ROOT / "lessons" / "zh").rglob("*_*.md")
    }
    found = {Path(name).relative_to("zh") for name in names(pages) if name.startswith("zh/")}
    found -= {Path("search.html")}
    expected = {path if path.parent.name else "lessons" / path for path in chinese}
    assert found >= {path.with_suffix(".html") for path in expected} | {
        Path("index.html"),
        Path("glossary.html"),
    }
    for name in found:
        for here, there in ((name, "zh" / name), ("zh" / name, name)):
            (switch,) = re.findall('class="course-language" href="([^"]+)"', (pages / here).read_text())
            assert (pages / here).parent.joinpath(switch).resolve() == pages / there


def test_a_chinese_page_links_to_chinese_pages_where_there_are_some(pages: Path) -> None:
    links = re.findall('href="([^"#]+)', (pages / "zh" / "lessons" / "08_ddp_with_torchrun.html").read_text())
    assert {"06_ddp_with_spawn.html", "../exercises/08_ddp_with_torchrun.html"} <= set(links)
    assert {"../../lessons/09_backends.html", "../../lessons/evidence.html"} <= set(links)
    for link in links:
        assert re.match("https?:", link) or (pages / "zh" / "lessons" / link.partition("?")[0]).exists(), link


def test_the_reference_has_every_public_name(pages: Path) -> None:
    reference = (pages / "reference.html").read_text()
    assert [name for name in course_lib.__all__ if f'id="course_lib.{name}"' not in reference] == []


# Axe needs half a minute for the contrast of all the words in a lesson. Of those with the same classes and
# colours around them it gets one; the others in code, which are most, lose their element.
ONE_OF_EACH_KIND = """() => {
    const kind = each => {
        if (!each) return ""
        const {color, backgroundColor} = getComputedStyle(each)
        const given = [each.tagName, each.getAttribute("class"), each.getAttribute("style")]
        return [kind(each.parentElement), ...given, color, backgroundColor].join()
    }
    const seen = new Set()
    for (const each of document.querySelectorAll("body *")) {
        if (![...each.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue
        const its = kind(each)
        if (!seen.has(its)) each.dataset.look = ""
        else if (each.matches(".highlight span")) each.replaceWith(each.textContent)
        seen.add(its)
    }
}"""
ONES = {"include": [["[data-look]"]]}
IN_THIS_SCHEME = "scheme => document.documentElement.dataset.theme === scheme"
# Formulas come after the page, and colours fade in.
AT_REST = """async () => {
    await window.MathJax?.startup?.promise
    await Promise.all(document.getAnimations().map(each => each.finished.catch(() => {})))
}"""
NOT_SEEN = """[...document.images].filter(each => !each.alt || !each.naturalWidth).map(each => each.src)"""


BY_DAY = {
    "index.html",
    "reference.html",
    "lessons/06_ddp_with_spawn.html",
    "exercises/06_ddp_with_spawn.html",
    "zh/lessons/06_ddp_with_spawn.html",
}


@pytest.mark.parametrize("which", ["by day", pytest.param("all", marks=pytest.mark.night)])
def test_a_page_is_readable_by_all(which: str, pages: Path, address: str, tmp_path: Path) -> None:
    """Axe finds nothing in light and dark, nothing is fetched from elsewhere, and a phone is wide enough."""
    wrong, asked = [], set()
    with fresh_page(require("chromium", "it shows the site"), tmp_path / "profile") as page:
        page.on("request", lambda request: asked.add(request.url))
        for name in names(pages) if which == "all" else sorted(BY_DAY):
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(address + name)
            page.evaluate(AT_REST)
            page.evaluate(ONE_OF_EACH_KIND)
            wrong += violations(
                page, name, {"runOnly": RULES, "rules": {"color-contrast": {"enabled": False}}}
            )
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.wait_for_function(IN_THIS_SCHEME, arg=scheme)
                page.evaluate(AT_REST)
                wrong += violations(page, f"{name}, {scheme}", {"runOnly": ["color-contrast"]}, ONES)
            wrong += [f"{name}: {url} is missing, or says nothing" for url in page.evaluate(NOT_SEEN)]
            page.set_viewport_size({"width": PHONE, "height": 844})
            if (wide := page.evaluate(WIDTH)) > PHONE:
                wrong.append(f"{name} is {wide} wide on a phone")
    assert wrong == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.night)])
def test_the_search_finds_a_symptom_by_its_first_words(every: int, address: str, tmp_path: Path) -> None:
    """By day it looks for a few: each is a page in a browser."""
    with fresh_page(require("chromium", "it shows the site"), tmp_path / "profile") as page:
        for words in [words for row in symptoms()[::every] for words in (row.seen, row.chinese)]:
            page.goto(f"{address}search.html?q=" + "+".join(re.findall(r"\w+", words)[:5]))
            page.wait_for_selector('.search li a[href*="lessons/symptoms"]', state="attached")


def test_the_search_finds_chinese_words_of_any_length(address: str, tmp_path: Path) -> None:
    with fresh_page(require("chromium", "it shows the site"), tmp_path / "profile") as page:
        for words, found in {
            "卡死": "lessons/13_",
            "DDP梯度": "lessons/06_",
            "数据分片": "lessons/07_",
        }.items():
            page.goto(f"{address}zh/search.html?q={words}")
            page.wait_for_selector(f'.search li a[href*="{found}"]', state="attached")


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    built = build(tmp_path, "# Home\n\n[gone](gone.md) and {term}`no such word`\n")
    assert built.returncode == 1
    assert "cross-reference target not found: 'gone.md'" in built.stderr
    assert "term not in glossary: 'no such word'" in built.stderr
