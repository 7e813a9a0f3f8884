"""The report of a failure: the cause, the learner's own lines, what the others were doing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course_lib import RankError, RankTimeout, Run
from course_lib.launcher import ask
from course_lib.rank.failure import report_exception, write_failure
from course_lib.record.layout import AT_WORK, PROGRAM, end_request, process_name
from course_lib.report import failed
from course_lib.report.evidence import failure_of, state_of
from course_lib.report.facts import Failure, RankState, Report
from course_lib.report.words import advice, error_text, state_text
from course_lib.tracebacks.learner_code import with_source
from tests.support.cells import cell, quiet_launch
from tests.support.programs import Jump, running, timeless


def failing(function: Any, *args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        quiet_launch(function, *args, **kwargs)
    assert caught.value.run.state == "failed"
    assert caught.value.run.error == str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value


def report_of(function: Any, *args: Any) -> str:
    """The report of a rank that has called a function, which is called here."""
    run = Run.create("made", 1)
    try:
        function(*args)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # from the function on
        report_exception(run.folder, 0, error)
    failures = failed.failures_of(run, {0: 1})
    return error_text(run, Report(failures[0], [state_of(run, 0, 1, failures[0])]))


# --- the whole text ---------------------------------------------------------------------------------------


def test_the_report_of_a_cell() -> None:
    training = cell("""
        import torch, torch.distributed as dist

        def step(model, x):
            return model(x)  # 3 columns, not 4

        def train():
            dist.init_process_group("gloo")
            model = torch.nn.Linear(3, 3)
            if dist.get_rank() == 1:
                step(model, torch.zeros(2, 4))
            while True:
                dist.barrier()
        """)
    name = training.filename.rpartition("/")[2]

    error = failing(training.train)

    head, *rest = str(error).split("\n")
    said = head.replace("addmm: ", "")  # newer torch names the operation
    assert said == ("rank 1 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)")
    assert "\n".join(rest[:-1]) == (
        "\n"
        f"{name}, line 10, in train\n"
        "         8     model = torch.nn.Linear(3, 3)\n"
        "         9     if dist.get_rank() == 1:\n"
        "---->   10         step(model, torch.zeros(2, 4))\n"
        "        11     while True:\n"
        "        12         dist.barrier()\n"
        "\n"
        f"{name}, line 4, in step\n"
        "         2 \n"
        "         3 def step(model, x):\n"
        "---->    4     return model(x)  # 3 columns, not 4\n"
        "         5 \n"
        "         6 def train():\n"
    ).replace(" \n", "\n")
    # where rank 0 is by then, its luck decides: it may not even be through with joining the group
    there = rf"rank 0 (waited in \w+|then lost its connection) \({name}, line \d+: dist\.\w+\(.*\)\)"
    assert re.fullmatch(there, timeless(rest[-1]))
    assert error.rank == 1
    assert "site-packages" not in str(error)

    cause, states = error.report.first_failure, error.report.states
    assert cause is not None
    assert (cause.rank, cause.kind, cause.exception, cause.signal) == (1, "raised", "RuntimeError", "")
    assert "mat1 and mat2 shapes" in cause.message
    assert [(frame["function"], frame["line"]) for frame in cause.frames] == [("train", 10), ("step", 4)]
    assert not cause.consequence
    assert [state.rank for state in states] == [0, 1]
    assert (states[1].phase, states[1].failure) == ("failed", cause)
    assert error.report.failures[-1] == cause
    assert error.report.wait_cause is None, "what rank 1 did by itself needs no explanation"


EXECUTED = """
import dataclasses, torch.distributed as dist
from course_lib import launch

@dataclasses.dataclass
class Model:
    width: int
    def __post_init__(self):
        self.fails

def train():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        Model(1)
    dist.barrier()
