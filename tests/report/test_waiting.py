"""Who waits for whom, told from what the ranks wrote down."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from typing import Any

import pytest

from course_lib import Run, stalls
from course_lib.launcher.ask import report_on
from course_lib.rank.failure import write_failure
from course_lib.record.layout import ASKED, RankFiles
from course_lib.report import words
from course_lib.report.cause_words import MOST_RANKS, PAST, PRESENT, cause_text
from course_lib.report.evidence import WARN_SECONDS, failure_of, state_of
from course_lib.report.facts import Report
from course_lib.report.wait_cause import wait_cause_of
from course_lib.report.waiting import doubts, stalled

TORCH = "/venv/site-packages/torch/distributed/distributed_c10d.py"
LONG = WARN_SECONDS + 2.5


def stack(*functions: str) -> list[tuple[str, int, str]]:
    """The learner's train(), and in it, one inside the other, functions of torch.distributed."""
    return [*((TORCH, 7, name) for name in reversed(functions)), ("/course/cell.py", 12, "train")]


@pytest.fixture(autouse=True)
def torch_is_not_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_lib.report.stacks.is_learners", lambda file: file.startswith("/course/"))


def call(number: int, name: str = "all_reduce", sizes: Any = ((4,),), group: str = "0") -> dict[str, Any]:
    return {"group": group, "number": number, "name": name, "sizes": list(map(list, sizes))}


def waits(number: int, *args: Any, stood: float = LONG, **kwargs: Any) -> dict[str, Any]:
    """The record of a rank that waits in a collective."""
    pending = call(number, *args, **kwargs)
    called = {"0": number} | {pending["group"]: number}
    places = stack("wrapper", pending["name"])
    now = time.time()
    return {
        "since": now - stood,
        "stack": places,
        "called": called,
        "pending": [pending],
        "recent": [pending],
    }


def elsewhere(called: dict[str, int] | None = None, stood: float = LONG) -> dict[str, Any]:
    """The record of a rank that is at a line of its own."""
    since = time.time() - stood
    return {"since": since, "stack": stack(), "called": called or {}, "pending": [], "recent": []}


def joins() -> dict[str, Any]:
    return elsewhere() | {"stack": stack("wrapper", "init_process_group", "wait")}


def explanation(run: Run, tense: int = PAST) -> str:
    states = [state_of(run, rank, asked=True) for rank in range(run.world_size)]
    return cause_text(wait_cause_of(states), states, tense)


def doing(run: Run, rank: int, exit_code: int | None) -> str:
    return words.state_text(run, state_of(run, rank, exit_code, asked=True))


def run_of(*records: dict[str, Any] | None, returned: tuple[int, ...] = ()) -> Run:
    run = Run.create("train", len(records))
    for rank, record in enumerate(records):
        if record is not None:
            (run.folder / f"rank-{rank}.where").write_text(json.dumps(record))
    for rank in returned:
        (run.folder / f"rank-{rank}.result").touch()
    return run


