"""Show a learner how a run is going, and leave a record of it under the cell.

In a notebook, a run that takes a while shows a widget: a progress bar for each rank, live curves of memory
and throughput, each rank's latest line, and a Stop button. At the end a static picture and a table, which are
still there when the notebook is reopened or converted, replace it; the ranks' last lines follow. A run with
nothing to draw leaves only those lines. In a terminal, lines are printed as they come.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..compat import let_clicks_in
from ..figures.tables import text_table
from ..host.hardware import cores
from ..host.notebook import in_kernel, shell
from ..record.layout import PROGRAM
from ..record.trace import as_shown
from ..report.cause_words import mismatch_text
from ..report.divergence import divergence
from ..report.evidence import WARN_SECONDS
from ..report.straggler import straggler
from ..report.wait_cause import apart
from ..report.waiting import stalled
from ..run.run import Run
from .ask import silent_ranks

WIDGET = "application/vnd.jupyter.widget-view+json"
SHOW_AFTER = 0.5  # seconds; a run that ends sooner gets no widget
FASTEST = 0.25  # seconds between two refreshes, at least
SLOWEST = 2.0  # seconds, at most
SHARE = 0.004  # share of the machine's CPU time that refreshing may take
MANY_RANKS = 16  # from this number on, one line of bars without text
LINES_KEPT = 20  # last lines of each rank's output, shown under the cell
TERMINAL_BYTES = 1 << 16  # of each rank's output, printed at most per refresh
CELL = '<td style="padding-right:.8em; white-space:nowrap">'
RED, ORANGE = "#d55e00", "#e69f00"
STRAGGLER = "A straggler"


def view_of(run: Run, shown: bool) -> View:
    """Return the view for a notebook or for a terminal; one that shows nothing unless ``shown``."""
    if not shown:
        return View(run)
    return NotebookView(run) if in_kernel() else TerminalView(run)


class View:
    """A view that shows nothing, and the base of the others. Setting ``stop`` asks for the run to end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stop = threading.Event()
        self.works = True

    def safely(self, show: Callable[..., None], *args: Any) -> None:
        """Call a method of the view; its error neither ends the run nor hides how it ended."""
        try:
            show(*args)
        except Exception as error:
            if self.works:
                why = f"{type(error).__name__}: {error}"
                with contextlib.suppress(Exception):  # stderr may be closed
                    print(f"course_lib: this run cannot be shown in full ({why})", file=sys.stderr)
            self.works = False

    def update(self) -> None:
        """Refresh the view; called about 20 times a second while the ranks run (for a Slurm job, 5)."""

    def tell(self, remark: str) -> None:
        """Show a remark on the run."""

    def finish(self) -> None:
        """Show how it ended; called once, when all ranks are gone and the run's end is recorded."""


class Note(NamedTuple):
    """A warning about a run."""

    title: str  # in a notebook
    color: str
    line: str  # in a terminal: the text, with a title of its own
    text: str

    def as_html(self) -> str:
        style = f"line-height:1.5; border-left:4px solid {self.color}; padding-left:.6em"
        lines = "<br>".join(map(html.escape, self.text.splitlines()))
        return f'<div style="{style}"><b>{self.title}</b><br>{lines}</div>'


def notes(run: Run, live: bool) -> Iterator[Note]:
    """Yield a run's warnings, the most urgent first; unless ``live``, only those that matter at the end."""
    if live and (text := stalled(run, silent_ranks(run, range(run.world_size)))):
        yield Note("No progress", RED, f"no progress:\n{text}", text)
    if found := divergence(run):
        yield Note("The ranks have diverged", RED, f"warning: {found}", str(found))
    if live and (worlds := apart(run)):
        text = mismatch_text(worlds)
        yield Note("Not one group", ORANGE, f"warning: {text}", text)
    if late := straggler(run):
        yield Note(STRAGGLER, ORANGE, f"a straggler: {late}", str(late))


