"""Say how a Slurm job ended that no kernel watched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..cluster import JobStatus
from ..run_folder import RankFiles

if TYPE_CHECKING:
    from .run import Run


def how_it_failed(run: Run, status: JobStatus) -> str:
    """Say briefly how the job failed, empty if it did not; `rejoin` gives the report with the lines."""
    exit_code = run.record.script_exit_code()
    if status.state == "COMPLETED" or (status.state == "UNKNOWN" and exit_code == 0):
        return ""
    for rank in range(run.world_size):
        try:
            failure = json.loads(RankFiles(run.folder, rank).failure.read_text())
            if failure["type"]:
                first = (failure["message"].splitlines() or [""])[0]
                return f"{run.who(rank)} raised {failure['type']}: {first}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if status.ended_by_slurm and not (status.state == "UNKNOWN" and exit_code is not None):
        return f"the job {status.ended_by_slurm}"
    return f"the job ended with exit code {1 if exit_code is None else exit_code}"
