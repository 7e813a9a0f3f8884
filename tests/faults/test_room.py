"""Runs that need more room than there is: a large result, a full disk, no folder."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course_lib import RankError, Run, launch, torchrun
from tests.support.cells import cell, quiet_launch
from tests.support.programs import ENOUGH, assert_none_left, calling_work, script

pytestmark = pytest.mark.alone

FILLS = """
    import os
    from pathlib import Path
    from course_lib import log, track

    def fill():
        try:
            with open(Path(os.environ["COURSE_RUN"]) / "filling", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1000))
        except OSError:
            pass
    """
FULL = {
    "it goes on": "for i in track(range(3)):\n    log(loss=i)",
    "it prints": "for i in range(10_000):\n    print('x' * 1000)",
    "it raises": "raise ValueError('unheard')",
}
REMOVES = """
    import os, shutil
    import torch.distributed as dist
    from course_lib import log, track

    def work():
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 0:
            while os.path.exists(os.environ["COURSE_RUN"]):  # something new may come meanwhile
                shutil.rmtree(os.environ["COURSE_RUN"], ignore_errors=True)
        dist.barrier()
        for i in track(range(3)):
            log(loss=i)
            log(**{f"new {i}": i})
            print("still here")
        RAISES
    """


@pytest.fixture(autouse=True)
def _warm() -> None:
    """The seconds in which the fork server loads torch are in no test's time."""
    quiet_launch(int, nprocs=1)


def run_it(launcher: str, source: str, folder: Path, **options: Any) -> Run:
    if launcher == "launch":
        return launch(cell(source).work, **options)
    return torchrun(script(folder, calling_work(source)), **options)


def outcome(launcher: str, source: str, folder: Path, **options: Any) -> tuple[Run, str]:
    """The run, and the report of its failure, empty where it did not fail."""
    began = time.monotonic()
    try:
        run, report = run_it(launcher, source, folder, dashboard=False, **options), ""
    except RankError as error:
        run, report = error.run, str(error)
    assert time.monotonic() - began < 3 * ENOUGH
    assert run.state == ("failed" if report else "done")
    assert_none_left(run)
    return run, report


def test_a_result_that_takes_long_to_save() -> None:
    """Meanwhile the rank stands still, and writes that down."""

    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(1)
            return int, (7,)

    assert quiet_launch(lambda: Slow()).results == [7, 7]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The course's folder on a disk of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    monkeypatch.setenv("COURSE_HOME", str(folder / "home"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("launcher", "how"), [*(("launch", how) for how in FULL), ("torchrun", "it goes on")]
)
def test_a_full_disk(launcher: str, how: str, small_disk: Path, tmp_path: Path) -> None:
    source = FILLS + "\n    def work():\n        fill()\n"
    source += "".join(f"        {line}\n" for line in FULL[how].splitlines())
    one = {"nprocs": 1} if launcher == "launch" else {"nproc_per_node": 1}  # another might not even begin
    run, report = outcome(launcher, source, tmp_path, **one)
    print(report)

    if launcher == "torchrun":
        assert report == "", "nothing of it needs the disk"
    else:
        words = ["the disk that holds the run is full", "No space left on device"]
        words += ["raised ValueError: unheard"] if how == "it raises" else []  # there may be room for it
        assert any(word in report.splitlines()[0] for word in words)
        assert (words[0] in report) == (str(run.folder) in report)


def test_a_result_for_which_there_is_no_room(small_disk: Path, tmp_path: Path) -> None:
    run, report = outcome("launch", "import torch\ndef work():\n    return torch.ones(1 << 20)\n", tmp_path)
    assert "raised OSError: what the function returned cannot be kept: " in report
    assert "No space left on device" in report.splitlines()[0]
    assert not list(run.folder.glob("*.part")), "it makes room again"
    assert Run.open().error == report


def test_a_disk_that_is_full_before_the_run(small_disk: Path) -> None:
    (small_disk / "home/runs").mkdir(parents=True)
    with contextlib.suppress(OSError), open(small_disk / "filling", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1000))
    with pytest.raises(OSError, match="no run can be kept: No space left on device; set COURSE_HOME"):
        quiet_launch(lambda: 1)


@pytest.mark.parametrize(
    ("launcher", "ends"),
    [("launch", "return"), ("launch", "raise ValueError('unheard')"), ("torchrun", "return")],
)
def test_a_folder_that_is_removed_under_the_run(
    launcher: str, ends: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, report = outcome(launcher, REMOVES.replace("RAISES", ends), tmp_path)

    assert not run.folder.exists()
    assert f"how this run ended cannot be kept: [Errno 2] No such file or directory: '{run.folder}" in (
        capsys.readouterr().err
    )
    if launcher == "torchrun":
        assert report == "", "nothing of it needs the folder"
    else:
        assert "ended with exit code 1; the run's folder was removed" in report.splitlines()[0]
    assert list(run.logs) == ["", ""]
    assert run._repr_html_()
