"""launch() with the faults that torchrun's tests cause, too: how ranks end, hang, and save at the end."""

from __future__ import annotations

import ast
import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from course_lib import RankError, RankTimeout, launch, stalls
from course_lib.launcher.dashboard import warning_html
from course_lib.report.facts import Absence, Call
from tests.support.cells import cell, quiet_launch
from tests.support.kernels import Kernel
from tests.support.programs import (
    ENDS,
    ENOUGH,
    HANGS,
    Jump,
    all_at,
    assert_marked,
    assert_timed_out,
    lines_of,
)


@pytest.mark.parametrize("how", ENDS)
def test_how_a_rank_ends(how: str) -> None:
    source, words = ENDS[how]
    with pytest.raises(RankError) as caught:
        quiet_launch(cell(source).work, nprocs=1)
    report = str(caught.value)

    assert report.startswith(f"rank 0 {words}"), report
    assert_marked(report, source)
    assert ("There is no memory left for this" in report) == (how == "no memory")
    assert caught.value.run.state == "failed"


def test_the_worker_that_was_killed_is_told_with_its_signal() -> None:
    """Whatever torch says of it: the worker's end, or of a socket that was reset."""
    training = cell("""
        import os, torch, torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, i):
                if i == 20 and os.environ["RANK"] == "0":
                    os.kill(os.getpid(), 9)
                return torch.ones(2000)

        def work():
            dist.init_process_group("gloo")
            for x in DataLoader(Data(), batch_size=4, num_workers=2):
                dist.all_reduce(x.sum())
        """)
    for _ in range(2):
        with pytest.raises(RankError) as caught:
            quiet_launch(training.work)

        assert re.match(r"rank 0 raised (RuntimeError|ConnectionResetError): ", str(caught.value))
        told = str(caught.value).splitlines()[-1]
        assert re.match(r"A worker of rank 0, process \d+, was killed \(SIGKILL\)", told)
        assert re.search(r"Of \d+\.\d GiB of memory, \d+\.\d GiB were available afterwards\.$", told)


