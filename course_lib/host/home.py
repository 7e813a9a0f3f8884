"""Find the folder where the course keeps data sets, runs, a learner's progress, and how it is shared."""

import os
from pathlib import Path


class CourseHomeError(OSError):
    """The course's folder cannot be created or written to; the message says why and what to set."""


def home() -> Path:
    """Return the course's own folder, absolute; if it does not exist, create it as private (mode 0700).

    ``COURSE_HOME`` names it; by default it is ``multi-gpu-course`` in the platform's cache folder (on Linux,
    ``~/.cache``). Raise `CourseHomeError` if it cannot be created or written to.
    """
    if chosen := os.environ.get("COURSE_HOME"):
        folder = Path(chosen)
    else:
        import platformdirs

        folder = platformdirs.user_cache_path("multi-gpu-course", appauthor=False)
    try:
        folder = folder.expanduser().absolute()
        for part in (*reversed(folder.parents), folder):
            part.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no user for "~nobody"
        raise refused(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise refused(folder, "you may not write there")
    return folder


def refused(folder: Path, reason: object) -> CourseHomeError:
    """Return the error that says why the course cannot write to a folder, and what to do."""
    return CourseHomeError(
        f"the course cannot keep its files in {folder} ({reason}): set COURSE_HOME to a folder you can write"
    )