class TerminalView(View):
    """A view that prints each line as it comes, with its rank in front."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        with contextlib.suppress(AttributeError):  # stdout's encoding may lack what ranks print
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        self._read: dict[Path, int] = {}
        self._warned: set[str] = set()  # titles of the notes at the last look
        self._job = ("", "")  # a job's state and reason
        self._look_again = time.monotonic() + WARN_SECONDS

    def update(self) -> None:
        if self.run.is_job and (job := (self.run.state, self.run.reason)) != self._job:
            self._job = job
            self.tell(self.run.headline())
        self._print_new(whole_lines=True)
        if time.monotonic() > self._look_again:
            self._look_again += 1
            # the straggler may change: it is named at the end
            self._warn(note for note in notes(self.run.snapshot(), live=True) if note.title != STRAGGLER)

    def tell(self, remark: str) -> None:
        print(remark, flush=True)

    def finish(self) -> None:
        self._print_new(whole_lines=False)
        if self.run.tracked:
            self.tell(self.run.headline())
            self.tell(text_table(self.run.table()))
            self._warn(notes(self.run, live=False))

    def _warn(self, found: Iterable[Note]) -> None:
        """Print the notes that are new since the last look."""
        before, self._warned = self._warned, set()
        for note in found:
            self._warned.add(note.title)
            if note.title not in before:
                self.tell(note.line)

    def _print_new(self, whole_lines: bool) -> None:
        for who in [PROGRAM, *range(self.run.world_size)]:
            front = "" if who == PROGRAM else f"[rank {who}] "
            for path in self.run.trace(who).log_files():
                for line in self._new_lines(path, whole_lines):
                    self.tell(front + line)

    def _new_lines(self, path: Path, whole_lines: bool) -> list[str]:
        start, left_out = self._read.get(path, 0), []
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size - start > TERMINAL_BYTES:
                    left_out = [f"… {size - start - TERMINAL_BYTES:,} bytes more in {path}"]
                    start = size - TERMINAL_BYTES
                file.seek(start)
                data = file.read(TERMINAL_BYTES)
        except OSError:
            return []
        if whole_lines:  # a progress bar may not end its line for hours: skip what it has replaced
            rest = data[data.rfind(b"\n") + 1 :]
            start += rest.rfind(b"\r", 0, -1) + 1
            data = data[: len(data) - len(rest)]
        self._read[path] = start + len(data)
        return left_out + as_shown(data.decode(errors="replace")).splitlines()


class NotebookView(View):
    """A view that shows the widget, and in the end what replaces it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._begun = time.monotonic()
        self._next = self._begun + SHOW_AFTER
        self._spent = 0.0
        self._box: Any = None

    def update(self) -> None:
        if time.monotonic() < self._next:
            return
        before = time.thread_time()
        if self._box is None:
            self._open()
        now = self.run.snapshot()
        self._title.value = f"<b>{html.escape(now.headline())}</b>"
        self._warning.value = warning_html(now)
        self._bars.value = bars_html(now)
        self._figure.update(now)
        self._image.value = self._figure.live_png()
        self._spent += time.thread_time() - before
        wait = self._spent / (SHARE * cores()) - (time.monotonic() - self._begun)
        self._next = time.monotonic() + min(SLOWEST, max(FASTEST, wait))

    def _open(self) -> None:
        import ipywidgets
        from IPython.display import display

        from ..run.picture import RunFigure

        self._figure = RunFigure(live=True)
        self._title, self._warning, self._bars = (ipywidgets.HTML() for _ in range(3))
        self._warning.add_class("course-warning")
        self._image = ipywidgets.Image(format="png", layout={"width": "826px", "max_width": "100%"})
        ends = {"justify_content": "space-between"}
        head = ipywidgets.HBox([self._title, self._stop_button()], layout=ends)
        self._box = ipywidgets.VBox([head, self._warning, self._bars, self._image])
        self._box.add_class("course-dashboard")
        # no text/plain: a run with nothing to draw leaves nothing here, however long it took
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        self._handle = display({WIDGET: view}, raw=True, display_id=True)

    def _stop_button(self) -> Any:
        """Return a Stop button, or a hint where a click would arrive only after the cell has ended."""
        import ipywidgets

        features = shell().kernel.kernel_info.get("supported_features", ())
        if "kernel subshells" not in features:  # in ipykernel 7, not in 6
            return ipywidgets.HTML("to stop: interrupt the cell (■)")
        button = ipywidgets.Button(
            description="Stop", icon="stop", button_style="warning", tooltip="End all ranks of this run"
        )
        button.add_class("course-stop")
        button.on_click(self._on_stop)
        let_clicks_in(button)
        return button

    def _on_stop(self, button: Any) -> None:
        self.stop.set()
        button.description, button.disabled = "Stopping…", True

    def tell(self, remark: str) -> None:
        print(remark)

    def finish(self) -> None:
        try:
            self._show_figures()
        finally:
            for line in printed_lines(self.run):
                print(line)

    def _show_figures(self) -> None:
        from IPython.display import display

        if self._box is not None:
            self._box.close()
        if self.run.tracked:
            picture, metadata = self.run.plot()._repr_mimebundle_()
            show = display if self._box is None else self._handle.update
            show(picture, metadata=metadata, raw=True)
            found = list(notes(self.run, live=False))
            table = {
                "text/html": "".join([self.run._repr_html_(), *(note.as_html() for note in found)]),
                "text/plain": "\n".join([text_table(self.run.table()), *(note.line for note in found)]),
            }
            display(table, raw=True)
        elif self._box is not None:
            self._handle.update({}, raw=True)


