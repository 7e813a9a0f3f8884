"""`make versions`: write constraints.txt from the environment that has just passed all tests.

The versions installed here were tested; the file lists them for every Python and platform that can have them.
uv resolves the rest: packages or versions for another Python or system, each with a marker.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("lab", "albert", "test", "site")  # what `make setup` installs
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main() -> None:
    frozen = output_of([*PIP, "freeze", "--exclude-editable"])
    versions = set(re.findall(r"(?m)^[\w.-]+==[^+\s]+", frozen))
    subprocess.run([*PIP, "install", "--quiet", "uv"], check=True)  # only now: uv is no part of the course
    written = Path(sys.prefix) / "constraints.txt"
    written.write_text("\n".join(sorted(versions)))  # uv keeps the versions in its output file if it can
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
    resolve += [*(f"--extra={extra}" for extra in EXTRAS), "--python-version=3.11"]
    output_of([*resolve, "--no-header", "--no-annotate", f"--output-file={written}"])
    text = written.read_text()
    resolved = {canonical(line) for line in re.findall(r"(?m)^[\w.-]+==[^\s;]+", text)}
    installed = {canonical(line) for line in versions if not line.startswith("uv==")}
    if lost := sorted(installed - resolved):
        sys.exit(f"make versions: nothing needs {', '.join(lost)}: remove .venv-newest, and try again")
    os.replace(written, ROOT / "constraints.txt")
    print(f"constraints.txt: {len(resolved)} versions")


def canonical(pinned: str) -> str:
    name, _, version = pinned.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower() + "==" + version


def output_of(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
