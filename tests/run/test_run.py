"""Run: what the ranks returned, printed and measured, and what its folder gives when it is opened again."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from course_lib import RankError, Run, log, track
from course_lib.record.layout import TICK, RankFiles
from course_lib.record.trace import peak_bytes, shortened
from tests.support.cells import cell, quiet_launch
from tests.support.runs import made_run


def made(name: str = "made", world_size: int = 1, state: str = "done", **facts: Any) -> Run:
    """A run's folder without its ranks."""
    run = Run.create(name, world_size, **facts)
    if state != "running":
        run.record.end(state)
    return run


# --- what the ranks printed -------------------------------------------------------------------------------


def test_output_of_python_of_c_and_of_children_is_kept_apart() -> None:
    def work() -> None:
        rank = os.environ["RANK"]
        print(f"python {rank} – größer 批 🚀")
        print(f"error {rank}", file=sys.stderr)
        os.write(1, f"c {rank}\n".encode())
        os.write(2, f"c error {rank}\n".encode())
        subprocess.run(["echo", f"child {rank}"], check=True)
        os.write(1, b"not utf-8: \xff\n")
        print("10 %\r20 %\r100 %")
        print("no newline", end="")

    logs = quiet_launch(work).logs

    assert len(logs) == 2
    for rank, text in enumerate(logs):
        assert text == (
            f"python {rank} – größer 批 🚀\nerror {rank}\nc {rank}\nc error {rank}\nchild {rank}\n"
            "not utf-8: \ufffd\n100 %\nno newline"
        )


def test_what_gloo_says_in_torch_2_10_is_left_out() -> None:
    said = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    run = made()
    run.trace(0).files.log.write_text(f"start\n{said}\n{said[:-30]}\nmore {said}\n[Gloo] Rank 0\nend\n")

    assert run.logs[0].split("\n") == ["start", said[:-30], f"more {said}", "[Gloo] Rank 0", "end", ""]
    assert run.trace(0).last_lines(9)[0:2] == ["start", said[:-30]]


def test_the_last_lines_of_a_progress_bar() -> None:
    run = made()
    run.trace(0).files.log.write_text("start\n10 %\r20 %\r100 %\n" + "long " * 500 + "\nend\n\n")

    assert run.trace(0).last_lines(3) == ["100 %", shortened("long " * 500), "end"]
    assert run.trace(0).last_lines(1) == ["end"]


def test_of_much_output_the_end_is_given_and_all_of_it_kept() -> None:
    run = made()
    whole = "".join(f"{i:08} " + "x" * 1014 + "\n" for i in range(5 * 1024))
    run.trace(0).files.log.write_text(whole)
    (text,) = run.logs

    assert len(text) < (1 << 20) + 400
    assert text.startswith("[the first 4,194,304 of 5,242,880 bytes are only in ")
    assert text.splitlines()[-1] == whole.splitlines()[-1]
    assert str(run.folder / "rank-0.log") in text.splitlines()[0]


def test_a_print_just_before_the_end_is_kept() -> None:
    def work() -> None:
        print("last words")
        os.write(1, b"of C\n")
        os.kill(os.getpid(), 9)

    with pytest.raises(RankError) as caught:
        quiet_launch(work, nprocs=1)
    assert caught.value.run.logs[0] == "last words\nof C\n"


# --- opened again -----------------------------------------------------------------------------------------


TRAINING = """
    import os, time
    import numpy as np, torch
    from course_lib import log, place, track

    def work():
        place()
        rank = int(os.environ["RANK"])
        for step in track([torch.zeros(250)] * 4):
            log(loss=step.sum() + rank + 0.123456)
            time.sleep(0.001)
        print("trained", rank)
        return {
            "weights": torch.full((2,), float(rank)),
            "losses": np.linspace(0, 1, 3),
            "accuracy": np.float64(0.5),
            "hits": np.int64(7),
            "words": ["Größe – 批", (1, None, True), {"a": {2}}, b"bytes", 1 + 2j],
            "half": torch.full((2,), float(rank), dtype=torch.bfloat16),
            "state": torch.nn.Linear(2, 2).state_dict(),
        }
    """


