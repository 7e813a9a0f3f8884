"""Put a report into words: how it begins, and a line for each rank; `cause_words` says why ranks wait."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..host.notebook import shell
from ..record.layout import AT_WORK, ENDING, PROGRAM, RankFiles
from ..record.trace import shortened
from ..tracebacks.learner_code import is_ours, with_source
from .cause_words import FORMS, MOST_RANKS, PAST, PRESENT, cause_text
from .facts import Cause, Failure, Mismatch, Position, RankState, Report, ThreadError
from .symptoms import about

if TYPE_CHECKING:
    from ..run.run import Run

MESSAGE_LINES = 12
CAUSE_LINES = 2  # of each exception that belongs to it
MOST_RELATED = 12  # of these exceptions
RELATIONS = {"inside": "containing", "from": "from", "during": "while handling"}
MESSAGE_LENGTH = 1200  # characters of a line of a message: torch's longest ones have a thousand
SIGNALS = {
    "SIGKILL": "was killed (SIGKILL); the system does that when memory runs out, a person by kill -9",
    "SIGSEGV": "crashed (SIGSEGV: it touched memory that is not its own)",
    "SIGABRT": "aborted (SIGABRT): a library gave up; its last words are in the log",
    "SIGBUS": "crashed (SIGBUS): often, on Linux, no space left in shared memory (/dev/shm)",
    "SIGTERM": "was asked to end (SIGTERM)",
}
# Gloo's last words in a rank for which a message was too large
TOO_LARGE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
OUT_OF_MEMORY = (
    "was killed (SIGKILL) because memory ran out, the machine's or that of a container's limit; take fewer "
    "ranks, smaller batches or fewer DataLoader workers"
)
UNRECORDED = {
    "folder removed": "; the run's folder was removed, and with it what was kept: {}",
    "disk full": "; its last words are lost, because the disk that holds the run is full: {}",
}
NO_MEMORY = (
    "There is no memory left for this, on the GPU, the machine or under a limit (a container's, ulimit's). "
    "Every rank has a model, gradients, optimizer state and data of its own: a smaller batch needs less, and "
    "so do fewer ranks (nprocs). Run.open().metrics has what each rank held."
)
# Advice on exceptions that give none, by the words in them; NCCL changed its own in version 2.30
ADVICE = {
    r"Duplicate GPU detected|Multiple Ranks are using the same GPU": (
        "NCCL takes one rank for each GPU, and two of these ranks use the same one. Where there is a GPU "
        "for each rank, call torch.cuda.set_device(local_rank) before init_process_group; where ranks "
        "share a GPU, use gloo. place() does the one and names the other."
    ),
    r"Cannot re-initialize CUDA in forked subprocess": (
        "A process that was forked from one that uses CUDA cannot use it. Let a DataLoader's workers "
        "return CPU tensors and move them to the GPU in the training loop, or start processes by the "
        'spawn method: DataLoader(…, multiprocessing_context="spawn"), torch.multiprocessing.spawn.'
    ),
    r"CUDA (error: )?out of memory": NO_MEMORY,
    r"^bdb\.BdbQuit$|^EOF when reading a line$": (
        "A rank has no keyboard: breakpoint() and input() have nothing to read. Let the rank print what "
        "you want to see (run.logs has it), and pass what you would type as an argument. To step through "
        "the function in a debugger, call it in the notebook, without what needs other ranks."
    ),
    r"^(\[Errno \d+\] )?Resource temporarily unavailable$|can't start new thread": (
        "Where a process or a thread was to start: a limit on their number has been reached (a "
        "container's, `ulimit -u`). Take fewer ranks (nprocs) or DataLoader workers, or shut down the "
        "kernels of other notebooks. Where a lock was asked for: somebody else holds it."
    ),
}


# --- whole texts ------------------------------------------------------------------------------------------


def error_text(run: Run, report: Report) -> str:
    """Return the text of a `RankError`."""
    cause, parts, hint = report.first_failure, list[str](), ""
    if cause is None:
        parts = [_timeout_text(run, report)]
    else:
        parts = [why] if (why := cause_text(report.wait_cause, ())) else []
        parts.append(f"{run.who(cause.rank)} {_failure_text(cause, run.folder)}")
        beside = [line for each in report.states if each.rank == cause.rank for line in beside_lines(each)]
        parts += [*beside, ""] if beside else []
        parts += map(show, cause.frames)
        hint = advice(run, cause)
    others = [state for state in report.states if cause is None or state.rank != cause.rank]
    parts += [line for state in others for line in state_lines(run, state, report.wait_cause)]
    parts += ["", str(report.divergence)] if report.divergence else []
    parts += ["", restart_text(run, report.before)] if report.before else []
    text = "\n".join([parts[0], "", *parts[1:]]).rstrip()
    return f"{text}\n\n{hint}" if hint else text


def _timeout_text(run: Run, report: Report) -> str:
    raised = [(run.who(state.rank), error) for state in report.states for error in state.thread_errors]
    # another thread's error explains more than what a rank waits for, and less than a mismatch
    raised = [each for each in raised if not (each[1].thread and report.wait_cause)]
    reasons = [f"{who}'s {thread_error_text(error)}" for who, error in raised[:1]]
    if report.wait_cause or not raised:
        reasons.append(cause_text(report.wait_cause, report.states))
    unseen = "no rank was seen: one shows once it calls place, track or log"
    ended = f"; {'the ranks were ended' if report.states else unseen}"
    why = "; ".join(filter(None, reasons))
    return f"not done after {report.timeout:g} s" + (f": {why}" if why else ended)


def restart_text(run: Run, before: Failure) -> str:
    """Say that torchrun has restarted the ranks, and what had ended the attempt before."""
    headline = _failure_headline(before, run.folder).partition("\n")[0]
    counted = f"restart {run.restarts} of {run.record.facts['max_restarts']}"
    who = f"{run.who(before.rank)} {headline}{_where(before)}"
    return f"torchrun had restarted the ranks ({counted}): before, {who}"


def warning_text(run: Run, states: Sequence[RankState], why: str) -> str:
    """Say in the present tense which ranks make no progress, and why."""
    lines = [why] if why else []
    for state in states[:MOST_RANKS]:
        if state.phase == "returned":
            doing = f"returned {state.seconds:.1f} s ago, and its process has not ended"
        elif state.position:
            doing = _at(state.position, state.seconds, PRESENT)
        else:
            doing = f"has not moved for {state.seconds:.1f} s"
        lines += [f"{run.who(state.rank)} {doing}", *beside_lines(state, PRESENT)]
    return "\n".join(lines + [f"and {len(states) - MOST_RANKS} more"] * (len(states) > MOST_RANKS))


def state_lines(run: Run, state: RankState, why: Cause | None = None) -> list[str]:
    """Say what a rank was doing, and at which line it made a call that did not match, perhaps earlier."""
    text = f"{run.who(state.rank)} {state_text(run, state)}"
    call = why.calls.get(state.rank) if isinstance(why, Mismatch) else None
    line = line_of(with_source(*call.place)) if call and call.place else ""
    if call and line not in text:
        text = f"{text.rstrip(':')}; its {call.name} was at {line}"
    return [text, *beside_lines(state)]


# --- one rank ---------------------------------------------------------------------------------------------


def state_text(run: Run, state: RankState) -> str:
    """Say what a rank was doing or how it ended, in words that follow "rank N"."""
    if state.phase == "returned":
        lingers = f" {state.seconds:.1f} s before, and its process had not ended" if state.seconds else ""
        return f"had returned{lingers}"
    failure, position = state.failure, state.position
    if failure and failure.lost_peer and failure.lost_at:
        return f"then lost its connection ({line_of(failure.lost_at)})"
    if failure and failure.signal == "SIGTERM" and position:
        return f"{_at(position, state.seconds)} when it was asked to end"
    if failure:
        return f"then {shortened(_failure_headline(failure, run.folder).splitlines()[0])}"
    if state.phase == "ended":
        return "had ended"
    if position:
        return _at(position, state.seconds)
    if state.phase != AT_WORK:
        return "was ending" if state.phase == ENDING else "was starting"
    if not state.stack or is_ours(state.stack[0][0]):
        return "was at work"
    return f"was in {state.stack[0][2]}"


def _at(position: Position, seconds: float | None, tense: int = PAST) -> str:
    line = line_of(position.frame)
    if position.function is None:
        return f"{FORMS['is'][tense]} at {line}"
    still = "" if seconds is None else f" for {seconds:.1f} s"
    return f"{position_text(position, tense)}{still} ({line})"


def position_text(position: Position, tense: int = PRESENT) -> str:
    """Say in which function a rank waits, or is."""
    if position.function is None:
        return f"{FORMS['is'][tense]} at a line of its own"
    return f"{FORMS['wait' if position.waits else 'is'][tense]} in {position.function}"


def _failure_text(failure: Failure, folder: Path) -> str:
    """Say in full how a rank failed, in words that follow "rank N"."""
    text = _failure_headline(failure, folder)
    if failure.crashed_in and failure.frames:
        text += "; meanwhile its code was here:"
    lines = [f"{text} and said", *failure.last_lines] if failure.last_lines and not failure.signal else [text]
    cut = len(failure.related) > MOST_RELATED or _is_cut(failure.message)
    for each in failure.related[:MOST_RELATED]:
        first, *more = _lines_of(each.text, CAUSE_LINES)
        lines += [f"{RELATIONS[each.how]} {first}", *more]
        for frame in each.frames:
            lines += [f"    {text}" for text in (line_of(frame), _left_out(frame)) if text]
        cut |= _is_cut(each.text, CAUSE_LINES)
    if cut and failure.kind == "raised":
        lines.append(f"[all of it is in {RankFiles(folder, failure.rank).failure}]")
    return "\n".join(lines)


def _lines_of(message: str, most: int = MESSAGE_LINES) -> list[str]:
    """Return the lines of a message; of a long one, its beginning and its end."""
    lines = [shortened(line, MESSAGE_LENGTH) for line in message.strip().splitlines()]
    if (more := len(lines) - most) > 0:  # a DataLoader worker's own error is at the end
        lines[most // 2 : -(most // 2)] = [f"[… {more:,} line{'s' * (more > 1)} …]"]
    return lines


def _is_cut(message: str, most: int = MESSAGE_LINES) -> bool:
    return _lines_of(message, most) != message.strip().splitlines()


def _failure_headline(failure: Failure, folder: Path) -> str:
    if failure.kind == "noted by the launcher":
        return failure.message
    if failure.kind == "signal":
        how = _ended_by(failure.signal, failure)
        if sizes := TOO_LARGE.search("\n".join(failure.last_lines)):
            how = f"aborted (SIGABRT): another rank sent it {sizes[1]} bytes, and it had room for {sizes[2]}"
        where = f" {failure.crashed_in}" if failure.crashed_in else ""
        return re.sub(r"(?<=\))|$", where, how, count=1)
    if failure.kind == "exit code":
        unexplained = "" if failure.rank == PROGRAM else " and without an exception (os._exit?)"
        why = UNRECORDED.get(failure.unrecorded, unexplained).format(folder)
        return f"ended with exit code {failure.exit_code}{why}"
    message = "\n".join(_lines_of(failure.message))
    if failure.exception == "SystemExit":
        return f"ended itself by sys.exit({message})"
    return f"raised {failure.exception}: {message}".rstrip(": ")


def _ended_by(signal: str, failure: Failure) -> str:
    """Say how a signal has ended a rank or its worker."""
    if signal == "SIGKILL" and failure.short_of_memory:
        return OUT_OF_MEMORY
    return SIGNALS.get(signal, f"was ended by {signal}")


def advice(run: Run, failure: Failure) -> str:
    """Say what to do about a failure; empty if that is not known."""
    if failure.kind != "raised":
        return ""
    texts = [failure.exception, failure.message, *(each.text for each in failure.related)]
    known = (hint for said, hint in ADVICE.items() if any(re.search(said, text) for text in texts))
    hint = next(known, NO_MEMORY if failure.short_of_memory and not failure.workers else "")
    symptom = about("\n".join(texts))
    shown = symptom and (symptom.lesson() if hint else symptom.text())
    return "\n\n".join(filter(None, [hint, shown, _of_workers(run, failure)]))


def _of_workers(run: Run, failure: Failure) -> str:
    """Say which signals ended a rank's workers, and how much memory was available; empty if none did."""
    who = f"A worker of {run.who(failure.rank)}, process"
    sentences = [f"{who} {pid}, {_ended_by(name, failure)}." for pid, name in failure.workers]
    if failure.memory:
        total, available = (size / (1 << 30) for size in failure.memory)
        sentences.append(f"Of {total:.1f} GiB of memory, {available:.1f} GiB were available afterwards.")
    return " ".join(sentences)


