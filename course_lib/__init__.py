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

_NAMES_OF = {
    "checkpoint.checkpoint": "CheckpointError load_checkpoint load_weights save_checkpoint",
    "data.digits": "digits",
    "data.pictures": "pictures",
    "exercises.check": "check",
    "exercises.progress": "progress",
    "exercises.sharing": "share_progress",
    "figures.charts": "bars curves stacked_bars",
    "figures.collectives": "collective collectives",
    "figures.grid": "grid",
    "figures.models": "global_batch loader_timeline memory_use message_cost "
    "rank_grid sampler_map step_timeline",
    "figures.shards": "shard_map",
    "figures.timeline": "timeline",
    "host.hardware": "machine",
    "launcher.launch": "launch",
    "launcher.scripts": "python torchrun",
    "launcher.slurm": "slurm",
    "launcher.why": "why",
    "lesson.guess": "guess guesses",
    "lesson.play": "play",
    "measure.bytes_sent": "bytes_sent",
    "measure.live_memory": "LiveMemory LivePeak",
    "measure.profiled": "overlap profiled",
    "rank.api": "log place track",
    "report.divergence": "divergence",
    "report.failed": "RankError RankTimeout",
    "report.waiting": "stalls",
    "run.run": "Run",
}
_HOME_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
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
    from .host.notebook import in_kernel

    if in_kernel():
        from .launcher.dashboard import rehearse
        from .launcher.forkserver import warm_up

        warm_up()
        _threading.Thread(target=rehearse, name="course-rehearsal", daemon=True).start()


_get_ready()
