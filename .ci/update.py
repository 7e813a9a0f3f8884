"""`make update`: update the course to its newest version and keep the learner's own changes.

nbgitpuller (Project Jupyter) does the work, as on the servers of many classes: it commits what the learner
changed, merges, and keeps the learner's lines where both sides changed the same lines. Before that, this
script undoes, in each notebook that the new version changes, all that the learner did not write: running a
lesson changes its outputs, and JupyterLab writes Python's version into a notebook as soon as it opens it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Fault(Exception):
    """The update stops; one sentence says what went wrong and what to do."""


def update() -> None:
    branch, upstream = followed()
    git("fetch", "--quiet", "origin", branch)
    base = git("merge-base", "HEAD", upstream)
    news = git("diff", "--name-only", base, upstream).splitlines()
    if not news:
        print("This is the newest version of the course.")
        return
    notebooks = [name for name in news if name.endswith(".ipynb")]
    kept = {name: text for name in notebooks if (text := keep_what_was_written(name, base)) is not None}
    merge(branch)
    for name, text in kept.items():
        if fault := broken(name):
            mine = (ROOT / name).with_suffix(".mine.ipynb")
            mine.write_text(text, encoding="utf-8")
            git("checkout", upstream, "--", name)
            print(f"{name} could not be merged ({fault}): it is the new one now, yours is {mine.name}.")
        else:
            print(f"{name}: what you wrote is kept, the rest is new.")
    todo = "Restart the kernels of open notebooks, and load these anew (File > Reload Notebook from Disk)."
    print(f"The course is up to date (files that changed: {len(news)}). {todo}")


def followed() -> tuple[str, str]:
    """Return the branch of `origin` that this clone follows, and git's name for it: "main", "origin/main"."""
    if not (ROOT / ".git").exists():
        raise Fault("this folder is no git clone (a ZIP's?): clone the course, then copy your files over.")
    upstream = git("rev-parse", "--abbrev-ref", "@{upstream}")
    remote, _, branch = upstream.partition("/")
    if remote != "origin":
        raise Fault(f"this clone follows {upstream}: update it with git, as you set it up with git.")
    return branch, upstream


def keep_what_was_written(name: str, base: str) -> str | None:
    """Put back each cell of a notebook as it was in `base`, except where the learner changed the text.

    Return the notebook, or None if it is the same as in `base` now.
    """
    path = ROOT / name
    try:
        before = json.loads(git("show", f"{base}:{name}"))
        now = json.loads(path.read_text(encoding="utf-8"))
        old = {text_of(cell): cell for cell in before["cells"]}
        cells = [old.get(text_of(cell), cell) for cell in now["cells"]]
    except (Fault, OSError, ValueError, KeyError):  # new, removed here, or no notebook: leave it to git
        return None
    text = json.dumps(before | {"cells": cells}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")  # as nbformat and JupyterLab write it
    return text if cells != before["cells"] else None


def text_of(cell: dict) -> tuple[str, str, str]:
    return cell["id"], cell["cell_type"], "".join(cell["source"])


def merge(branch: str) -> None:
    puller = [sys.executable, "-m", "nbgitpuller.pull", git("remote", "get-url", "origin"), branch, str(ROOT)]
    run = subprocess.run(puller, capture_output=True, text=True)
    if run.returncode:
        subprocess.run(["git", "merge", "--abort"], cwd=ROOT, capture_output=True)
        # nbgitpuller writes what git says to stdout, and its own errors to stderr
        said = run.stdout if "CalledProcessError" in run.stderr else run.stderr
        raise Fault(f"nothing was merged, at most your own changes were committed: {said.splitlines()[-1]}")
    print(*re.findall(r"(?m)^Renamed .*\n", run.stdout), sep="", end="")


def broken(name: str) -> str:
    """Return why JupyterLab cannot handle a merged notebook, or ""; nbformat would repair it silently."""
    try:
        ids = [cell.get("id") for cell in json.loads((ROOT / name).read_text("utf-8"))["cells"]]
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError):
        return "git's merge is no notebook"
    return "a cell stands twice" if len(set(ids)) < len(ids) else ""


def git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if run.returncode:
        raise Fault((run.stderr.strip().splitlines() or [f"git {arguments[0]} failed"])[-1])
    return run.stdout.strip()


if __name__ == "__main__":
    try:
        update()
    except (Fault, OSError) as fault:  # no git, no disk space, no permission
        sys.exit(f"Update stopped: {fault}")
    except KeyboardInterrupt:
        sys.exit("\nUpdate interrupted: run the same command again.")
