"""Where this process runs: in a notebook's kernel, in an IPython, or in a plain Python."""

from __future__ import annotations

import sys
from typing import Any


def shell() -> Any:
    """IPython's shell; None in a plain Python."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not there while IPython loads
    return get_ipython() if get_ipython else None


def in_kernel() -> bool:
    """Whether a notebook can show widgets here."""
    return getattr(shell(), "kernel", None) is not None
