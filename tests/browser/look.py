"""`make look N=06`: run a notebook in a real JupyterLab and keep what a learner sees, as pictures.

For the eyes of whoever writes a lesson or an exercise: nbval sees outputs, not a page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.notebooks.execute import ROOT, LessonError, find
from tests.support.lab import Lab, Notebook, fresh_page

FOLDERS = ("lessons", "exercises", "solutions")
HEIGHT = 1400  # pixels of a picture
PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer"
GUESS, SLIDER = ".course-guess button", ".course-play .noUi-handle"


def look(path: Path, into: Path, seconds: float) -> int:
    """Run a notebook in JupyterLab, on a copy; how many pictures it took, one for each screenful.

    As it opens, with what is folded; after Run All; and with a guess and a slider, after a click on each.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        course = Path(made, "course")
        for each in FOLDERS:
            shutil.copytree(ROOT / each, course / each)
        with opened(course, str(path.relative_to(ROOT)), HEIGHT) as notebook:
            count = screenfuls(notebook.page, into / f"{path.stem}-1-opened")
            notebook.run_all()
            notebook.wait_idle(seconds)
            count += screenfuls(notebook.page, into / f"{path.stem}-2-run")
            if touch(notebook.page):
                count += screenfuls(notebook.page, into / f"{path.stem}-3-touched")
    return count


@contextmanager
def opened(course: Path, name: str, height: int) -> Iterator[Notebook]:
    """Open a notebook of a folder in JupyterLab, which gets the space beside that folder."""
    beside = course.parent
    (beside / "jupyter").mkdir()
    lab = Lab(course, beside / "jupyter", Path(os.environ.get("COURSE_HOME", beside / "home")))
    try:
        with fresh_page(shutil.which("chromium") or "chromium", beside / "chromium", height) as page:
            notebook = Notebook(page, lab, name)
            page.keyboard.press("Control+b")  # the file browser goes
            yield notebook
    finally:
        lab.close()


def screenfuls(page: Any, name: Path) -> int:
    """Take a picture of each screenful, and return how many they are."""
    panel = page.locator(PANEL)
    height, shown = panel.evaluate("panel => [panel.scrollHeight, panel.clientHeight]")
    tops = range(0, height, shown)
    for at, top in enumerate(tops):
        panel.evaluate("(panel, top) => { panel.scrollTop = top }", top)
        page.wait_for_timeout(200)
        panel.screenshot(path=f"{name}-{at:02}.png")
    return len(tops)


def touch(page: Any) -> bool:
    """Click on the first guess and move the first slider; whether there is one of them."""
    guess, slider = (page.locator(each) for each in (GUESS, SLIDER))
    found = guess.count() + slider.count() > 0
    if guess.count():
        guess.first.click()
    if slider.count():
        slider.first.press("ArrowRight")
    page.wait_for_timeout(3000)  # until the picture is drawn anew
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make look", description=__doc__)
    parser.add_argument("notebooks", nargs="+", metavar="N", help="a lesson's number, or a notebook's path")
    parser.add_argument("--into", type=Path, default=Path(tempfile.gettempdir()) / "look")
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    for name in arguments.notebooks:
        try:
            path = find(name)
        except LessonError as error:
            print(error, file=sys.stderr)
            return 2
        count = look(path, arguments.into, arguments.seconds)
        print(f"{path.name}: {count} pictures in {arguments.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
