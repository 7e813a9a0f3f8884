"""Launch, watch and diagnose PyTorch ranks from a notebook cell: the library of the course."""

import os as _os
import threading as _threading

# Threads of OpenMP that have nothing to do sleep instead of spinning. On cores that ranks share, or that
# other work keeps busy, spinning makes a training several times slower. Read once, when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .checkpoint.checkpoint import CheckpointError, load_checkpoint, load_weights, save_checkpoint
from .data.digits import digits
from .exercises.check import check
from .exercises.progress import progress
from .figures.charts import bars, compare, curves
from .figures.collectives import collective, collectives
from .figures.conversions import conversion_map
from .figures.grid import grid
from .figures.shards import shard_map
from .figures.stacked import stacked_bars
from .figures.timeline import timeline
from .hardware import machine
from .launcher.dashboard import rehearse as _rehearse
from .launcher.launch import launch
from .launcher.processes import warm_up as _warm_up
from .launcher.scripts import python, torchrun
from .measure.live_memory import LiveMemory
from .measure.wire import bytes_sent
from .notebook import in_kernel as _in_kernel
from .rank.calls import log, place, track
from .report.failed import RankError, RankTimeout
from .run.run import Run

__all__ = [
    "CheckpointError",
    "LiveMemory",
    "RankError",
    "RankTimeout",
    "Run",
    "bars",
    "bytes_sent",
    "check",
    "collective",
    "collectives",
    "compare",
    "conversion_map",
    "curves",
    "digits",
    "grid",
    "launch",
    "load_checkpoint",
    "load_weights",
    "log",
    "machine",
    "place",
    "progress",
    "python",
    "save_checkpoint",
    "shard_map",
    "stacked_bars",
    "timeline",
    "torchrun",
    "track",
]

if _in_kernel():  # torch loads in the background while the learner reads
    _warm_up()
    _threading.Thread(target=_rehearse, name="course-rehearsal", daemon=True).start()
