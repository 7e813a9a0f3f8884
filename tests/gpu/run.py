"""`make gpu`: run all that needs a GPU in this course, on a machine that is lent for half an hour.

    make gpu ARGS="--fetch .whl"         the day before, with a package index: download wheels for it
    make gpu WHEELS=.whl OUT=/somewhere  there, with PYTHON (3.12 with torch, torchvision, matplotlib)
    make gpu                             after `make setup`: with .venv; otherwise with PYTHON
    make gpu ARGS="--minutes 9"          stop after 9 minutes instead of 24
    make gpu ARGS="lesson/06 figure"     only the parts with these prefixes
    python3 tests/gpu/run.py figure      the same without make

Each part is a process with a time limit; if it fails or hangs, the others go on. Figures are written into
`lessons/recorded/gpu`. OUT (`.gpu/out`) has a log of each part, and `summary.md`, which grows with each one.

Standard library only: nothing else is certain to be installed on that machine.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".gpu"
MARK = "COURSE_GPU_PART"  # environment variable of all processes that a part starts
GRACE = 15  # seconds between interrupting a part that takes too long and killing it
TAIL = 12  # lines of a failed part's log that the summary shows

# Between two launches no process of a lesson uses the GPU, and an idle driver shuts the GPU down.
KEEPS_THE_GPU_AWAKE = "import sys, torch; torch.ones(1, device='cuda'); sys.stdin.read()"
FACTS = "import json; from tests.gpu.figures import *; print(json.dumps([facts(), list(FIGURES)]))"

# What the course needs besides torch, torchvision, numpy, pillow and matplotlib, which such machines have
WHEELS = ["ipykernel", "nbformat", "nbval", "pytest", "ipywidgets", "cloudpickle", "psutil", "platformdirs"]
WHEELS += ["nvidia-ml-py", "transformers"]
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40))]


@dataclass(frozen=True)
class Part:
    """A command with a time limit in seconds; parts that are ``shared`` may run side by side."""

    name: str
    command: list[str]
    seconds: float
    shared: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a part ended: done, failed, hung, cut (the whole time was up), interrupted or not started."""

    name: str
    status: str
    seconds: float = 0
    last: tuple[str, ...] = ()  # lines of its log

    def __str__(self) -> str:
        words = f": {self.last[-1]}" if self.last else ""
        return f"{self.name}: {self.status}, {self.seconds:.0f} s{words}"[:200]


class Running:
    """A part under way; all processes that it starts carry its mark."""

    def __init__(self, part: Part, out: Path, environment: dict[str, str], deadline: float) -> None:
        self.part, self.mark, self.interrupted = part, uuid.uuid4().hex, False
        self.began = time.monotonic()
        self.until = min(self.began + part.seconds, deadline)
        self.log = out / f"{part.name}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> Outcome | None:
        """Return the outcome; None while the part runs. One that is late is interrupted, then killed."""
        code, late = self.process.poll(), time.monotonic() - self.until
        if code is None and late < GRACE:
            if late > 0 and not self.interrupted:
                self.interrupted = True
                os.killpg(self.process.pid, signal.SIGINT)  # a chance to report where it was
            return None
        if self.interrupted or code is None:
            return self.end("hung" if self.until == self.began + self.part.seconds else "cut")
        return self.end("failed" if code else "done")

    def end(self, status: str) -> Outcome:
        """Kill what is left of the part, in any session, and return the outcome."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = [line.strip(" =\t")[:300] for line in lines if line.strip(" =\t")][-TAIL:]
        return Outcome(self.part.name, status, time.monotonic() - self.began, tuple(last))


def marked(mark: str) -> list[int]:
    """Return the ids of the processes with this mark in their environment (on Linux)."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                found.append(int(path.split("/")[2]))
    return found


def run(
    parts: list[Part], out: Path, environment: dict[str, str], deadline: float, machine: str, at_once: int
) -> list[Outcome]:
    """Run parts in their order until ``deadline`` (of time.monotonic), and write the summary after each.

    Parts that are shared run side by side, at most ``at_once``. Ctrl-C, or SIGTERM, ends those that run.
    """
    waiting, running, ended, signals = list(parts), list[Running](), list[Outcome](), list[int]()
    handlers = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    def note(outcome: Outcome) -> None:
        ended.append(outcome)
        print(outcome, flush=True)
        new = out / ".summary.md.new"
        new.write_text(summary(machine, ended), encoding="utf-8")
        new.replace(out / "summary.md")

    out.mkdir(parents=True, exist_ok=True)
    try:
        while (waiting or running) and not signals:
            while waiting and (not running or all(each.part.shared for each in running)):
                if running and not (waiting[0].shared and len(running) < at_once):
                    break
                part = waiting.pop(0)
                if deadline - time.monotonic() < GRACE:
                    note(Outcome(part.name, "not started"))
                else:
                    running.append(Running(part, out, environment, deadline))
            for each in list(running):
                if outcome := each.look():
                    running.remove(each)
                    note(outcome)
            time.sleep(0.1)
    finally:
        for each in running:
            note(each.end("interrupted"))
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended


