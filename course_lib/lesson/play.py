"""`play`: sliders and switches over a picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from IPython.display import display
from ipywidgets import VBox, interactive

from ..figures.style import Picture
from ..host.notebook import in_kernel

UNITS = {"kib": "KiB", "mib": "MiB", "gib": "GiB", "gbit": "Gbit", "gb": "GB"}  # in the names of values


def play(figure: Callable[..., Picture], **values: Any) -> Picture | None:
    """Show a picture with a slider or a switch for each value, redrawn whenever one moves (lesson 07).

    The figure draws the picture from the values, passed by name. They are given as for
    `ipywidgets.interact`: ``(1, 8)`` is a slider, a list is a choice, True or False a switch. Each begins
    with the figure's own default. A notebook keeps the picture as it was last drawn; without a notebook, the
    picture of the defaults is returned.
    """
    defaults = {name: inspect.signature(figure).parameters[name].default for name in values}
    if not in_kernel():
        return figure(**defaults)
    controls = {name: interactive.widget_from_abbrev(value, defaults[name]) for name, value in values.items()}
    for name, control in controls.items():
        if isinstance(values[name], bool):
            control.value = defaults[name]  # ipywidgets begins with the abbreviation
        control.description = " ".join(UNITS.get(word, word) for word in name.split("_"))
        control.style.description_width = "15em"
        control.layout.width = "34em"
    box = VBox(list(controls.values()))
    box.add_class("course-play")

    def drawn() -> Picture:
        return figure(**{name: control.value for name, control in controls.items()})

    display(box)
    handle = display(drawn(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: handle.update(drawn()), "value")
    return None
