"""Entry point of what `python` and `torchrun` start: ``python -m course_lib.rank.entry_script script.py …``.

It runs the script of `python`, torchrun's agent (``--torchrun …``; on a job's node ``--node …``), or a rank
that the agent has started (``--rank script.py …``). Each records how it failed. Each, except a job's agent,
ends with the process that started it, as a rank of `launch` does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from ..compat import before_agent_ends_rank, choose_ports_by
from ..files import discard, read_json, write_whole
from ..kill import end_with, is_alive, kill_group_of
from ..record.layout import AT_WORK, PROGRAM, RankFiles, end_request, process_name, was_asked_to_end
from ..tracebacks.learner_code import is_learners, with_source
from .failure import related, report_exception, watch_children, write_failure
from .failure_reporter import FailureReporter, exit_code
from .recorder import attach, note, report_failure

RECORD_SECONDS = 0.5  # for ranks to record where they are before the agent ends them; it takes 0.1
FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
TRACEBACK = re.compile(r"(?s)((?:.*?Traceback \([^\n]*\n(?:(?: [^\n]*)?\n)*)?)([^\s:]*):?(.*)")
CHAIN = re.compile(
    r"\n\n(The above exception was the direct cause of|During handling of the above exception).*:\n\n"
)
UNTIL: dict[int, float] = {}  # in torchrun's agent: until when it waits for a rank, by pid
RESERVATIONS: list[socket.socket] = []  # in torchrun's agent, see `_reserved_port`


def run_program(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script arguments…`` would, and record which of its ranks failed."""
    folder = Path(os.environ["COURSE_RUN"])
    end_with(int(os.environ["COURSE_KERNEL"]))
    watch_children()
    try:
        _run(script, arguments)
    except SystemExit:
        raise
    except BaseException as error:
        rank = getattr(error, "error_index", None)  # both exceptions of torch.multiprocessing have it
        if rank is None:
            report_exception(folder, PROGRAM, error)
        else:
            _report_spawned(folder, rank, error)
        sys.exit(1)


def run_agent(arguments: list[str], of_a_job: bool = False) -> None:
    """Run torchrun on one node, and record which of its ranks ended without recording a failure."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder = Path(os.environ["COURSE_RUN"])
    if of_a_job:  # Slurm ends it; the kernel may be gone by then
        logs = folder / "torchrun" / f"node-{os.environ['SLURM_NODEID']}"
        arguments = ["--redirects=3", f"--log-dir={logs}", *arguments]
    else:
        end_with(int(os.environ["COURSE_KERNEL"]))
    os.environ["COURSE_KERNEL"] = str(os.getpid())  # a rank ends with its agent
    if sys.platform == "linux":  # elsewhere two sockets cannot be bound to one port
        choose_ports_by(_reserved_port)
    before_agent_ends_rank(functools.partial(_before_it_is_ended, folder))
    try:
        run.main(arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if not RankFiles(folder, rank).failure.exists():
                write_failure(folder, rank, text=str(error), exit_code=failure.exitcode, pid=failure.pid)
        print(error, file=sys.stderr)
        sys.exit(1)
    except SystemExit:
        raise
    except BaseException as error:
        if of_a_job and isinstance(error, SignalException):
            print(error, file=sys.stderr)  # Slurm ends all torchruns when one fails: that one reports
        else:
            report_exception(folder, PROGRAM, error)
        sys.exit(1)


def _before_it_is_ended(folder: Path, pid: int) -> None:
    """Let a rank record where it is before the agent ends it; ask all ranks before the first one is ended.

    Nothing that ranks do from then on is the cause: a rank has already failed, perhaps without a record.
    """
    if pid not in UNTIL:
        until, now = time.monotonic() + RECORD_SECONDS, str(time.time())
        for each in filter(is_alive, {pid, *(child.pid for child in psutil.Process().children())}):
            UNTIL[each] = until
            with contextlib.suppress(OSError):  # a full disk
                write_whole(end_request(folder, process_name(each)), now)
    while is_alive(pid) and not _has_recorded(folder, pid) and time.monotonic() < UNTIL[pid]:
        time.sleep(0.01)


def _has_recorded(folder: Path, pid: int) -> bool:
    """Return whether the rank with this pid has recorded where it is, since it was asked."""
    for path in folder.glob("rank-*.where"):
        if read_json(path.with_suffix(".json")).get("process") == process_name(pid):
            return bool(read_json(path).get("asked"))
    return False


def _reserved_port() -> int:
    """Return a free port that the system assigns to no other program until this process ends.

    torchrun picks the port for rank 0's store, and rank 0 opens it seconds later: meanwhile the system could
    assign that port to any program on the machine. A socket that is bound to it, and does not listen, keeps
    it for the one program that asks for it by number.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    RESERVATIONS.append(holder)
    return holder.getsockname()[1]


