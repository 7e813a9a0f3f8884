"""A learner opens lesson 00 in JupyterLab, runs it, stops a run, and finds the pictures again."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.browser.look import SLIDER
from tests.support.lab import LIMIT, Lab, Notebook, fresh_page
from tests.support.needs import require
from tests.support.processes import processes_marked, wait_for

pytestmark = pytest.mark.browser
LESSON = "lessons/00_start_here.ipynb"
PATIENCE = """
def patience():
    import torch
    import torch.distributed as dist

    from course_lib import log, place, track

    dist.init_process_group(place()[1])
    for step in track(range(100_000)):
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        log(step=step)


import time

from course_lib import launch

launch(patience, nprocs=2)
"""

HANG = """
import torch
import torch.distributed as dist

from course_lib import launch


def forgetful():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def forgetful_and_busy():
    import time
    forgetful()
    while True:
        time.sleep(0.01)


launch(forgetful_and_busy, nprocs=2, timeout=30)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a copy of the lessons."""
    require("chromium", "the browser tests drive JupyterLab in it")
    lessons = Path(__file__).parents[2] / "lessons"
    place = tmp_path_factory.mktemp("lab")
    folder, home = place / "course", place / "home"
    shutil.copytree(lessons, folder / "lessons", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    server = Lab(folder, place / "jupyter", home)
    try:
        yield server
    finally:
        server.close()
    wait_for(lambda: not processes_marked("COURSE_HOME", str(home)), what="the end of every process")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory, lab: Lab) -> Iterator[Any]:
    program = require("chromium", "the browser tests drive JupyterLab in it")
    with fresh_page(program, tmp_path_factory.mktemp("chromium")) as page:
        yield page.context


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    page = chromium.new_page()
    yield page
    page.close()


def add_cells(path: Path, *sources: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    for source in sources:
        notebook.cells.append(nbformat.v4.new_code_cell(source.strip()))
    for cell in notebook.cells:  # so that what the browser shows was made now
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)


def pictures(page: Any) -> int:
    return page.locator(".jp-OutputArea-output.jp-RenderedImage img").count()


def test_lesson_00_runs_is_stopped_and_reopened(lab: Lab, page: Any) -> None:
    add_cells(lab.folder / LESSON, PATIENCE)
    notebook = Notebook(page, lab, LESSON)
    notebook.run_all()

    # the lesson's own training shows a dashboard that moves
    page.wait_for_function("document.querySelector('.course-dashboard img')?.src")
    sources = set()

    def moved() -> bool:  # in one call, which waits for nothing: the dashboard goes when its run ends
        sources.add(page.evaluate("document.querySelector('.course-dashboard img')?.src"))
        return len(sources - {None}) >= 3

    wait_for(moved, LIMIT / 1000, "three different pictures of a run")

    # the added cell runs until Stop is pressed
    page.locator(".jp-CodeCell").last.locator(".course-dashboard").wait_for()
    page.locator(".jp-CodeCell").last.locator("button.course-stop").click()
    pressed = time.monotonic()
    page.wait_for_function(
        "[...document.querySelectorAll('.jp-CodeCell')].pop().innerText.includes('Stopped')"
    )
    print(f"stopped {time.monotonic() - pressed:.2f} s after the click")
    notebook.wait_idle(LIMIT / 1000)
    assert page.locator(".course-dashboard").count() == 0
    shown = pictures(page)
    assert shown >= 3, "the lesson's pictures and the stopped run's"

    # saved, closed, opened again without a run: the pictures are there, and no widget is missed
    notebook.save()
    saved = lab.folder / LESSON

    def is_saved() -> bool:
        try:
            return "Stopped" in str(nbformat.read(saved, as_version=4).cells[-1].get("outputs"))
        except nbformat.reader.NotJSONError:  # JupyterLab empties the file before it writes it
            return False

    wait_for(is_saved, what="the saved notebook")
    again = Notebook(page, lab, LESSON)
    wait_for(lambda: pictures(again.page) == shown, what=f"{shown} pictures in the reopened notebook")
    assert "model not found" not in page.inner_text(".jp-Notebook").lower()
    widths = page.eval_on_selector_all(
        ".jp-OutputArea-output.jp-RenderedImage img", "images => images.map(image => image.naturalWidth)"
    )
    assert all(width > 300 for width in widths), widths


PLAYS = """
from course_lib import guess, play
from course_lib.figures.style import Picture


def figure(height=2):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    drawn = Figure((2, 1))
    FigureCanvasAgg(drawn)
    drawn.subplots().bar([0], [height])
    return Picture(drawn, f"A bar of {height}.")


