"""`make gpu`: try all that needs a GPU in this course, on a machine that is lent for half an hour.

    make gpu ARGS="--fetch .whl"         the day before, with a package index: download wheels for it
    make gpu WHEELS=.whl OUT=/somewhere  there, with PYTHON (3.12 with torch, torchvision, matplotlib)
    python3 .ci/gpu.py --wheels .whl     the same, without make
    make gpu                             after `make setup`: with .venv; otherwise with PYTHON
    make gpu ARGS="--minutes 9"          stop after 9 minutes instead of 24; with --resume, go on for 9 more
    make gpu ARGS="lesson/06 figure"     only the parts with these prefixes
    make gpu ARGS="--keep gpu.zip"       back home: copy its recorded figures into lessons/recorded/gpu
    python .ci/gpu.py --here             with this Python, also where there is .venv: `record()` of a notebook

The work is done in `.gpu`, in parts: each is a separate process with a time limit, and the others go on if it
fails or hangs. After each part, OUT (`.gpu/out`) has `summary.md`, `differences.md` (what differs from what
the lessons say), `state.json`, and `gpu.zip` with these, the logs and the executed notebooks. On a GPU, the
recorded figures are also in `lessons/recorded/gpu`. Without a GPU this is a rehearsal: parts that need one
are skipped by name.

Standard library only: nothing else is certain to be installed on that machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".gpu"
RECORDED = ROOT / "lessons" / "recorded" / "gpu"
REHEARSED = (
    ROOT / "tests" / "gpu" / "rehearsed.json"
)  # from a rehearsal's OUT: the cells that differ without a GPU
MARK = "COURSE_GPU_PART"  # environment variable of all processes that a part starts
SKIPPED = 77  # exit code of a part that cannot run on this machine
# Between two launches no process of a lesson uses the GPU, and an idle driver shuts the GPU down.
KEEPS_THE_GPU_AWAKE = "import sys, torch; torch.ones(1, device='cuda'); sys.stdin.read()"
GRACE = 15  # seconds between interrupting a part that takes too long and killing it
ENDED = {"done", "skipped", "failed", "hung"}  # --resume does not run these parts again

# What the course needs besides torch, torchvision, numpy, pillow and matplotlib, which such machines have
WHEELS = ["ipykernel", "nbclient", "nbformat", "nbval", "pytest", "ipywidgets", "cloudpickle", "psutil"]
WHEELS += ["platformdirs", "nvidia-ml-py", "transformers"]
ARE_THERE = {"numpy", "pillow", "matplotlib", "torch", "torchvision", "triton", "contourpy", "kiwisolver"}
ARE_THERE |= {"fonttools", "cycler", "pyparsing"}
PLATFORMS = [
    "manylinux1",
    "manylinux2014",
    *(f"manylinux_2_{n}" for n in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)),
]

FACTS = "import json; from tests.gpu.figures import facts; print(json.dumps(facts()))"
FIGURES = "from tests.gpu.figures import FIGURES; print(*FIGURES)"


NEXT = (
    "Next, by hand: `make gpu ARGS='--keep gpu.zip'`, where this was another copy of the course; read "
    "differences.md and fix the texts; `make lesson` for the lessons whose figures are new in "
    "lessons/recorded/gpu, so that their saved outputs show them; commit both."
)


@dataclass(frozen=True)
class Part:
    """A command with a time limit; parts that have a group may run side by side."""

    name: str
    command: list[str]
    seconds: float
    group: str = ""


class Course:
    """The environment and the deadline of all parts, and the outcome of each."""

    def __init__(
        self, python: str, site: Path | None, out: Path, minutes: float, began: float | None = None
    ) -> None:
        self.python, self.out, self.minutes = python, out, minutes
        self.deadline = (time.monotonic() if began is None else began) + 60 * minutes
        self.lock = threading.RLock()
        self.running: set[int] = set()
        self.stopped = False
        self.state: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        paths = [*([str(site)] if site else []), str(ROOT)]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
            "COURSE_HOME": str(WORK / "home"),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine's may be older than our pytest
            **{"PY_COLORS": "0", "PYTHON_COLORS": "0", "NO_COLOR": "1", "MPLBACKEND": "Agg"},
        }
        for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # a notebook's kernel sets them; the reports are files
            self.environment.pop(name, None)
        # Many containers set it; each rank would then compile everything that it imports.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if site:
            self.environment["JUPYTER_PATH"] = str(site / "share" / "jupyter")

    # --- a part -------------------------------------------------------------------------------------------

    def run(self, part: Part) -> None:
        """Run a part, unless the time is up, and note the outcome."""
        if self.stopped:
            return
        left = self.deadline - time.monotonic()
        if left < GRACE:
            self.note(part, "not started", 0, f"the {self.minutes:g} minutes were up")
            return
        folder = WORK / "parts" / part.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            code = self.until(part, folder / "log.txt", min(part.seconds, left))
        except OSError as error:
            self.note(part, "failed", time.monotonic() - began, f"it could not be started: {error}")
            return
        seconds, words = time.monotonic() - began, last_words(folder / "log.txt")
        if self.stopped:
            self.note(part, "cut", seconds, f"interrupted; before: {words}")
        elif code is None and left < part.seconds:
            self.note(part, "cut", seconds, f"the {self.minutes:g} minutes were up; before: {words}")
        elif code is None:
            self.note(part, "hung", seconds, f"ended after {part.seconds:g} s; before: {words}")
        elif code == SKIPPED or (code == 0 and re.search(r"^\d+ skipped\b", words)):
            self.note(part, "skipped", seconds, words.removeprefix("skipped: "))
        else:
            self.note(part, "failed" if code else "done", seconds, words)

    def until(self, part: Part, log: Path, seconds: float) -> int | None:
        """Run a part's command, kill all that it started, and return its exit code; None after a timeout."""
        mark = uuid.uuid4().hex
        with log.open("wb") as file:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**self.environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process.pid)
            try:
                return process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                send(process.pid, signal.SIGINT)  # a chance to report where it was
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=GRACE)
                return None
            finally:
                send(process.pid, signal.SIGKILL)
                for pid in marked(mark):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
                self.running.discard(process.pid)

    def stop(self) -> None:
        """Kill the running parts and start no others."""
        self.stopped = True
        for pid in list(self.running):
            send(pid, signal.SIGKILL)

    def note(self, part: Part, status: str, seconds: float, words: str) -> None:
        print(f"{part.name}: {status}, {seconds:.0f} s: {words}"[:300], flush=True)
        with self.lock:
            ended = datetime.datetime.now().isoformat(timespec="seconds")
            self.state[part.name] = {
                "status": status,
                "seconds": round(seconds, 1),
                "words": words,
                "at": ended,
            }
            self.publish()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let a process hold the GPU, if there is one, while the parts run."""
        if not self.facts["gpus"]:
            yield
            return
        command = [self.python, "-c", KEEPS_THE_GPU_AWAKE]
        with subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE) as process:
            try:
                yield
            finally:
                process.kill()

    # --- what is written --------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write all results so far; each file replaces the last one at once, so no reader sees half of it."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = json.dumps({"facts": self.facts, "parts": self.state}, indent=1, ensure_ascii=False) + "\n"
        replace(WORK / "state.json", state)
        replace(self.out / "state.json", state)
        replace(self.out / "summary.md", summary(self.facts, self.state))
        replace(self.out / "differences.md", differences(self.facts, WORK / "parts", read_json(REHEARSED)))
        if self.facts and not self.facts["gpus"]:
            found = json.dumps(rehearsed(self.facts, WORK / "parts"), indent=1, ensure_ascii=False) + "\n"
            replace(self.out / "rehearsed.json", found)
        new = self.out / ".gpu.zip.new"
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("summary.md", "differences.md", "state.json"):
                archive.write(self.out / name, name)
            for path in sorted((WORK / "parts").rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # a running part replaces its files
                    if path.is_file() and not path.name.endswith(".new"):
                        archive.write(path, path.relative_to(WORK))
        new.replace(self.out / "gpu.zip")

    def ask(self, code: str, seconds: float = 240) -> str:
        """Return the last line that code prints in the parts' Python; empty, with a message, if it fails."""
        command = [self.python, "-c", code]
        both = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "text": True,
        }
        try:
            run = subprocess.run(command, cwd=ROOT, env=self.environment, timeout=seconds, **both)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{self.python} does not answer: {error}"[:300], flush=True)
            return ""
        if run.returncode:
            print(
                f"{self.python} cannot tell: {(run.stderr.strip().splitlines() or ['no word'])[-1]}",
                flush=True,
            )
            return ""
        return (run.stdout.strip().splitlines() or [""])[-1]


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def marked(mark: str) -> list[int]:
    """Return the ids of the processes with this mark in their environment, in any session (on Linux)."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                found.append(int(path.split("/")[2]))
    return found


def last_words(log: Path) -> str:
    """Return the last line of a log that contains words."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            if words := line.strip(" =\t"):
                return words[:400]
    return "it said nothing"


def replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# --- the reports ------------------------------------------------------------------------------------------


def where(facts: dict[str, Any]) -> str:
    if not facts:
        return "This machine could not be asked what it is."
    if not facts["gpus"]:
        return f"A rehearsal without a GPU: torch {facts['torch']}, Python {facts['python']}."
    return "{device}, driver {driver}, CUDA {cuda}, torch {torch}, Python {python}, {date}".format(**facts)


def summary(facts: dict[str, Any], state: dict[str, dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for each in state.values():
        counts[each["status"]] = counts.get(each["status"], 0) + 1
    lines = [
        "# make gpu",
        "",
        where(facts),
        "",
        ", ".join(f"{n} {what}" for what, n in counts.items()) + ".",
        "",
    ]
    lines += ["| part | became | seconds | its last words |", "| --- | --- | ---: | --- |"]
    for name, each in state.items():
        words = each["words"].replace("|", "\\|")[:200]
        lines.append(f"| {name} | {each['status']} | {each['seconds']:.0f} | {words} |")
    if facts.get("gpus") and any(name.startswith("figure/") for name in state):
        lines += ["", NEXT]
    for status, title in {"skipped": "Skipped", "not started": "Not started", "cut": "Cut off"}.items():
        if named := [name for name, each in state.items() if each["status"] == status]:
            lines += ["", f"{title}: {', '.join(named)}."]
    return "\n".join(lines) + "\n"


def rehearsed(facts: dict[str, Any], parts: Path) -> dict[str, Any]:
    """Return torch's version and each lesson's cells that differ without a GPU: an older torch does that."""
    lessons = filter(None, [read_json(path) for path in sorted((parts / "lesson").glob("*/differs.json"))])
    cells = {each["lesson"]: [cell["cell"] for cell in each["differs"]] for each in lessons}
    return {"torch": facts["torch"], "cells": {lesson: found for lesson, found in cells.items() if found}}


def differences(facts: dict[str, Any], parts: Path, without: dict[str, Any] | None = None) -> str:
    """Report the claims, tests and cells that differ from the lessons, and statements never yet run.

    ``without`` is the result of a rehearsal: cells that differ there, with the same torch, are marked.
    """
    same_torch = bool(without) and bool(facts) and without["torch"] == facts["torch"] and facts["gpus"]
    known = without["cells"] if same_torch else {}
    lines = ["# What differs from what the lessons say", "", where(facts), ""]
    claims = (read_json(parts / "claims" / "differs.json") or {}).get("claims", [])
    lines += ["## What the texts claim", ""]
    for each in sorted(claims, key=lambda each: each["so"]):
        lines.append(f"- {'so' if each['so'] else '**NOT SO**'}, lesson {each['lesson']}: “{each['quote']}” ")
        lines.append(f"  Seen: {each['seen']}")
    lines += [] if claims else ["None was tried."]
    lines += ["", "## Tests that fail", ""]
    failed = []
    for log in sorted((parts / "tests").glob("*/log.txt")):
        text = log.read_text(encoding="utf-8", errors="replace")
        failed += re.findall(r"(?m)^(?:FAILED|ERROR) .*$", text)
    lines += [f"- {line[:400]}" for line in failed] or ["None that was run."]
    lessons = [read_json(path) for path in sorted((parts / "lesson").glob("*/differs.json"))]
    lines += ["", "## Cells", ""]
    for lesson in filter(None, lessons):
        named = f"{lesson['lesson']}: {lesson['executed']} of {lesson['cells']} cells executed"
        lines.append(
            f"- {named}, {len(lesson['differs'])} differ{lesson['stopped'] and '; ' + lesson['stopped']}"
        )
        for each in lesson["differs"]:
            also = each["cell"] in known.get(lesson["lesson"], [])
            also = f" (also without a GPU, with torch {facts['torch']})" if also else ""
            lines += [f"  - `{each['cell']}`, which begins `{each['begins'][:80]}`{also}", ""]
            for side in ("saved", "here"):
                lines += [f"        {side + ':':7}{line[:300]}" for line in each[side].splitlines() or [""]]
            lines.append("")
    lines += ["", "## Said, and not run before: to be read beside the executed lessons in gpu.zip", ""]
    for lesson in filter(None, lessons):
        lines += [f"- {lesson['lesson'][:2]}, `{each['cell']}`: {each['text']}" for each in lesson["unsure"]]
    return "\n".join(lines) + "\n"


# --- the parts --------------------------------------------------------------------------------------------


def parts(python: str, figures: list[str]) -> list[Part]:
    """List all parts, the most valuable first: time may run out before the end."""

    def of(name: str, seconds: float, module: str, *words: str, group: str = "") -> Part:
        out = ["--out", str(WORK / "parts" / name)]
        return Part(name, [python, "-m", module, *words, *out], seconds, group)

    found = [Part("doctor", [python, "-m", "course_lib", "doctor"], 240)]
    found.append(of("claims", 240, "tests.gpu.claims"))
    found += [of(f"figure/{name}", 240, "tests.gpu.figures", name) for name in figures]
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        # -p no:cacheprovider: the cache would be written into the course
        command = [python, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(path)]
        found.append(Part(f"tests/{path.stem.removeprefix('test_')}", command, 300))
    for path in sorted((ROOT / "lessons").glob("[0-9][0-9]_*.ipynb")):
        words = [str(path), "--seconds-per-cell", "80"]
        found.append(of(f"lesson/{path.stem[:2]}", 300, "tests.gpu.lesson", *words, group="lessons"))
    return found


def side_by_side() -> int:
    """Return how many lessons run at once: one per four cores, so each runs as on the two it was saved on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // 4))


def chosen(all_parts: list[Part], names: list[str]) -> list[Part]:
    if unknown := [name for name in names if not any(each.name.startswith(name) for each in all_parts)]:
        raise SystemExit(
            f"make gpu: no part begins with {unknown[0]!r}; they are: {', '.join(p.name for p in all_parts)}"
        )
    return [each for each in all_parts if not names or each.name.startswith(tuple(names))]


def install(python: str, wheels: Path, site: Path) -> bool:
    """Install a folder's wheels into ``site``, beside the machine's packages, without an index."""
    found = sorted(glob.glob(str(wheels / "*.whl")))
    if not found:
        print(
            f"make gpu: there are no wheels in {wheels}: fill it where there is an index, by --fetch",
            flush=True,
        )
        return False
    if read_json(site / "wheels.json") == [os.path.basename(each) for each in found]:
        return True
    shutil.rmtree(site, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    run = subprocess.run([*pip, "--target", str(site), *found], cwd=ROOT, stdin=subprocess.DEVNULL)
    if run.returncode:
        print("make gpu: pip could not install the wheels; going on with what the machine has", flush=True)
        return False
    replace(site / "wheels.json", json.dumps([os.path.basename(each) for each in found]))
    return True


def fetch(folder: Path) -> int:
    """Fill a folder with the wheels that a machine without an index needs (Linux on x86-64, Python 3.12)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.whl"):
        path.unlink()  # from an earlier fetch: pip would find two versions
    pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", "3.12"]
    pip += ["--implementation", "cp", "-d", str(folder)]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    for platform in PLATFORMS:
        pip += ["--platform", f"{platform}_x86_64"]
    if code := subprocess.run([*pip, *WHEELS]).returncode:
        return code
    for path in folder.glob("*.whl"):
        if path.name.split("-")[0].lower() in ARE_THERE or path.name.startswith("nvidia_c"):
            path.unlink()  # that machine has its own, and two versions would clash
    kept = sorted(folder.glob("*.whl"))
    print(f"{len(kept)} wheels, {sum(each.stat().st_size for each in kept) / 1e6:.0f} MB, in {folder}")
    return 0


def keep(archive: Path) -> int:
    """Copy the figures that a GPU recorded into the course; say of each other one why it is refused."""
    sys.path.insert(0, str(ROOT))
    from tests.gpu.records import Refused, checked, files_in

    try:
        found = files_in(archive)
    except Refused as refusal:
        print(f"make gpu: nothing of {archive} is kept: {refusal}", file=sys.stderr)
        return 1
    kept = 0
    for name, files in sorted(found.items()):
        try:
            record = checked(name, files)
        except Refused as refusal:
            print(f"{name}: not kept: {refusal}")
            continue
        RECORDED.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"
        replace(RECORDED / f"{name}.json", text)
        (RECORDED / f"{name}.png").write_bytes(files["png"])
        print(f"{name}: kept")
        kept += 1
    print(f"{kept} of {len(found)} recorded figures were kept, in {RECORDED}")
    return int(kept == 0)


def default_python() -> str:
    own = ROOT / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="only those whose names begin so, as in figure or lesson/06")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, where there is no package index")
    parser.add_argument("--out", type=Path, default=WORK / "out")
    parser.add_argument("--minutes", type=float, default=24, help="for all of it (24)")
    parser.add_argument("--here", action="store_true", help="with this Python, also where there is .venv")
    parser.add_argument("--resume", action="store_true", help="go on where the last call stopped")
    parser.add_argument(
        "--fetch", type=Path, metavar="FOLDER", help="fill a folder of wheels, and nothing else"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="ZIP", help="take over what was recorded, and nothing else"
    )
    asked = parser.parse_args(arguments)
    if asked.keep:
        return keep(asked.keep.resolve())
    if asked.fetch:
        return fetch(asked.fetch.resolve())
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an outer time limit ends this like Ctrl-C
    WORK.mkdir(exist_ok=True)
    python = sys.executable if asked.wheels or asked.here else default_python()
    site = WORK / "site" if asked.wheels else None
    if asked.wheels:
        install(python, asked.wheels.resolve(), WORK / "site")
    course = Course(python, site, asked.out.resolve(), asked.minutes, began)
    known = read_json(WORK / "state.json") if asked.resume or asked.parts else None
    course.state = known["parts"] if isinstance(known, dict) and isinstance(known.get("parts"), dict) else {}
    course.facts = json.loads(course.ask(FACTS) or "{}")
    if not course.facts:
        print(f"make gpu: {python} has no torch that works: name one that has, by PYTHON", file=sys.stderr)
        return 1
    if not asked.resume and not asked.parts:
        shutil.rmtree(WORK / "parts", ignore_errors=True)
    print(where(course.facts), flush=True)
    figures = (course.ask(FIGURES) or "").split()
    to_do = [
        part
        for part in chosen(parts(python, figures), asked.parts)
        if not (asked.resume and course.state.get(part.name, {}).get("status") in ENDED)
    ]
    with course.awake(), concurrent.futures.ThreadPoolExecutor(side_by_side()) as pool:
        try:
            for part in to_do:
                if not part.group:
                    course.run(part)
            list(pool.map(course.run, [part for part in to_do if part.group]))
        except KeyboardInterrupt:
            course.stop()
    course.publish()
    if course.stopped:
        print("\nInterrupted: what is there so far is in", course.out)
        return 130
    print(f"{course.out / 'summary.md'} and differences.md beside it say what became of it.")
    return int(any(each["status"] not in ("done", "skipped") for each in course.state.values()))


if __name__ == "__main__":
    sys.exit(main())
