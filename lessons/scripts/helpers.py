"""What lessons use besides their subject: a killer of ranks, repeated runs, records, shorter output.

from scripts.helpers import Killer  # in a notebook of the folder lessons
"""

import hashlib
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from datetime import date
from pathlib import Path

import torch
from IPython.display import Image, display

from course_lib import RankError, Run, launch

GPU_RECORDS = Path(__file__).parents[1] / "recorded" / "gpu"
CPP_FILE = re.compile(r"\[[^\]]*(\.cc|\.cpp|\.h):\d+\] ?|in: /\S+\.cpp:\d+, ")  # in errors of C++


class Killer(threading.Thread):
    """Kills a rank of the newest run, in the background, ``wait`` seconds after ``once()`` has become true.

    It sends SIGKILL, as `kill -9` does; no program can catch it. ``at`` is then the second of the run.
    """

    def __init__(self, rank, once, wait=0.0):
        super().__init__(daemon=True)
        self.rank, self.once, self.wait, self.at = rank, once, wait, None
        self.start()

    def run(self):
        while not self.once():
            time.sleep(0.002)
        time.sleep(self.wait)
        run = Run.open()
        os.kill(run.facts(self.rank)["pid"], signal.SIGKILL)
        self.at = run.trace(self.rank).ticks["seconds"][-1]


class Record:
    """What cells returned where the lesson was made: for machines that cannot run them, or in so little time.

    It is made by the lesson's own run: ``COURSE_RECORD=1 make lesson N=17``.
    """

    def __init__(self, path):
        self.path = Path(path)

    def __call__(self, work, why_not):
        """What ``work()`` returns, as plain data: run here, or as recorded where there is a `why_not`."""
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        name = work.__name__
        if why_not:
            if name not in kept:
                raise RuntimeError(
                    f"{name} cannot be run here, and {self.path} has no record of it: {why_not}"
                )
            print(
                f"Not run here: {why_not}.\nRecorded on {kept[name]['date']}, on {kept[name]['machine']}:\n"
            )
            return kept[name]["returned"]
        returned = json.loads(_tidy(json.dumps(work())))
        if os.environ.get("COURSE_RECORD") == "1":
            machine = f"{os.cpu_count()} CPU cores, Linux {platform.release().split('-')[0]}, "
            machine += f"torch {torch.__version__.split('+')[0]}"
            kept[name] = {"date": date.today().isoformat(), "machine": machine, "returned": returned}
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        return returned


def _tidy(text):
    """Without the folders of this machine."""
    for path, short in ((sys.prefix, ".venv"), (str(Path.cwd()), "."), (tempfile.gettempdir(), "/tmp")):
        text = text.replace(path, short)
    return text


class GpuFigure:
    """A figure that a GPU made, as `make gpu` recorded it: a JSON file, and its picture beside it."""

    def __init__(self, record, png):
        self.record, self.png = record, png

    def __repr__(self):
        return f"[picture:\n{self.record['alt']}]"

    def _repr_mimebundle_(self, **_):
        inches = int.from_bytes(self.png[16:20], "big") / 144  # the course draws with 144 dots an inch
        return (
            {"image/png": self.png, "text/plain": repr(self)},
            {"image/png": {"alt": self.record["alt"], "width": round(96 * inches)}},
        )

    def write(self, path):
        path = Path(path)
        record = self.record | {"picture_sha256": hashlib.sha256(self.png).hexdigest()}
        text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"
        path.with_suffix(".png").write_bytes(self.png)
        path.write_text(text)

    @classmethod
    def read(cls, path):
        """Raise FileNotFoundError where nothing was recorded."""
        path = Path(path)
        return cls(json.loads(path.read_text()), path.with_suffix(".png").read_bytes())


def gpu_figure(name, own=None, records=GPU_RECORDS):
    """Show this machine's own figure of a GPU; where it has none, the recorded one with its device and date.

    ``own()`` makes it here. Without ``own`` the cell above has made it. `make gpu` records them. Where
    nothing was recorded, nothing is shown. What others published is the cell's next line.
    """
    if torch.cuda.is_available():
        if own is None:
            print("This machine has a GPU: the figure above is its own.")
        else:
            display(own())
        return
    try:
        found = GpuFigure.read(Path(records) / f"{name}.json")
    except FileNotFoundError:
        return
    what = "on a GPU ({device}, driver {driver}, torch {torch})".format(**found.record)
    print(f"Recorded on {found.record['date']}, {what}:")
    display(found)


def show(figure, alt, width=690):
    """Display a drawing, with what it shows in words; also where matplotlib's backend is not Jupyter's."""
    import matplotlib.pyplot as plt

    content = io.BytesIO()
    figure.savefig(content, bbox_inches="tight")
    plt.close(figure)
    display(Image(content.getvalue(), width=width, alt=alt))


def in_turns(ways, rounds=3):
    """What each of several functions returns, by name, in each round.

    Every second round goes back, so that a machine that grows slower meanwhile is as fair to the last as to
    the first.
    """
    found = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            found[name].append(ways[name]())
    return found


def terminal(module, *words):
    """What ``python -m module words…`` prints in a terminal."""
    command = [sys.executable, "-m", module, *map(str, words)]
    plain = os.environ | {"PYTHON_COLORS": "0"}  # a notebook asks its programs for colours
    done = subprocess.run(command, env=plain, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.replace(sys.executable, "python")


def lines_with(text, *words):
    """The lines of a text that have one of the words in them, each cut to 200 characters."""
    found = [line for line in text.splitlines() if any(word in line for word in words)]
    return "\n".join(CPP_FILE.sub("", line)[:200] for line in found)


def attempt(function, *args, nprocs, device=None):
    """What fresh ranks returned; where one fails, its reason."""
    try:
        return launch(function, *args, nprocs=nprocs, device=device, timeout=60, dashboard=False).results
    except RankError as error:
        return reason(error)


def reason(error):
    """The first line of an error, and of NCCL's last one, without C++ files, cut to 170 characters."""
    first, _, last = str(error).strip().partition("Last error:")
    words = CPP_FILE.sub("", " ".join(each.strip().splitlines()[0] for each in (last, first) if each.strip()))
    return words if len(words) <= 170 else words[:169] + "…"


def print_reasons(answers):
    """Print each reason in ``{column: {row: (state, reason)}}`` once, and below it where it was given."""
    where = {}
    for column, cells in answers.items():
        of_column = {}
        for row, (_, words) in cells.items():
            if words:
                of_column.setdefault(reason(words), []).append(row)
        for words, rows in of_column.items():
            rows = "all" if len(rows) == len(cells) else ", ".join(rows)
            where.setdefault(words, []).append(f"{column.replace(chr(10), ' ')}: {rows}")
    for words, columns in where.items():
        print(words, *textwrap.wrap("; ".join(columns), 106), sep="\n    ")
