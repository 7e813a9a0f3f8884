"""Nobody else gets in: where the course listens, and who may enter its folders."""

from __future__ import annotations

import contextlib
import os
import stat
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from course_lib import Run, launch, torchrun
from tests.support.processes import Socket, listening, wait_for

LOOPBACK = {"127.0.0.1", "::1"}
RANKS = """
    import os, time
    from pathlib import Path
    import torch, torch.distributed as dist

    def reduce_until_told():
        dist.init_process_group("gloo")
        there, rank = Path(os.environ["THERE"]), os.environ["RANK"]
        told = torch.zeros(1)
        while not told.item():  # rank 0 is told, and all leave together
            told.fill_(rank == "0" and (there / "go").exists())
            dist.all_reduce(told)
            (there / rank).touch()
            time.sleep(0.01)
        dist.destroy_process_group()
    """


@contextlib.contextmanager
def at_work(start: Callable[[], Run], there: Path) -> Iterator[tuple[Run, set[Socket]]]:
    """While ranks 0 and 1 call one collective after the other: their run, and who listens since it began."""
    before = listening(psutil.Process())
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(start()))
    umask = os.umask(0)  # whatever the learner's own is
    thread.start()
    try:
        wait_for(lambda: not thread.is_alive() or all((there / rank).exists() for rank in "01"))
        yield Run.open(), listening(psutil.Process()) - before
    finally:
        (there / "go").touch()
        thread.join(300)
        os.umask(umask)
    assert [run.state for run in runs] == ["done"]
    assert listening(psutil.Process()) <= before


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THERE", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_launch_listens_on_loopback_alone(there: Path, course_home: Path) -> None:
    ranks: dict[str, Callable[[], None]] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec(textwrap.dedent(RANKS), ranks)

    work = ranks["reduce_until_told"]
    with at_work(lambda: launch(work, nprocs=2, dashboard=False), there) as (run, found):
        store = int(run.environments[0]["MASTER_PORT"])
        assert Socket(os.getpid(), "127.0.0.1", store) in found, "the test does not see what listens"
        assert {each.pid for each in found} > {os.getpid()}, "it does not see the ranks"
        assert {each.host for each in found} <= LOOPBACK
        # what is put there as a rank's result is unpickled: only the owner can
        assert [mode(path) for path in (course_home, course_home / "runs", run.folder)] == [0o700] * 3


def test_of_torchrun_only_its_own_store_for_the_ranks_listens_everywhere(there: Path) -> None:
    path = there / "script.py"
    path.write_text(textwrap.dedent(RANKS) + "reduce_until_told()\n")
    with at_work(lambda: torchrun(path, dashboard=False), there) as (run, found):
        ours = {each for each in found if each.pid == os.getpid()}
        everywhere = {each for each in found if each.host not in LOOPBACK}
        assert {each.host for each in ours} == {"127.0.0.1"}
        assert {each.host for each in everywhere} <= {"::", "0.0.0.0"}
        assert {each.port for each in everywhere} <= {int(run.environments[0]["MASTER_PORT"])}
        says = "store that torchrun itself opens for the ranks listens on every interface"
        assert says in " ".join((torchrun.__doc__ or "").split())
        assert everywhere, "torchrun's own store keeps to loopback now: its docstring says otherwise"
        assert mode(run.folder) == 0o700, "torchrun's logs are inside"
        assert (run.folder / "torchrun" / "node-0").is_dir()
