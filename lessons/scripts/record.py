"""What `make gpu` runs, from a cell, on Kaggle, Colab or any other Jupyter server with a GPU.

from scripts.record import record  # in a notebook of the folder lessons
record(minutes=24)  # later, with record("--resume"), it goes on where it stopped
"""

import signal
import subprocess
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
PANES = [Path("/kaggle/working"), Path("/content")]  # what the file panes of Kaggle and Colab show


def record(*words, minutes=24):
    """Run the course's GPU checks with this kernel's Python; return the path of gpu.zip, which has it all.

    The words are those of .ci/gpu.py, as in ``record("figure")``. A Stop ends it, and what it has is kept.
    Raises FileNotFoundError where it recorded nothing; the lines above then say why.
    """
    out = next((pane / "gpu" for pane in PANES if pane.is_dir()), COURSE / ".gpu" / "out")
    found = out / "gpu.zip"
    before = found.stat().st_mtime_ns if found.exists() else None
    command = [sys.executable, "-u", COURSE / ".ci" / "gpu.py", "--here", "--minutes", minutes, "--out", out]
    process = subprocess.Popen(
        [str(word) for word in (*command, *words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a Stop reaches this function alone
    )
    with process:
        try:
            _show(process.stdout)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)  # it takes that as Ctrl-C: it ends its parts, and reports
            _show(process.stdout)
    if not found.exists() or found.stat().st_mtime_ns == before:
        raise FileNotFoundError(f"nothing was recorded in {found}: the lines above say why")
    return found


def _show(lines):
    for line in lines:
        print(line, end="", flush=True)