def run_rank(script: str, arguments: list[str]) -> None:
    """Run a rank whose output torchrun has already redirected to a file."""
    folder, rank = Path(os.environ["COURSE_RUN"]), int(os.environ["RANK"])
    end_with(int(os.environ["COURSE_KERNEL"]))
    files, attempt = RankFiles(folder, rank), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    before = read_json(files.facts)  # of the attempt before, if torchrun has restarted this rank
    ended_unseen = before and "returned" not in before and not files.failure.exists()
    if ended_unseen and not was_asked_to_end(folder, before["process"], time.time()):
        write_failure(folder, rank, message="was killed, or ended itself without an exception")
    if files.failure.exists():
        files.failure.replace(files.failure_of_attempt(max(0, attempt - 1)))
    discard(files.standstill)  # of an earlier attempt: ``attempt`` stays 0 on a node whose ranks did not fail
    if _of_this_node(before):  # processes that the earlier attempt started may live on
        kill_group_of(files.facts)
    attach(rank)
    watch_children()
    output = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", folder)).parent
    note(restart=attempt, output=os.path.relpath(output, folder), phase=AT_WORK)
    failure_reporter = FailureReporter(functools.partial(_report, folder, rank))
    try:
        try:
            _run(script, arguments)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        note(returned=time.time())
    except BaseException as error:
        failure_reporter.error = error
        try:
            failure_reporter.report()
        finally:
            failure_reporter.report_here()


def _of_this_node(facts: dict[str, Any]) -> bool:
    """Return whether a rank wrote its facts on this node: a pid of another node may be any process here."""
    return bool(facts) and facts["process"] == process_name(facts["pid"])


def _report(folder: Path, rank: int, error: BaseException) -> int:
    report_failure(folder, rank, error)
    return exit_code(error)


def _run(script: str, arguments: list[str]) -> None:
    """Run a script as ``__main__``; no other Python code runs between the script's end and the return."""
    sys.argv = [script, *arguments]
    if os.environ.pop("PYTHONSAFEPATH", None):
        sys.path.insert(0, "")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if script == "-m":
        sys.path[0] = os.getcwd()
        spec: Any = find_spec(arguments[0])
        if spec.submodule_search_locations is not None:
            spec = find_spec(f"{arguments[0]}.__main__")
        code, script = spec.loader.get_code(spec.name), spec.origin
        main.__spec__, main.__package__, sys.argv = spec, spec.parent, [script, *arguments[1:]]
    else:
        sys.path[0] = str(Path(script).parent)
        code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    main.__file__ = script
    exec(code, vars(main))


def _report_spawned(folder: Path, rank: int, error: BaseException) -> None:
    """Record the failure of a rank of mp.spawn, whose traceback arrives as text."""
    text = str(error)
    exit_code = getattr(error, "exit_code", None)
    if exit_code is not None:
        write_failure(folder, rank, text=text, exit_code=exit_code)
        return
    first, *later = CHAIN.split(text)  # by turns: a traceback, and how it led to the next one
    exception, others = _parsed(first), list[dict[str, Any]]()
    for how, block in zip(later[::2], later[1::2], strict=True):
        others.insert(0, related("from" if "direct" in how else "during", exception))
        exception = _parsed(block)
    write_failure(folder, rank, **exception, text=text, related=others)


def _parsed(text: str) -> dict[str, Any]:
    """Return what `failure.described` returns, from the text of a traceback, or of a group's."""
    if "Exception Group Traceback" in text:
        text = re.sub(r"^ +[|+] ?", "", text, flags=re.MULTILINE)
    stack, kind, message = TRACEBACK.findall(text)[0]
    frames = [(m["file"], int(m["line"]), m["function"]) for m in FRAME_LINE.finditer(stack)]
    own = [frame for frame in frames if is_learners(frame[0])]
    shown = [with_source(*frame) for frame in own or frames[-1:]]
    return {"type": kind, "message": message.strip(), "frames": shown}


if __name__ == "__main__":
    match sys.argv[1:]:
        case "--torchrun", *arguments:
            run_agent(arguments)
        case "--node", *arguments:
            run_agent(arguments, of_a_job=True)
        case "--rank", script, *arguments:
            run_rank(script, arguments)
        case script, *arguments:
            run_program(script, arguments)
