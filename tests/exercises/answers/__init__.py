"""Answers that people really give to the exercises; a file `answers_NN` for each notebook registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# question, answer, the properties that hold all the same, words of a hint (or of the trouble)
WRONG: list[tuple[str, Any, set[str], str]] = []
RIGHT: list[tuple[str, Any]] = []  # in another style than the solution's


def wrong(number: str, *hold: str, hint: str) -> Callable[[Any], Any]:
    """Register a wrong answer."""

    def register(answer: Any) -> Any:
        WRONG.append((number, answer, set(hold), hint))
        return answer

    return register


def right(number: str) -> Callable[[Any], Any]:
    """Register a right answer in another style than the solution's."""

    def register(answer: Any) -> Any:
        RIGHT.append((number, answer))
        return answer

    return register
