"""The course's pictures: of several runs, of a lesson's own numbers (of one run: `run_figure`).

All take their look from `STYLE` and `COLORS`, are drawn without pyplot (so that the live dashboard and the
learner's own figures do not meet), and carry a text that says what they show.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..run.run import Run

# Okabe and Ito's palette: told apart with any colour vision (yellow left out, it is pale on white).
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": None,  # set in `styled`
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
DPI = 144


class Picture:
    """A finished figure: shows itself in a notebook, reads as a sentence elsewhere.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
    alt : str
        What the picture shows, in words.
    """

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        """The picture as a PNG file."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def save(self, path: str) -> None:
        """Write it to a file; the ending says which kind (.png, .svg, .pdf)."""
        self.figure.savefig(path, dpi=DPI)

    def __repr__(self) -> str:
        return f"[picture: {self.alt}]"

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        width = int(self.figure.get_figwidth() * 96)
        return (
            {"image/png": self.png(), "text/plain": repr(self)},
            {"image/png": {"alt": self.alt, "width": width}},
        )


@contextmanager
def styled() -> Iterator[None]:
    """The course's style, for what is drawn inside."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLORS)}):
        yield


def new_figure(
    columns: int = 1, width: float = 8.6, height: float = 3.2, margins: Mapping[str, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """An empty figure in the course's style (inches), its axes side by side, by given margins or fitted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(width, height), layout=None if margins else "constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False, gridspec_kw=dict(margins or {}))[0]
    return figure, list(axes)


# --- several runs -----------------------------------------------------------------------------------------


def compare(runs: Mapping[str, Run], title: str | None = None) -> Picture:
    """Several runs side by side: throughput of all ranks together, and the rank with the most memory.

    Parameters
    ----------
    runs
        The runs by name; the first is what the others are compared with.

    Raises
    ------
    ValueError
        There is no run, or one without a `track` loop to compare.
    """
    if not runs:
        raise ValueError("compare needs at least one run: compare({'one rank': a, 'two ranks': b})")
    rates = [run.samples_per_second() for run in runs.values()]
    for name, rate in zip(runs, rates, strict=True):
        if not rate:
            raise ValueError(
                f"the run {name!r} has no throughput to compare: it did not loop over track(loader)"
            )
    peaks = [max(map(run.peak_memory_bytes, range(run.world_size))) / 2**20 for run in runs.values()]
    names = list(runs)
    ratio = rates[-1] / rates[0]
    rate_title = title or (f"{names[-1]}: {ratio:.2f} × {names[0]}" if len(names) > 1 else "Throughput")
    figure, (left, right) = new_figure(2, height=1.4 + 0.45 * len(names))
    with styled():
        _bars(left, dict(zip(names, rates, strict=True)), rate_title, "samples/s, all ranks together")
        _bars(
            right,
            dict(zip(names, peaks, strict=True)),
            "Peak memory of a rank",
            "MiB, the rank with the most",
        )
    words = "; ".join(
        f"{name}: {rate:,.0f} samples/s, {peak:,.0f} MiB"
        for name, rate, peak in zip(names, rates, peaks, strict=True)
    )
    return Picture(figure, f"{rate_title}. {words}.")


# --- a lesson's own numbers -------------------------------------------------------------------------------


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
) -> Picture:
    """Lines by name, each ``(x, y)``; the title says what is to be seen, the labels carry the units."""
    figure, (axes,) = new_figure(1, width=7.2, height=3.8)
    with styled():
        for name, (x, y) in series.items():
            axes.plot(x, y, label=name, marker="o" if len(x) <= 12 else None, markersize=5)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if all(float(value).is_integer() for x, _ in series.values() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if logx:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if logy:
            axes.set_yscale("log")
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=3)
    words = "; ".join(f"{name}: from {y[0]:.3g} to {y[-1]:.3g}" for name, (_, y) in series.items() if len(y))
    return Picture(figure, f"{title}. {ylabel} against {xlabel}. {words}.")


def bars(values: Mapping[str, float], title: str, xlabel: str, form: str = "{:,.0f}") -> Picture:
    """Bars by name, each with its number."""
    figure, (axes,) = new_figure(1, width=7.2, height=1.3 + 0.42 * len(values))
    with styled():
        _bars(axes, values, title, xlabel, form)
    words = "; ".join(f"{name}: {form.format(value)}" for name, value in values.items())
    return Picture(figure, f"{title}. {xlabel}. {words}.")


def _bars(axes: Axes, values: Mapping[str, float], title: str, xlabel: str, form: str = "{:,.0f}") -> None:
    drawn = axes.barh(list(values), list(values.values()), height=0.6)
    for i, bar in enumerate(drawn):
        bar.set_color(COLORS[i % len(COLORS)])
    axes.bar_label(drawn, fmt=form, padding=4)
    axes.set_xlim(0, max(values.values()) * 1.2)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title=title, xlabel=xlabel)