def rehearse() -> None:
    """Load what the first dashboard draws with: in a thread, so it leaves matplotlib's settings alone."""
    import ipywidgets  # noqa: F401
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..run import picture  # noqa: F401

    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    figure.subplots().set_title("fonts", weight="bold")
    canvas.print_png(io.BytesIO())


def warning_html(run: Run) -> str:
    """Return the most urgent of a run's notes; empty if there is none."""
    return next((note.as_html() for note in notes(run, live=True)), "")


def bars_html(run: Run) -> str:
    """Return each rank's progress bar as HTML, with its step, latest values and last line."""
    if run.world_size >= MANY_RANKS:
        bars = "".join(_bar(run, rank, "4em")[0] for rank in range(run.world_size))
        return f'<div style="line-height:1.2">{bars}</div>'
    rows = []
    for rank, trace in enumerate(run.traces()):
        bar, progress = _bar(run, rank, "12em")
        logged = [f"{html.escape(name)} {value:.4g}" for name, value in trace.latest().items()]
        values = " · ".join([progress, *logged])
        line = html.escape(" ".join(trace.last_lines(1)))
        rows.append(
            f"<tr>{CELL}rank {rank}</td>{CELL}{bar}</td>{CELL}{values}</td>"
            '<td style="max-width:28em; overflow:hidden; text-overflow:ellipsis; white-space:nowrap">'
            f"<code>{line}</code></td></tr>"
        )
    return f'<table style="line-height:1.5">{"".join(rows)}</table>'


def _bar(run: Run, rank: int, width: str) -> tuple[str, str]:
    """Return a rank's progress bar as HTML, and in words."""
    ticks = run.trace(rank).ticks
    if not ticks["passes"].any():
        begun = "at work" if len(ticks["passes"]) else "starting"
        size, progress = 'value="0"', "queued" if run.waits() else begun
    else:
        passes, step, total = (ticks[name][-1] for name in ("passes", "pass_steps", "pass_total"))
        known = not math.isnan(total)
        size = f'value="{step:.0f}" max="{max(1, total):.0f}"' if known else ""
        progress = f"pass {passes:.0f}, step {step:.0f}" + (f"/{total:.0f}" if known else "")
    return f'<progress style="width:{width}" {size} aria-label="rank {rank}"></progress>', progress


def printed_lines(run: Run) -> list[str]:
    """Return the last lines of the program's and each rank's output, with the rank in front."""
    shown = []
    for who in [PROGRAM, *range(run.world_size)]:
        lines = run.trace(who).last_lines(LINES_KEPT + 1)
        front = "" if who == PROGRAM else f"rank {who} | "
        if len(lines) > LINES_KEPT:
            shown.append("…" if who == PROGRAM else f"{front}… (all of it: run.logs[{who}])")
        shown += [front + line for line in lines[-LINES_KEPT:]]
    return shown
