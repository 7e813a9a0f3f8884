"""Launch, watch and diagnose PyTorch ranks from a notebook cell: the library of the course.

The public names are loaded on first use: a rank that needs `track` does not load the launcher.
"""

import importlib as _importlib
import os as _os
import threading as _threading
from typing import Any as _Any

# Idle OpenMP threads sleep instead of spinning: on cores that ranks share, or that other work keeps busy,
# spinning makes training several times slower. The variable is read once, when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOME_OF = {
    "CheckpointError": "checkpoint.checkpoint",
    "LiveMemory": "measure.live_memory",
    "LivePeak": "measure.live_memory",
    "RankError": "report.failed",
    "RankTimeout": "report.failed",
    "Run": "run.run",
    "bars": "figures.charts",
    "bytes_sent": "measure.bytes_sent",
    "check": "exercises.check",
    "collective": "figures.collectives",
    "collectives": "figures.collectives",
    "curves": "figures.charts",
    "digits": "data.digits",
    "divergence": "report.divergence",
    "global_batch": "figures.models",
    "grid": "figures.grid",
    "guess": "lesson.guess",
    "guesses": "lesson.guess",
    "launch": "launcher.launch",
    "load_checkpoint": "checkpoint.checkpoint",
    "load_weights": "checkpoint.checkpoint",
    "loader_timeline": "figures.models",
    "log": "rank.calls",
    "machine": "hardware",
    "memory_use": "figures.models",
    "message_cost": "figures.models",
    "overlap": "measure.profiled",
    "pictures": "data.pictures",
    "place": "rank.calls",
    "play": "lesson.play",
    "profiled": "measure.profiled",
    "progress": "exercises.progress",
    "python": "launcher.scripts",
    "rank_grid": "figures.models",
    "sampler_map": "figures.models",
    "save_checkpoint": "checkpoint.checkpoint",
    "shard_map": "figures.shards",
    "share_progress": "exercises.sharing",
    "slurm": "launcher.slurm",
    "stacked_bars": "figures.charts",
    "stalls": "report.stalls",
    "step_timeline": "figures.models",
    "timeline": "figures.timeline",
    "torchrun": "launcher.scripts",
    "track": "rank.calls",
    "why": "launcher.why",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(_importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _get_ready() -> None:
    """In a notebook's kernel, load torch and what the first dashboard needs while the learner reads."""
    from .notebook import in_kernel

    if in_kernel():
        from .launcher.dashboard import rehearse
        from .launcher.forkserver import warm_up

        warm_up()
        _threading.Thread(target=rehearse, name="course-rehearsal", daemon=True).start()


_get_ready()