def test_a_run_opened_again_is_the_same() -> None:
    """With what its ranks returned, of every plain kind, and its table in words."""
    run = quiet_launch(cell(TRAINING).work, device="cpu")

    for again in (Run.open(), Run.open(run.folder), Run.open(str(run.folder))):
        assert again.folder == run.folder
        assert (again.name, again.world_size, again.state) == ("work", 2, "done")
        assert again.seconds == run.seconds
        assert list(again.logs) == ["trained 0\n", "trained 1\n"]
        assert repr(again) == repr(run)
        assert again.table() == run.table()
        assert again._repr_html_() == run._repr_html_()
        assert again.samples_per_second() == run.samples_per_second() > 0
        for rank in range(2):
            assert again.metrics[rank].keys() == run.metrics[rank].keys()
            for name, series in run.metrics[rank].items():
                np.testing.assert_array_equal(again.metrics[rank][name], series)
            for result in (again.results[rank], run.results[rank]):
                assert torch.equal(result["weights"], torch.full((2,), float(rank)))
                assert torch.equal(result["half"], torch.full((2,), float(rank), dtype=torch.bfloat16))
                assert torch.equal(result["state"]["weight"], run.results[rank]["state"]["weight"])
                np.testing.assert_array_equal(result["losses"], [0, 0.5, 1])
                assert (result["accuracy"], result["hits"]) == (0.5, 7)
                assert result["words"] == ["Größe – 批", (1, None, True), {"a": {2}}, b"bytes", 1 + 2j]

    first, second = run.table()
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert (first["device"], first["samples"], first["last logged"]) == ("cpu", "1,000", "loss 0.1235")
    assert int(first["samples/s"].replace(",", "")) > 0
    assert first["peak memory"].endswith(" MiB")


def test_a_running_run_can_be_looked_at() -> None:
    run = made(state="running")
    assert run.results == [None]
    assert "running" in repr(run)
    assert 0 <= run.seconds < 60


def test_opening_what_is_not_there(course_home: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run yet in"):
        Run.open()
    with pytest.raises(FileNotFoundError, match="there is no folder /no/such/run"):
        Run.open("/no/such/run")
    with pytest.raises(ValueError, match="holds no whole run"):
        Run.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"name": "work", "world_si',
        "[]",
        '{"name": "work", "world_size": NaN}',
        '{"name": "work", "world_size": -2}',
        '{"name": "work", "world_size": 2, "seconds": {}, "started": null}',
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_run_json_is_told(content: str | bytes) -> None:
    run = made()
    (run.folder / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ValueError, match=r"holds no whole run: its run\.json cannot be read"):
        Run.open(run.folder)


def test_half_a_run_reads_as_far_as_it_goes() -> None:
    """Every file of a rank may be missing, or cut short at any byte."""

    def work() -> None:
        for _ in track([torch.zeros(4)] * 3):
            log(loss=1.5, accuracy=0.5)

    whole = quiet_launch(work)
    for path in whole.folder.glob("rank-0.*"):
        content = path.read_bytes()
        for kept in {0, 1, 7, len(content) // 2, len(content) - 1} - {-1}:
            path.write_bytes(content[:kept])
            look_at_all(Run.open(whole.folder))
        path.unlink()
        look_at_all(Run.open(whole.folder))
        path.write_bytes(content)
    with open(whole.folder / "rank-0.points", "r+b") as file:
        file.truncate(3 * 32 + 5)
    assert list(Run.open(whole.folder).metrics[0]["loss"]) == [1.5, 1.5]
    assert list(Run.open(whole.folder).metrics[0]["accuracy"]) == [0.5]


def look_at_all(run: Run) -> None:
    """Everything but the results, which a folder may lack."""
    assert len(list(run.logs)) == 2
    for series in run.metrics:
        assert set(TICK[:4]) <= series.keys()
    assert len(run.table()) == 2
    assert run._repr_html_().startswith("<p>")
    assert not run.samples_per_second() < 0
    assert not peak_bytes(run.trace(0).ticks) < 0
    assert run.trace(0).latest().keys() <= {"loss", "accuracy"}
    assert isinstance(run.tracked, bool)
    assert run.trace(0).last_lines(3) is not None
    assert isinstance(run.facts(0), dict)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank-0.names", b"\xff\xfe\nloss\n"),
        ("rank-0.points", np.array([[np.nan, 1, 1, 1], [-5, 1, 1, 1], [1e300, 1, 1, 1]]).tobytes()),
        ("rank-0.ticks", np.full((3, len(TICK)), np.nan).tobytes()),
        ("rank-0.json", b"[1, 2]"),
        ("rank-0.json", b'{"device": {"<b>": 1}, "pid": "x"}'),
        ("rank-0.log", b"\xff\x00\x1b[31m<script>" * 100),
    ],
)
def test_a_folder_with_nonsense_can_be_looked_at(name: str, content: bytes) -> None:
    run = made(world_size=2)
    (run.folder / "rank-0.names").write_text("loss\naccuracy\n")
    (run.folder / name).write_bytes(content)

    again = Run.open(run.folder)
    assert "<script>" not in again._repr_html_()
    assert "<b>:" not in again._repr_html_()
    look_at_all(again)


