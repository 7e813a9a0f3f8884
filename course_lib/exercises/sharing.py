"""Share a learner's progress with a class, as a file of points and tries, for `course board`.

Tries are noted only while they are shared. The folder may be one where strangers write, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..files import discard, whole_file, write_whole
from ..home import home
from .progress import one_at_a_time, results

MOST_LETTERS = 40  # characters of a name
MOST_TRIES = 1_000_000
MOST_POINTS = 1000.0  # of a question
ENDING = ".json"  # of a file in the class's folder
# What names are made of
ADJECTIVES = """
amber azure bold brave bright calm clear coral crisp dapper eager early fair fleet gentle glad golden
green happy hardy indigo ivory jolly keen kind light lively lucky merry mild nimble noble patient plucky
quick quiet rapid ruby silver spry steady sunny swift warm
"""
ANIMALS = """
alpaca badger beaver bison camel crane deer dolphin eagle falcon ferret finch fox gecko gull hare heron
ibis jackdaw koala lark lemur lynx marten mole moose newt ocelot otter owl panda pelican puffin quail
raven robin seal stork swan tapir toad turtle vole walrus wren yak
"""


class SharingError(OSError):
    """Progress cannot be shared in that folder; the message says why and what to do."""


@dataclass
class Tries:
    """How a learner is doing on one question; times are seconds since 1970."""

    points: float  # the best
    most: float
    tries: int = 0
    first: float | None = None
    last: float | None = None
    in_vain: int = 0  # tries since the points last rose
    since: float | None = None  # when they last rose, or the first try if they never did

    @classmethod
    def read(cls, found: Any, latest: float) -> Tries:
        """Validate what an untrusted file says of a question; no time may be later than ``latest``.

        Raises
        ------
        ValueError
            A field is missing, unknown or impossible.
        """
        if not isinstance(found, dict) or found.keys() != {each.name for each in fields(cls)}:
            raise ValueError("these are not the fields of a question")
        _possible(found, "most", MOST_POINTS)
        _possible(found, "points", found["most"])
        _possible(found, "tries", MOST_TRIES, int)
        _possible(found, "in_vain", found["tries"], int)
        for name in ("first", "last", "since"):
            if found[name] is not None:
                _possible(found, name, latest)
        return cls(**found)

    def another(self, points: float, most: float, now: float) -> None:
        """Count a try."""
        self.tries, self.last, self.most = self.tries + 1, now, most
        self.first = now if self.first is None else self.first
        if points > self.points:
            self.points, self.in_vain, self.since = points, 0, now
        else:
            self.in_vain += 1
            self.since = now if self.since is None else self.since


def _possible(found: dict[str, Any], name: str, most: float, *kinds: type) -> None:
    value = found[name]
    if type(value) not in (kinds or (int, float)) or not 0 <= value <= most:
        raise ValueError(f"{name} is not a number from 0 to {most:g}")


@dataclass
class Sharing:
    """What progress a learner shares, where, and under what name; kept in the learner's own folder."""

    folder: str
    file: str
    name: str
    questions: dict[str, Tries]

    @property
    def path(self) -> Path:
        return Path(self.folder, self.file)

    def keep(self) -> None:
        write_whole(_kept_in(), json.dumps(asdict(self)))

    def publish(self) -> None:
        """Write the file that the class sees; `whole_file` creates its own, so no planted link diverts it."""
        whole = json.dumps({"name": self.name, "questions": asdict(self)["questions"]})
        with whole_file(self.path) as file:
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), 0o644)  # the teacher is another user
            file.write(whole.encode())


def _kept_in() -> Path:
    return home() / "sharing.json"


def _kept() -> Sharing | None:
    """Read what is shared; None if nothing is, or if the record of it is damaged."""
    try:
        kept = json.loads(_kept_in().read_text())
        folder, file, name = (str(kept[part]) for part in ("folder", "file", "name"))
        return Sharing(folder, file, name, read_questions(kept["questions"], math.inf))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_questions(found: Any, latest: float) -> dict[str, Tries]:
    """Validate what an untrusted file says of all questions.

    Raises
    ------
    ValueError
        As `Tries.read`.
    """
    if not isinstance(found, dict):
        raise ValueError("the questions are not a dict")
    return {number: Tries.read(tries, latest) for number, tries in found.items()}


