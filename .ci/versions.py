"""`make versions`: write constraints.txt from the environment that has just passed all tests.

The file lists the versions that are installed here, which were tested. uv adds what another Python or another
system needs instead, with a marker.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main() -> None:
    installed = versions_in(output_of([*PIP, "freeze", "--exclude-editable"]))
    output_of([*PIP, "install", "--quiet", "uv"])  # only now: uv is no part of the course
    written = Path(sys.prefix) / "constraints.txt"
    written.write_text("\n".join(sorted(installed)))  # uv keeps the versions in its output file if it can
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
    resolve += [f"--extra={extra}" for extra in ("lab", "albert", "test", "site")]  # as `make setup` does
    resolve += ["--python-version=3.11", "--no-header", "--no-annotate", f"--output-file={written}"]
    output_of(resolve)
    resolved = versions_in(written.read_text())
    if lost := sorted(each for each in installed - resolved if not each.startswith("uv==")):
        sys.exit(f"make versions: nothing needs {', '.join(lost)}: remove .venv-newest, and try again")
    os.replace(written, ROOT / "constraints.txt")
    print(f"constraints.txt: {len(resolved)} versions")


def versions_in(text: str) -> set[str]:
    """Return each `name==version`, with the name as the package index spells it, without a local version."""
    found = re.findall(r"(?m)^([\w.-]+)==([^+;\s]+)", text)
    return {f"{re.sub('[-_.]+', '-', name).lower()}=={version}" for name, version in found}


def output_of(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