def test_main_memory_does_not_count_for_a_rank_that_took_a_gpu() -> None:
    """It is noted until CUDA is there; a rank's peak would be that of its Python and libraries."""
    run = made_run(world_size=2)
    path = RankFiles(run.folder, 1).ticks
    rows = np.fromfile(path).reshape(-1, len(TICK))
    before, later = rows[:20], rows[20:]
    before[:, TICK.index("memory_bytes")] = 300 * 2**20
    later[:, TICK.index("memory_bytes")] = 14 * 2**20
    later[:, TICK.index("reserved_bytes")] = 20 * 2**20
    later[:, TICK.index("peak_bytes")] = 16 * 2**20  # between two readings it held more
    rows.tofile(path)

    assert peak_bytes(run.trace(1).ticks) == 16 * 2**20
    assert peak_bytes(run.trace(0).ticks) == 100 * 2**20, "a rank on the CPU"
    np.testing.assert_array_equal(run.metrics[1]["memory_bytes"], [0] * 20 + [14 * 2**20] * len(later))


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile_files(payload: Any) -> dict[str, bytes]:
    zipped, legacy, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(payload, zipped)
    torch.save(payload, legacy, _use_new_zipfile_serialization=False)
    torch.save(np.array([payload], dtype=object), objects)
    return {
        "zip": zipped.getvalue(),
        "legacy": legacy.getvalue(),
        "bare pickle": pickle.dumps(payload),
        "array of objects": objects.getvalue(),
        "cut short": zipped.getvalue()[:-40],
        "empty": b"",
    }


@pytest.mark.parametrize("kind", hostile_files(None))
def test_opening_a_folder_runs_no_code_of_it(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "code-ran"
    run = made(world_size=2)
    (run.folder / "rank-0.result").write_bytes(hostile_files(Marker(mark))[kind])

    again = Run.open(run.folder)
    with pytest.raises(ValueError, match=r"the result of rank 0 in .*rank-0\.result is not loaded again"):
        _ = again.results
    assert not mark.exists()
    assert len(again.logs) == 2, "the rest of it is there"
    torch.load(io.BytesIO(hostile_files(Marker(mark))["zip"]), weights_only=False)
    assert mark.exists(), "the test's own weapon is blunt"


def test_an_object_is_only_loaded_by_the_process_that_started_its_ranks() -> None:
    defined = cell("""
        class Outcome:
            accuracy = 0.5

        def work():
            print("done")
            return Outcome()
        """)

    run = quiet_launch(defined.work)

    assert run.results[0].accuracy == 0.5
    with pytest.raises(ValueError, match="only tensors, arrays, numbers, strings and containers"):
        _ = Run.open().results
    assert Run.open().logs[0] == "done\n"


# --- folders ----------------------------------------------------------------------------------------------


def test_runs_of_the_same_moment_have_folders_of_their_own() -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(made("same").folder)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(folders)) == 20
    assert all(folder.is_dir() for folder in folders)


def test_the_name_of_a_function_is_no_path_and_no_markup() -> None:
    run = made("<lambda>", world_size=2)
    assert "&lt;lambda&gt;: 2 ranks, done" in run._repr_html_()
    assert made("../../../etc/x\n" + "é" * 300).folder.parent == run.folder.parent


def test_a_course_folder_that_cannot_be_used_is_told_before_anything_starts(course_home: Path) -> None:
    """Of a COURSE_HOME itself: tests/host/test_home.py."""
    course_home.mkdir()
    (course_home / "runs").touch()
    with pytest.raises(OSError, match=r"no run can be kept.*set COURSE_HOME") as caught:
        quiet_launch(os.getpid)
    assert str(course_home / "runs") in str(caught.value)


def test_the_newest_run_is_the_newest_of_this_kernel() -> None:
    mine = Run.create("mine", 1)
    other = Run.create("other kernel's", 1, kernel_pid=os.getppid())
    assert Run.open().folder == mine.folder
    assert Run.open(other.folder).name == "other kernel's"
