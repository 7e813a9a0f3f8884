"""launch(): what goes to the ranks, what comes back, and what is refused before anything starts."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import RankError, Run, launch
from course_lib.launcher import watch
from course_lib.launcher.dashboard import TerminalView
from course_lib.launcher.processes import Ranks
from tests.support.cells import cell, quiet_launch
from tests.support.processes import alive, listening, wait_for
from tests.support.programs import Jump, all_at


def gone(run: Run) -> bool:
    """Whether none of a run's processes lives."""
    pids = [run.facts(rank).get("pid") for rank in range(run.world_size)]
    return not any(pid and alive(pid) for pid in pids)


def runs_of(course_home: Path) -> list[Path]:
    return list((course_home / "runs").glob("*"))


# --- functions --------------------------------------------------------------------------------------------


def test_ranks_meet_reduce_and_return() -> None:
    def work(start: int, *, step: int) -> tuple[int, float]:
        dist.init_process_group("gloo")
        value = torch.tensor(float(start + step * dist.get_rank()))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]), value.item()

    run = quiet_launch(work, 10, step=5, nprocs=3)

    assert run.results == [(0, 45.0), (1, 45.0), (2, 45.0)]
    assert (run.name, run.world_size, run.state, run.error) == ("work", 3, "done", "")
    assert run.seconds > 0
    assert list(run.logs) == ["", "", ""]
    assert gone(run)


def test_a_process_that_a_rank_forks_is_no_rank() -> None:
    def work() -> list[int] | str:
        codes = []
        for end in ("returns", "exits", "raises"):
            if pid := os.fork():
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif end == "exits":
                sys.exit(0)
            elif end == "raises":
                raise KeyError("of the forked one")
            else:
                return "the forked one's"
        return codes

    assert quiet_launch(work, nprocs=2).results == [[0, 0, 1]] * 2


def test_a_program_that_a_rank_starts_is_no_rank() -> None:
    def work() -> tuple[str, int]:
        program = "from course_lib import place, track; place(); print(len(list(track(range(3)))))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout, os.getpid()

    run = quiet_launch(work, nprocs=1)
    assert run.results == [("3\n", run.facts(0)["pid"])]
    assert run.logs == [""]


def test_what_the_function_registers_at_exit_runs(tmp_path: Path) -> None:
    def work() -> None:
        atexit.register((tmp_path / os.environ["RANK"]).touch)

    quiet_launch(work, nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["0", "1"]


def test_a_function_of_a_module_of_the_learners_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_training.py").write_text("import os\ndef work():\n    return 'first'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_training

    assert quiet_launch(my_training.work).results == ["first", "first"]
    (tmp_path / "my_training.py").write_text("import os\ndef work():\n    return 'edited'\n")
    assert quiet_launch(my_training.work).results == ["edited", "edited"]  # the ranks are fresh


# --- what comes back --------------------------------------------------------------------------------------


def test_what_is_made_to_be_shared_is_shared() -> None:
    model = torch.nn.ParameterList([torch.zeros(2) for _ in range(120)]).share_memory()
    spawn = multiprocessing.get_context("spawn")
    queue, event, value = spawn.Queue(), spawn.Event(), spawn.Value("i", 0)

    def work(given: dict[str, Any]) -> bool:
        rank = int(os.environ["RANK"])
        with torch.no_grad():
            given["model"][-1][rank] += rank + 1
        with value.get_lock():
            value.value += 1
        queue.put(rank)
        return event.is_set()

    event.set()
    assert quiet_launch(work, {"model": model}, nprocs=2).results == [True, True]
    assert model[-1].tolist() == [1, 2]
    assert value.value == 2
    assert sorted([queue.get(timeout=60), queue.get(timeout=60)]) == [0, 1]


def test_a_result_that_cannot_be_sent_back_is_named() -> None:
    def work() -> dict[str, Any]:
        return {"guard": [threading.Lock()]} if os.environ["RANK"] == "1" else {}

    named = r"rank 1 raised TypeError: the function returned a dict.* \(result\['guard'\]\[0\] is <.*lock"
    with pytest.raises(RankError, match=named) as caught:
        quiet_launch(work)
    assert caught.value.rank == 1
    assert "entry.py" not in str(caught.value), "the library's own lines are no help"
    assert not list(caught.value.run.folder.glob("*.part"))


def test_a_result_that_cannot_be_loaded_again_is_told_and_the_run_has_ended() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return eval, ("1 / 0",)

    why = (
        r"result cannot be read here \(nor can those of rank 1\): a Odd \(ZeroDivisionError: division by zero"
    )
    with pytest.raises(RankError, match=why) as caught:
        quiet_launch(lambda: Odd())
    assert caught.value.run.state == Run.open().state == "failed"


def test_where_one_result_cannot_be_read_its_rank_is_told_and_the_others_are_kept() -> None:
    def work() -> Any:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        return model if dist.get_rank() == 1 else 0.5

    told = r"rank 1 is done, but its result .*: a DistributedDataParallel \(.*return .* state_dict\(\)"
    with pytest.raises(RankError, match=told) as caught:
        quiet_launch(work)
    assert (caught.value.rank, caught.value.run.results) == (1, [0.5, None])


# --- what the ranks find ----------------------------------------------------------------------------------


def a_broken_pipe(*_: Any) -> None:
    raise BrokenPipeError("nobody reads")


def test_a_display_that_fails_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TerminalView, "update", a_broken_pipe)
    run = launch(time.sleep, 0.5, nprocs=2, device="cpu")
    assert (run.state, Run.open().state, run.results) == ("done", "done", [None, None])
    assert capsys.readouterr().err == (
        "course_lib: this run cannot be shown in full (BrokenPipeError: nobody reads)\n"
    )


