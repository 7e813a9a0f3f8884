"""What a rank says of itself while it does not get on: where it stands, since when, in which collective.

The rank's own thread looks at the main thread ten times a second, for some microseconds. While nothing moves,
``rank-N.where`` holds a record (read by `hang`); when the rank gets on, it goes. Collectives are
counted by PyTorch's flight recorder, with which every rank numbers those of a process group alike.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

STILL_SECONDS = 0.3  # who has not moved for so long gets a record
MOST_FRAMES = 100


class Lookout:
    """Looks at this process's main thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._main = threading.main_thread().ident
        self._place: tuple[Any, ...] = ()
        self._status = b""
        self._stands_since = self._called_since = time.time()
        self._written = ""

    def look(self, steps: int) -> None:
        """Compare with the last look, and keep the record up to date."""
        now = time.time()
        frame = sys._current_frames().get(self._main or 0)
        place = id(frame), frame.f_lasti if frame else None, steps
        status = _flight_recorder(includeCollectives=False)
        if (place, status) != (self._place, self._status):
            self._stands_since = now
        if status != self._status:
            self._called_since = now
        self._place, self._status = place, status
        if now - self._called_since >= STILL_SECONDS:
            stands = now - self._stands_since >= STILL_SECONDS
            self._write({"since": self._stands_since, "stack": _stack(frame)} if stands else {})
        elif self._written:
            self._write(None)
        del frame  # or what the learner's function holds would live on

    def close(self) -> None:
        """The last word: which collectives this rank has called."""
        self._write({})

    def _write(self, record: dict[str, Any] | None) -> None:
        text = "" if record is None else json.dumps(record | collectives())
        if text == self._written:
            return
        self._written = text
        with contextlib.suppress(OSError):
            if not text:
                self._path.unlink(missing_ok=True)
                return
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(text)
            part.replace(self._path)


def _stack(frame: Any) -> list[tuple[str, int, str]]:
    places = []
    while frame is not None and len(places) < MOST_FRAMES:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places


def _flight_recorder(**options: Any) -> bytes:
    """The flight recorder's word as JSON; empty without distributed, and where this torch has none."""
    if "torch.distributed" not in sys.modules:
        return b""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json

        return _dump_fr_trace_json(**options)
    except Exception:  # private to torch: the stacks tell where a rank is all the same
        return b""


def collectives() -> dict[str, Any]:
    """For each process group how many collectives were called; those that are not over yet; the last one."""
    called: dict[str, int] = {}
    calls, pending = [], []
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        for entry in json.loads(_flight_recorder() or "{}").get("entries", []):
            if entry["is_p2p"]:
                continue
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            called[group] = max(number, called.get(group, 0))
            name = entry["profiling_name"].rpartition(":")[2]
            calls.append({"group": group, "number": number, "name": name, "sizes": entry["input_sizes"]})
            if not entry["retired"] and entry["state"] != "completed":
                pending.append(calls[-1])
    return {"called": called, "pending": pending, "last": calls[-1:]}