def summary(machine: str, outcomes: list[Outcome]) -> str:
    """Return the text of summary.md: a line for each part, and the last lines of those that failed."""
    lines = ["# make gpu", "", machine, "", *(f"- {each}" for each in outcomes)]
    for each in outcomes:
        if each.status != "done" and each.last:
            lines += ["", f"## {each.name}: {each.status}", "", *(f"    {line}" for line in each.last)]
    return "\n".join(lines) + "\n"


def parts(python: str, figures: list[str]) -> list[Part]:
    """List all parts, the most valuable first: time may run out before the end."""
    # no:cacheprovider: the cache would be written into the course
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    nbval = ["-p", "nbval.plugin", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=80"]
    tests = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    lessons = [
        *((f"lesson/{path.stem[:2]}", path) for path in sorted((ROOT / "lessons").glob("*.ipynb"))),
        *((f"deeper/{path.stem}", path) for path in sorted((ROOT / "lessons" / "deeper").glob("*.ipynb"))),
    ]
    return [
        Part("doctor", [python, "-m", "course_lib", "doctor"], 240),
        *(Part(f"figure/{name}", [python, "-m", "tests.gpu.figures", name], 240) for name in figures),
        *(Part(f"tests/{path.stem[5:]}", [*pytest, "-rA", str(path)], 300) for path in tests),
        *(Part(name, [*pytest, *nbval, str(path)], 300, shared=True) for name, path in lessons),
    ]


@contextlib.contextmanager
def gpu_awake(python: str, environment: dict[str, str]) -> Iterator[None]:
    """Let a process hold the GPU meanwhile."""
    command = [python, "-c", KEEPS_THE_GPU_AWAKE]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


def environment_of(python: str, site: Path | None) -> dict[str, str]:
    """Return the environment of the parts, in which the wheels come before the machine's packages."""
    paths = [*([str(site)] if site else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
        "COURSE_HOME": str(WORK / "home"),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine's may be older than our pytest
        "MPLBACKEND": "Agg",
    }
    # Many containers set it; each rank would then compile everything that it imports.
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | changed


def fetch(folder: Path) -> int:
    """Fill a folder with the wheels that a machine without an index needs (Linux on x86-64, Python 3.12)."""
    for path in folder.glob("*.whl"):
        path.unlink()  # from another day: pip would find two versions
    pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version=3.12"]
    pip += ["--implementation=cp", "-d", str(folder), "--constraint", str(ROOT / "constraints.txt")]
    code = subprocess.run([*pip, *(f"--platform={name}" for name in PLATFORMS), *WHEELS]).returncode
    for path in folder.glob("numpy-*.whl"):
        path.unlink()  # that machine has its own, with which its torch was built
    print(f"{len(list(folder.glob('*.whl')))} wheels are in {folder}")
    return code


def install(python: str, folder: Path, site: Path) -> None:
    """Install a folder's wheels into ``site``, beside the machine's packages, without an index."""
    shutil.rmtree(site, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    if subprocess.run([*pip, str(site), *map(str, folder.glob("*.whl"))]).returncode:
        raise SystemExit(f"make gpu: pip could not install the wheels in {folder}")


def ask(python: str, environment: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the machine is, by `tests.gpu.figures`, and the names of the figures."""
    told = subprocess.run(
        [python, "-c", FACTS], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=240
    )
    if told.returncode:
        raise SystemExit(f"make gpu: {python} has no torch that works: name one that has, by PYTHON")
    facts, figures = json.loads(told.stdout.splitlines()[-1])
    if not facts["gpus"]:
        raise SystemExit(
            f"make gpu: torch {facts['torch']} sees no CUDA GPU on this machine; nothing was run"
        )
    return facts, figures


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="only those whose names begin so, as in figure or lesson/06")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, where there is no package index")
    parser.add_argument("--out", type=Path, default=WORK / "out", help="where logs and summary.md go")
    parser.add_argument("--minutes", type=float, default=24, help="for all of it (24)")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download wheels, and nothing else")
    asked = parser.parse_args(words)
    if asked.fetch:
        return fetch(asked.fetch.resolve())
    deadline = time.monotonic() + 60 * asked.minutes
    own, site = ROOT / ".venv" / "bin" / "python", WORK / "site"
    python = str(own) if own.exists() and not asked.wheels else sys.executable
    if asked.wheels:
        install(python, asked.wheels.resolve(), site)
    environment = environment_of(python, site if asked.wheels else None)
    facts, figures = ask(python, environment)
    machine = "{device}, driver {driver}, CUDA {cuda}, torch {torch}, Python {python}, {date}".format(**facts)
    found = parts(python, figures)
    if unknown := [name for name in asked.parts if not any(each.name.startswith(name) for each in found)]:
        names = ", ".join(each.name for each in found)
        raise SystemExit(f"make gpu: no part begins with {unknown[0]!r}; they are: {names}")
    found = [each for each in found if each.name.startswith(tuple(asked.parts or [""]))]
    print(machine, flush=True)
    out, cores = asked.out.resolve(), len(os.sched_getaffinity(0))
    at_once = max(1, min(4, cores // 4))  # a lesson runs as on the two cores on which it was saved
    with gpu_awake(python, environment):
        outcomes = run(found, out, environment, deadline, machine, at_once)
    print(f"\n{summary(machine, outcomes)}\nThis and the logs are in {out}")
    statuses = {each.status for each in outcomes}
    return 130 if "interrupted" in statuses else int(statuses != {"done"})


if __name__ == "__main__":
    sys.exit(main())
