"""A Slurm job for `watch` to follow: submit it, ask for its state, and cancel it."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable

from ..host import cluster
from ..rank.failure import write_failure
from ..record.layout import PROGRAM, RankFiles
from ..run.run import Run
from .processes import ExternalLauncher

LOOK_SECONDS = 0.2  # between two looks at the run's files: on a shared disk, each slows others down
ASK_AT_LEAST, ASK_AT_MOST = 0.5, 10.0  # seconds between two queries to Slurm
ASK_SHARE = 0.1  # the same interval, as a share of the time since the job's state changed
SETTLE_SECONDS = 15.0  # how long after the script's end Slurm may take to say how the job ended
CANCEL_SECONDS = 90.0  # Slurm's KillWait is 30 s, for a job's processes to save something
NODE_LOST = re.compile(r"Node failure on (\S+)")  # srun's words


class SlurmJob(ExternalLauncher):
    """A Slurm job, submitted now or, without ``submit``, earlier by another kernel."""

    report_seconds = SETTLE_SECONDS

    def __init__(self, run: Run, submit: Callable[[], int] | None = None) -> None:
        super().__init__(run)
        if submit is not None:
            run.record.note(job=submit())
        assert run.job is not None
        self._number = run.job
        self._since = time.monotonic()  # when the job entered its present state
        self._status = cluster.JobStatus("PENDING")
        self._silence = ""  # why Slurm does not answer
        self._ended_at: float | None = None  # when its script's end was seen
        self._ask_now, self._enough = threading.Event(), threading.Event()
        self._asks = threading.Thread(target=self._ask, name="course-slurm", daemon=True)
        self._asks.start()

    def _ask(self) -> None:
        """Query Slurm, in a thread: an answer may take a minute, and Stop must not wait for it."""
        forgotten = False
        while not self._enough.is_set():
            self._ask_now.clear()
            try:
                status, self._silence = cluster.ask(self._number), ""
            except cluster.SlurmError as error:
                status, self._silence = self._status, str(error)
            known = status.state != "UNKNOWN" or forgotten  # UNKNOWN counts the second time in a row
            forgotten = status.state == "UNKNOWN"
            if known and status != self._status:
                self._status, self._since = status, time.monotonic()
            if self._status.over:
                return
            share = ASK_SHARE * (time.monotonic() - self._since)
            self._ask_now.wait(min(ASK_AT_MOST, max(ASK_AT_LEAST, share)))

    def began(self) -> bool:
        return not self._status.waits

    def wait(self, seconds: float) -> None:
        time.sleep(max(seconds, LOOK_SECONDS))
        status, silence = self._status, self._silence
        if silence and not status.over:  # Slurm does not answer: say why
            status = status._replace(reason=silence)
        with contextlib.suppress(OSError):
            self._run.record.note_job(status)

    def code(self) -> int | None:
        status, exit_code = self._status, self._run.record.script_exit_code()
        if not status.over and exit_code is None:
            return None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._ask_now.set()
        settled = time.monotonic() > self._ended_at + SETTLE_SECONDS
        if not status.over:  # the script has left an exit code, but for Slurm the job is not over
            return exit_code if settled else None
        if status.state in ("COMPLETED", "FAILED") and exit_code is None and not settled:
            return None  # a new file on a shared disk may show up late
        if status.state == "COMPLETED" or (status.state == "UNKNOWN" and exit_code == 0):
            return 0
        return exit_code or 1

    def exit_codes(self) -> dict[int | str, int | None]:
        codes = super().exit_codes()
        if codes[PROGRAM] and (why := self._ended_by_slurm()):
            if not RankFiles(self._run.folder, PROGRAM).failure.exists():
                write_failure(self._run.folder, PROGRAM, message=why, exit_code=codes[PROGRAM])
            return {PROGRAM: codes[PROGRAM]}  # its ranks failed as a consequence
        return codes

    def _ended_by_slurm(self) -> str:
        status, exit_code = self._status, self._run.record.script_exit_code()
        if status.state == "UNKNOWN" and exit_code is not None:
            return ""
        if why := cluster.ENDINGS.get(status.state):
            lost = NODE_LOST.findall(self._run.output)
            which = f": {', '.join(dict.fromkeys(lost))}" if lost else ""
            return (f"(on {status.nodes}) {why}" if status.nodes else why) + which
        if status.state == "FAILED" and exit_code is None and not any(self._run.folder.glob("torchrun/*")):
            return (
                f"failed before its script could write into the run's folder, {self._run.folder}: is that on "
                f"a disk that the nodes share? Set COURSE_HOME to a folder there"
            )
        return ""

    def kill(self) -> None:
        """Cancel the job, unless it is over, and wait until it is gone."""
        if not self._status.over and self._run.record.script_exit_code() is None:
            try:
                cluster.cancel(self._number)
                until = time.monotonic() + CANCEL_SECONDS
                while not self._status.over and time.monotonic() < until:
                    self._ask_now.set()
                    self._asks.join(ASK_AT_LEAST)
                if not self._status.over:
                    raise cluster.SlurmError(f"it is {self._status.state} {CANCEL_SECONDS:g} s later")
            except cluster.SlurmError as error:
                print(f"course_lib: job {self._number} was to be cancelled, but {error}", file=sys.stderr)
        self._enough.set()
        self._ask_now.set()
        with contextlib.suppress(OSError):
            self._run.record.note_job(self._status)
