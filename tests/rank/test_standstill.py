"""What a rank writes down about its own standstill."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import Run
from course_lib.compat import flight_recorder
from course_lib.rank import standstill
from course_lib.rank.standstill import StallRecorder
from course_lib.record.layout import ASKED, RankFiles
from course_lib.report.stacks import position_of
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

NOTHING = {"called": {}, "pending": [], "recent": []}


def record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have called some in this very process."""
    monkeypatch.setattr(standstill, "flight_recorder", lambda *_, **__: b"")


@pytest.mark.usefixtures("no_collectives")
def test_a_standstill_is_on_record_until_the_thread_gets_on(tmp_path: Path) -> None:
    own, gates = StallRecorder(RankFiles(tmp_path, 0)), [threading.Lock(), threading.Lock()]

    def train() -> None:
        gates[0].acquire()  # stands here
        gates[1].acquire()  # and then here

    for gate in gates:
        gate.acquire()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    own._main = thread.ident
    wait_for(lambda: stands(own))
    seen = [record(own._path)]
    gates[0].release()
    wait_for(lambda: not stands(own))
    wait_for(lambda: stands(own))
    seen.append(record(own._path))
    gates[1].release()
    thread.join()

    (file, first, function), *_ = seen[0]["stack"]
    assert (file, function) == (__file__, "train")
    assert seen[1]["stack"][0] == [__file__, first + 1, function]
    assert seen[1]["since"] >= seen[0]["since"] + standstill.STILL_SECONDS
    assert seen[0] | NOTHING == seen[0], "no collective was called"


@pytest.fixture
def standing(tmp_path: Path, no_collectives: None) -> Iterator[StallRecorder]:
    """A `StallRecorder` at a thread that does not move until the test is over."""
    own, end = StallRecorder(RankFiles(tmp_path, 0)), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    own._main = thread.ident
    yield own
    end.set()
    thread.join()


def test_who_is_asked_says_at_once_where_it_stands(standing: StallRecorder, tmp_path: Path) -> None:
    standing.look(0)
    assert not standing._path.exists(), "it may be at work"
    (tmp_path / ASKED).touch()
    standing.look(1)  # a step further: it has not stood still at all
    told = record(standing._path)
    assert (told["asked"], told["stack"][0][2]) == (True, "wait")


def test_the_learners_line_is_on_record_however_deep_a_library_waits(
    tmp_path: Path, no_collectives: None
) -> None:
    """A model of 200 nested modules has six hundred of torch's frames above the learner's."""
    end, model = threading.Event(), torch.nn.Module()
    model.forward = end.wait
    for _ in range(200):
        model = torch.nn.Sequential(model)

    def train() -> None:
        model(None)

    thread = threading.Thread(target=train)
    thread.start()
    own = StallRecorder(RankFiles(tmp_path, 0))
    own._main = thread.ident
    try:
        wait_for(lambda: stands(own))
    finally:
        end.set()
        thread.join()

    stack = record(own._path)["stack"]
    assert stack[0][2] == "wait"
    position = position_of(stack)
    assert position is not None
    assert (position.frame["function"], position.function) == ("train", "forward")


def stands(own: StallRecorder) -> bool:
    own.look(0)
    return "since" in record(own._path)


