"""Read what a class shares in a folder, for the board.

Anybody may have written these files. A file is read only if it is small and regular (no link, no pipe), and
counts only if every value in it is possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..sharing import ENDING, MOST_LETTERS, Tries, cleaned, read_questions

STUCK_TRIES = 3
STUCK_SECONDS = 5 * 60
STUCK_LAST_SECONDS = 20 * 60
BUSY_SECONDS = 15 * 60
RULE = (
    f"Stuck: {STUCK_TRIES} tries or more without more points, {STUCK_SECONDS // 60} minutes or more since "
    "the points last rose (or since the first try), and the last try was at most "
    f"{STUCK_LAST_SECONDS // 60} minutes ago."
)
MOST_BYTES = 32 << 10  # of a file; one with all questions takes 8 KiB
ALL_BYTES = 16 << 20
MOST_FILES = 20_000  # that are looked at
MOST_LEARNERS = 500  # that are shown
AHEAD_SECONDS = 3600  # that a learner's clock may be ahead
FRESH_SECONDS = 1.0  # several pages share one scan of the folder
# Follow no link and wait for no pipe
SAFELY = os.O_RDONLY | sum(getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "BINARY"))


@dataclass
class Learner:
    """A learner, as one file describes them."""

    id: str
    name: str
    questions: dict[str, Tries]


def read_learner(path: str, now: float) -> Learner:
    """Read one file of a class's folder.

    Raises
    ------
    OSError, ValueError
        It is not one that `share_progress` writes.
    """
    with open(os.open(path, SAFELY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        raise ValueError("without a name")
    return Learner(
        hashlib.sha256(os.fsencode(os.path.basename(path))).hexdigest()[:8],
        cleaned(name)[:MOST_LETTERS] or "(no name)",
        read_questions(found.get("questions"), now + AHEAD_SECONDS),
    )


def stuck_seconds(tries: Tries, most: float, now: float) -> float | None:
    """Return how many seconds a learner has been stuck on a question, by `RULE`; None if they are not."""
    if tries.points >= most or tries.in_vain < STUCK_TRIES or tries.since is None or tries.last is None:
        return None
    seconds = now - tries.since
    return seconds if seconds >= STUCK_SECONDS and now - tries.last <= STUCK_LAST_SECONDS else None


class ClassFolder:
    """A class's folder, scanned again and again; files that have not changed are not read again."""

    def __init__(self, folder: Path, most: Mapping[str, float], titles: Mapping[str, str]) -> None:
        self.folder, self.most, self.titles = folder, most, titles
        self._read: dict[str, tuple[object, Learner | None]] = {}  # by path: its state, and what it said
        self._lock = threading.Lock()
        self._seen: dict[str, Any] = {}
        self._seen_at = -FRESH_SECONDS

    def view(self) -> dict[str, Any]:
        """Return what the page shows, as plain data."""
        with self._lock:
            if time.monotonic() - self._seen_at >= FRESH_SECONDS:
                self._seen, self._seen_at = self._look(time.time()), time.monotonic()
            return self._seen

    def _look(self, now: float) -> dict[str, Any]:
        try:
            with os.scandir(self.folder) as entries:
                files = list(_stated(islice(entries, MOST_FILES)))
                further = sum(1 for _ in islice(entries, 10 * MOST_FILES))
        except OSError as error:
            return {"trouble": f"{self.folder} cannot be read: {error.strerror}"}
        learners, left_out = self._learners(files, now)
        readable = [each for each in learners if each]
        shown = readable[:MOST_LEARNERS]
        names = Counter(each.name for each in shown)
        return {
            "rule": RULE,
            "folder": str(self.folder),
            "unreadable": len(learners) - len(readable),
            "left_out": further + left_out + len(readable) - len(shown),
            "busiest": self._busiest(shown, now),
            "questions": {
                number: {"most": most, "title": self.titles[number]}
                for number, most in sorted(self.most.items())
                if any(number in each.questions for each in shown)
            },
            "learners": [
                {
                    "id": each.id,
                    "name": f"{each.name} · {each.id[:4]}" if names[each.name] > 1 else each.name,
                    "questions": {
                        number: self._shown(number, tries, now)
                        for number, tries in sorted(each.questions.items())
                        if number in self.most
                    },
                }
                for each in sorted(shown, key=lambda each: (each.name.casefold(), each.id))
            ],
        }

    def _learners(
        self, files: list[tuple[str, os.stat_result]], now: float
    ) -> tuple[list[Learner | None], int]:
        """Return the newest files' learners, None for each unreadable file, and how many are left out."""
        before, self._read, bytes_left = self._read, {}, ALL_BYTES
        files.sort(key=lambda file: file[1].st_mtime, reverse=True)
        for path, found in files:
            small = found.st_size <= MOST_BYTES and stat.S_ISREG(found.st_mode)
            bytes_left -= found.st_size if small else 0
            if bytes_left < 0:
                break
            same = found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino
            if path in before and before[path][0] == same:
                self._read[path] = before[path]
                continue
            try:
                self._read[path] = same, self._known(read_learner(path, now)) if small else None
            except FileNotFoundError:  # removed meanwhile
                continue
            except (OSError, ValueError):
                self._read[path] = same, None
        learners = [learner for _, learner in self._read.values()]
        return learners, len(files) - len(learners)

    def _known(self, learner: Learner) -> Learner:
        """Keep only the questions that this course has.

        Raises
        ------
        ValueError
            A question has more points than there are.
        """
        learner.questions = {n: tries for n, tries in learner.questions.items() if n in self.most}
        if any(tries.points > self.most[number] for number, tries in learner.questions.items()):
            raise ValueError("more points than there are")
        return learner

    def _shown(self, number: str, tries: Tries, now: float) -> dict[str, Any]:
        return {
            "points": tries.points,
            "tries": tries.tries,
            "in_vain": tries.in_vain,
            "ago": None if tries.last is None else max(0.0, now - tries.last),
            "stuck": stuck_seconds(tries, self.most[number], now),
        }

    def _busiest(self, learners: list[Learner], now: float) -> str | None:
        """Return the exercise most tried lately; else that of the latest try, or the first; else None."""
        tried = [(tries.last or 0.0, n[:2]) for each in learners for n, tries in each.questions.items()]
        lately = Counter(exercise for last, exercise in tried if now - last <= BUSY_SECONDS)
        if lately:
            return max(sorted(lately), key=lambda exercise: lately[exercise])
        return max(tried, key=lambda each: (each[0], -int(each[1])))[1] if tried else None


def _stated(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the learners' files and their stat; one that is still being written has another ending."""
    for entry in entries:
        if entry.name.endswith(ENDING) and not entry.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                yield entry.path, entry.stat(follow_symlinks=False)