def note_try(number: str, points: float, most: float) -> None:
    """Count a try if progress is shared; a missing or unwritable folder does not spoil a check."""
    with contextlib.suppress(OSError), one_at_a_time():
        sharing = _kept()
        if sharing:
            tries = sharing.questions.setdefault(number, Tries(0.0, most))
            tries.another(points, most, time.time())
            sharing.keep()
            sharing.publish()


def shared_where() -> str:
    """Say, for a headline, in which folder and as whom progress is shared; empty if it is not."""
    sharing = _kept()
    return f", shared in {sharing.folder} as “{sharing.name}”" if sharing else ""


def share_progress(folder: str | os.PathLike[str] | None, name: str | None = None) -> None:
    """Let a class see how far you are: ``share_progress("/srv/class")`` (every exercise).

    From now on each `check` writes to a file in that folder: for each question your best points, the number
    of your tries, when the first and the last was, and since when your points have not risen. Neither your
    code nor the feedback is written. A teacher sees it with ``course board``.

    Parameters
    ----------
    folder
        The class's folder; your teacher knows its path. None ends the sharing and removes your file.
    name
        The name that the class sees, 40 characters at most. By default two words and a number are drawn, and
        stay the same as long as you share.

    Raises
    ------
    SharingError
        There is no such folder, or it cannot be written to.
    ValueError, TypeError
        The name is empty or too long, or not a string.
    CourseHomeError
        The course's own folder cannot be written to (`COURSE_HOME`).
    """
    with one_at_a_time():
        before = _kept()
        if folder is None:
            _kept_in().unlink(missing_ok=True)
            print(_taken_away(before) if before else "Your progress was not shared.")
            return
        place = str(Path(folder).expanduser().absolute())
        sharing = before if before and before.folder == place else _begun(place)
        sharing.name = sharing.name if name is None else _name(name)
        try:
            sharing.publish()
            sharing.keep()
        except OSError as error:
            if sharing is not before:
                discard(sharing.path)
            raise SharingError(
                f"your progress cannot be shared in {place} ({error.strerror}): ask your teacher for the "
                "path of a folder that is there and that you can write"
            ) from None
        if before and sharing is not before:
            _taken_away(before)
    print(
        f"Whoever can read {place} sees you as “{sharing.name}” from now on, with your best points in each "
        "question, how many tries you made, when the first and the last was, and since when your points have "
        "not risen, but nothing of your code; `share_progress(None)` takes this away and ends it."
    )


def _begun(place: str) -> Sharing:
    name = (
        f"{secrets.choice(ADJECTIVES.split())} {secrets.choice(ANIMALS.split())} {10 + secrets.randbelow(90)}"
    )
    questions = {number: Tries(points, most) for number, (points, most) in results().items()}
    return Sharing(place, f"learner-{secrets.token_hex(8)}{ENDING}", name, questions)


def _name(given: str) -> str:
    """Return a name as it is shown, on one line."""
    if not isinstance(given, str):
        raise TypeError(f"name must be a string, or None to have one drawn; got {given!r}")
    name = cleaned(given)
    if not 0 < len(name) <= MOST_LETTERS:
        raise ValueError(f"name must have 1 to {MOST_LETTERS} letters; got {len(name)}, {name[:60]!r}")
    return name


def cleaned(name: str) -> str:
    """Clear a name of line breaks, lone surrogates and characters that change the text direction."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())


def _taken_away(sharing: Sharing) -> str:
    """Remove the file that the class sees, and say how that went."""
    try:
        sharing.path.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror
        return f"Your progress is not shared any more, but {sharing.path} is still there ({why}): remove it."
    return f"Your progress is not shared any more, and {sharing.path} is removed."