def test_steps_and_collectives_are_moves(standing: StallRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(lambda: stands(standing))
    standing.look(1)
    assert record(standing._path) == NOTHING | {"asked": False, "groups": {}}, "its loop goes on"

    wait_for(lambda: stands(standing))
    monkeypatch.setattr(standstill, "flight_recorder", lambda *_, **__: b"{}")
    assert not stands(standing)
    assert not standing._path.exists(), "it calls collectives: nothing needs to be known"


def test_a_call_that_only_polls_has_not_moved(
    standing: StallRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader looks every 5 s whether its workers are alive: that is no progress."""
    clock = {"now": 1000.0, "worked": 7.0}
    monkeypatch.setattr(standstill.time, "time", lambda: clock["now"])
    monkeypatch.setattr(standstill, "cpu_seconds", lambda _: clock["worked"])
    places = itertools.count()
    call: list[Any] = [(1, 2)]
    monkeypatch.setattr(standing, "_where", lambda: ((next(places), 0), call[0]))

    def since(worked: float) -> float:
        """Look again and again, while it works for this share of the time; the place is another each time."""
        for _ in range(50):
            clock["now"] += 0.1
            clock["worked"] += worked * 0.1
            standing.look(0)
        return clock["now"] - standing._stands_since

    assert since(worked=0.001) == pytest.approx(4.9)
    assert since(worked=0.001) == pytest.approx(9.9)
    assert since(worked=0.5) == 0, "it works there"
    assert since(worked=0) == pytest.approx(5)
    call[0] = (1, 4)
    assert since(worked=0) == pytest.approx(4.9), "the learner's code has moved on"
    call[0] = None
    assert since(worked=0) == 0, "no call of the learner's"
    call[0] = (1, 4)
    assert since(worked=math.nan) == 0, "the system does not say whether it works"


@pytest.mark.parametrize("word", [b"", b"no json", b"[]", b'{"entries": [{}]}', b'{"entries": null}'])
def test_without_a_flight_recorder_there_is_the_place(
    word: bytes, standing: StallRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "flight_recorder", lambda *_, **__: word)
    wait_for(lambda: stands(standing))
    assert record(standing._path) | NOTHING == record(standing._path)


def records(monkeypatch: pytest.MonkeyPatch, **entries: list[dict[str, Any]]) -> None:
    def word(of_nccl: bool = False, **_: Any) -> bytes:
        return json.dumps({"entries": entries["nccl" if of_nccl else "gloo"]}).encode()

    monkeypatch.setattr(standstill, "flight_recorder", word)


def test_nccl_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recorder is another one, and so are its numbers in a group that gloo serves, too."""
    common = {"process_group": ["0", "default_pg"], "input_sizes": [[1]], "is_p2p": False, "retired": False}
    gloo = common | {"collective_seq_id": 5, "profiling_name": "gloo:all_reduce", "state": "completed"}
    nccl = common | {"collective_seq_id": 2, "profiling_name": "nccl:broadcast", "state": "started"}
    for first, last in ((gloo, "broadcast"), (nccl, "all_reduce")):
        gloo["time_created_ns"], nccl["time_created_ns"] = (1, 2) if first is gloo else (2, 1)
        records(monkeypatch, gloo=[gloo], nccl=[nccl])
        told = standstill.flight()
        assert told["called"] == {"0": 5, "0 over nccl": 2}
        assert [(each["group"], each["name"]) for each in told["pending"]] == [("0 over nccl", "broadcast")]
        assert [each["name"] for each in told["recent"][-1:]] == [last], "the one that was called last"


def test_nccls_recorder_is_asked_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: torch's own recorder of NCCL answers, and has nothing."""
    if not hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json"):
        pytest.skip("this torch is built without NCCL")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert json.loads(flight_recorder(of_nccl=True, includeCollectives=False))
    assert list(standstill.collectives(of_nccl=True)) == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert flight_recorder(of_nccl=True) == b""


def last_word(run: Run, rank: int) -> dict[str, Any]:
    return record(run.folder / f"rank-{rank}.where")


def test_the_last_word_counts_the_collectives_of_each_group() -> None:
    def work() -> str:
        dist.init_process_group("gloo")
        group = dist.new_group([0, 1])
        for _ in range(3):
            dist.all_reduce(torch.ones(2, 5))
        if dist.get_rank() < 2:
            other = 1 - dist.get_rank()
            dist.broadcast(torch.ones(1), 0, group=group)
            pair = dist.isend(torch.ones(1), other), dist.irecv(torch.ones(1), other)
            for each in pair:  # no collective
                each.wait()
            dist.all_reduce(torch.ones(7), group=group)
            return group.group_name
        dist.destroy_process_group()  # the recorder remembers
        return ""

    run = quiet_launch(work, nprocs=3)

    name = run.results[0]
    for rank in range(2):
        word = last_word(run, rank)
        assert word["called"] == {"0": 3, name: 2}
        assert word["groups"] == {"0": [0, 1, 2], name: [0, 1]}
        assert last_call(word) == (name, 2, "all_reduce", [[7]], ["Float"])
    assert last_word(run, 2)["called"] == {"0": 3}
    assert last_call(last_word(run, 2)) == ("0", 3, "all_reduce", [[2, 5]], ["Float"])
    assert [call["number"] for call in last_word(run, 2)["recent"]] == [1, 2, 3]


def last_call(word: dict[str, Any]) -> tuple[Any, ...]:
    call = word["recent"][-1]
    return call["group"], call["number"], call["name"], call["sizes"], call["dtypes"]


def test_a_group_that_was_made_again_has_no_earlier_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of the default group before it, and of all that were made then, those of this one."""
    records(
        monkeypatch, gloo=[entry(0, "0", 1), entry(1, "7", 1), *(entry(2, "7", n) for n in (1, 2))], nccl=[]
    )
    told = standstill.flight()
    assert told["called"] == {"0": 1, "7": 2}
    assert [(call["group"], call["number"]) for call in told["recent"]] == [("0", 1), ("7", 1), ("7", 2)]

    before = [*(entry(0, "0", number) for number in (1, 2, 3)), entry(1, "7", 5)]
    records(monkeypatch, gloo=[*before, entry(2, "0", 1), entry(2, "0", 2)], nccl=[])
    told = standstill.flight()
    assert told["called"] == {"0": 2}
    assert told["pending"] == told["recent"]
    assert [(call["group"], call["number"]) for call in told["recent"]] == [("0", 1), ("0", 2)]


clock = itertools.count()


def entry(group_id: int, group: str, number: int, **more: Any) -> dict[str, Any]:
    """What the flight recorder tells of one collective, which has not ended."""
    told = {"pg_id": group_id, "process_group": [group, ""], "collective_seq_id": number, "input_sizes": []}
    told |= {"profiling_name": "gloo:barrier", "is_p2p": False, "retired": False, "state": "started"}
    return told | {"time_created_ns": next(clock)} | more


def test_what_the_recorder_has_forgotten_still_counts(
    standing: StallRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps 16 entries, of all groups and of messages."""
    for entries in ([entry(1, "7", 2)], [entry(0, "0", number) for number in (1, 2)]):
        records(monkeypatch, gloo=entries, nccl=[])
        standing.look(0)
    standing.close()
    assert record(standing._path)["called"] == {"7": 2, "0": 2}


def test_another_default_group_has_other_groups(
    standing: StallRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives them the same names once more; what has only been destroyed is still told."""
    world: Any = SimpleNamespace(group=SimpleNamespace(WORLD=Group()))
    monkeypatch.setitem(sys.modules, "torch.distributed", world)
    for made in ({"0": [0, 1, 2], "1": [0, 1]}, {}):
        monkeypatch.setattr(standstill, "process_groups", lambda made=made: (made, 2))
        records(monkeypatch, gloo=[entry(1, "1", 5)], nccl=[])
        standing.look(0)
        world.group.WORLD = None
    assert standing._groups == {"0": [0, 1, 2], "1": [0, 1]}
    assert standing._called == {"1": 5}
    world.group.WORLD = Group()
    monkeypatch.setattr(standstill, "process_groups", lambda: ({"0": [0, 1, 2]}, 2))
    records(monkeypatch, gloo=[entry(2, "0", 1)], nccl=[])
    standing.close()
    told = record(standing._path)
    assert (told["groups"], told["called"]) == ({"0": [0, 1, 2]}, {"0": 1})


class Group:
    """Stands for torch's, to which one may refer weakly."""


def test_the_line_of_a_collective_is_not_that_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [[{"filename": "/home/me/train.py", "line": line, "name": "train"}] for line in (3, 4)]
    traced = [entry(0, "0", 1, frames=lines[0]), entry(0, "0", 1, is_p2p=True, frames=lines[1])]
    monkeypatch.setattr(standstill, "traced_collectives", lambda of_nccl: [] if of_nccl else traced)
    assert standstill.called_at() == {("0", 1): ("/home/me/train.py", 3, "train")}


def test_the_last_record_stays(standing: StallRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that began before it, in another thread, ends after it, and writes nothing."""
    wait_for(lambda: stands(standing))
    last, writes = threading.Thread(target=standing.close), standstill.write_whole

    def slowly(path: Path, text: str) -> None:
        if threading.current_thread() is not last:
            last.start()
            assert not wait_for_end(last), "it waits for this one"
        writes(path, text)

    monkeypatch.setattr(standstill, "write_whole", slowly)
    standing.look(1)
    last.join()
    assert record(standing._path)["forked"] == []
    standing.look(2)
    assert record(standing._path)["forked"] == []


def wait_for_end(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return not thread.is_alive()
