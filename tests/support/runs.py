"""Make runs as ranks would have left them, without any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib import Run
from course_lib.record.layout import TICK, RankFiles


def made_run(world_size: int, seconds: float = 5.0, name: str = "train") -> Run:
    """Make a run: each rank trains at 1000 samples/s, and rank r ends with (r + 1) · 100 MiB in use."""
    run = Run.create(name, world_size)
    for rank in range(world_size):
        time = np.arange(0, seconds, 0.1) + 0.1
        rows = np.full((len(time), len(TICK)), np.nan)
        columns: dict[str, Any] = {
            "seconds": time,
            "samples": time * 1000,
            "steps": time * 10,
            "tracked_seconds": time,
            "passes": 1,
            "pass_steps": time * 10,
            "pass_total": seconds * 10,
            "memory_bytes": time / time[-1] * (rank + 1) * 100 * 2**20,
        }
        for field, values in columns.items():
            rows[:, TICK.index(field)] = values
        rows.astype("<f8").tofile(RankFiles(run.folder, rank).ticks)
    return run
