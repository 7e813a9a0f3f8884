"""What can be counted of a lesson's form, and the limits: one person reads it, alone, in the evening.

    python -m tests.notebooks.form 06 deeper/06_buckets

Words are those of Markdown cells without code blocks and <details>; visible code is neither blank nor folded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.notebooks.execute import find, read
from tests.notebooks.minutes import rounded, teach

BANNED = re.compile(
    r"tried, not shown|not (?:been )?run\b|saved run|in the median|by its source|see below|\bissue \d{3,}"
    r"|pull request \d+|#\d{4,}|seeds? in (?:the )?prose",
    re.IGNORECASE,
)
MEASURED = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?\s*(?:%|×|ms|µs|s\b|GB|GiB|MiB|MB|KiB|Gbit)")
TO_A_LESSON = re.compile(r"\]\((?:\.\./)?(\d\d_\w+\.ipynb)")
TO_DO = re.compile(r"\*\*(?:Change it|Your turn|Play)")
MOST = {
    "minutes": 45,
    "words": 1800,
    "visible lines": 160,
    "longest cell": 25,
    "cells over 15 lines": 3,
    "brackets %": 3.0,
    "brackets in brackets": 0,
    "paragraphs over 60 words": 0,
    "sentences over 25 words %": 4.0,
    "guesses": 6,
    "links to lessons": 5,
    "pictures": 6,
    "banned words": 0,
    "numbers per 100 words": 1.5,
}
LEAST = {"guesses": 3, "to do": 3, "pictures": 3}
OTHERWISE = {"05_collectives": {"words": 2000}}
DEEPER = {"minutes": 20, "words": 1500}


def counts(path: Path) -> dict[str, float]:
    """Return what is counted of a lesson, by name."""
    cells = read(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    everything, source = "\n".join(texts), "\n".join(cell.source for cell in code)
    lines = [
        sum(bool(line.strip()) for line in cell.source.splitlines())
        for cell in code
        if not folds(cell, "source")
    ]
    plain = "\n\n".join(map(_prose, texts))
    noted = re.sub(r"`[^`]*`|\$[^$]+\$", "code", plain)
    words = max(1, len(plain.split()))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|>]|\d+\.)\s?)", noted)
    paragraphs = [each for each in blocks if each.strip() and not each.lstrip().startswith(("#", "|"))]
    sentences = [each for block in paragraphs for each in re.split(r"(?<=[.!?:])\s+", block) if each.split()]
    long = sum(len(each.split()) > 25 for each in sentences)
    in_brackets = sum(len(each.split()) for each in re.findall(r"\(([^()]*)\)", noted))
    shown = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    named = re.findall(r"\blessons? \d\d\b(?!\]\()", plain)
    return {
        "minutes": rounded(teach(path)),
        "words": words,
        "visible lines": sum(lines),
        "longest cell": max(lines, default=0),
        "cells over 15 lines": sum(each > 15 for each in lines),
        "brackets %": round(100 * in_brackets / words, 1),
        "brackets in brackets": len(re.findall(r"\([^()]*\(", noted)),
        "paragraphs over 60 words": sum(len(each.split()) > 60 for each in paragraphs),
        "sentences over 25 words %": round(100 * long / max(1, len(sentences)), 1),
        "guesses": len(re.findall(r"\bguess\(", source)) or everything.count("**Predict"),
        "to do": len(TO_DO.findall(everything)),
        "links to lessons": len(set(TO_A_LESSON.findall(everything))) + len(named),
        "pictures": shown + everything.count("!["),
        "banned words": len(BANNED.findall(plain)),
        "numbers per 100 words": round(100 * len(MEASURED.findall(noted)) / words, 1),
    }


def over(path: Path) -> list[str]:
    """Return in words what is over, or below, the limits of a lesson or of a deeper notebook."""
    deeper = path.parent.name == "deeper"
    most = MOST | (DEEPER if deeper else OTHERWISE.get(path.stem, {}))
    least = {} if deeper else LEAST | ({"pictures": 0} if path.stem.startswith("00") else {})
    found = counts(path)
    wrong = [f"{name}: {found[name]}, at most {limit}" for name, limit in most.items() if found[name] > limit]
    wrong += [
        f"{name}: {found[name]}, at least {limit}" for name, limit in least.items() if found[name] < limit
    ]
    return wrong + list(_wrong_guesses([cell for cell in read(path).cells if cell.cell_type == "code"]))


def folds(cell: Any, what: str) -> bool:
    """Return whether a cell's "source" or its "outputs" are folded when the notebook opens."""
    return bool(cell.metadata.get("jupyter", {}).get(f"{what}_hidden"))


def _wrong_guesses(code: list[Any]) -> Iterator[str]:
    """Yield which guess has no answer, or an answer that shows before its cell runs."""
    asked = [(at, options) for at, cell in enumerate(code) for options in _arguments(cell, "guess")]
    told = [options for cell in code[-1:] for options in _arguments(cell, "guesses")]
    if (asked or told) and len(told) != 1:
        yield "there is no guesses(…) at the end"
    answers = told[0] if told else []
    if len(answers) != len(asked):
        yield f"{len(asked)} guesses, {len(answers)} answers in guesses(…)"
    for (_, options), answer in zip(asked, answers, strict=False):
        if answer is not None and answer not in options:
            yield f"the answer {answer!r} is none of {options}"
    for at, options in asked:
        shows = (cell for cell in code[at + 1 :] if cell.outputs and not _arguments(cell, "guess"))
        if (cell := next(shows, None)) and not folds(cell, "outputs") and not _arguments(cell, "guesses"):
            yield f"the output that answers guess{tuple(options)} is not folded"


def _arguments(cell: Any, name: str) -> list[list[str | None]]:
    """Return the arguments of each call of that function in a cell; None for one that is computed."""
    if not re.search(rf"\b{name}\(", cell.source):
        return []
    calls = [each for each in ast.walk(ast.parse(cell.source)) if isinstance(each, ast.Call)]
    named = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == name]
    return [[getattr(each, "value", None) for each in call.args] for call in named]


def _prose(text: str) -> str:
    text = re.sub(r"```.*?```|<details>.*?</details>", " ", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


if __name__ == "__main__":
    for path in map(find, sys.argv[1:]):
        print(path.stem, counts(path), *over(path), sep="\n  ")
