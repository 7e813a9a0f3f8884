"""Record where a stuck rank is, since when, and in which collective.

The recorder's thread looks at the main thread ten times a second, for some microseconds. It writes a record
(``RankFiles.standstill``) while no collective begins, when the launcher asks all ranks (`layout.ASKED`) or
torchrun's agent asks this one (`layout.end_request`), and at the rank's end. The record covers the threads
and the processes that the rank has forked, such as a DataLoader's workers. `report.waiting` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil

from ..compat import flight_recorder, process_groups, traced_collectives
from ..files import discard, write_whole
from ..record.layout import ASKED, EVERYONE, OVER_NCCL, RankFiles, end_request, process_name
from ..tracebacks.learner_code import Place, frame_of, is_learners
from ..tracebacks.stack_dumps import answer, request, size_of
from .blocking_call import blocking_call
from .threads import cpu_seconds, other_threads, stack_of

STILL_SECONDS = 0.3  # a rank without a new collective for this long gets a record
POLLING_SHARE = 0.02  # a call that uses a smaller share of CPU time only polls: it is stuck
THREADS_SECONDS = 2.0  # between two looks at other threads, unless asked: they may move all the time
FORKED_SECONDS = 2.0  # for forked processes to write their stacks; it takes milliseconds
MOST_FORKED = 32
RECENT = 16  # collectives to record: a rank may have passed some that others called differently


class StallRecorder:
    """Watches this process's main thread and writes the record of a standstill."""

    def __init__(self, files: RankFiles, stack_signal: Callable[[], int | None] = lambda: None) -> None:
        self._path, self._stacks = files.standstill, files.stack
        by_agent = end_request(files.folder, process_name(os.getpid()))
        self._asked_paths = [str(files.folder / ASKED), str(by_agent)]
        self._stack_signal = stack_signal
        self._launched = dict(os.environ)
        self._main = threading.main_thread().ident
        self._place: tuple[Any, ...] = ()
        self._call: tuple[Any, ...] | None = None
        self._steps, self._flights = 0, b""
        self._stands_since = self._called_since = time.time()
        self._cpu_seconds = 0.0  # of the main thread when it came to this place
        self._threads: list[dict[str, Any]] = []
        self._threads_at = 0.0
        self._forked: list[str] | None = None  # stacks of the forked processes, once asked
        self._written = ""
        # Collected since the default group was made; groups that have been destroyed stay
        self._default_group: Callable[[], Any] = lambda: None
        self._groups: dict[str, list[int]] = {}
        self._called: dict[str, int] = {}
        self._places: dict[tuple[str, int], Place | None] = {}
        self._writing, self._closed = threading.RLock(), False  # the last record may come from any thread

    def look(self, steps: int) -> None:
        """Compare with the last look, and keep the record up to date."""
        now, worked = time.time(), cpu_seconds(self._main)
        self._look_at_groups()
        place, call = self._where()
        # bytes that change with each collective: much cheaper than reading the collectives
        flights = b"".join(flight_recorder(nccl, includeCollectives=False) for nccl in (False, True))
        polls = worked - self._cpu_seconds < POLLING_SHARE * (now - self._stands_since)
        stands = place == self._place or (call == self._call is not None and polls)
        if not stands or (steps, flights) != (self._steps, self._flights):
            self._stands_since, self._cpu_seconds = now, worked
        if flights != self._flights:
            self._called_since = now
            with self._writing:
                self._called |= flight()["called"]  # the flight recorder forgets them soon
                self._places = {}
        self._place, self._call, self._steps, self._flights = place, call, steps, flights
        asked = any(map(os.path.exists, self._asked_paths))
        if asked or now - self._called_since >= STILL_SECONDS:
            record: dict[str, Any] = {"asked": asked}
            if asked or now - self._stands_since >= STILL_SECONDS:
                record |= {"since": self._stands_since, "stack": stack_of(self._main)}
                if asked or now - self._threads_at >= THREADS_SECONDS:
                    self._threads, self._threads_at = other_threads(), now
                record |= {"threads": self._threads, **blocking_call(self._main, self._launched)}
            if asked and self._forked is None:
                self._write(record)  # the rest may take longer
                self._forked = self._ask_forked()
            self._write(record | ({"forked": self._forked} if asked else {}))
        elif self._written:
            self._write(None)

    def close(self) -> None:
        """Write a last record: which collectives this rank has called, and which threads are left."""
        self._look_at_groups()
        self._write({"asked": True, "threads": other_threads(), "forked": []}, last=True)

    def _look_at_groups(self) -> None:
        """Note the process groups; forget them when another default group is made, which reuses the names."""
        world = None
        with contextlib.suppress(Exception):  # torch.distributed is not there, or half imported
            world = sys.modules["torch.distributed"].group.WORLD
        with self._writing:
            if world is not None and world is not self._default_group():
                self._default_group = weakref.ref(world)
                self._groups, self._called, self._places = {}, {}, {}
            self._groups |= process_groups()[0]

    def _where(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return where the main thread is, and where the learner's innermost call is."""
        frame = frame_of(self._main)  # hold it only here: it keeps alive all that it refers to
        place = id(frame), frame.f_lasti if frame else -1
        while frame is not None and not is_learners(frame.f_code.co_filename):
            frame = frame.f_back
        return place, None if frame is None else (id(frame), frame.f_lasti)

    def _ask_forked(self) -> list[str]:
        """Return the stacks of this process's forks, which write them to one file."""
        number, stacks, until = self._stack_signal(), list[str](), time.monotonic() + FORKED_SECONDS
        if number is None:
            return stacks
        for child in psutil.Process().children(recursive=True)[:MOST_FORKED]:
            start = size_of(self._stacks)
            if time.monotonic() < until and request(child.pid, number):
                stacks.append(answer(self._stacks, start, until))
        return stacks

    def _write(self, record: dict[str, Any] | None, last: bool = False) -> None:
        with self._writing:
            if self._closed:
                return
            text = "" if record is None else json.dumps(record | self._flight() | {"groups": self._groups})
            changed = text != self._written
            self._closed, self._written = last, text
            if not text:
                discard(self._path)
            elif changed:
                with contextlib.suppress(OSError):
                    write_whole(self._path, text)

    def _flight(self) -> dict[str, Any]:
        """Return `flight`, with the learner's line that called each collective."""
        seen = flight()
        seen["called"] = self._called = self._called | seen["called"]
        if any((call["group"], call["number"]) not in self._places for call in seen["recent"]):
            self._places = called_at()  # slower than `flight`
        for call in seen["recent"]:
            call["place"] = self._places.get((call["group"], call["number"]))
        return seen


Call = tuple[str, int, dict[str, Any]]  # a collective: its group, its number there, the recorder's entry


def called_at() -> dict[tuple[str, int], Place | None]:
    """Return the learner's innermost line in the calls of the latest collectives, by group and number."""
    found: dict[tuple[str, int], Place | None] = {}
    for of_nccl in (False, True):
        for group, number, entry in _collectives_in(traced_collectives(of_nccl), of_nccl):
            frames = ((each["filename"], each["line"], each["name"]) for each in entry.get("frames", []))
            found[group, number] = next((place for place in frames if is_learners(place[0])), None)
    return found


def flight() -> dict[str, Any]:
    """Return how many collectives each process group has called, those not over yet, and the latest."""
    called: dict[str, int] = {}
    calls, pending = list[dict[str, Any]](), []
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # the form may have changed
        found = [*collectives(), *collectives(of_nccl=True)]
        found.sort(key=lambda call: call[2].get("time_created_ns", 0))
        # a group that was destroyed and made again has the same name and a higher id, and counts anew
        latest = {group: entry.get("pg_id", 0) for group, _, entry in found}
        for group, number, entry in found:
            everyone = EVERYONE + (OVER_NCCL if group.endswith(OVER_NCCL) else "")
            if entry.get("pg_id", 0) < max(latest[group], latest.get(everyone, 0)):
                continue
            called[group] = max(number, called.get(group, 0))
            name = entry["profiling_name"].rpartition(":")[2]
            call = {"group": group, "number": number, "name": name, "sizes": entry["input_sizes"]}
            calls.append(call | {"dtypes": entry.get("input_dtypes", [])})
            if not (entry["retired"] or entry["state"] == "completed"):
                pending.append(calls[-1])
    return {"called": called, "pending": pending, "recent": calls[-RECENT:]}


def collectives(of_nccl: bool = False) -> list[Call]:
    """Return the last collectives in a flight recorder."""
    return _collectives_in(json.loads(flight_recorder(of_nccl) or "{}").get("entries", []), of_nccl)


def _collectives_in(entries: list[dict[str, Any]], of_nccl: bool) -> list[Call]:
    suffix = OVER_NCCL if of_nccl else ""
    return [
        (entry["process_group"][0] + suffix, entry["collective_seq_id"], entry)
        for entry in entries
        if not entry.get("is_p2p")  # such a message has the number of the collective before it
    ]
