"""Install other people's tools for the same tasks into a virtual environment beside the course's.

It sees the packages of the Python that runs this, torch among them, so it is small and made in seconds. What
cannot be installed, for example without a network, is left out.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("accelerate", "ipyparallel", "tqdm")
PROBE = """
import importlib.metadata, platform, sysconfig
known = {{each.metadata["Name"] for each in importlib.metadata.distributions()}}
there = [name for name in {names} if name in known]
print(platform.python_version(), sysconfig.get_path("purelib"), *there, sep="\\n")
"""


@dataclass
class Peers:
    """The peers that are there, their Python and its folder of packages, and a line for each one left out."""

    python: str = ""
    packages: str = ""
    there: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def installed_peers(folder: Path, names: Sequence[str] = NAMES) -> Peers:
    """Return the peers, after installing those that are missing."""
    python = folder / "bin/python"
    version, packages, *there = _look(python, names)
    if version != platform.python_version():  # there is none yet, or the course's Python has changed
        venv.create(folder, clear=True, with_pip=False, symlinks=True)
        version, packages, *there = _look(python, names)
    peers = Peers(str(python), packages)
    # written each time: the course's folder may have moved
    Path(peers.packages, "course.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in names:
        if name not in there and (problem := _install(name, peers.python)):
            peers.left_out.append(f"{name} is left out, it could not be installed: {problem}")
        else:
            peers.there.add(name)
    return peers


def _look(python: Path, names: Sequence[str]) -> list[str]:
    """Return a Python's version, its folder of packages, and the peers in it; empty if it does not work."""
    try:
        run = subprocess.run([python, "-c", PROBE.format(names=tuple(names))], capture_output=True, text=True)
    except OSError:
        return ["", ""]
    return run.stdout.split("\n")[:-1] or ["", ""]


def _install(name: str, python: str) -> str:
    """Install a peer; return pip's last words if that failed, else an empty string."""
    print(f"installing {name} beside the course", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept.txt")  # a peer that wants another torch is left out
        kept.write_text(f"torch=={importlib.metadata.version('torch')}\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
        command = [*pip, "install", "--quiet", "--constraint", str(kept), name]
        run = subprocess.run(command, capture_output=True, text=True)
    return (run.stderr.strip().splitlines() or ["pip failed"])[-1] if run.returncode else ""
