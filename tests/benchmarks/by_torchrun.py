"""A rank of ``torchrun by_torchrun.py FOLDER``."""

import sys

from tests.benchmarks.work import leave

leave(sys.argv[1])