# --- beside its main thread -------------------------------------------------------------------------------


def beside_lines(state: RankState, tense: int = PAST) -> list[str]:
    """Say what runs beside the main thread of a rank, in lines that follow the rank's own."""
    lines = [f"its {thread_error_text(error)}{_where(error)}" for error in state.thread_errors]
    waited_for = state.phase == "returned" and not any(each.daemon for each in state.beside)
    keeps = " (not a daemon: the process waits for it)" if waited_for else ""
    names_by = defaultdict(list)
    for each in state.beside:
        kind = "thread" if each.thread else "DataLoader worker" if each.loads else "forked process"
        doing = _at(each.position, None, tense) if each.position else f"{FORMS['is'][tense]} running"
        names_by[kind, doing].append(f' "{each.thread}"' if each.thread else "")
    for (kind, doing), names in names_by.items():
        plural = f"{kind}{'es' if kind.endswith('s') else 's'}{','.join(filter(None, names))}"
        who = f"its {kind}{names[0]}" if len(names) == 1 else f"each of its {len(names)} {plural}"
        lines.append(f"{who}{keeps} {doing}")
    return [f"    {line}" for line in lines]


def thread_error_text(error: ThreadError) -> str:
    """Say what ended a thread, or what the main thread handles, in words that follow "its"."""
    message = shortened(error.message.partition("\n")[0])
    thread = f'thread "{error.thread}"' if error.thread else "main thread"
    return f"{thread} raised {error.type}: {message}".rstrip(": ")


