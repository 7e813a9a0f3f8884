"""`make setup`: make .venv and install the course into it, with all that its tests need.

The versions are those of constraints.txt, which passed all tests. With --oldest, .venv-oldest gets the lowest
versions that pyproject.toml allows; with --newest, .venv-newest gets the newest that the package index has.
A stamp is written into .venv last. While it fits pyproject.toml, constraints.txt and this file, nothing is
installed. Otherwise every step is taken, and what is there is kept: the half of an interrupted run, a torch.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
MODE = "".join(sys.argv[1:])
VENV = ROOT / (".venv" + MODE[1:])
PYTHON, STAMP = VENV / "bin" / "python", VENV / "course-setup-done"
FOR_PIP = VENV / "course-setup"  # its constraints, log and downloads, for which /tmp may be too small
OPTIONS = {
    "--oldest": ["--only-binary", ":all:"],  # what a learner would have to build is not supported
    "--newest": ["--upgrade", "--upgrade-strategy", "eager"],
}
# JupyterLab asks nobody for news, and has no page that lets a link copy a stranger's files into the course
NO_NEWS = '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}'
NO_PULLING_BY_LINK = '{"ServerApp": {"jpserver_extensions": {"nbgitpuller": false}}}'
# The tested versions that fit only the tested torch
TORCHS_OWN = re.compile(r"(?m)^(torch|torchvision|triton|cuda-[\w-]+|nvidia-(?!ml-py)[\w-]+)==.*\n")
KNOWN_FAULTS = {  # by what pip says
    "No space left on device|Disk quota exceeded": "the disk is full: make room, and run this again.",
    r"(?i)connection broken|timed out|connect\w*error": "pip reaches no package index: is there a network?",
}


class Fault(Exception):
    """Why the set-up stops: what went wrong and what to do, in one sentence."""


def set_up():
    if is_done():
        return
    try:
        fcntl.flock(os.open(str(ROOT), os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        raise Fault("another set-up is at work in this folder: wait until it has ended.") from None
    shutil.rmtree(str(FOR_PIP), ignore_errors=True)
    options = check_the_space()
    make_venv()
    install([*options, *OPTIONS.get(MODE, [])])
    write(VENV / "share/jupyter/lab/settings/overrides.json", NO_NEWS)
    write(VENV / "etc/jupyter/jupyter_server_config.json", NO_PULLING_BY_LINK)
    write(STAMP, wanted())
    print(f"Set-up done: the course is in {VENV.name}.")


def wanted():
    """Return the stamp of an up-to-date .venv: the course's folder and a digest of what it requires."""
    asked = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)]
    return f"{ROOT}\n{hashlib.sha256(b''.join(path.read_bytes() for path in asked)).hexdigest()}\n"


def is_done():
    """Return whether nothing is left to do; never so with --newest, as only the index knows."""
    made = STAMP.read_text() if STAMP.exists() else ""
    home = made.partition("\n")[0]
    if home not in ("", str(ROOT)):
        raise Fault(f"{VENV.name} was made in {home} and only works there: remove it, and run this again.")
    return MODE != "--newest" and made == wanted() and PYTHON.exists()


def check_the_space():
    """Raise if the disk is too full; return pip options that save space if it is nearly so."""
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    there = sum(path.lstat().st_size for path in VENV.rglob("*")) / 1e9
    needed, downloads = (9.4 - there, 2.8) if sys.platform == "linux" else (2.2 - there, 0.5)
    needed, downloads = (1.2, 0.3) if installed("torch") else (needed, downloads)
    if free < needed:
        room = f"{needed:.1f} GB of disk are needed, {free:.1f} are free"
        raise Fault(f"{room}: make room, or see lessons/README.md.")
    return [] if free > needed + downloads else ["--no-cache-dir"]


def installed(name):
    """Return the ``.dist-info`` folders in .venv of a package; none if it is not installed."""
    return list(VENV.glob(f"lib/python3*/site-packages/{name}-*.dist-info"))


def make_venv():
    """Make .venv, or add pip to one that lacks it; make it anew if its Python is gone."""
    if PYTHON.exists() and (VENV / "bin" / "pip").exists():
        return
    if sys.version_info < (3, 11):  # noqa: UP036  (all of this file is Python 3.6, to be able to say this)
        this = sys.version.split()[0]
        raise Fault(f"Python {this} is too old: name 3.11 or newer, as in `PYTHON=python3.12 make setup`.")
    if not (find_spec("venv") and find_spec("ensurepip")):
        raise Fault(f"venv is missing: on Debian, `sudo apt install python3.{sys.version_info[1]}-venv`.")
    subprocess.check_call([sys.executable, "-m", "venv", *([] if PYTHON.exists() else ["--clear"]), VENV])


def install(options):
    """Have pip install the course; raise with its last error if it fails."""
    for package in installed("*"):
        if not (package / "RECORD").exists():  # pip writes it last: this is what a kill left
            shutil.rmtree(str(package))
    print(f"Making {VENV.name}: this takes some minutes if PyTorch has to be downloaded.", flush=True)
    versions, log = FOR_PIP / "constraints.txt", FOR_PIP / "log"
    write(versions, constraints())
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *options]
    pip += ["--log", str(log), "-c", str(versions), "-e", ".[lab,albert,test,site]"]
    if subprocess.call(pip, cwd=str(ROOT), env=dict(os.environ, TMPDIR=str(FOR_PIP), PIP_USER="0")):
        told = log.read_text(errors="replace") if log.exists() else ""
        known = [sentence for words, sentence in KNOWN_FAULTS.items() if re.search(words, told)]
        errors = re.findall(r"ERROR: (?!Exception:|ResolutionImpossible)(.*)", told)
        raise Fault(known[0] if known else f"pip failed: {(errors or ['see above'])[-1]}")
    shutil.rmtree(str(FOR_PIP))


def constraints():
    """Return the versions that pip has to keep to: the tested ones, but a torch that is there."""
    lowest = dict(re.findall(r'(?m)^ +"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8")))
    if MODE:
        return "".join(f"{name}=={version}\n" for name, version in lowest.items() if MODE == "--oldest")
    tested = (ROOT / "constraints.txt").read_text()
    for package in installed("torch"):
        version = package.name[len("torch-") : -len(".dist-info")]
        there, least = ([int(part) for part in text.split(".")[:2]] for text in (version, lowest["torch"]))
        if there >= least and f"torch=={version.partition('+')[0]}\n" not in tested:
            tested = TORCHS_OWN.sub("", tested) + f"torch=={version}\n"
    return tested


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    try:
        set_up()
        # With PYTHONDONTWRITEBYTECODE set, each rank would compile its imports
        compiled = [str(PYTHON), "-m", "compileall", "-qq", "course_lib", "tests", "lessons/scripts"]
        subprocess.call(compiled, cwd=str(ROOT))
    except (Fault, OSError, subprocess.CalledProcessError) as fault:
        sys.exit(f"Set-up stopped: {fault}")
    except KeyboardInterrupt:
        print("\nSet-up interrupted: run the same command again and it goes on.", file=sys.stderr)
        sys.exit(130)
