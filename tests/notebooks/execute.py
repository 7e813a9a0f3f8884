"""`make lesson N=06`: execute lessons from top to bottom and save them with outputs, ready to commit."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import resource
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "lessons"
DEEPER = CORE / "deeper"  # what only some readers need, a notebook for each subject
SECONDS_PER_CELL = 900  # three times as long as nbval waits in `make test`
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
MOST_OF_OTHERS = 0.1  # of the cores: with more, the times that a lesson shows are not its own
PR_SET_CHILD_SUBREAPER = 36
LIVE_WIDGET = "application/vnd.jupyter.widget-view+json"
REPR = re.compile(r"\w+\(")  # how a widget's own text begins


class LessonError(Exception):
    """Why a notebook was not saved, in words for its author."""


def find(name: str) -> Path:
    """Return the path of a notebook, given its number, as in "06" or "deeper/06_buckets", or its path."""
    if name.endswith(".ipynb"):
        found = [path for path in [Path(name)] if path.is_file()]
    else:
        found = [path for path in [CORE / f"{name}.ipynb"] if path.is_file()]
        found = found or sorted(CORE.glob(f"{name}_*.ipynb"))
    if len(found) != 1:
        raise LessonError(
            f"no lesson {name!r}" if not found else f"{name!r} is {len(found)} lessons: {found}"
        )
    return found[0].resolve()


def execute(path: Path, seconds_per_cell: float = SECONDS_PER_CELL, even_if_disturbed: bool = False) -> None:
    """Execute a notebook in a fresh kernel and its own folder, and save it unless a cell fails.

    Times are a lesson's evidence, so it is not saved either where other processes took much of the cores.
    """
    notebook = read(path)
    with cores_of_others() as share:
        run(notebook, path.parent, seconds_per_cell)
    words = f"other processes took {share():.0%} of the cores meanwhile"
    if share() > MOST_OF_OTHERS and not even_if_disturbed:
        raise LessonError(f"{words}, so its times are not its own (N='06 --even-if-disturbed' saves it)")
    print(f"  {words}")
    clean(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if counts != list(range(1, len(counts) + 1)):
        raise LessonError(f"its cells count {counts}: is one of them skipped?")
    nbformat.validate(notebook)
    new = path.with_name(f".{path.name}.new")
    nbformat.write(notebook, new)
    new.replace(path)


@contextlib.contextmanager
def cores_of_others() -> Iterator[Callable[[], float]]:
    """Measure the share of the cores that other processes take, or the host of a virtual machine."""
    me, shares = psutil.Process(), []
    before, began, children = busy_seconds() - own_seconds(), time.monotonic(), me.children()
    with unwaited_seconds(me) as unwaited:
        yield lambda: shares[0]
        for orphan in set(me.children()) - set(children):  # the fork server, which has just lost its kernel
            with contextlib.suppress(psutil.Error):
                orphan.wait(10)
    seconds = (time.monotonic() - began) * len(me.cpu_affinity())
    shares.append(max(0.0, busy_seconds() - own_seconds() - unwaited() - before) / seconds)


@contextlib.contextmanager
def unwaited_seconds(me: psutil.Process) -> Iterator[Callable[[], float]]:
    """Measure the time of descendants that nobody waits for, such as ranks that end with their namespace."""
    seen, done, waited_before = dict[psutil.Process, float](), threading.Event(), own_seconds()
    others = set(me.children(recursive=True))  # not the lesson's: they were there before it

    def look() -> None:
        while not done.wait(0.2):
            for process in {me, *me.children(recursive=True)} - others:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    seen[process] = times.user + times.system

    thread = threading.Thread(target=look)
    first = sum(me.cpu_times()[:2])
    thread.start()
    try:
        yield lambda: max(0.0, sum(seen.values()) - first - (own_seconds() - waited_before))
    finally:
        done.set()
        thread.join()


def busy_seconds() -> float:
    """Return how long the cores that this process may use have worked, for anybody."""
    of_each = psutil.cpu_times(percpu=True)
    mine = [of_each[number] for number in psutil.Process().cpu_affinity() if number < len(of_each)]
    return sum(each.user + each.nice + each.system + each.irq + each.softirq + each.steal for each in mine)


def own_seconds() -> float:
    """Return the processor time of this process and of its descendants that have ended."""
    of_all = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in of_all)


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook and convert it to today's format, in which each cell has an id."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError as error:
        raise LessonError(f"it is no notebook: {error}") from None
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        notebook = nbformat.v4.upgrade(notebook)
    _, notebook = nbformat.validator.normalize(notebook)
    empty = [
        str(at) for at, cell in numbered(notebook) if cell.cell_type == "code" and not cell.source.strip()
    ]
    if empty:
        raise LessonError(f"empty code cells cannot be counted: cell {', '.join(empty)}")
    return notebook


def run(notebook: nbformat.NotebookNode, folder: Path, seconds_per_cell: float = SECONDS_PER_CELL) -> None:
    """Execute a notebook's cells in a fresh kernel in that folder; the notebook gets the outputs."""
    started: list[int] = []
    client = NotebookClient(
        notebook,
        timeout=seconds_per_cell,
        startup_timeout=300,
        kernel_name=KERNELSPEC["name"],
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
        on_cell_execute=lambda cell, cell_index: started.append(cell_index),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise LessonError(explain(notebook, started, error, seconds_per_cell)) from None


def numbered(notebook: nbformat.NotebookNode) -> enumerate:
    return enumerate(notebook.cells, start=1)


def explain(notebook: nbformat.NotebookNode, started: list[int], error: Exception, seconds: float) -> str:
    if not started:
        return f"the kernel did not start: {error}"
    if isinstance(error, CellExecutionError):
        what = f"{error.ename}: {error.evalue}\n{error.traceback}"
    elif isinstance(error, CellTimeoutError):
        what = f"not done after {seconds:g} s" + shown(notebook.cells[started[-1]])
    else:
        what = "its kernel died" + shown(notebook.cells[started[-1]])
    first_line = notebook.cells[started[-1]].source.strip().splitlines()[0]
    return f"cell {started[-1] + 1} of {len(notebook.cells)}, which begins {first_line!r}: {what}"


def shown(cell: nbformat.NotebookNode) -> str:
    """Return what an unfinished cell has shown so far: its figure says where waiting ranks are."""
    found = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "".join(f"\n{text.rstrip()}" for text in found if text)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove what belongs to this machine or this run: paths, times, versions, live widgets."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = dict(KERNELSPEC)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for at, cell in numbered(notebook):
        for record in ("execution", "ExecuteTime"):
            cell.metadata.pop(record, None)
        if cell.cell_type != "code":
            continue
        shown = [output for output in map(without_widget, cell.outputs) if output]
        if len(shown) < len(cell.outputs):
            print(f"  cell {at}: left out a live widget, which a saved notebook cannot show")
        cell.outputs = [without_paths(output) for output in shown]


def without_widget(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """Return an output as a saved notebook shows it: a guess as its text, another live widget not at all."""
    if LIVE_WIDGET in output.get("data", {}):
        text = output["data"].get("text/plain", "")
        if not text or REPR.match(text):
            return None
        output["data"] = nbformat.NotebookNode({"text/plain": text})
    return output


def without_paths(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    for key in ("text", "evalue"):
        if key in output:
            output[key] = hide(output[key])
    if "traceback" in output:
        output["traceback"] = [hide(line) for line in output["traceback"]]
    for kind, content in output.get("data", {}).items():
        if kind.startswith("text/"):
            output["data"][kind] = hide(content)
    return output


def places() -> list[tuple[str, str]]:
    """Return regular expressions for what names this machine, and what readers see instead."""
    home = str(Path.home())
    folders = [
        (os.environ.get("COURSE_HOME", ""), "~/.cache/multi-gpu-course"),
        (str(ROOT), "."),
        (sys.prefix if sys.prefix != sys.base_prefix else "", ".venv"),  # .venv may be elsewhere
        (sysconfig.get_path("purelib"), "site-packages"),
        (sysconfig.get_path("stdlib"), "lib/python"),
    ]
    # IPython shortens the home folder to ~ by itself
    folders += [
        (path.replace(home, "~", 1), short) for path, short in folders if path.startswith(home + os.sep)
    ]
    folders = sorted(folders, key=lambda pair: -len(pair[0]))
    folders += [(home, "~"), (tempfile.gettempdir(), "/tmp")]
    found = [(re.escape(tempfile.gettempdir()) + r"/ipykernel_\d+/\d+\.py", "<cell>")]
    for path, short in folders:
        if len(path) > 1:
            if short == ".":
                found.append((re.escape(path) + "/", ""))
            found.append((re.escape(path) + r"(?![\w-])", short))
    if re.search(r"[-.\d]", socket.gethostname()):  # a plain word may occur in the lesson
        found.append((rf"\b{re.escape(socket.gethostname())}\b", "localhost"))
    return found


def hide(text: str) -> str:
    for pattern, short in places():
        text = re.sub(pattern, lambda match, short=short: short, text)
    return text


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """Return the texts that a cell printed or showed. A dashboard, shown if a run takes long, has none."""
    found = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return [hide(text) for text in found if text]


def errors(cell: nbformat.NotebookNode) -> list[str]:
    return [each.ename for each in cell.outputs if each.output_type == "error"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lesson", description=__doc__)
    parser.add_argument(
        "lessons", nargs="*", metavar="N", help="a lesson's number, as in 06, or a notebook's path"
    )
    parser.add_argument("--seconds-per-cell", type=float, default=SECONDS_PER_CELL)
    parser.add_argument(
        "--even-if-disturbed",
        action="store_true",
        help=f"save it though other processes took more than {MOST_OF_OTHERS:.0%}% of the cores",
    )
    arguments = parser.parse_args()
    if not arguments.lessons:
        print("Which lesson? As in: make lesson N=06, or N='00 02 06'.", file=sys.stderr)
        return 2
    with contextlib.suppress(AttributeError):  # not on every system; orphans become ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    failed = False
    for name in arguments.lessons:
        try:
            path = find(name)
            print(f"{path.name} …", flush=True)
            execute(path, arguments.seconds_per_cell, arguments.even_if_disturbed)
        except LessonError as error:
            print(f"Lesson {name} was not saved: {error}", file=sys.stderr)
            failed = True
        except KeyboardInterrupt:
            print(f"\nInterrupted: lesson {name} is as it was.", file=sys.stderr)
            return 130
        else:
            print(f"{path.name}: executed and saved.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
