"""Kill processes of an answer that have outlived its ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from ..kill import kill_families
from ..launcher.dashboard import View

CLOCK_SECONDS = 2.0  # by which two clocks may differ on when a process began


class LeftoversEnd(View):
    """A view that shows nothing, and kills escaped processes once the ranks are gone.

    Such a process has the run's folder in its environment, or has a file in that folder open. One that has
    neither, from a rank that ended itself at once, is not found.
    """

    def finish(self) -> None:
        folder = self.run.folder
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or process.create_time() < self.run.started - CLOCK_SECONDS:
                    continue
                named = process.environ().get("COURSE_RUN") == str(folder)
                if named or any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                    kill_families([process])
