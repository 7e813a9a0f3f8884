"""Draw the picture of one run, live and at the end: memory and throughput of each rank."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figures.style import COLORS, RANK_COLORS, Picture, new_figure, rank_ink, styled
from ..record.trace import peak_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from .run import Run

MANY_RANKS = 16  # from here on, a mean line and a band for the range instead of a line per rank
THROUGHPUT_WINDOW = 1.0  # seconds that each point of the throughput curve looks back
LIVE_SECONDS = 10.0  # the first length of a live picture's time axis, which then doubles
LIVE_ROOM = 1.5  # top of the other axes, as a multiple of the highest point, so that they last a while
LIVE_MARGINS = {"left": 0.08, "right": 0.977, "top": 0.9, "bottom": 0.27, "wspace": 0.22}  # no fit: faster
Curve = tuple[np.ndarray, np.ndarray]


def plot_run(run: Run) -> Picture:
    """Draw the memory and throughput of each rank of a run."""
    drawn = RunFigure()
    drawn.update(run)
    alt = f"Memory and throughput over {run.seconds:.1f} seconds of {run.name}. "
    alt += "; ".join(
        f"rank {row['rank']}: peak memory {row['peak memory']}, {row['samples/s']} samples/s"
        for row in run.table()
    )
    return Picture(drawn.figure, f"{alt}.")


class RunFigure:
    """A figure of a run that can be updated as the run goes on.

    A live picture keeps axes, grid and labels as a background and redraws only curves and titles, which takes
    a fifth of the time; the background is redrawn when the curves have outgrown the axes.
    """

    def __init__(self, live: bool = False) -> None:
        self.live = live
        self.figure, (self.memory, self.rate) = new_figure(2, margins=LIVE_MARGINS if live else None)
        self._moving: dict[Any, Any] = {}
        self._limits: dict[Axes, tuple[float, float]] = {}
        self._background: Any = None
        with styled():
            for axes, unit in ((self.memory, "MiB"), (self.rate, "samples/s")):
                axes.set_xlabel("seconds since the launch")
                axes.set_ylabel(unit)
                axes.locator_params(nbins=4 if live else 6)

    @styled()
    def update(self, run: Run) -> None:
        """Draw what the ranks of the run have written so far."""
        ticks = [trace.ticks for trace in run.traces()]
        memory = [(columns["seconds"], columns["memory_bytes"] / 2**20) for columns in ticks]
        reserved = [(columns["seconds"], columns["reserved_bytes"] / 2**20) for columns in ticks]
        rates = list(map(throughput, ticks))
        if len(ticks) < MANY_RANKS:
            self._lines(self.memory, memory)
            self._lines(self.memory, reserved, "--")  # with torch's cache; not there on the CPU
            self._lines(self.rate, rates)
        else:
            self._band(self.memory, memory)
            self._band(self.rate, rates)
        peaks = [peak_bytes(columns) / 2**20 for columns in ticks] or [0.0]
        top = int(np.argmax(peaks))
        on = f", on rank {top}" if len(ticks) > 1 else ""
        at_most = f"Memory: at most {peaks[top]:,.0f} MiB{on}"
        self._add((self.memory, "title"), self.memory.set_title(at_most))
        total = run.samples_per_second()
        together = f", {len(ticks)} ranks together" if len(ticks) > 1 else ""
        nothing = "Throughput: no track() yet" if run.state == "running" else "Throughput: no track()"
        rate = f"{total:,.0f} samples/s{together}" if total else nothing
        self._add((self.rate, "title"), self.rate.set_title(rate))
        room = 1.15 if len(ticks) >= MANY_RANKS else 1.05
        self._fit(self.memory, [*memory, *reserved], room)
        self._fit(self.rate, rates, room)
        if 1 < len(ticks) < MANY_RANKS and not self.figure.legends:
            handles = [self._moving[self.memory, rank, "-"] for rank in range(len(ticks))]
            below = "lower center" if self.live else "outside lower center"
            self.figure.legend(handles=handles, loc=below, ncols=8)
            self._background = None

    def live_png(self) -> bytes:
        """Return the current picture as a PNG, quick to draw and small to send."""
        from PIL import Image

        canvas: Any = self.figure.canvas
        if self._background is None:
            canvas.draw()
            self._background = canvas.copy_from_bbox(self.figure.bbox)
        canvas.restore_region(self._background)
        for artist in self._moving.values():
            artist.axes.draw_artist(artist)
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def _add(self, key: Any, artist: Artist) -> None:
        artist.set_animated(self.live)  # left out of the background
        self._moving[key] = artist

    def _lines(self, axes: Axes, curves: Sequence[Curve], style: str = "-") -> None:
        for rank, (x, y) in enumerate(curves):
            if (axes, rank, style) not in self._moving:
                (line,) = axes.plot([], [], style, color=rank_ink(rank), label=f"rank {rank}")
                if style == "-":  # more ranks than colours
                    line.set_linestyle(["-", ":"][rank // len(RANK_COLORS)])
                self._add((axes, rank, style), line)
            self._moving[axes, rank, style].set_data(x, y)

    def _band(self, axes: Axes, curves: Sequence[Curve]) -> None:
        begun = [(x, np.nan_to_num(y)) for x, y in curves if len(x) > 1]
        if not begun:
            return
        grid = np.linspace(min(x[0] for x, _ in begun), max(x[-1] for x, _ in begun), 200)
        values = np.stack([np.interp(grid, x, y) for x, y in begun])
        if (axes, "band") in self._moving:
            self._moving.pop((axes, "band")).remove()
        else:
            (line,) = axes.plot([], [], color=COLORS[0])
            self._add((axes, "mean"), line)
            words = "line: mean of the ranks, band: lowest to highest"
            axes.annotate(words, (0, 1), (4, -4), "axes fraction", "offset points", va="top", fontsize=8)
        band = axes.fill_between(grid, values.min(0), values.max(0), color=COLORS[0], alpha=0.25, lw=0)
        self._add((axes, "band"), band)
        self._moving[axes, "mean"].set_data(grid, values.mean(0))

    def _fit(self, axes: Axes, curves: Sequence[Curve], room: float) -> None:
        right = max((x[-1] for x, _ in curves if len(x)), default=0.1)
        known = [float(np.nanmax(y)) for _, y in curves if np.isfinite(y).any()]
        top = max(known, default=1.0) * room
        right, top = max(right, 0.1), max(top, 1e-9)
        if self.live:
            right = LIVE_SECONDS * 2 ** max(0, math.ceil(math.log2(right / LIVE_SECONDS)))
            before = self._limits.get(axes, (0.0, 0.0))
            top = before[1] if top <= before[1] else LIVE_ROOM * top
            if (right, top) == before:
                return
            self._limits[axes] = right, top
            self._background = None
        axes.set_xlim(0, right)
        axes.set_ylim(0, top)


def throughput(ticks: Mapping[str, np.ndarray]) -> Curve:
    """Return, at each tick, samples per second of `track` time over the last second (NaN outside `track`)."""
    seconds, samples, tracked = ticks["seconds"], ticks["samples"], ticks["tracked_seconds"]
    if not len(seconds):
        return seconds, samples
    before = np.searchsorted(seconds, seconds - THROUGHPUT_WINDOW, side="left")
    spent = tracked - tracked[before]
    rate = np.full(len(seconds), np.nan)
    busy = spent > 0.2 * THROUGHPUT_WINDOW
    np.divide(samples - samples[before], spent, out=rate, where=busy)
    return seconds, rate