@pytest.mark.parametrize("how", HANGS)
def test_a_timeout_names_the_odd_one_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, why, doing = HANGS[how]
    defined = cell(source)
    jump = Jump(monkeypatch, lambda: all_at(*lines_of(doing)))
    with pytest.raises(RankTimeout) as caught:
        quiet_launch(defined.work, nprocs=len(doing), timeout=120)
    took = time.monotonic() - jump.at

    print(f"timeout to RankTimeout: {took:.2f} s")
    assert took < ENOUGH
    assert_timed_out(caught.value, why, doing, Path(defined.filename).name)
    run, report = caught.value.run, caught.value.report
    assert isinstance(caught.value, TimeoutError)
    assert (report.first_failure, report.timeout, report.failures) == (None, 120, [])
    returned = [told == "had returned" for told in doing]
    assert [state.phase == "returned" for state in report.states] == returned
    assert run.results == ["early" if each else None for each in returned]
    if how == "a rank does not join":
        assert report.wait_cause == Absence([0], [1], Call("init_process_group"), returned=False)
    if how == "a rank never calls the collective":
        waits, sleeps = stalls(run)
        assert (waits.doing, sleeps.doing) == ("waits in all_reduce", "is at a line of its own")
        assert waits.line.endswith("dist.all_reduce(torch.ones(1))")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("os.environ['MASTER_PORT'] = '1'", r"MASTER_PORT is 1 instead of \d+ on ranks 0, 1"),
        ("arguments.update(rank=0, world_size=3)", "RANK is 0 instead of 1 on rank 1; WORLD_SIZE is 3 .+"),
        (
            "arguments.update(rank=r, world_size=2, init_method=f'file://{tempfile.mkdtemp()}/meet')",
            r"init_method is file://\S+/meet on rank 0 and init_method is file://\S+/meet on rank 1",
        ),
        ("dist.set_debug_level(dist.DebugLevel.DETAIL)", "rank 1 never called barrier"),
    ],
)
def test_ranks_that_never_meet(line: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"""
    import os, tempfile, time, torch.distributed as dist

    def work():
        arguments, r = {{}}, int(os.environ["RANK"])
        {line}
        dist.init_process_group("gloo", **arguments)
        if r == 1:
            time.sleep(600)
        dist.barrier()
    """
    lines = (9, 8) if "barrier" in why else (6, 6)
    Jump(monkeypatch, lambda: all_at(*lines))
    with pytest.raises(RankTimeout) as caught:
        quiet_launch(cell(source).work, timeout=120)
    apart = "" if "barrier" in why else "the ranks do not meet in init_process_group: "
    assert re.match(f"not done after 120 s: {apart}{why}", str(caught.value)), str(caught.value)


def test_where_gloo_aborts_the_calls_are_told() -> None:
    line = "dist.all_reduce(torch.ones(3).to([torch.float64, torch.float32][r]), group=group)"
    source = f"""
    import torch, torch.distributed as dist

    def work():
        dist.init_process_group("gloo")
        r, group = dist.get_rank(), dist.new_group([1, 0])
        {line}
        dist.barrier()
    """
    with pytest.raises(RankError) as caught:
        quiet_launch(cell(source).work)
    head, _, rest = str(caught.value).partition("\n\n")
    assert head == (
        "the ranks do not match: collective 1 of group [0, 1] is all_reduce of shape [3] of float64 "
        "on rank 0 and all_reduce of shape [3] of float32 on rank 1"
    )
    assert "aborted (SIGABRT)" in rest
    assert re.findall(r"----> +6     (.*)", rest) == [line], "of the one that did"
    assert "compat" not in rest
    others = [told for told in rest.splitlines() if told.startswith("rank ") and "aborted" not in told]
    assert [line in told for told in others] == [True], "of the other, which may be further"


def test_a_message_that_is_too_large_is_told_with_both_sizes() -> None:
    source = """
    import torch, torch.distributed as dist

    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.send(torch.ones(8, 4), 1)
        else:
            dist.recv(torch.ones(4, 4), 0)  # here
        dist.barrier()
    """
    with pytest.raises(RankError) as caught:
        quiet_launch(cell(source).work)
    told = "code: another rank sent it 128 bytes, and it had room for 64; meanwhile its code was here:\n"
    assert re.match(rf"rank 1 aborted \(SIGABRT\) in a thread that runs no Python {told}", str(caught.value))
    assert_marked(str(caught.value), source)


def test_a_collective_that_times_out_by_itself_tells_who_is_missing() -> None:
    source = """
    import datetime, time, torch, torch.distributed as dist

    def work():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))  # here
        while True:
            time.sleep(0.05)
    """
    with pytest.raises(RankError) as caught:
        quiet_launch(cell(source).work)
    head = str(caught.value).partition("\n\n")[0]
    assert head == "rank 1 never called all_reduce (collective 1), in which rank 0 waited"
    assert "rank 0 raised RuntimeError" in str(caught.value)
    assert_marked(str(caught.value), source)


def test_an_error_comes_first_while_its_rank_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import torch, torch.distributed as dist

    def work():
        dist.init_process_group("gloo")
        try:
            if dist.get_rank() == 1:
                1 / 0
            dist.all_reduce(torch.ones(1))
        finally:
            dist.barrier()
    """
    Jump(monkeypatch, lambda: all_at(8, 10))
    with pytest.raises(RankTimeout) as caught:
        quiet_launch(cell(source).work, timeout=120)
    head, *_, last = str(caught.value).splitlines()
    raised = "main thread raised ZeroDivisionError: division by zero"
    assert head.startswith(f"not done after 120 s: rank 1's {raised}; the ranks do not match: collective 1 ")
    assert re.fullmatch(rf"    its {raised} \(.*, line 7: 1 / 0\)", last)


def test_the_file_of_a_lock_is_told_and_who_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = """
    import os, time
    from filelock import FileLock
    from torch.utils.file_baton import FileBaton

    def work(folder):
        if os.environ["RANK"] == "0":
            with FileLock(f"{folder}/cache"):
                open(f"{folder}/built", "w").close()
                time.sleep(600)
        while not os.path.exists(f"{folder}/built"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            with FileLock(f"{folder}/cache"):
                pass
        FileBaton(f"{folder}/built").wait()
    """
    Jump(monkeypatch, lambda: all_at(9, 13, 15))
    with pytest.raises(RankTimeout) as caught:
        quiet_launch(cell(source).work, str(tmp_path), nprocs=3, timeout=120)
    told = str(caught.value).partition("\n")[0]
    assert f"rank 1 waited for the lock {tmp_path}/cache, which rank 0 holds: with FileLock(" in told
    left = "which no process here has locked: if it was left behind, delete it: FileBaton("
    assert f"rank 2 waited for the lock {tmp_path}/built, {left}" in told


def test_ranks_that_each_make_a_group_of_one_are_doubted(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for size in sizes[: int(os.environ["RANK"]) + 1]:
            one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
            dist.init_process_group("gloo", **one)
            dist.destroy_process_group()

    sizes = [1, 1]
    run = launch(work, nprocs=2, device="cpu")
    told = "the ranks do not meet in init_process_group: the world size is 1 instead of 2 on ranks 0, 1"
    out, err = capfd.readouterr()
    assert f"the run is done, but {told}\n" in out
    assert "course_lib" not in err, "nbgrader gives no points to a cell that writes there"
    assert f"<b>Not one group</b><br>{told}</div>" in warning_html(run)

    sizes = [2]
    assert warning_html(launch(work, nprocs=2, device="cpu")) == ""
    assert "world size" not in capfd.readouterr().out


def test_ranks_are_interrupted_and_may_save_before_they_are_killed(tmp_path: Path) -> None:
    """Whichever thread has launched them."""
    source = """
    import asyncio
    from course_lib import launch, Run

    def work(way):
        rank = os.environ["RANK"]
        say(f"{way}-{rank}")
        while True:
            try:
                while True:
                    time.sleep(0.05)
            except KeyboardInterrupt:
                print("saved", flush=True)
                if rank == "0":
                    return "saved"

    def run(way):
        try:
            launch(work, way, dashboard=False)
        except KeyboardInterrupt as error:
            run = error.run
            say("caught-" + way, repr((Run.open().state, run.results, run.logs, str(error))))

    def main(way):
        run(way)

    def thread(way):
        threading.Thread(target=run, args=[way]).start()
        time.sleep(600)

    def of_asyncio(way):
        asyncio.run(asyncio.to_thread(run, way))

    for way in (main, thread, of_asyncio):
        try:
            way(way.__name__)
        except KeyboardInterrupt:
            pass
        while not (THERE / f"caught-{way.__name__}").exists():
            time.sleep(0.01)
    """
    with Kernel(tmp_path, source) as kernel:
        for way in ("main", "thread", "of_asyncio"):
            kernel.wait_for(f"{way}-0", f"{way}-1")
            kernel.interrupt()
            kernel.wait_for(f"caught-{way}")
            state, results, logs, text = ast.literal_eval((kernel.there / f"caught-{way}").read_text())
            assert (state, results, logs) == ("stopped", ["saved", None], ["saved\n"] * 2)
            assert text.endswith("killed, as still running 2 s after the interrupt: rank 1")
        assert kernel.process.wait(60) == 0


SLOW_TO_JOIN = """
    import time
    import torch.distributed as dist

    def work():
        class Slow(dist.Store):
            def get(self, key):
                if rank == 1 and key.endswith("/2"):
                    time.sleep(0.5)  # ranks 0 and 1 are connected by now, and rank 1 looks for rank 2
                return store.get(key)

            def set(self, key, value):
                store.set(key, value)

            def add(self, key, amount):
                return store.add(key, amount)

            def wait(self, keys, *timeout):
                store.wait(keys, *timeout)

            def has_extended_api(self):
                return False

        store, rank, world_size = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=Slow(), rank=rank, world_size=world_size)
        dist.destroy_process_group()
        return rank
    """


def test_a_rank_that_joins_and_leaves_does_not_fail_one_that_still_joins() -> None:
    defined = cell(SLOW_TO_JOIN)
    for _ in range(6):  # one in three would fail
        assert quiet_launch(defined.work, nprocs=3).results == [0, 1, 2]
