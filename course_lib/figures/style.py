"""The style of the course's pictures, and the class `Picture`.

Pictures are drawn without pyplot, to keep the live dashboard apart from the learner's own figures, and carry
a text alternative that says what they show.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with any colour vision (without yellow, which is pale on white).
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
RANK_COLORS = [*COLORS, "#f0e442"]
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
    "axes.prop_cycle": f"cycler('color', {COLORS})",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
DPI = 144


def rank_color(rank: int) -> str:
    """Return the fill colour of a rank, the same in every picture."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def rank_ink(rank: int) -> str:
    """Return the colour of a rank's lines and text: the fill colour, but a dark yellow instead of yellow."""
    return "#8a7f00" if rank % len(RANK_COLORS) == 7 else rank_color(rank)


def ink_on(rank: int) -> str:
    """Return the colour of text on a rank's fill colour."""
    return "black" if rank % len(RANK_COLORS) in (3, 4, 5, 7) else "white"


class Picture:
    """A finished figure, displayed as an image in a notebook and in words, its `alt`, elsewhere."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.set_dpi(DPI)
        self.figure.canvas.print_png(buffer)  # `savefig` would draw it twice
        return buffer.getvalue()

    def __repr__(self) -> str:
        return f"[picture:\n{self.alt}]"  # JupyterLab shows the first line of a folded output

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        width = int(self.figure.get_figwidth() * 96)
        return (
            {"image/png": self.png(), "text/plain": repr(self)},
            {"image/png": {"alt": self.alt, "width": width}},
        )


@contextmanager
def styled() -> Iterator[None]:
    """Apply the course's style to what is drawn inside the block."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(
    columns: int = 1, width: float = 8.6, height: float = 3.2, margins: Mapping[str, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Create an empty figure (inches) in the course's style, axes side by side; no margins: fitted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(width, height), layout=None if margins else "constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False, gridspec_kw=dict(margins or {}))[0]
    return figure, list(axes)


def figure_with_margins(
    width: float, height: float, left: float, top: float, bottom: float, right: float = 0.22
) -> tuple[Figure, Axes]:
    """Create a figure with one pair of axes inside margins (inches); to fit these would take longer."""
    margins = {"left": left / width, "right": 1 - right / width, "top": 1 - top / height}
    figure, (axes,) = new_figure(width=width, height=height, margins=margins | {"bottom": bottom / height})
    return figure, axes


def left_of(names: Iterable[str]) -> float:
    """Return the inches that the names of rows need."""
    return 0.2 + 0.085 * max(map(len, names))


def without_lines(axes: Axes) -> None:
    """Remove the lines that boxes do not need: grid, ticks, frame."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