play(figure, height=(1, 8))
"""


def test_a_guess_is_locked_in_an_answer_is_folded_and_a_slider_draws(lab: Lab, page: Any) -> None:
    path = lab.folder / "lessons" / "guess.ipynb"
    cells = [new_code_cell(each) for each in (PLAYS, "guess('one', 'two')", "print('it is:'); print(1 + 1)")]
    cells[2].metadata["jupyter"] = {"outputs_hidden": True}
    cells[2].outputs = [new_output("stream", name="stdout", text="it is:\n2\n")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    notebook = Notebook(page, lab, "lessons/guess.ipynb")
    playing, guessing, answer = (
        page.locator(".jp-CodeCell").nth(at).locator(".jp-Cell-outputWrapper") for at in range(3)
    )
    assert "2" not in answer.inner_text(), "folded when it opens"
    notebook.run_all()
    notebook.wait_idle(LIMIT / 1000)
    wait_for(lambda: "2" in answer.inner_text(), LIMIT / 1000, "the answer")

    buttons = guessing.locator(".course-guess button")
    buttons.first.wait_for()
    assert buttons.all_inner_texts() == ["one", "two"]
    buttons.nth(1).click()
    wait_for(buttons.first.is_disabled, LIMIT / 1000, "one click is final")
    page.keyboard.press("Shift+Enter")  # from the button on, without another click
    wait_for(lambda: "one  |  [two]" in guessing.inner_text(), LIMIT / 1000, "the guess as text")
    prompt = page.locator(".jp-CodeCell .jp-InputPrompt").nth(2)
    before = prompt.inner_text()
    page.keyboard.press("Shift+Enter")
    wait_for(lambda: prompt.inner_text() not in (before, "[*]:"), LIMIT / 1000, "the next cell's run")

    image = playing.locator(".jp-RenderedImage img")
    first = image.get_attribute("src")
    playing.locator(SLIDER).press("ArrowRight")
    wait_for(lambda: image.get_attribute("src") != first, LIMIT / 1000, "a new picture")

    notebook.save()
    wait_for(lambda: "[two]" in path.read_text(), what="the saved notebook")
    saved = nbformat.read(path, as_version=4)
    assert "widgets" not in saved.metadata
    assert saved.cells[0].outputs[-1].metadata["image/png"]["alt"] == "A bar of 3."


@pytest.mark.night
def test_a_hang_is_told_while_it_lasts(lab: Lab, page: Any) -> None:
    path = "lessons/hang.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(nbformat.v4.new_notebook(metadata=kernel), lab.folder / path)
    add_cells(lab.folder / path, HANG)
    notebook = Notebook(page, lab, path)
    notebook.run_all()

    warning = page.locator(".course-dashboard .course-warning")
    page.wait_for_function("document.querySelector('.course-warning')?.innerText.includes('No progress')")
    told = warning.inner_text()
    assert "rank 1 has not called all_reduce (collective 1), in which rank 0 waits" in told
    assert re.search(r"rank 0 waits in all_reduce for \d\d", told)
    assert "Cell In[1], line 10: dist.all_reduce(torch.ones(1))" in told
    notebook.wait_idle(LIMIT / 1000)
    shown = page.locator(".jp-CodeCell").last.inner_text()
    assert "RankTimeout: not done after 30 s: rank 1 never called all_reduce (collective 1)" in shown


def test_the_button_of_lesson_20_kills_a_rank_while_its_cell_runs(lab: Lab, page: Any) -> None:
    path = lab.folder / "lessons" / "20_surviving.ipynb"
    notebook = nbformat.read(path, as_version=4)
    (kill,) = (at for at, cell in enumerate(notebook.cells) if "with kill_button(" in cell.source)
    notebook.cells = notebook.cells[: kill + 1]
    notebook.cells[kill].source = re.sub(r"patience=\d+", "patience=90", notebook.cells[kill].source)
    nbformat.write(notebook, path)
    add_cells(path)
    opened = Notebook(page, lab, "lessons/20_surviving.ipynb")
    opened.run_all()
    cell = page.locator(".jp-CodeCell").last
    cell.locator(".course-dashboard").wait_for()
    wait_for(lambda: "my PID is" in cell.inner_text(), LIMIT / 1000, "the ranks' latest lines")
    time.sleep(1)
    cell.locator("button", has_text="kill rank 1").click()
    page.wait_for_function(
        "[...document.querySelectorAll('.jp-CodeCell')].pop().innerText.includes('killed by your click')"
    )
    opened.wait_idle(LIMIT / 1000)
    assert "rank 1 was killed (SIGKILL)" in cell.inner_text()
    assert cell.locator("button", has_text="kill rank").count() == 0
