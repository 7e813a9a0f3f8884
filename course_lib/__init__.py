"""Launch, watch and diagnose PyTorch ranks from a notebook cell: the library of the course."""

import os as _os
import sys as _sys
import threading as _threading

# Threads of OpenMP that have nothing to do sleep instead of spinning. On cores that ranks share, or that
# other work keeps busy, spinning makes a training several times slower. Read once, when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .check import check
from .checkpoint import CheckpointError, load_checkpoint, load_weights, save_checkpoint
from .dashboard import rehearse as _rehearse
from .data import digits
from .figures import bars, compare, curves
from .launch import launch
from .machine import machine
from .progress import progress
from .rank import log, place, track
from .report import RankError, RankTimeout
from .run import Run
from .scripts import python, torchrun
from .start import warm_up as _warm_up

__all__ = [
    "CheckpointError",
    "RankError",
    "RankTimeout",
    "Run",
    "bars",
    "check",
    "compare",
    "curves",
    "digits",
    "launch",
    "load_checkpoint",
    "load_weights",
    "log",
    "machine",
    "place",
    "progress",
    "python",
    "save_checkpoint",
    "torchrun",
    "track",
]

if "ipykernel" in _sys.modules:  # in a notebook: torch loads in the background while the learner reads
    _warm_up()
    _threading.Thread(target=_rehearse, name="course-rehearsal", daemon=True).start()
