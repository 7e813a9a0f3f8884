"""The programs of lessons/scripts: loaded, typed in a terminal, or with some lines of a learner's own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 900


def load(name: str) -> ModuleType:
    """Return a program as a module of its own, which nothing else has."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(*words: object) -> tuple[int, str, str]:
    """Return exit code, output and errors of ``python words…``, from nothing."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout, done.stderr


def changed(path: Path, lines: str, name: str) -> Path:
    """Write a program with some lines of a learner's own, which may call it `program`."""
    path.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"import torch\nimport {name} as program\n{textwrap.dedent(lines)}\n"
        'if __name__ == "__main__":\n    program.train(program.parse_arguments())\n'
    )
    return path
