"""A class of two small questions, and notebooks that answer them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from course_lib.exercises.in_rank.work import in_group
from course_lib.exercises.question import Ask, Finding, question
from course_lib.exercises.wording import told

SUM, GROUP = "it returns the sum", "all ranks have the sum"
HONEST_SECOND = """
def second(number):
    import torch
    import torch.distributed as dist
    total = torch.tensor(number)
    dist.all_reduce(total)
    return total.item()
"""
HONEST_FIRST = "def first(numbers):\n    return sum(numbers)\n"


def register() -> None:
    """The questions 99.1 and 99.2."""
    question("99.1", "first(numbers)", {SUM: 2})(_first)
    question("99.2", "second(number)", {GROUP: 3})(_second)


def _first(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    numbers = [rng.randrange(10**6) for _ in range(3)]
    found = ask(_called, numbers)[0]
    yield Finding(SUM, found == sum(numbers), f"of {numbers} it returned {told(found)}", "Add them.")


def _called(answer: Any, numbers: list[int]) -> Any:
    return answer(numbers)


def _second(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    number = rng.randrange(10**6)
    found = ask(_summed, number, nprocs=2)
    yield Finding(GROUP, found == [2 * number + 1] * 2, f"it returned {found}", "Which collective adds?")


@in_group
def _summed(answer: Any, number: int) -> Any:
    return answer(number + dist.get_rank())


def cell(source: str, mark: str = "", **more: Any) -> dict[str, Any]:
    """A code cell as JupyterLab saves it; ``mark`` is nbgrader's name of it."""
    about = {"nbgrader": {"grade_id": mark}} if mark else {}
    return {"cell_type": "code", "source": source, "metadata": about, "outputs": [], **more}


def check(place: int, source: str = "") -> dict[str, Any]:
    """A cell with the check of question 99.1 or 99.2."""
    name = {1: "first", 2: "second"}[place]
    return cell(source or f'check("99.{place}", {name})', f"e99-{place}-check")


def notebook(*cells: Any, **about: Any) -> bytes:
    """A notebook's bytes; a cell may be its source alone."""
    whole = [cell(each) if isinstance(each, str) else each for each in cells]
    return json.dumps({"cells": whole, "metadata": about, "nbformat": 4, "nbformat_minor": 5}).encode()
