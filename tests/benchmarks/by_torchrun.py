"""A rank of ``torchrun by_torchrun.py FOLDER``."""

import sys

from work import leave

leave(sys.argv[1])