def _where(error: Failure | ThreadError) -> str:
    return f" ({line_of(error.frames[-1])})" if error.frames else ""


# --- lines of code ----------------------------------------------------------------------------------------


def label(filename: str) -> str:
    """Return a name to show: ``Cell In[7]`` for a cell of this kernel, a short path for a file."""
    ipython, path = shell(), Path(filename)
    if ipython and (name := ipython.compile.format_code_name(filename)):
        return " ".join(name)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working folder is gone
        return path.name


def line_of(frame: Mapping[str, Any]) -> str:
    """Format a frame's place and source line in one line."""
    source = dict(frame["source"]).get(frame["line"], "").strip()
    return f"{label(frame['file'])}, line {frame['line']}" + (f": {shortened(source)}" if source else "")


def show(frame: Mapping[str, Any]) -> str:
    """Format a frame as source lines, with the failing one marked."""
    lines = [f"{label(frame['file'])}, line {frame['line']}, in {frame['function']}"]
    for number, text in frame["source"]:
        mark = "---->" if number == frame["line"] else "     "
        lines.append(f"{mark} {number:4} {shortened(text)}".rstrip())
    if left := _left_out(frame):
        lines += ["", left]
    return "\n".join(lines) + "\n"


def _left_out(frame: Mapping[str, Any]) -> str:
    """Say how many calls after a frame are not shown; empty if none."""
    calls = frame.get("left_out", 0)
    return f"[{calls} more call{'s' * (calls > 1)}]" if calls else ""