def test_where_watching_fails_the_ranks_end_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "report_on", a_broken_pipe)  # asked for the report of a failure
    with pytest.raises(BrokenPipeError):
        launch(lambda: print("a last line") or 1 / 0, nprocs=2, device="cpu")
    run = Run.open()
    assert (run.state, run.error) == (
        "failed",
        "the launcher itself failed, so the ranks were ended: BrokenPipeError('nobody reads')",
    )
    assert gone(run)
    assert "a last line" in capsys.readouterr().out, "the display has come to its end"


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_cannot_be_ended_changes_nothing_of_what_is_told(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = Ranks.kill

    def hung(ranks: Ranks) -> None:
        kill(ranks)
        raise subprocess.TimeoutExpired("a rank", 5)

    monkeypatch.setattr(Ranks, "kill", hung)
    with pytest.raises(RankError, match="ZeroDivisionError") if fails else contextlib.nullcontext():
        quiet_launch(lambda: 1 // (not fails))
    assert Run.open().state == ("failed" if fails else "done")
    assert "a process of this run may still be there: TimeoutExpired" in capsys.readouterr().err


def test_the_environment_is_as_torchrun_sets_it() -> None:
    found = quiet_launch(lambda: dict(os.environ), nprocs=3).results

    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == ["0", "1", "2"]
    for each in found:
        assert each["WORLD_SIZE"] == each["LOCAL_WORLD_SIZE"] == "3"
        assert (each["MASTER_ADDR"], each["GROUP_RANK"]) == ("127.0.0.1", "0")
        assert each["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert each["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert 0 < int(each["MASTER_PORT"]) < 65536
        assert int(each["OMP_NUM_THREADS"]) >= 1
        assert each["OMP_WAIT_POLICY"] == "PASSIVE", "idle threads sleep"
        assert each["PYTHON_COLORS"] == "0", "or Python 3.13 puts them between the words of a traceback"
    assert len({each["MASTER_PORT"] for each in found}) == 1
    assert "RANK" not in os.environ, "nothing of it stays in the kernel"


def test_the_learners_changes_reach_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> tuple[Any, ...]:
        return os.environ.get("COLOUR"), os.getcwd(), str(tmp_path) in sys.path

    monkeypatch.setenv("COLOUR", "green")
    quiet_launch(work)
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert quiet_launch(work).results == [("blue", str(tmp_path), True)] * 2
    monkeypatch.delenv("COLOUR")
    assert quiet_launch(work).results == [(None, str(tmp_path), True)] * 2


def test_what_torch_reads_while_it_is_loaded_may_be_set_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fork server has loaded it before."""

    def work() -> tuple[str, int]:
        dist.init_process_group("gloo")
        return dist.get_debug_level().name, logging.getLogger("torch.distributed").getEffectiveLevel()

    assert quiet_launch(work, nprocs=1).results == [("OFF", logging.WARNING)]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TORCH_LOGS", "+distributed")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    run = quiet_launch(work, nprocs=1)
    assert run.results == [("DETAIL", logging.DEBUG)]
    assert re.search(r"^\[[IV]\d+ .*\.cpp:\d+\]", run.logs[0], re.MULTILINE), "C++'s own messages"


def test_the_cores_are_shared_out() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for nprocs in (1, 2):
        found = quiet_launch(torch.get_num_threads, nprocs=nprocs).results
        assert found == [max(1, cores // nprocs)] * nprocs


def test_random_numbers_differ_between_ranks_and_launches() -> None:
    def work() -> tuple[float, ...]:
        return float(np.random.rand()), random.random(), torch.initial_seed(), float(torch.rand(()))

    drawn = quiet_launch(work).results + quiet_launch(work).results

    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [4] * 4


def test_a_rank_starts_processes_as_a_plain_program_does() -> None:
    """A DataLoader's workers get a data set defined in a cell, which only a fork hands them."""
    loading = cell("""
        import multiprocessing
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, i):
                return i * i

        def work():
            batches = [batch.tolist() for batch in DataLoader(Squares(), batch_size=4, num_workers=2)]
            return multiprocessing.get_start_method(), batches
        """)

    for method, batches in quiet_launch(loading.work).results:
        assert method == multiprocessing.get_start_method()
        assert batches == [[0, 1, 4, 9], [16, 25, 36, 49]]


# --- what is refused --------------------------------------------------------------------------------------


def takes(x: Any) -> None: ...


DO_NOT_FIT = "takes cannot be called with these arguments: .*"


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        *[((takes, 1), {"nprocs": n}, f"whole number.*got {n!r}") for n in (0, "two", True, 1.5)],
        *[((takes, 1), {"timeout": s}, f"seconds above 0.*got {s!r}") for s in (0, math.inf, math.nan, "5")],
        ((takes, 1), {"device": "tpu"}, "'tpu'"),
        ((0.97,), {}, r"launch\(train, 3\).*0\.97, a float"),
        ((takes,), {}, f"{DO_NOT_FIT}missing.*x"),
        ((takes, 1, 2), {}, f"{DO_NOT_FIT}too many"),
        ((takes, 1), {"rate": 3}, f"{DO_NOT_FIT}.*unexpected.*rate"),
    ],
)
def test_a_wrong_call_is_told_before_anything_starts(
    args: Any, kwargs: Any, words: str, course_home: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        launch(*args, **kwargs)
    assert runs_of(course_home) == []


LOCK = threading.Lock()


def test_what_only_forked_processes_can_share_is_refused_with_what_would_do(course_home: Path) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    refused = (
        r"^argument 1 of takes cannot be .*: it is <multi.*Queue.*fork context.*by .*get_context\('spawn'\)"
    )
    with pytest.raises(TypeError, match=refused):
        launch(takes, queue)
    assert runs_of(course_home) == []


OTHERS = cell(
    """
class Config:
    lock = LOCK

class Trainer:
    __slots__ = ("parts",)
    def __init__(self): self.parts = [LOCK]
    def run(self): return LOCK

def helper(): return [LOCK for _ in range(2)]
def work(): return helper()
def reads(): return Config().lock
class Logs:
    def __init__(self): self.kept, self.left_out = {"to": LOCK}, LOCK
    def __getstate__(self): return {"kept": self.kept}
config, run = Logs(), Trainer().run
def reads_one(): return config
""",
    LOCK=LOCK,
)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "named"),
    [
        (takes, (LOCK,), {}, "argument 1 of takes"),
        (takes, (), {"x": {"deep": [LOCK]}}, "argument x="),
        (functools.partial(takes, LOCK), (), {}, "partial"),
        (cell("def work():\n    return LOCK\n", LOCK=LOCK).work, (), {}, "LOCK, which work uses"),
        ((lambda guard: lambda: guard)(LOCK), (), {}, "guard, which <lambda> uses"),
        (OTHERS.work, (), {}, "^LOCK, which helper uses, which work uses,"),
        (OTHERS.reads, (), {}, "^Config.lock, which reads uses,"),
        (OTHERS.reads_one, (), {}, r"^config.kept\['to'\], which reads_one uses,"),
        (OTHERS.run, (), {}, r"^run.__self__.parts\[0\]"),
    ],
)
def test_what_cannot_be_sent_is_named(
    function: Any, args: Any, kwargs: Any, named: str, course_home: Path
) -> None:
    with pytest.raises(TypeError, match=f"{named}.*cannot be sent to the ranks") as caught:
        launch(function, *args, **kwargs)
    assert "cannot pickle" in str(caught.value)
    assert "is <unlocked _thread.lock" in str(caught.value), "the thing itself"
    assert "\n" not in str(caught.value)
    assert runs_of(course_home) == []


