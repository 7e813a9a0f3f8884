"""`course board`: a class at work, as one HTML file, from the files that learners share (`sharing`).

Anybody may have written these files. A file is read only if it is small and regular (no link, no pipe), and
counts only if every value in it is possible. The page runs no script.
"""

from __future__ import annotations

import html
import json
import os
import stat
import time
from itertools import islice
from pathlib import Path

from ..files import write_whole
from . import questions
from .page import page
from .question import QUESTIONS
from .sharing import ENDING, MOST_LETTERS, Tries, cleaned, read_questions

EVERY_SECONDS = 5.0
STUCK_TRIES, STUCK_MINUTES, LAST_MINUTES = 3, 5, 20
RULE = (
    f"Stuck: {STUCK_TRIES} tries or more without more points, for {STUCK_MINUTES} minutes or more, the last "
    f"one at most {LAST_MINUTES} minutes ago."
)
MOST_BYTES = 32 << 10  # of a file; one with all questions takes 8 KiB
MOST_FILES = 500
AHEAD_SECONDS = 3600  # that a learner's clock may be ahead

Learner = tuple[str, dict[str, Tries]]  # a name, and the tries at each question


def show(folder: Path, file: Path) -> None:
    """Rewrite the file every `EVERY_SECONDS`, until an exception ends this; the page then says so.

    `OSError` is raised if the folder cannot be read, or the file cannot be written.
    """
    if file.resolve().parent == folder.resolve():
        raise OSError(f"{file} has everybody's points, and {folder} is the class's: name another --html FILE")
    questions.load()
    body, trouble = class_at(folder, time.time()), ""
    print(f"The class is in {file.absolute()}: open it in a browser. Ctrl-C ends this.", flush=True)
    before = os.umask(0o077)  # the page is for its owner alone
    try:
        while True:
            write_whole(file, page("The class at a glance", trouble + body, EVERY_SECONDS))
            time.sleep(EVERY_SECONDS)
            try:
                body, trouble = class_at(folder, time.time()), ""
            except OSError as error:  # a shared disk may be away for a while
                trouble = f"<p>Not read since then: {html.escape(str(error))}</p>"
    finally:
        write_whole(file, page("The class as it was when `course board` ended", trouble + body))
        os.umask(before)


def class_at(folder: Path, now: float) -> str:
    """Return the page's body: a table for each exercise that was tried, the latest first."""
    learners, unread, left_out = read_class(folder, now)
    head = f"Learners in {folder} at {time.strftime('%H:%M:%S')}: {len(learners)}. "
    head += f"Files that could not be read as progress: {unread}. " * bool(unread)
    head += f"At most {MOST_FILES} files are read; left out: {left_out} or more." * bool(left_out)
    tried = sorted((tries.last, number[:2]) for _, known in learners for number, tries in known.items())
    tables = [_table(each, learners, now) for each in dict.fromkeys(each for _, each in reversed(tried))]
    return "\n".join([f"<p>{html.escape(head)}</p>", *tables, f"<p>{RULE}</p>"])


def _table(exercise: str, learners: list[Learner], now: float) -> str:
    """Return an exercise's table: who is stuck comes first, then who has begun, then the others."""
    asked = {number: asked for number, asked in sorted(QUESTIONS.items()) if number.startswith(exercise)}
    head = "".join(f"<th>{number} {each.signature.partition('(')[0]}</th>" for number, each in asked.items())
    rows = []
    for name, known in learners:
        cells = "".join(_cell(known.get(number), each.most, now) for number, each in asked.items())
        row = f"<tr><th><bdi>{html.escape(name)}</bdi></th>{cells}</tr>"
        rows.append(("stuck" not in cells, known.keys().isdisjoint(asked), name.casefold(), row))
    table = f"<table><tr><th>learner</th>{head}</tr>{''.join(row for *_, row in sorted(rows))}</table>"
    return f"<h2>Exercise {exercise}</h2>{table}"


def _cell(tries: Tries | None, most: float, now: float) -> str:
    if tries is None:
        return "<td>–</td>"
    words, mark = f"{tries.points:g} of {most:g}", ""
    if tries.points >= most:
        words, mark = f"✓ {words}", "all"
    elif is_stuck(tries, now):
        words, mark = f"⚠ {words}, stuck for {_duration(now - tries.since)}", "stuck"
    last = "before it was shared"
    if tries.tries:
        last = f"tries: {tries.tries}, the last {_duration(now - tries.last)} ago"
    return f'<td class="{mark}">{words}<br><small>{last}</small></td>'


def is_stuck(tries: Tries, now: float) -> bool:
    """Tell whether a learner who has not reached all points is stuck, by `RULE`."""
    is_long = now - tries.since >= 60 * STUCK_MINUTES
    return tries.in_vain >= STUCK_TRIES and is_long and now - tries.last <= 60 * LAST_MINUTES


def _duration(seconds: float) -> str:
    minutes = max(0, int(seconds // 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"


def read_class(folder: Path, now: float) -> tuple[list[Learner], int, int]:
    """Return the learners of a folder's newest files, and how many files are unreadable and left out."""
    with os.scandir(folder) as entries:  # a file that is still being written has another ending
        paths = [each.path for each in islice(entries, 10 * MOST_FILES) if each.name.endswith(ENDING)]
    paths.sort(key=_written, reverse=True)
    learners, unread = [], 0
    for path in paths[:MOST_FILES]:
        try:
            learners.append(read_learner(path, now))
        except (OSError, ValueError, RecursionError):
            unread += 1
    return learners, unread, max(0, len(paths) - MOST_FILES)


def _written(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:  # it was removed meanwhile
        return 0.0


def read_learner(path: str, now: float) -> Learner:
    """Read a learner's file; raise OSError, ValueError or RecursionError if it is not one."""
    no_link_no_wait = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_link_no_wait)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        raise ValueError("without a name")
    known = read_questions(found.get("questions"), now + AHEAD_SECONDS)
    known = {number: tries for number, tries in known.items() if number in QUESTIONS}
    if any(tries.points > QUESTIONS[number].most for number, tries in known.items()):
        raise ValueError("more points than there are")
    return cleaned(name)[:MOST_LETTERS] or "(no name)", known
