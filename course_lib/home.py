"""Where the course keeps what it makes: data sets, and the folders of runs."""

import os
from pathlib import Path


class CourseHomeError(OSError):
    """The course's folder cannot be created or written; the message says why and what to set."""


def home() -> Path:
    """The course's own folder, made private (mode 0700) when it is not there yet.

    Returns
    -------
    pathlib.Path
        The folder that the environment variable ``COURSE_HOME`` names, made absolute; without it the
        platform's cache folder for ``multi-gpu-course`` (``~/.cache/multi-gpu-course`` on Linux).

    Raises
    ------
    CourseHomeError
        When the folder cannot be created, or exists and cannot be written.
    """
    chosen = os.environ.get("COURSE_HOME")
    if chosen:
        folder = Path(chosen)
    else:
        import platformdirs

        folder = platformdirs.user_cache_path("multi-gpu-course", appauthor=False)
    try:
        folder = folder.expanduser().absolute()
        for part in (*reversed(folder.parents), folder):
            part.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~nobody" is nobody's home
        raise _refused(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(folder, "you may not write there")
    return folder


def _refused(folder: Path, reason: object) -> CourseHomeError:
    return CourseHomeError(
        f"the course cannot keep its files in {folder} ({reason}): set COURSE_HOME to a folder you can write"
    )
