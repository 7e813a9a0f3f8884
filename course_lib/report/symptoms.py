"""What people search for: the rows of `lessons/symptoms.md`, found by words or by what an exception says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "symptoms.md"  # a link; a wheel has a copy


class Symptom(NamedTuple):
    """A row: what people see or ask, in English and Chinese, a sentence about it, the cell that shows it."""

    seen: str
    chinese: str
    answer: str
    where: str  # a link in Markdown

    def text(self) -> str:
        """Return the sentence, and the lesson with the cell that shows it."""
        return f"{self.answer.replace('`', '')} {self.lesson()}"

    def lesson(self) -> str:
        """Return which lesson shows it, and in which notebook."""
        name, file = re.findall(r"\[([^]]+)\]\(([^)]+)\)", self.where)[0]
        return f"See lesson {name}: lessons/{file}"


@cache
def symptoms() -> tuple[Symptom, ...]:
    """Return the rows of the page, in order; none where it is missing: a report does without them."""
    page = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    rows = [line.strip().strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return tuple(Symptom(*(cell.strip() for cell in row)) for row in rows if "](" in row[-1])


def about(error: str) -> Symptom | None:
    """Return the first row whose words in backticks are all in an exception's text, or None."""
    for row in symptoms():
        quoted = re.findall(r"`([^`]+)`", row.seen)
        if quoted and all(words in error for words in quoted):
            return row
    return None


def found(words: list[str]) -> list[Symptom]:
    """Return the rows that have any of these words, those with the most first."""
    counts = {row: sum(word.lower() in " ".join(row).lower() for word in words) for row in symptoms()}
    return sorted(filter(counts.__getitem__, counts), key=lambda row: -counts[row])
