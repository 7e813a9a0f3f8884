"""Launch, watch and diagnose PyTorch ranks from a notebook cell: the library of the course."""

import os as _os
import threading as _threading

# Threads of OpenMP that have nothing to do sleep instead of spinning. On cores that ranks share, or that
# other work keeps busy, spinning makes a training several times slower. Read once, when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .check import check
from .checkpoint import CheckpointError, load_checkpoint, load_weights, save_checkpoint
from .collective_figure import collective, collectives
from .conversion_map import conversion_map
from .dashboard import rehearse as _rehearse
from .data import digits
from .figures import bars, compare, curves
from .grid import grid
from .launch import launch
from .live_memory import LiveMemory
from .machine import machine
from .notebook import in_kernel as _in_kernel
from .progress import progress
from .rank import log, place, track
from .report import RankError, RankTimeout
from .run import Run
from .scripts import python, torchrun
from .shards import shard_map
from .stacked_figure import stacked_bars
from .start import warm_up as _warm_up
from .timeline import timeline
from .wire import bytes_sent

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
