"""`guess`: buttons for one guess, before a cell shows the answer; `guesses`: guesses beside answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ipywidgets
from IPython.display import display

from ..host.notebook import in_kernel, shell


@dataclass(repr=False)
class Guess:
    """One question of this notebook: its options, and the one that was chosen."""

    options: tuple[str, ...]
    chosen: str | None = None

    def __repr__(self) -> str:
        marked = [f"[{option}]" if option == self.chosen else option for option in self.options]
        return "Your guess:  " + "  |  ".join(marked)


_asked: dict[object, Guess] = {}  # by cell, in order


def guess(*options: str) -> None:
    """Show buttons for the reader's guess at the question above (lesson 00). The first click is final.

    Where no front end shows buttons, the options are printed, and the notebook goes on.
    """
    question = _asked.setdefault(_cell() or options, Guess(options))
    if question.options != options:  # the cell was edited
        question.options, question.chosen = options, None
    if not in_kernel():
        print(question)
    elif question.chosen:
        display(question)
    else:
        _show_buttons(question)


def guesses(*answers: str) -> None:
    """Print what was guessed in this notebook beside what came out, ``answers``, in the lesson's order."""
    if len(answers) != len(_asked):
        print(f"This lesson asks {len(answers)} times, and you have run {len(_asked)} of its questions.")
        return
    width = max(24, *map(len, answers))
    for number, (question, answer) in enumerate(zip(_asked.values(), answers, strict=True), start=1):
        if answer not in question.options:
            raise ValueError(f"{answer!r} is none of question {number}'s options: {question.options}")
        mark = "  " if question.chosen is None else "✓ " if question.chosen == answer else "✗ "
        print(f"{mark}{number}. it was: {answer:{width}} you guessed: {question.chosen or '–'}")


def _cell() -> object:
    """Return the id of the running cell, its number if the front end sends no id, or None without cells."""
    try:
        return shell().get_parent()["metadata"]["cellId"]
    except (AttributeError, KeyError, TypeError):
        return getattr(shell(), "execution_count", None)  # nbclient sends no id, and runs a cell once


def _show_buttons(question: Guess) -> None:
    buttons = [ipywidgets.Button(description=option, layout={"width": "auto"}) for option in question.options]
    box = ipywidgets.HBox(buttons, layout={"flex_flow": "row wrap"})
    box.add_class("course-guess")

    def lock(button: Any) -> None:
        if question.chosen is None:
            question.chosen, button.button_style = button.description, "info"
            for each in buttons:
                each.disabled = each is not button  # this one keeps the focus: Shift + Enter goes on from it
            shell().events.register("pre_run_cell", settle)

    def settle(_: Any) -> None:
        shell().events.unregister("pre_run_cell", settle)
        handle.update(question)
        box.close()

    for button in buttons:
        button.on_click(lock)
    data = box._repr_mimebundle_() | {"text/plain": str(question)}  # the text is what a saved notebook keeps
    handle = display(data, raw=True, display_id=True)