ELSEWHERE = elsewhere({"0": 4})
CASES = {
    "two that have returned": (
        [waits(5, "barrier"), ELSEWHERE, ELSEWHERE],
        (1, 2),
        "ranks 1, 2 never called barrier (collective 5), in which rank 0 waited; they have returned",
    ),
    "one has returned, one has not": (
        [waits(5), ELSEWHERE, ELSEWHERE],
        (1,),
        "ranks 1, 2 never called all_reduce (collective 5), in which rank 0 waited",
    ),
    "who is a collective further does not count": (
        [waits(5), waits(6), ELSEWHERE],
        (),
        "rank 2 never called all_reduce (collective 5), in which rank 0 waited",
    ),
    "other numbers of tensors": (
        [waits(5, sizes=[[4], [2, 2]]), waits(5, sizes=[])],
        (),
        "the ranks do not match: collective 5 is all_reduce of shapes [4], [2, 2] on rank 0 "
        "and all_reduce of no tensor on rank 1",
    ),
    "sizes that may differ": (
        [waits(5, "scatter", sizes=[[4], [4]]), waits(5, "scatter", sizes=[[4]])],
        (),
        "",
    ),
    "over NCCL, which counts for itself": (
        [waits(5, group="0 over nccl"), elsewhere({"0": 4, "0 over nccl": 4})],
        (),
        "rank 1 never called all_reduce (collective 5), in which rank 0 waited",
    ),
    "over NCCL, of which one never called any": (
        [waits(1, group="0 over nccl"), ELSEWHERE],
        (),
        "rank 1 never called all_reduce (collective 1), in which rank 0 waited",
    ),
    "a group of which nobody is known to be late": ([ELSEWHERE, waits(2, group="7")], (), ""),
    "one has not joined": (
        [joins(), elsewhere(), joins()],
        (),
        "rank 1 never called init_process_group, in which ranks 0, 2 waited",
    ),
    "all join": ([joins(), joins()], (), ""),
    "all wait in the same": ([waits(5), waits(5)], (), ""),
    "all are busy": ([ELSEWHERE, ELSEWHERE], (), ""),
    "nothing is known of one": ([waits(5), None], (), ""),
    "nothing is known": ([None, None], (), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_whom_the_others_wait_for(case: str) -> None:
    records, returned, expected = CASES[case]
    assert explanation(run_of(*records, returned=returned)) == expected


def test_the_call_in_which_a_rank_failed_counts_too() -> None:
    """It is over then, and no longer pending. An error of the rank's own has nothing to do with it."""
    run = run_of(waits(5) | {"pending": []}, ELSEWHERE)
    assert explanation(run) == ""
    write_failure(run.folder, 0, type="ValueError", message="no such column", frames=[])
    assert explanation(run) == ""
    lost = "[gloo/pair.cc:1] Connection closed by peer"
    write_failure(run.folder, 0, type="RuntimeError", message=lost, frames=[])
    assert explanation(run) == "rank 1 never called all_reduce (collective 5), in which rank 0 waited"


def warning(run: Run) -> str:
    """As if the machine had taken no time since the records were made."""
    return re.sub(r"for 1[2-9]\.\d s", "for 12.5 s", stalled(run, {}))


def test_a_record_that_is_half_written_is_none() -> None:
    run = run_of(waits(5), elsewhere({"0": 4}))
    for text in ("", '{"called": {"0"', "\x00", "[1]", "7"):
        (run.folder / "rank-1.where").write_text(text)
        assert explanation(run) == ""
        assert warning(run).startswith("rank 0 waits in all_reduce for 12.5 s (cell.py, line 12)")


def test_groups_that_differ_are_doubted_and_nonsense_is_not() -> None:
    groups = [{"groups": {"1": ranks}} for ranks in ([0, 1], [0, 2])]
    run = run_of(*groups)
    assert doubts(run).startswith(
        "the run is done, but the ranks made different groups: new_group 1 is [0, 1]"
    )
    for odd in ([1], {"1": 7}, "no", None):
        assert doubts(run_of(groups[0], {"groups": odd})) == ""


# --- at the end the ranks are asked ------------------------------------------------------------------------


def lives(run: Run, rank: int, *functions: str) -> None:
    """The rank is a living process (this one), and its stack when a signal asked for it was this."""
    files = RankFiles(run.folder, rank)
    files.facts.write_text(json.dumps({"pid": os.getpid()}))
    lines = [f'  File "{file}", line {line} in {function}\n' for file, line, function in stack(*functions)]
    files.stack.write_text("main thread 0x00ff\nThread 0x00ff (most recent call first):\n" + "".join(lines))


def test_a_record_of_before_the_question_is_not_believed() -> None:
    """The rank has left init_process_group since, and had no time yet to say so."""
    run = run_of(joins(), {"called": {}, "pending": [], "recent": []}, returned=(1,))
    assert (
        explanation(run) == "rank 1 never called init_process_group, in which rank 0 waited; it has returned"
    )
    lives(run, 0, "wrapper", "all_reduce")
    (run.folder / ASKED).touch()
    assert explanation(run) == ""
    RankFiles(run.folder, 0).stack.unlink()  # nor had it time for its stack
    assert explanation(run) == ""
    assert doing(run, 0, None).startswith("waited in init_process_group for "), "the latest that is known"


def test_a_rank_that_cannot_answer_waits_where_its_stack_says() -> None:
    answered = [waits(1, "barrier") | {"asked": True}, elsewhere() | {"asked": True}]
    run = run_of(*answered, None, None)
    (run.folder / ASKED).touch()
    lives(run, 2, "wrapper", "barrier")
    lives(run, 3, "wrapper", "sleep")
    for rank in (0, 1):
        RankFiles(run.folder, rank).facts.write_text(json.dumps({"pid": os.getpid()}))
    assert explanation(run) == "rank 1 never called barrier (collective 1), in which ranks 0, 2 waited"


def test_a_rank_that_got_no_time_to_write_its_stack_was_where_its_record_says() -> None:
    run = run_of(waits(5, stood=3), None, None)
    for rank in range(3):
        files = RankFiles(run.folder, rank)
        files.facts.write_text(json.dumps({"pid": os.getpid()} | ({"phase": "at work"} if rank < 2 else {})))
        files.stack.write_text("main thread 0x00ff\n")
    assert re.match(r"waited in all_reduce for [3-9]\.", doing(run, 0, None))
    assert (doing(run, 1, None), doing(run, 2, None)) == ("was at work", "was starting")


def test_a_rank_that_is_ending_gets_a_moment_to_say_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the report came first, and said that it "was ending"."""
    run = run_of(None)
    RankFiles(run.folder, 0).facts.write_text(json.dumps({"pid": os.getpid(), "phase": "ending"}))
    monkeypatch.setattr("course_lib.launcher.ask.ASK_SECONDS", 0.1)

    def at_the_end(run: Run) -> str:
        return words.state_text(run, report_on(run, {0: None}, {}).states[0])

    with monkeypatch.context() as short:
        short.setattr("course_lib.launcher.ask.TELL_SECONDS", 0.1)
        assert at_the_end(run) == "was ending"

    frames = [{"file": "/course/cell.py", "line": 12, "function": "train", "source": [[12, "step()"]]}]
    lost = "[gloo/pair.cc:1] Connection closed by peer"
    told = {"type": "RuntimeError", "message": lost, "frames": frames}
    monkeypatch.setattr("course_lib.launcher.ask.TELL_SECONDS", 60)
    timer = threading.Timer(0.3, write_failure, (run.folder, 0), told)
    timer.start()
    assert "cell.py, line 12" in at_the_end(run)
    timer.join()


def test_the_record_of_a_rank_that_is_gone_is_its_last_word() -> None:
    run = run_of(waits(5), elsewhere({"0": 4}))
    (run.folder / ASKED).touch()
    assert explanation(run) == "rank 1 never called all_reduce (collective 5), in which rank 0 waited"


def test_ranks_that_never_answer_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_lib.launcher.ask.ASK_SECONDS", 0.1)
    run = run_of(waits(5), elsewhere({"0": 4}))
    for rank in (0, 1):
        RankFiles(run.folder, rank).facts.write_text(json.dumps({"pid": os.getpid()}))
    began = time.monotonic()
    assert report_on(run, {0: None, 1: None}, {}).wait_cause is None
    assert time.monotonic() - began < 5
    assert (run.folder / ASKED).exists()


# --- beside the main thread --------------------------------------------------------------------------------


def thread(name: str, *functions: str, daemon: bool = True) -> dict[str, Any]:
    return {"name": name, "daemon": daemon, "stack": stack(*functions)}


def reported(run: Run, tense: int = PAST) -> list[str]:
    """What is told of rank 0, and below it."""
    state = state_of(run, 0, asked=True)
    text = re.sub(r" for \d+\.\d s", "", words.state_text(run, state))
    return [text, *(line.strip() for line in words.beside_lines(state, tense))]


def test_threads_are_told_by_name() -> None:
    threads = [thread("saver", "all_reduce"), thread("a"), thread("b"), thread("lib") | {"stack": []}]
    at = "cell.py, line 12"
    told = [f'its thread "saver" waited in all_reduce ({at})', f'each of its 2 threads "a", "b" was at {at}']
    assert reported(run_of(elsewhere() | {"threads": threads})) == [f"was at {at}", *told]
    # it is the saver that waits in the collective, not the main thread in its own function
    record = waits(5) | {"stack": [("/venv/threading.py", 3, "join"), *stack()], "threads": threads[:1]}
    assert reported(run_of(record)) == [f"was in join ({at})", told[0]]
    assert reported(run_of(record | {"threads": []})) == [f"waited in join ({at})"]
    # a daemon ends with its rank, for whose part in a collective others may wait
    record = {"asked": True, "threads": threads}
    assert reported(run_of(record, returned=(0,))) == ["had returned", told[0]]
    now = reported(run_of(elsewhere() | {"threads": threads[:1]}), PRESENT)
    assert now[1:] == [f'its thread "saver" waits in all_reduce ({at})']


def dump(*functions: str) -> str:
    """The stack of a forked process that is at a line of the learner's."""
    start = ("/lib/multiprocessing/process.py", 9, "_bootstrap")
    places = [("/course/data.py", 7, "get"), *(("/venv/lib.py", 8, name) for name in functions), start]
    lines = [f'  File "{file}", line {line} in {name}\n' for file, line, name in [*places, *stack()]]
    return "Current thread 0xaa (most recent call first):\n" + "".join(lines)


def test_forked_processes_are_told_where_the_rank_may_wait_for_them() -> None:
    forked = {"forked": [dump("_worker_loop"), dump("work"), dump("_worker_loop"), dump("work"), "", "no"]}
    loads = elsewhere() | {"stack": [("/venv/dataloader.py", 3, "__next__"), *stack()]} | forked
    assert reported(run_of(loads)) == [
        "was in __next__ (cell.py, line 12)",
        "each of its 2 DataLoader workers was at data.py, line 7",
        "each of its 2 forked processes was at data.py, line 7",
    ]
    assert reported(run_of(waits(5) | forked)) == ["waited in all_reduce (cell.py, line 12)"]
    assert reported(run_of(elsewhere() | forked)) == ["was at cell.py, line 12"], "it is busy itself"


def test_what_ended_a_thread_is_told_and_where_nothing_else_explains_it_first() -> None:
    frame = {"file": "/course/cell.py", "line": 9, "function": "fetch", "source": [[9, "open(path)"]]}
    error = {"thread": "prefetch", "type": "OSError", "message": "gone\nfor good", "frames": [frame]}
    run = run_of(elsewhere(), elsewhere())
    RankFiles(run.folder, 0).facts.write_text(json.dumps({"thread_errors": [error], "phase": "at work"}))
    raised = 'thread "prefetch" raised OSError: gone'
    assert reported(run)[1:] == [f"its {raised} (cell.py, line 9: open(path))"]
    lines = words.error_text(run, report_on(run, {0: None, 1: None}, {}, timeout=3)).splitlines()
    assert lines[0] == f"not done after 3 s: rank 0's {raised}"

    write_failure(run.folder, 0, type="Empty", message="", frames=[])
    failures = {0: failure_of(run, 0, 1)}
    lines = words.error_text(run, report_on(run, {0: 1, 1: None}, failures)).splitlines()
    assert lines[:3] == ["rank 0 raised Empty", "", f"    its {raised} (cell.py, line 9: open(path))"]


def test_a_program_whose_ranks_were_not_seen_is_told_how_they_show() -> None:
    head = words.error_text(Run.create("made", 0), Report(timeout=3)).partition("\n")[0]
    assert head == "not done after 3 s; no rank was seen: one shows once it calls place, track or log"


# --- while it lasts ---------------------------------------------------------------------------------------


def test_the_warning_is_in_the_present_tense() -> None:
    at = elsewhere({"0": 4}, stood=60)
    assert warning(run_of(waits(5), waits(5), at, at)).splitlines() == [
        "ranks 2, 3 have not called all_reduce (collective 5), in which ranks 0, 1 wait",
        "rank 0 waits in all_reduce for 12.5 s (cell.py, line 12)",
        "rank 1 waits in all_reduce for 12.5 s (cell.py, line 12)",
        "rank 2 is at cell.py, line 12",
        "rank 3 is at cell.py, line 12",
    ]
    assert explanation(run_of(waits(5), at), PRESENT) == (
        "rank 1 has not called all_reduce (collective 5), in which rank 0 waits"
    )


def test_a_rank_outside_the_learners_code_has_not_moved() -> None:
    run = run_of(elsewhere() | {"stack": [(TORCH, 7, "wait")]})
    assert warning(run) == "rank 0 has not moved for 12.5 s"


def test_only_a_long_standstill_is_told_and_only_of_who_is_still_there() -> None:
    assert stalled(run_of(waits(5, stood=WARN_SECONDS - 5), elsewhere({"0": 4}, stood=0)), {}) == ""
    assert stalled(run_of(elsewhere({"0": 4}), returned=(0,)), {}) == ""
    assert stalled(run_of({"called": {"0": 3}, "pending": [], "recent": []}, None), {}) == ""
    assert len(stalled(run_of(waits(5), elsewhere({"0": 4}, stood=0)), {}).splitlines()) == 2


def test_a_rank_that_has_returned_and_does_not_end_is_told() -> None:
    run = run_of(elsewhere({"0": 4}), elsewhere({"0": 4}), elsewhere({"0": 4}), returned=(0, 1, 2))
    for rank in (0, 1):
        lives(run, rank)
    for rank in (0, 2):  # rank 1 has only just returned, and rank 2 has ended
        os.utime(RankFiles(run.folder, rank).result, times=(time.time() - LONG,) * 2)
    ended = r"rank 0 returned 1[2-9]\.\d s ago, and its process has not ended"
    assert re.fullmatch(ended, stalled(run, {}))
    assert re.fullmatch(
        r"had returned 1[2-9]\.\d s before, and its process had not ended", doing(run, 0, None)
    )
    assert [doing(run, rank, None) for rank in (1, 2)] == ["had returned"] * 2
    threads = [thread("daemon"), thread("beats", daemon=False), thread("x", daemon=False) | {"stack": []}]
    (run.folder / "rank-0.where").write_text(json.dumps(elsewhere() | {"threads": threads}))
    keeps = "(not a daemon: the process waits for it)"
    assert reported(run)[1:] == [
        f'its thread "beats" {keeps} was at cell.py, line 12',
        f'its thread "x" {keeps} was running',
    ]
    RankFiles(run.folder, 2).result.unlink()
    (run.folder / "rank-2.where").write_text(json.dumps(elsewhere(stood=0)))
    assert stalled(run, {}) == "", "rank 2 works on: that is progress"


def test_of_many_some_are_shown() -> None:
    lines = stalled(run_of(*[waits(5)] * (MOST_RANKS + 12)), {}).splitlines()
    assert len(lines) == MOST_RANKS + 1
    assert lines[-1] == "and 12 more"


# --- at its end, as data (of a real hang: tests/faults/test_launch_faults.py) ------------------------------

AT_12 = ("/course/cell.py", 12, "train")


@pytest.mark.parametrize(
    ("record", "doing"),
    [
        ({"stack": [("/torch/_t.py", 3, "backward"), AT_12], "pending": [1]}, "waits in backward"),
        ({"stack": [("/torch/serialization.py", 3, "save"), AT_12]}, "is in save"),
    ],
)
def test_where_a_rank_stood(record: dict[str, Any], doing: str) -> None:
    run = Run.create("train", 1, started=time.time() - 10)
    (run.folder / "rank-0.where").write_text(json.dumps({"since": run.started + 4} | record))
    run.record.end("failed")

    (stall,) = stalls(Run.open(run.folder))
    assert (stall.rank, stall.doing) == (0, doing)
    assert stall.line == "cell.py, line 12"


@pytest.mark.parametrize(
    ("file", "doing"), [("result", "has returned"), ("failure.json", "has failed"), ("log", "is gone")]
)
def test_a_rank_that_stood_nowhere(file: str, doing: str) -> None:
    run = run_of(None if doing == "is gone" else elsewhere())
    (run.folder / f"rank-0.{file}").touch()
    run.record.end("failed")

    (stall,) = stalls(run)
    assert (stall.doing, stall.line) == (doing, "")
