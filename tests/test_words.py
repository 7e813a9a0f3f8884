"""The course's English: words that readers stumbled over, and what stands for them, must not come back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = {
    "lessons": ("lessons/*.ipynb", "lessons/deeper/*.ipynb", "lessons/*.md", "lessons/scripts/*"),
    "solutions": ("solutions/*.ipynb",),  # the exercises are generated from them
    "course_lib": ("course_lib/**/*.py", "course_lib/**/*.html"),
    ".ci": (".ci/*.py", ".ci/site/*.py", ".ci/site/*.md", ".ci/run"),
    "pages": ("*.md", "exercises/*.md", "course_lib/*.md", ".binder/*.md"),
}
# What may follow "a training", which is no noun then
OF_TRAINING = (
    "run|job|data|set|loop|step|script|program|function|code|time|mode|process|epoch|pass|state|loss|curve|"
    "speed|rate|digit|image|picture|text|sentence|sample|example|batch|corpus|framework|command"
)
UNITS = "process|rank|call|step|message|batch|epoch|copy|worker|GPU|device|collective"
# What to write, with a regular expression for what must not come back
INSTEAD = {
    "a training run, a job": (
        rf"\b(?:a|another|each|every|one|whole) training\b(?! (?:{OF_TRAINING}))|\btrainings\b"
    ),
    "fix": r"\bmend(?:s|ed|ing)?\b",
    "backend (of a thread: communication thread)": r"\bcarriers?\b",
    "random numbers, RNG state": r"\bdice\b",
    "evaluated": (
        r"\bright, judged\b|\b(?:samples?|pictures?|images?|models?)\b[^.]{0,30}\bjudged\b"
        r"|\bjudging (?:a|the) model\b"
    ),
    "diverge": r"\b(?:ranks|replicas|weights) (?:have )?part(?:ed)?\b(?! of| in)",
    "difference from": r"\bdifferences? to (?!you|them|readers)",
    "submit": r"\bhand(?:s|ed|ing)? in (?:a|the|your|its|one|another) (?:Slurm )?job\b",
    "directives": r"\borders? (?:for|to) Slurm\b",
    "the GPUs": r"\b(?:the|all|two|four|eight|GPU|graphics) cards\b",
    "cost (fixed cost, latency)": r"\bpric(?:e|es|ed)\b",
    "what is true": r"\bwhat holds\b(?! (?:a|the|it|them|up)\b)",
    "go through the report line by line": r"\baloud\b",
    "rebuild buckets": r"\bla(?:y|ys|id|ying) out\b[^.]{0,20}\bbuckets?\b",
    "all to all": r"\beverybody to everybody\b",
    "is started": r"\b(?:is|are|was|were) born\b",
    "one fewer": rf"\bone (?:{UNITS}) less\b",
    "too small by a factor of": r"\btoo (?:small|large),? by (?:about )?the\b",
    "needed memory": r"\bneeded room\b",
    "stays in the autograd graph": r"\b(?:a|the|no|its) way back\b",
    "to keep this under a minute": r"\bkeeps? its minute\b",
    "nothing left out": r"\bwithout nothing\b",
    "sit idle": r"\bothers idle\b",
    "what it costs": r"\bcosts? nothing\b",
}
# Why words may stand in a file, by the file and the words as they stand there
EXCEPTIONS: dict[tuple[str, str], str] = {}


def words_of(path: Path) -> str:
    """Return what people wrote in a file, in one line; of a notebook, its cells without their outputs."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return in_one_line(text)


def in_one_line(text: str) -> str:
    return re.sub(r"""["'\s]*\n[\s#>]*(?:[fr]*["'])?""", " ", text)  # without marks of comments and strings


def found_in(text: str) -> dict[str, str]:
    """Return what to write, by the words that must not come back, as they stand there."""
    return {hit[0]: instead for instead, wrong in INSTEAD.items() for hit in re.finditer(wrong, text, re.I)}


@pytest.mark.parametrize("place", PLACES)
def test_words_do_not_come_back(place: str) -> None:
    paths = sorted({path for pattern in PLACES[place] for path in ROOT.glob(pattern) if path.is_file()})
    assert paths
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        hits = found_in(words_of(path)).items()
        found += [
            f"{name}: {words!r} → {instead}" for words, instead in hits if (name, words) not in EXCEPTIONS
        ]
    assert not found, "\n".join(found)


def test_an_exception_is_still_needed() -> None:
    unused = [(name, words) for name, words in EXCEPTIONS if words not in found_in(words_of(ROOT / name))]
    assert unused == []


@pytest.mark.parametrize(
    "text",
    [
        "when a training is not faster",
        "Two trainings side by side",
        "a model to mend",
        "each device has its own carrier",
        "the state of the dice",
        "right, judged = counts.tolist()",
        "each sample is judged once",
        "the ranks part after the first step",
        "the difference to one device",
        "it hands in the job",
        "the orders for Slurm",
        "the number of all cards",
        "a call has a fixed price",
        "what holds on a GPU",
        "read the report aloud",
        "DDP lays out the buckets anew",
        "everybody to everybody",
        "where the workers are born",
        "with one process less",
        "too small by the batch size",
        "the needed room",
        "it leaves a way back",
        "so the lesson keeps its minute",
        "without nothing",
        "one works while the others idle",
        "the norm costs nothing",
    ],
)
def test_each_of_them_is_seen(text: str) -> None:
    assert len(found_in(text)) == 1
    for new_line in ("\n    # ", ' "\n        f"'):  # of a comment, of a string
        assert len(found_in(in_one_line(text.replace(" ", new_line)))) == 1


def test_what_reads_like_them_is_not() -> None:
    text = (
        "A training run, each training step and the training set; what holds the ranks up; it makes a "
        "difference to you; a part of the ranks; the judge; on its way; recommended; everybody is here."
    )
    assert found_in(text) == {}