# --- around it --------------------------------------------------------------------------------------------


def test_faults_leave_nothing_in_the_kernel_though_their_errors_are_kept() -> None:
    """No socket, no file, no thread, no process; and its own handler of interrupts is back."""
    kept: list[RankError] = []

    def bad(how: str) -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.barrier()
        if how == "raise":
            raise ValueError
        if how == "kill":
            os.kill(os.getpid(), 9)
        time.sleep(60)

    def mine(*_: Any) -> None: ...

    def faults() -> None:
        for how in ("raise", "kill", "hang"):
            with pytest.raises(RankError) as caught:
                quiet_launch(bad, how, timeout=0.5)
            kept.append(caught.value)
            assert signal.getsignal(signal.SIGINT) is mine
            assert quiet_launch(lambda: os.environ["RANK"]).results == ["0", "1"]
            assert signal.getsignal(signal.SIGINT) is mine

    me, theirs = psutil.Process(), signal.signal(signal.SIGINT, mine)
    try:
        faults()
        kept.clear()
        gc.collect()
        before = me.num_fds(), threading.active_count(), me.num_threads(), listening(me)
        faults()
    finally:
        signal.signal(signal.SIGINT, theirs)
    assert listening(me) == before[3]
    assert all(error.__traceback__ and gone(error.run) for error in kept)
    kept.clear()
    gc.collect()
    assert me.num_fds() <= before[0]
    assert threading.active_count() <= before[1]
    wait_for(lambda: me.num_threads() <= before[2], what="the store's threads to end")