first = train
"""
LAUNCHED = "launch(first, dashboard=False)"


@pytest.mark.parametrize(
    ("cells", "file", "line"),
    [
        (["\n%%timeit -n1 -r1" + EXECUTED + LAUNCHED], "Cell In[1]", 15),
        (["%%capture\n%%prun" + EXECUTED, "%%time\ndef train():\n    pass", LAUNCHED], "Cell In[1]", 15),
        ([f"text = {EXECUTED!r}", "exec(text)", LAUNCHED], "<string>", 14),
        ([f"exec({EXECUTED!r})", LAUNCHED], "<string>, without source", 14),
    ],
)
def test_a_function_in_a_text_or_in_a_cell_that_a_magic_runs(
    cells: list[str], file: str, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell replaces it
    shell = InteractiveShell()
    monkeypatch.setattr(InteractiveShell, "_instance", shell)
    monkeypatch.setattr(shell, "showtraceback", lambda *_, **__: None)
    error = [shell.run_cell(each, store_history=True).error_in_exec for each in cells][-1]

    assert isinstance(error, RankError)
    file, _, bare = file.partition(",")
    shown = [text for text in str(error).splitlines() if text.startswith(("---->", file))]
    assert shown == [
        text
        for text in [
            f"{file}, line {line}, in train",
            f"---->   {line}         Model(1)" * (not bare),
            f"{file}, line {line - 5}, in __post_init__",
            f"----> {line - 5:4}         self.fails" * (not bare),
        ]
        if text
    ]
    assert f"({file}, line {line + 1}" in str(error).splitlines()[-1], "where rank 0 waited"


def test_it_is_shown_without_the_launchers_frames() -> None:
    failure = Failure(0, "noted by the launcher", 0.0, message="is gone")
    error = RankError(Run.create("made", 2), Report(failure, [RankState(1, "returned")]))

    lines = error._render_traceback_()
    assert lines == ["\x1b[31mRankError\x1b[0m: rank 0 is gone", "", "rank 1 had returned"]


# --- exceptions of every kind -----------------------------------------------------------------------------

RAISES = {
    "caused by another": (
        "try:\n    1 / 0\nexcept Exception as e:\n    raise Mine('mine') from e",
        "raised Mine: mine\nfrom ZeroDivisionError: division by zero\n    cell_.*, line 6: 1 / 0\n\n",
    ),
    "while handling another": (
        "try:\n    {}['a']\nexcept Exception:\n    raise Mine('mine')",
        "raised Mine: mine\nwhile handling KeyError: 'a'\n    cell_.*, line 6: {}\\['a'\\]\n\n",
    ),
    "from None": (
        "try:\n    1 / 0\nexcept Exception:\n    raise Mine('mine') from None",
        "raised Mine: mine\n\n",
    ),
    "interrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "an exit with words": ("import sys; sys.exit('no data')", r"ended itself by sys.exit\(no data\)"),
    "syntax": ("exec('x = (')", "raised SyntaxError: .*never closed"),
}


@pytest.mark.parametrize("kind", RAISES)
def test_what_was_raised(kind: str) -> None:
    body, head = RAISES[kind]
    lines = body.splitlines()
    defined = cell(
        "class Mine(Exception):\n    pass\n\ndef work():\n" + "".join(f"    {line}\n" for line in lines)
    )

    report = report_of(defined.work)

    assert re.match(f"rank 0 {head}", report), report
    last = 4 + len(lines)
    assert f"line {last}, in work" in report
    assert f"---->    {last}     {lines[-1]}" in report


GATHERED = """
def load(shard):
    return {}[shard]

def work():
    errors = []
    for shard in "ab":
        try:
            load(shard)
        except KeyError as error:
            error.add_note(f"in shard {shard}")
            errors.append(error)
    raise ExceptionGroup("all", errors)
