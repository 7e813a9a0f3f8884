"""What a rank waits for where it waits for no rank."""

from __future__ import annotations

import pytest

from course_lib.report.cause_words import PRESENT, cause_text
from course_lib.report.facts import Absence, Call, Position, RankState

LIB = "/usr/lib/python3"
QUEUED = "an item that nobody has put into the queue"
WAITS = {
    "q.get()": ([("queue.py", "get"), ("threading.py", "wait")], QUEUED),
    "simple.get()": ([], QUEUED),
    "q.put(1)": ([("queue.py", "put"), ("threading.py", "wait")], "room in a queue that nobody takes from"),
    "t.join()": ([("threading.py", "join")], "a thread that has not ended"),
    "p.join()": ([("process.py", "join"), ("popen_fork.py", "wait")], "a process that has not ended"),
    'run(["sleep"])': ([("subprocess.py", "run")], "a process that has not ended"),
    "f.result()": ([("_base.py", "result"), ("threading.py", "wait")], "a result that is not there"),
    "e.wait()": ([("threading.py", "wait")], "an event or a condition that nobody has signalled"),
    "r.get()": ([("pool.py", "get"), ("threading.py", "wait")], "a result of its pool's workers"),
    "lock.acquire()": ([], "a lock that has not been released"),
    "with lock:": ([], "a lock that has not been released"),
    "fcntl.flock(f, 2)": ([], "a lock that has not been released"),
    's.get("ready")': ([], "a key that no rank has set in the store"),
    's.wait(["ready"])': ([], "a key that no rank has set in the store"),
    'barrier(s, 2, "b", 300)': ([("store.py", "barrier")], "a key that no rank has set in the store"),
    "work.wait()": ([], "an operation that has not finished, such as a message whose other rank never came"),
    "next(batches)": ([("dataloader.py", "__next__")], "a batch of its DataLoader's workers"),
    "asyncio.run(main())": ([("base_events.py", "run_forever")], "a task of its asyncio loop"),
    'input("on? ")': ([], "a keyboard, which a rank does not have"),
    "s.accept()": ([("socket.py", "accept")], "another process or a file"),
    "init()": (
        [("distributed_c10d.py", "init_process_group")],
        "ranks that never joined under the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    ),
}


def idle(rank: int, call: str, inner: list[tuple[str, str]] | None = None) -> RankState:
    stack = [(f"{LIB}/{file}", 1, function) for file, function in reversed(inner or [])]
    return RankState(rank, "at work", stack=[*stack, ("/course/cell.py", 3, "train")], own_call=call)


@pytest.mark.parametrize("call", WAITS)
def test_each_kind_of_wait_has_a_cause(call: str) -> None:
    inner, what = WAITS[call]
    assert cause_text(None, [idle(0, call, inner)]) == f"rank 0 waited for {what}: {call}"


def test_ranks_that_only_stand_are_told_where_nothing_else_is() -> None:
    slept = idle(1, "time.sleep(60)"), idle(2, "time.sleep(60)")
    got = idle(0, "q.get()", [("queue.py", "get")])
    assert (
        cause_text(None, [got, *slept])
        == f"rank 0 waited for {QUEUED}: q.get(); ranks 1, 2 were in time.sleep(60)"
    )
    assert cause_text(None, slept, PRESENT) == "ranks 1, 2 are in time.sleep(60)"
    assert cause_text(None, [RankState(0, "at work")]) == ""
    leaves = idle(3, "with writer:", [("writer.py", "__exit__"), ("writer.py", "flush")])
    assert cause_text(None, [leaves]) == "rank 3 was in with writer:", "that takes no lock"


def test_what_keeps_a_missing_rank_is_told_too() -> None:
    absence = Absence([0], [1], Call("barrier", number=1), returned=False)
    never = "rank 0 never called barrier (collective 1), in which rank 1 waited"
    got = idle(0, "q.get()", [("queue.py", "get")])
    told = f"{never}; rank 0 waited for {QUEUED}: q.get()"
    assert cause_text(absence, [got, idle(1, "barrier()")]) == told
    assert cause_text(absence, [idle(0, "time.sleep(9)"), idle(1, "barrier()")]) == never


def test_no_thread_of_a_rank_runs() -> None:
    frame = {"file": "/course/cell.py", "line": 3, "source": []}
    silent = RankState(0, "at work", silent=12.3, position=Position(frame, None, waits=False))
    held = "Python's interpreter lock for 12 s, so that no other thread could run"
    assert cause_text(None, [silent]) == f"rank 0 held {held}"
    stopped = RankState(1, "at work", silent=12.3)
    why = "not run for 12 s: it is stopped, or C code holds Python's interpreter lock"
    assert cause_text(None, [stopped], PRESENT) == f"rank 1 has {why}"
