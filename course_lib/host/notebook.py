"""Find out whether this process is a notebook's kernel, IPython or plain Python."""

import sys
from typing import Any


def shell() -> Any:
    """Return IPython's shell, or None in plain Python."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # missing while IPython loads
    return get_ipython() if get_ipython else None


def in_kernel() -> bool:
    """Return whether this process is a notebook's kernel, which can show widgets."""
    return getattr(shell(), "kernel", None) is not None