"""


def test_each_error_in_a_group_has_its_lines_and_notes() -> None:
    gathered = cell(GATHERED)
    name = Path(gathered.filename).name
    inside = [
        f"containing KeyError: '{shard}'\nin shard {shard}\n"
        f"    {name}, line 8: load(shard)\n    {name}, line 2: return {{}}[shard]\n"
        for shard in "ab"
    ]
    assert report_of(gathered.work).startswith(
        f"rank 0 raised ExceptionGroup: all (2 sub-exceptions)\n{''.join(inside)}\n{name}"
    )


def test_an_exit_without_an_error_is_a_return() -> None:
    assert quiet_launch(sys.exit, 0).results == [None, None]


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "was asked to end (SIGTERM)"), (signal.SIGALRM, "was ended by SIGALRM")],
)
def test_the_signal_that_ended_a_rank(number: signal.Signals, words: str) -> None:
    run = Run.create("made", 1)
    failure = failure_of(run, 0, -number)
    assert failure is not None
    assert (failure.kind, failure.signal, failure.exit_code) == ("signal", number.name, -number)
    assert error_text(run, Report(failure)).startswith(f"rank 0 {words}")


def test_a_crash_in_another_thread_is_not_blamed_on_the_line() -> None:
    """In the main thread: tests/faults/test_launch_faults.py; in one without Python code: test_stacks.py."""
    crash = cell("""
        import ctypes, threading, time

        def work():
            threading.Thread(target=ctypes.string_at, args=[0]).start(); time.sleep(600)
        """)
    report = str(failing(crash.work, nprocs=1))
    where = r"in another thread, in string_at \(__init__.py, line \d+.*\); meanwhile its code was here:"
    assert re.match(rf"rank 0 crashed \(SIGSEGV.* not its own\) {where}", report)
    assert "---->    4     " in report


def test_the_report_stays_short_whatever_is_raised() -> None:
    deep = cell("def down(n):\n    return down(n + 1)\n").down
    assert re.search(r"in down\n.*\n.*down\(n \+ 1\)\n\n\[\d+ more calls\]\Z", report_of(deep, 0))
    odd = "def odd(n):\n    if n:\n        return even(n)\n    1 / n\n"
    pair = cell(f"def even(n):\n    return odd(n - 1)\n\n{odd}").even
    shown = re.findall(r"in (?:even|odd)$|^\[\d+ more calls", report_of(pair, 9), re.MULTILINE)
    assert shown == ["in even", "in odd", "[15 more calls", "in odd"]

    def many() -> None:
        raise ValueError("line\n" * 100_000)

    text = report_of(many)
    assert "\n[… 99,988 lines …]\n" in text
    path = text.partition("\n[all of it is in ")[2].partition("]")[0]
    assert json.loads(open(path).read())["message"].count("line\n") == 100_000


def test_an_exception_with_closed_output() -> None:
    def work() -> None:
        sys.stdout.close()
        os.close(1)
        os.close(2)
        raise ValueError("unheard")

    assert str(failing(work, nprocs=1)).startswith("rank 0 raised ValueError: unheard")


# --- cause and consequence --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:76",
        "Read error [127.0.0.1]:45201: Connection reset by peer. This is typically caused by a remote worker",
        "[../gloo/transport/tcp/pair.cc:144] writev [127.0.0.1]:3: Broken pipe",
        "NCCL error: remote process exited or there was a network error",
        "failed to recv, got 0 bytes",
        "recvValue failed on SocketImpl(fd=5)",
        "sendBytes failed on SocketImpl",
    ],
)
def test_the_loss_of_a_peer_is_a_consequence(text: str) -> None:
    run = Run.create("made", 2)
    now = time.time()
    for rank, message, at in ((0, text, now), (1, "no such column", now + 0.4)):
        record = {"time": at, "type": "RuntimeError", "message": message, "frames": [], "text": ""}
        record |= {"exit_code": None}
        (run.folder / f"rank-{rank}.failure.json").write_text(json.dumps(record))
    failures = failed.failures_of(run, {0: 1, 1: 1})

    assert [failure.consequence for failure in failures.values()] == [True, False]
    assert failed.first_failure(failures).rank == 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),  # a DataLoader's worker was killed
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("ConnectionRefusedError", "[Errno 111] Connection refused"),
        ("redis.exceptions.ConnectionError", "Connection closed by server."),
        ("RuntimeError", "the label server: connection refused"),
    ],
)
def test_a_lost_connection_of_the_programs_own_is_a_cause(kind: str, text: str) -> None:
    assert not failed_with(kind, text).consequence


def test_who_is_ended_by_torchrun_is_never_the_cause() -> None:
    """Even if its handler raised at that before the failure that led to it was recorded."""
    run = Run.create("made", 3)
    write_failure(run.folder, 0, type="KeyboardInterrupt", message="asked to end", frames=[], pid=70)
    write_failure(run.folder, 1, exit_code=-signal.SIGTERM, pid=71)
    write_failure(run.folder, 2, exit_code=3, pid=72)
    for pid, later in ((70, -60), (71, -60), (72, 60)):
        end_request(run.folder, process_name(pid)).write_text(str(time.time() + later))
    failures = failed.failures_of(run, {0: 1, 1: -signal.SIGTERM, 2: 3})

    assert [failure.consequence for failure in failures.values()] == [True, True, False]
    assert failed.first_failure(failures).rank == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gloo/transport/tcp/pair.cc:561] Connection closed by peer", r"then lost its connection \(.*\)"),
        ("my handler does not like this", "then raised RuntimeError: my handler does not like this"),
    ],
)
def test_who_was_asked_to_end_may_have_lost_its_connection_before(text: str, words: str) -> None:
    run = Run.create("made", 1)
    frames = [with_source(__file__, 1, "f")]
    write_failure(run.folder, 0, type="RuntimeError", message=text, frames=frames, pid=70)
    end_request(run.folder, process_name(70)).write_text(str(time.time() - 60))
    failure = failure_of(run, 0, 1)

    assert failure is not None
    assert failure.consequence
    assert re.fullmatch(words, state_text(run, RankState(0, "failed", failure=failure)))


def test_of_two_failures_the_first_is_the_cause() -> None:
    one, other = Failure(0, "raised", 10.0), Failure(1, "raised", 9.0)
    lost, program = Failure(2, "raised", 1.0, lost_peer=True), Failure(PROGRAM, "exit code", 0.0)
    assert failed.first_failure({0: one, 1: other}) is other
    assert failed.first_failure({2: lost, 0: one}) is one
    assert failed.first_failure({PROGRAM: program, 2: lost}) is lost
    assert failed.first_failure({PROGRAM: program}) is program


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        (["CheckpointException ranks:dict_keys([1])\n(RANK 1)"] * 2, 1),
        (["worker on Rank=1 failed", "OSError: No space left on device"], 1),
        (["ranks 0, 1 failed"] * 2, 0),
        (["rank 2 failed"] * 2, 0),
        (["rank 1 sent nothing", "[gloo/transport/tcp/pair.cc:5] Connection closed by peer"], 0),
    ],
)
def test_a_rank_that_reports_anothers_failure_is_not_the_cause(texts: list[str], first: int) -> None:
    run = Run.create("made", 2)
    for rank, text in enumerate(texts):
        write_failure(run.folder, rank, type="RuntimeError", message=text, frames=[])
    assert failed.first_failure(failed.failures_of(run, {0: 1, 1: 1})).rank == first


def test_the_rank_whose_folder_is_gone_is_named_where_all_save_a_checkpoint(tmp_path: Path) -> None:
    def save() -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("gloo")
        dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path if dist.get_rank() < 2 else "/proc/gone")

    with pytest.raises(RankError) as caught:
        quiet_launch(save, nprocs=3)
    assert caught.value.rank == 2
    assert str(caught.value).startswith("rank 2 raised torch.distributed.checkpoint.api.CheckpointException")


ENDS = {  # how rank 1 ends, what is told of it, and what rank 0 waits in
    "cleans up first": (
        "try:\n        raise KeyError\n    finally:\n        dist.destroy_process_group()",
        "raised KeyError",
        "dist.all_reduce(torch.zeros(1000))",
    ),
    "is killed": (
        "os.kill(os.getpid(), 9)",
        "was killed (SIGKILL)",
        "try:\n            dist.barrier()\n"
        "        except RuntimeError as e:\n            raise OSError('sync') from e",
    ),
    "exits": ("os._exit(0)", "ended with exit code 0", "dist.recv(torch.zeros(10), src=1)"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_survivors_lost_connection_is_never_named_the_cause(how: str) -> None:
    ends, told, waits = ENDS[how]
    source = (
        "import os, torch, torch.distributed as dist\n"
        "def work():\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.all_reduce(torch.zeros(1))\n"
        "    if dist.get_rank() == 0:\n"
        f"        {waits}\n"
        f"    {ends}\n"
    )
    error = failing(cell(source).work)

    assert str(error).startswith(f"rank 1 {told}"), str(error)
    last = str(error).splitlines()[-1]
    assert last.startswith("rank 0 ")
    assert "raise OSError" not in last, "but where it waited"


# --- what to do about it ---------------------------------------------------------------------------------

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage "
    "(run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
ADVICE = {
    "two ranks on one GPU": (
        NCCL + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 59000",
        "NCCL takes one rank for each GPU",
    ),
    "and in torch 2.15 with NCCL 2.30": (
        "Failed to initialize NCCL communicator: invalid usage\nNCCL Last Error: "
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this "
        "configuration.",
        "use gloo. place()",
    ),
    "CUDA in a worker": (
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        + "  File worker.py\n" * 20
        + "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
        "you must use the 'spawn' start method",
        'multiprocessing_context="spawn"',
    ),
    "no memory": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB",
        "a smaller batch needs less",
    ),
    "no room for a thread of Python's": ("can't start new thread", "a limit on their number"),
    "no room for a thread": ("Resource temporarily unavailable", "a limit on their number"),
    "no memory for a context": ("CUDA error: out of memory", "There is no memory left for this, on the GPU"),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_a_known_error_comes_with_advice(kind: str) -> None:
    message, words = ADVICE[kind]
    failure = failed_with("torch.distributed.DistBackendError", message)

    other = RankState(1, AT_WORK, stack=[("/elsewhere/torch.py", 3, "all_reduce")])
    text = error_text(Run.create("made", 2), Report(failure, [other]))
    head, hint = text.split("\nrank 1 was in all_reduce\n\n")
    assert head.startswith(f"rank 0 raised torch.distributed.DistBackendError: {message.splitlines()[0]}")
    assert words in hint
    assert not failure.consequence


def test_a_rank_has_no_keyboard() -> None:
    def work() -> None:
        breakpoint()
        print("goes on")

    report = str(failing(work, nprocs=1))
    assert report.startswith("rank 0 raised bdb.BdbQuit\n")
    assert report.splitlines()[-1].startswith("A rank has no keyboard: ")
    of_input = failed_with("EOFError", "EOF when reading a line")
    assert advice(Run.create("made", 2), of_input).startswith("A rank has no keyboard: ")


def test_advice_for_the_cause_of_an_error_and_none_for_others() -> None:
    def work() -> None:
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        except RuntimeError as error:
            raise ValueError("training failed") from error

    hint, lesson = report_of(work).split("\n\n")[-2:]
    assert hint.endswith("Run.open().metrics has what each rank held.")
    assert lesson.startswith("See lesson 02 deeper, ")
    for message in (
        "shapes cannot be multiplied (2x4 and 3x3)",
        "Connection closed by peer",
        "out of memory",
    ):
        assert advice(Run.create("made", 2), failed_with("RuntimeError", message)) == ""


def test_workers_that_were_killed_are_told_beside_other_advice() -> None:
    known = failed_with("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
    killed = {"workers": [(7, "SIGKILL")], "memory": [8 << 30, 1 << 30]}
    hint, _, told = advice(Run.create("made", 2), replace(known, **killed)).split("\n\n")
    assert hint.startswith("There is no memory left for this, on the GPU")
    assert told.startswith("A worker of rank 0, process 7, was killed (SIGKILL)")
    assert told.endswith("Of 8.0 GiB of memory, 1.0 GiB were available afterwards.")
    told = advice(Run.create("made", 0), replace(failed_with("EOFError", ""), rank=PROGRAM, **killed))
    assert told.startswith("A worker of the program, process 7, ")


def failed_with(kind: str, message: str) -> Failure:
    run = Run.create("made", 2)
    record = {"time": 0.0, "type": kind, "message": message, "frames": [], "exit_code": None}
    (run.folder / "rank-0.failure.json").write_text(json.dumps(record))
    failure = failure_of(run, 0, 1)
    assert failure is not None
    return failure


# --- where the ranks are ----------------------------------------------------------------------------------


def test_no_signal_reaches_a_program_that_handles_it() -> None:
    """Slurm's --signal=USR1 has programs save, requeue themselves and exit. Rank 1 can run no thread."""
    handling = cell("""
    import ctypes, json, os, signal, time
    from pathlib import Path

    def work():
        folder = Path(os.environ["COURSE_RUN"])
        if os.environ["RANK"] == "1":
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                signal.signal(number, lambda number, _: (folder / f"got-{number}").touch())
            while json.loads((folder / "rank-1.json").read_text())["stack_signal"] is not None:
                time.sleep(0.01)
            (folder / "holds").touch()
            while True:
                ctypes.PyDLL(None).sleep(60)
        while not (folder / "holds").exists():
            time.sleep(0.01)
        raise ValueError("of rank 0")
    """)
    error = failing(handling.work)
    assert str(error).startswith("rank 0 raised ValueError: of rank 0")
    assert list(error.run.folder.glob("got-*")) == []


def test_workers_of_a_loader_are_told_where_the_rank_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "ASK_SECONDS", 60)
    beside = cell("""
    import os, threading, torch
    from pathlib import Path

    class Data(torch.utils.data.Dataset):
        def __init__(self, lock):
            self.lock = lock

        def __len__(self):
            return 8

        def __getitem__(self, i):
            Path(os.environ["COURSE_RUN"], f"worker-{os.getpid()}").touch()
            with self.lock:
                return i

    def work():
        lock = threading.Lock()
        with lock:
            loader = iter(torch.utils.data.DataLoader(Data(lock), num_workers=2))
        next(loader)
    """)

    def there() -> bool:
        run = running()
        return run is not None and len(list(run.folder.glob("worker-*"))) == 2

    Jump(monkeypatch, there)
    with pytest.raises(RankTimeout) as caught:
        quiet_launch(beside.work, nprocs=1, timeout=120)

    _, _, rank, workers = timeless(str(caught.value)).splitlines()
    assert re.fullmatch(r"rank 0 was in __next__ \(.*: next\(loader\)\)", rank)
    assert re.fullmatch(r" +each of its 2 DataLoader workers was at .*: with self\.lock:", workers)
