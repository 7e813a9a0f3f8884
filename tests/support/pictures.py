"""Find faults in figures."""

from __future__ import annotations

from typing import Any

from matplotlib.text import Text


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts in a figure that overlap."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    return [
        (one, other)
        for i, (one, box) in enumerate(boxes)
        for other, another in boxes[i + 1 :]
        if box.width and another.width and box.overlaps(another)
    ]


def is_whole(figure: Any) -> bool:
    """Return whether nothing in a figure reaches beyond its edges."""
    left, bottom, right, top = figure.get_tightbbox().extents
    width, height = figure.get_size_inches()
    return min(left, bottom, width - right, height - top) > -1e-3
