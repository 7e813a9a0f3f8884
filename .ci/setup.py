"""`make setup`: make .venv and install the course into it, with all that its tests need.

The versions are those of constraints.txt, which passed all tests. With --oldest, .venv-oldest gets the lowest
versions that pyproject.toml allows; with --newest, .venv-newest gets the newest that the package index has.
The last step writes a stamp into .venv. As long as it matches pyproject.toml, constraints.txt and this file,
nothing is done. Otherwise all steps run; they keep an installed torch, and what an interrupted run installed.
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
    "--oldest": ["--only-binary", ":all:"],  # the course does not support versions that have to be built
    "--newest": ["--upgrade", "--upgrade-strategy", "eager"],
}
# JupyterLab asks nobody for news, and offers no links that copy a stranger's files into the course
NO_NEWS = '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}'
NO_PULLING_BY_LINK = '{"ServerApp": {"jpserver_extensions": {"nbgitpuller": false}}}'
# The packages whose tested versions work only with the tested torch
WITH_TORCH = re.compile(r"(?m)^(torch|torchvision|triton|cuda-[\w-]+|nvidia-(?!ml-py)[\w-]+)==.*\n")
KNOWN_FAULTS = {  # patterns in pip's log
    "No space left on device|Disk quota exceeded": "the disk is full: make room, and run this again.",
    r"(?i)connection broken|timed out|connect\w*error": "pip reaches no package index: is there a network?",
}


class Fault(Exception):
    """The set-up stops; one sentence says what went wrong and what to do."""


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
    """Return the stamp of an up-to-date .venv: the course's folder and a hash of what it requires."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)]
    return f"{ROOT}\n{hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()}\n"


def is_done():
    """Return whether nothing is left to do; with --newest, only the index knows, so this is False."""
    stamp = STAMP.read_text() if STAMP.exists() else ""
    home = stamp.partition("\n")[0]
    if home not in ("", str(ROOT)):
        raise Fault(f"{VENV.name} was made in {home} and only works there: remove it, and run this again.")
    return MODE != "--newest" and stamp == wanted() and PYTHON.exists()


def check_the_space():
    """Raise Fault if the disk is too full; if it is nearly full, return pip's option that saves space."""
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    used = sum(path.lstat().st_size for path in VENV.rglob("*")) / 1e9
    needed, downloads = (9.4 - used, 2.8) if sys.platform == "linux" else (2.2 - used, 0.5)
    needed, downloads = (1.2, 0.3) if installed("torch") else (needed, downloads)
    if free < needed:
        sizes = f"{needed:.1f} GB of disk are needed, {free:.1f} are free"
        raise Fault(f"{sizes}: make room, or see lessons/README.md.")
    return [] if free > needed + downloads else ["--no-cache-dir"]


def installed(name):
    """Return a package's ``.dist-info`` folders in .venv; none if it is not installed."""
    return list(VENV.glob(f"lib/python3*/site-packages/{name}-*.dist-info"))


def make_venv():
    """Make .venv if it is missing or has lost its Python; add pip to one that lacks it."""
    if PYTHON.exists() and (VENV / "bin" / "pip").exists():
        return
    if sys.version_info < (3, 11):  # noqa: UP036  (Python 3.6 can read this file, and say this)
        this = sys.version.split()[0]
        raise Fault(f"Python {this} is too old: name 3.11 or newer, as in `PYTHON=python3.12 make setup`.")
    if not (find_spec("venv") and find_spec("ensurepip")):
        raise Fault(f"venv is missing: on Debian, `sudo apt install python3.{sys.version_info[1]}-venv`.")
    subprocess.check_call([sys.executable, "-m", "venv", *([] if PYTHON.exists() else ["--clear"]), VENV])


def install(options):
    """Have pip install the course; raise Fault with pip's last error if it fails."""
    for package in installed("*"):
        if not (package / "RECORD").exists():  # pip writes it last: it was killed before
            shutil.rmtree(str(package))
    print(f"Making {VENV.name}: this takes some minutes if PyTorch has to be downloaded.", flush=True)
    versions, log = FOR_PIP / "constraints.txt", FOR_PIP / "log"
    write(versions, constraints())
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *options]
    pip += ["--log", str(log), "-c", str(versions), "-e", ".[lab,albert,test,site]"]
    if subprocess.call(pip, cwd=str(ROOT), env=dict(os.environ, TMPDIR=str(FOR_PIP), PIP_USER="0")):
        said = log.read_text(errors="replace") if log.exists() else ""
        known = [sentence for words, sentence in KNOWN_FAULTS.items() if re.search(words, said)]
        errors = re.findall(r"ERROR: (?!Exception:|ResolutionImpossible)(.*)", said)
        raise Fault(known[0] if known else f"pip failed: {(errors or ['see above'])[-1]}")
    shutil.rmtree(str(FOR_PIP))


def constraints():
    """Return the versions that pip has to keep to: the tested ones, except of a torch that is there."""
    lowest = dict(re.findall(r'(?m)^ +"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8")))
    if MODE:
        return "".join(f"{name}=={version}\n" for name, version in lowest.items() if MODE == "--oldest")
    tested = (ROOT / "constraints.txt").read_text()
    for package in installed("torch"):
        version = package.name[len("torch-") : -len(".dist-info")]
        has, least = ([int(part) for part in text.split(".")[:2]] for text in (version, lowest["torch"]))
        if has >= least and f"torch=={version.partition('+')[0]}\n" not in tested:
            tested = WITH_TORCH.sub("", tested) + f"torch=={version}\n"
    return tested


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    try:
        set_up()
        # Where PYTHONDONTWRITEBYTECODE is set, each rank would compile what it imports
        compiled = [str(PYTHON), "-m", "compileall", "-qq", "course_lib", "tests", "lessons/scripts"]
        subprocess.call(compiled, cwd=str(ROOT))
    except (Fault, OSError, subprocess.CalledProcessError) as fault:
        sys.exit(f"Set-up stopped: {fault}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up interrupted: run the same command again and it goes on.")
