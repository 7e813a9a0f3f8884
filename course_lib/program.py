"""``python -m course_lib.program script.py …``: the frame around a program that `python` starts.

It ends with the kernel that started it, as a rank does, and tells which of its ranks failed, and how.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

from .entry import end_with
from .failure import is_learners, report_exception, with_source, write_failure

FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def run_program(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script arguments…`` would, and tell which of its ranks failed."""
    folder = Path(os.environ["COURSE_RUN"])
    end_with(int(os.environ["COURSE_KERNEL"]))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        rank = getattr(error, "error_index", None)  # torch.multiprocessing's two exceptions carry it
        if rank is None:
            report_exception(folder, "program", error)
        else:
            _report_spawned(folder, rank, error)
        sys.exit(1)


def _report_spawned(folder: Path, rank: int, error: BaseException) -> None:
    """A rank of mp.spawn failed: its traceback reaches us as text."""
    text = str(error)
    signal_name = getattr(error, "signal_name", None)
    if signal_name or hasattr(error, "exit_code"):
        how = f"was ended by {signal_name}" if signal_name else f"ended with exit code {error.exit_code}"
        write_failure(folder, rank, "", how, [], text)
    else:
        last = [line for line in text.splitlines() if line and not line.startswith(" ")][-1]
        kind, _, message = last.partition(": ")
        frames = [(m["file"], int(m["line"]), m["function"]) for m in FRAME_LINE.finditer(text)]
        own = [frame for frame in frames if is_learners(frame[0])]
        write_failure(folder, rank, kind, message, [with_source(*f) for f in own or frames[-1:]], text)


if __name__ == "__main__":
    run_program(sys.argv[1], sys.argv[2:])