def lingers() -> str:
    threading.Thread(target=time.sleep, args=(60,)).start()  # not a daemon: holds the interpreter up
    return "returned"


def test_a_rank_that_lingers_after_its_return_does_not_hold_the_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "LINGER_SECONDS", 0.3)

    def beats() -> None:
        time.sleep(60)

    def work() -> str:
        if os.environ["RANK"] == "1":
            threading.Thread(target=beats, name="heartbeat").start()  # not a daemon: holds the process up
        return "returned"

    run = launch(work)

    head, first, told = capsys.readouterr().out.splitlines()
    assert head == (
        "These ranks were killed 0.3 s after their function had returned (torchrun would have kept waiting):"
    )
    assert first == "rank 1 had returned"
    keeps = r' +its thread "heartbeat" \(not a daemon: the process waits for it\) was at .*time\.sleep\(60\)'
    assert re.fullmatch(keeps, told)

    assert run.seconds < 30
    assert run.results == ["returned", "returned"]
    assert run.state == "done"
    assert gone(run)


def test_ranks_that_have_returned_and_not_ended_are_done_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the end of a process takes seconds; the timeout is for the function."""
    jump = Jump(monkeypatch, lambda: all_at(None, None))

    run = quiet_launch(lingers, timeout=120)

    assert jump.at
    assert run.results == ["returned", "returned"]
    assert run.state == "done"
    assert gone(run)


def test_a_plain_script_without_a_main_guard(tmp_path: Path) -> None:
    """Its file is not run again in the ranks, also when launches in several threads overlap."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import json, os, sys, threading
        print("top level", flush=True)
        import torch, torch.distributed as dist
        from course_lib import launch, RankError

        class Outcome:
            def __init__(self, rank):
                self.rank = rank

        def work(x):
            dist.init_process_group("gloo")
            value = torch.tensor(float(x))
            dist.all_reduce(value)
            return Outcome(dist.get_rank()), value.item()

        def bad():
            raise ValueError("from the script")  # marked

        def several(x):
            for _ in range(3):
                found.append((x, [value for _, value in launch(work, x, dashboard=False).results]))

        results = launch(work, 3, dashboard=False).results
        assert [type(outcome) for outcome, _ in results] == [Outcome, Outcome]
        print(json.dumps([(outcome.rank, value) for outcome, value in results]))
        try:
            launch(bad, dashboard=False)
        except RankError as error:
            print(json.dumps(str(error)))

        main, found = sys.modules["__main__"], []
        threads = [threading.Thread(target=several, args=(x,)) for x in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [(x, [2.0 * x] * 2) for x in (1, 2, 3) for _ in range(3)], found
        assert sys.modules["__main__"] is main
        """)
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    first, results, report = done.stdout.splitlines()
    assert first == "top level", "the script's own lines ran once, in the kernel alone"
    assert json.loads(results) == [[0, 6.0], [1, 6.0]]
    assert "raised ValueError: from the script" in json.loads(report)
    assert 'raise ValueError("from the script")  # marked' in json.loads(report)
    assert done.stderr == ""


def test_a_function_may_mention_cudnn() -> None:
    def tuned() -> bool:
        torch.backends.cudnn.benchmark = True
        return torch.backends.cudnn.benchmark

    assert quiet_launch(tuned, nprocs=1).results == [True]
    assert quiet_launch(lambda module: module.__name__, torch.backends.cudnn, nprocs=1).results == [
        "torch.backends.cudnn"
    ]


def test_a_notebook_that_was_emptied_by_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's `%reset` takes away the __spec__ of __main__, which multiprocessing asks for."""
    emptied = types.ModuleType("__main__")
    del emptied.__spec__
    monkeypatch.setitem(sys.modules, "__main__", emptied)
    assert quiet_launch(os.getpid, nprocs=1).results != [os.getpid()]
    assert sys.modules["__main__"] is emptied
