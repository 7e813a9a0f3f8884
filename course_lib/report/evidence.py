"""Turn what one rank has written into facts: how it failed, or what it was doing.

Each rank records where it is and which collectives it has called (`rank.standstill`), once it makes no
progress or is asked (`launcher.ask`), and at its end how it failed (`rank.failure`).
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..record.layout import AT_WORK, PROGRAM, STARTING, was_asked_to_end
from ..tracebacks.learner_code import is_learners
from .facts import Call, Failure, OtherActivity, RankState, Related, ThreadError
from .stacks import asked_stack, crash_position, others_in, position_in
from .words import MESSAGE_LINES

if TYPE_CHECKING:
    from ..record.trace import Trace
    from ..run.run import Run

# What a rank's error says when another rank is gone; a program may lose connections of its own, too
GONE = r"(connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|error|closed))"
LOST_PEER = re.compile(
    rf"\bgloo/.*{GONE}|{GONE}.*\bremote worker|^torch\.distributed\.\w+: .*{GONE}|recvvalue failed|"
    r"remote process exited|sendbytes failed|failed to recv",
    re.IGNORECASE | re.DOTALL,
)
CRASHES = {"SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"}  # `faulthandler` writes the stacks on these
TIMED_OUT = re.compile(r"timed out waiting|wait timeout|failed to pass monitoredbarrier", re.IGNORECASE)
NAMED = re.compile(r"\branks?[ :=#]{0,2}(?:dict_keys)?[(\[{]*(\d+(?:, *\d+)*)", re.IGNORECASE)
NO_MEMORY = re.compile(r"MemoryError\b|an(not|'t) allocate memory")
SIGNALS = {-number: number.name for number in signal.Signals}  # names, by the exit code that each causes
WARN_SECONDS = 10.0  # without progress for this long, the dashboard says who waits where
BUSY = 0.2  # a rank that uses a larger share of CPU time in one place does not wait there


def failure_of(run: Run, rank: int | str, exit_code: int | None) -> Failure | None:
    """Return how a rank failed; None if it is running or has finished well."""
    trace = run.trace(rank)
    return None if trace.has_result else failure_in(run, trace, trace.failure, exit_code)


def failure_in(run: Run, trace: Trace, record: Mapping[str, Any], exit_code: int | None) -> Failure | None:
    """Return the failure that a rank or the launcher has recorded, or that the exit code shows, if any."""
    rank = trace.files.rank
    seen, exit_code = record.get("time", time.time()), record.get("exit_code", exit_code)
    asked_to_end = bool(record) and was_asked_to_end(trace.files.folder, record.get("process", ""), seen)
    if record.get("type"):
        return _raised(run, trace, record, asked_to_end)
    if record.get("message"):
        return Failure(rank, "noted by the launcher", seen, message=record["message"])
    if exit_code is None:
        return None
    name = SIGNALS.get(exit_code, "")
    unrecorded = "" if name else run.unrecorded
    position, crashed_in = crash_position(trace) if name in CRASHES else (None, "")
    # a library that gives up prints why, and so do argparse and sys.exit("…") in a program
    prints = name == "SIGABRT" or (rank == PROGRAM and not name and not unrecorded)
    return Failure(
        rank,
        "signal" if name else "exit code",
        seen,
        signal=name,
        crashed_in=crashed_in,
        exit_code=exit_code,
        frames=[position.frame] if position else [],
        last_lines=trace.last_lines(MESSAGE_LINES) if prints else [],
        unrecorded=unrecorded,
        asked_to_end=asked_to_end,
        short_of_memory=name == "SIGKILL" and run.short_of_memory,
    )


def _raised(run: Run, trace: Trace, record: Mapping[str, Any], asked_to_end: bool) -> Failure:
    rank, kind, message, frames = trace.files.rank, record["type"], record["message"], record["frames"]
    related = [Related(**each) for each in record.get("related", [])]
    texts = [f"{kind}: {message}", *(each.text for each in related)]
    stacks = [frames, *(each.frames for each in related)]
    lost = [stack for stack, text in zip(stacks, texts, strict=True) if LOST_PEER.search(text)]
    ends = [stack[-1] for stack in [*reversed(lost), frames] if stack]
    own = [end for end in ends if is_learners(end["file"])]
    named = {int(number) for text in texts for found in NAMED.findall(text) for number in found.split(",")}
    workers = [(pid, SIGNALS.get(code, "")) for pid, code in record.get("workers", [])]
    killed = "SIGKILL" in dict(workers).values()
    # argparse raises it, too, and prints what was wrong
    prints = kind == "SystemExit" and message.strip().isdigit()
    return Failure(
        rank,
        "raised",
        record["time"],
        exception=kind,
        message=message,
        related=related,
        frames=frames,
        last_lines=trace.last_lines(MESSAGE_LINES) if prints else [],
        workers=workers,
        memory=record.get("memory"),
        asked_to_end=asked_to_end,
        blames=[] if rank in named else sorted(named),
        lost_peer=bool(lost),
        lost_at=next(iter(own + ends), None),
        timed_out=any(map(TIMED_OUT.search, texts)),
        short_of_memory=any(map(NO_MEMORY.search, [kind, *texts])) or (killed and run.short_of_memory),
    )


def state_of(
    run: Run,
    rank: int,
    exit_code: int | None = None,
    failure: Failure | None = None,
    silent: float | None = None,
    asked: bool = False,
) -> RankState:
    """Return what a rank does, from its record or, if it was ``asked`` and cannot answer, from its stack."""
    trace, lives = run.trace(rank), run.lives(rank)
    record, facts = trace.standstill, trace.facts
    unanswered = asked and not record.get("asked")
    outdated = unanswered and lives  # it may have gone on since it wrote its record
    recorded = record.get("stack", [])
    stack = asked_stack(trace) if unanswered and not run.is_job else recorded
    seconds = max(0.0, run.clock(rank) - record["since"]) if "since" in record else None
    phase = facts.get("phase", STARTING)
    if trace.has_returned:
        phase, seconds = "returned", trace.seconds_since_return
        if seconds < WARN_SECONDS or not lives or run.is_job:
            seconds = None
    elif failure := failure or failure_of(run, rank, exit_code):
        phase = "failed"
    elif exit_code is not None or (not stack and facts and not lives):
        phase = "ended"  # a program ends its other ranks when one has failed
    seconds = silent or seconds
    stack = stack or recorded  # on a busy machine it may have had no time to write its stack
    position = position_in(record, stack)
    function = position.function if position and not (outdated and stack is recorded) else None
    errors = [*record.get("handles", []), *facts.get("thread_errors", [])]
    known = {} if outdated else record
    recent, pending = ([Call(**call) for call in known.get(which, [])] for which in ("recent", "pending"))
    if failure and (failure.consequence or failure.timed_out):
        pending = pending or recent[-1:]  # its last call has ended with the failure
    idle = phase == AT_WORK and seconds and not trace.cpu_share(seconds) > BUSY
    state = RankState(
        rank,
        phase,
        stack,
        position,
        seconds,
        failure,
        function,
        called=known.get("called"),
        waits_in=None if phase == "returned" else _waits_in(pending, known.get("meets")),
        recent=recent,
        groups=known.get("groups", {}),
        own_call=known.get("call", "") if idle else "",
        joins=known.get("joins", {}),
        lock_file=known.get("lock_file", ""),
        lock_holder=_named(run, known.get("lock_holder")),
        silent=silent,
        thread_errors=[ThreadError(**error) for error in errors],
    )
    return replace(state, beside=_relevant(others_in(record), state))


def _named(run: Run, pid: int | None) -> str:
    """Name the rank that has this pid, or another process; empty without a pid."""
    pids = [trace.facts.get("pid") for trace in run.traces()] if pid else []
    return f"rank {pids.index(pid)}" if pid in pids else f"process {pid}" if pid else ""


def _waits_in(pending: list[Call], meets: dict[str, Any] | None) -> Call | None:
    """Return the call in which a rank waits: the main thread's rather than an older pending one."""
    if meets is None:
        return pending[0] if pending else None
    same = [call for call in pending if call.name == meets["name"]]
    return same[-1]._replace(root=meets["root"]) if same and "root" in meets else Call(**meets)


def _relevant(others: list[OtherActivity], state: RankState) -> list[OtherActivity]:
    """Return what may hold a rank up: threads in the learner's code and, if it waits for no rank, its forks.

    A process whose function has returned waits for all threads that are not daemons.
    """
    if state.phase == "returned":
        if state.seconds is None:  # others may have waited for threads that ended with it
            return [each for each in others if each.daemon and each.position and each.position.waits]
        return [each for each in others if not each.daemon]
    if state.phase not in (STARTING, AT_WORK):
        return []
    position = state.position
    called = position is not None and position.function is not None and not position.waits
    return [each for each in others if each.position and (called or each.thread)]
