"""Share a learner's progress with a class, as a file of points and tries, for `course board`.

Tries are counted only while they are shared. Strangers may be able to write to the folder, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import discard, whole_file
from ..host.home import home
from .progress import one_at_a_time, results

MOST_LETTERS = 40  # of a name
ENDING = ".json"  # of a file in the class's folder


@dataclass
class Tries:
    """How a learner is doing on one question; times are seconds since 1970, 0 where there was none."""

    points: float  # the best
    tries: int = 0
    in_vain: int = 0  # tries since the points last rose
    last: float = 0.0
    since: float = 0.0  # when the points last rose, or the first try if they never did

    def another(self, points: float, now: float) -> None:
        """Count a try."""
        self.tries, self.in_vain, self.last = self.tries + 1, self.in_vain + 1, now
        if points > self.points:
            self.points, self.in_vain = points, 0
        if not self.in_vain or not self.since:
            self.since = now


def read_questions(found: Any, latest: float = math.inf) -> dict[str, Tries]:
    """Read the questions in an untrusted file; raise ValueError for a value that is not possible."""
    most = {"points": 1e3, "tries": 1e6, "in_vain": 1e6, "last": latest, "since": latest}
    for tries in found.values() if isinstance(found, dict) else [None]:
        if not isinstance(tries, dict) or tries.keys() != most.keys():
            raise ValueError("these are not the fields of a question")
        for name, value in tries.items():
            kinds = (int,) if name in ("tries", "in_vain") else (int, float)
            if type(value) not in kinds or not 0 <= value <= most[name]:
                raise ValueError(f"{name} is not a number from 0 to {most[name]:g}")
    return {number: Tries(**tries) for number, tries in found.items()}


@dataclass
class Sharing:
    """What a learner shares, under what name, and in which file; kept in the learner's own folder."""

    path: str
    name: str
    questions: dict[str, Tries]

    def write(self, path: str | Path) -> None:
        """Write it as JSON; `whole_file` creates a new file, so no planted link diverts it."""
        with whole_file(Path(path)) as file:
            os.fchmod(file.fileno(), 0o644)  # the teacher is another user
            file.write(json.dumps(asdict(self)).encode())


def _kept_in() -> Path:
    return home() / "sharing.json"


def _kept() -> Sharing | None:
    """Read what is shared; return None if nothing is, or if the file is damaged."""
    try:
        kept = json.loads(_kept_in().read_text())
        return Sharing(str(kept["path"]), str(kept["name"]), read_questions(kept["questions"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def note_try(number: str, points: float) -> None:
    """Count a try if progress is shared; a missing or unwritable folder does not spoil a check."""
    with contextlib.suppress(OSError), one_at_a_time():
        if sharing := _kept():
            sharing.questions.setdefault(number, Tries(0.0)).another(points, time.time())
            sharing.write(_kept_in())
            sharing.write(sharing.path)


def shared_where() -> str:
    """Say, for a headline, in which folder and as whom progress is shared; empty if it is not."""
    sharing = _kept()
    return f", shared in {os.path.dirname(sharing.path)} as “{sharing.name}”" if sharing else ""


def share_progress(folder: str | os.PathLike[str] | None, name: str = "") -> None:
    """Let a class see how far you are: ``share_progress("/srv/class", "Anna")`` (every exercise).

    From now on each `check` writes to a file in that folder: for each question your best points, the number
    of your tries, when the last was, and since when your points have not risen. Neither your code nor the
    feedback is written. A teacher sees it with ``course board``.

    Parameters
    ----------
    folder
        The class's folder; your teacher knows its path. None ends the sharing and removes your file.
    name
        The name that the class sees, any that you like: 1 to 40 characters.

    Raises
    ------
    OSError
        The folder does not exist, or you cannot write there; or you cannot write in `COURSE_HOME`.
    ValueError
        The name is missing or too long.
    """
    with one_at_a_time():
        before = _kept()
        if folder is None:
            _kept_in().unlink(missing_ok=True)
            if before:
                Path(before.path).unlink(missing_ok=True)
            print(f"Your progress {'is not shared any more' if before else 'was not shared'}.")
            return
        name = cleaned(name)
        if not 0 < len(name) <= MOST_LETTERS:
            raise ValueError(
                f"give the name that the class may see, of 1 to {MOST_LETTERS} letters, as in "
                f'share_progress("{folder}", "Anna"); got {name[:60]!r}'
            )
        place = Path(folder).expanduser().absolute()
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise OSError(f"{place} is not a folder that you can write in: ask your teacher for the class's")
        questions = before.questions if before else {n: Tries(points) for n, (points, _) in results().items()}
        sharing = Sharing(str(place / f"learner-{secrets.token_hex(8)}{ENDING}"), name, questions)
        sharing.write(_kept_in())  # first: without it, nobody could remove the shared file
        try:
            sharing.write(sharing.path)
        except OSError:
            before.write(_kept_in()) if before else discard(_kept_in())
            raise
        if before:
            discard(Path(before.path))
    print(
        f"Whoever can read {place} sees you as “{name}” from now on: your best points in each question, how "
        "many tries you made, and when, but nothing of your code. `share_progress(None)` ends it."
    )


def cleaned(name: str) -> str:
    """Clear a name of line breaks, lone surrogates and characters that change the text direction."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
