"""Try a second signal while the handler of the first is running."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def signal_inside_a_signal(handler: Callable[..., Any]) -> None:
    """Call a handler, and again at each line of its own Python code; the two calls must not deadlock."""

    def again(*_: Any) -> Any:
        handler(signal.SIGTERM, None)
        return again

    def first() -> None:
        sys.settrace(again)
        handler(signal.SIGTERM, None)
        sys.settrace(None)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for itself"
