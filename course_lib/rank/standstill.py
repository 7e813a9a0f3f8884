"""Record where a stuck rank is, since when, and in which collective.

The recorder's thread looks at the main thread ten times a second, for some microseconds. While the rank's
collectives stand still, once the launcher asks (`run_folder.ASKED`), and at the end, ``RankFiles.standstill``
holds a record, which `report.waiting` evaluates. PyTorch's flight recorders number the collectives of a
process group in the same way on every rank: NCCL has one recorder, all other backends have another.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..files import discard, write_whole
from ..frames import frame_of, is_learners
from ..private_names import flight_recorder
from ..run_folder import ASKED, OVER_NCCL, RankFiles

STILL_SECONDS = 0.3  # after so long without a new collective, a rank gets a record
MOST_FRAMES = 100  # of a deeper stack, the innermost ones and those around the learner's
# In these a rank does not wait for all others: it may be done while some of them are still joining.
ONE_WAY = ("broadcast", "gather", "reduce", "scatter")


class Lookout:
    """Watches this process's main thread and writes the record of a standstill."""

    def __init__(self, files: RankFiles) -> None:
        self._path = files.standstill
        self._asked_path = str(files.folder / ASKED)
        self._main = threading.main_thread().ident
        self._place: tuple[Any, ...] = ()
        self._flights = b""
        self._stands_since = self._called_since = time.time()
        self._written = ""

    def look(self, steps: int) -> None:
        """Compare with the last look, and keep the record up to date."""
        now = time.time()
        place = (*self._where(), steps)
        flights = status() + status(of_nccl=True)
        if (place, flights) != (self._place, self._flights):
            self._stands_since = now
        if flights != self._flights:
            self._called_since = now
        self._place, self._flights = place, flights
        asked = os.path.exists(self._asked_path)
        if asked or now - self._called_since >= STILL_SECONDS:
            record: dict[str, Any] = {"asked": asked}
            if asked or now - self._stands_since >= STILL_SECONDS:
                record |= {"since": self._stands_since, "stack": self._stack()}
            self._write(record)
        elif self._written:
            self._write(None)

    def close(self) -> None:
        """Write a last record: which collectives this rank has called."""
        self._write({"asked": True})

    # Hold a frame only inside these two: it keeps alive all that the learner's function refers to.

    def _where(self) -> tuple[int, int]:
        frame = frame_of(self._main)
        return id(frame), frame.f_lasti if frame else -1

    def _stack(self) -> list[tuple[str, int, str]]:
        """Return where the thread is, innermost first: with the learner's innermost line, however deep."""
        frame, places, own = frame_of(self._main), list[tuple[str, int, str]](), False
        while frame is not None and not (own and len(places) >= MOST_FRAMES):
            places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            own = own or is_learners(frame.f_code.co_filename)
            frame = frame.f_back
        half = MOST_FRAMES // 2
        return places if len(places) <= MOST_FRAMES else places[:half] + places[-half:]

    def _write(self, record: dict[str, Any] | None) -> None:
        text = "" if record is None else json.dumps(record | flight())
        if text == self._written:
            return
        self._written = text
        if text:
            with contextlib.suppress(OSError):
                write_whole(self._path, text)
        else:
            discard(self._path)


def flight() -> dict[str, Any]:
    """Return how many collectives each process group has called, those not over yet, and the last one."""
    called: dict[str, int] = {}
    calls, pending = [], []
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        entries = [(entry, "") for entry in collectives()]
        entries += [(entry, OVER_NCCL) for entry in collectives(of_nccl=True)]
        for entry, over in sorted(entries, key=lambda pair: pair[0].get("time_created_ns", 0)):
            group, number = entry["process_group"][0] + over, entry["collective_seq_id"]
            called[group] = max(number, called.get(group, 0))
            name = entry["profiling_name"].rpartition(":")[2]
            calls.append({"group": group, "number": number, "name": name, "sizes": entry["input_sizes"]})
            if not is_over(entry):
                pending.append(calls[-1])
    return {"called": called, "pending": pending, "last": calls[-1:]}


def collectives(of_nccl: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a flight recorder's entries for the last collectives, in a format that is private to torch."""
    for entry in json.loads(flight_recorder(of_nccl) or "{}").get("entries", []):
        if not entry["is_p2p"]:
            yield entry


def is_over(entry: dict[str, Any]) -> bool:
    return entry["retired"] or entry["state"] == "completed"


def status(of_nccl: bool = False) -> bytes:
    """Return bytes that change with each collective: much cheaper than reading which ones there were."""
    return flight_recorder(of_nccl, includeCollectives=False)
