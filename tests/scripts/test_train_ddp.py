"""lessons/scripts/train_ddp.py, as a learner starts it: alone, by torchrun, killed, with wrong arguments."""

from __future__ import annotations

import importlib.util
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from course_lib import torchrun
from tests.support.processes import wait_for

SCRIPT = Path(__file__).parents[2] / "lessons" / "scripts" / "train_ddp.py"
SMALL = ["--width", "2", "--batch-size", "500"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 300


@pytest.fixture(autouse=True)
def _one_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits are made once for all tests of this file."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path_factory.getbasetemp() / "home-of-train-ddp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_ddp", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(*words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of ``python words…``."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout, done.stderr


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["model"]


# --- as it should be --------------------------------------------------------------------------------------


def test_alone_and_then_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    words = [SCRIPT, *SMALL, "--checkpoint", path]
    code, output, errors = typed(*words, "--epochs", 1)
    assert (code, errors) == (0, ""), "no bar where no terminal is"
    line = r"epoch {}: loss \d\.\d{{3}}, held-out accuracy \d+\.\d%, [\d,]+ samples/s on 1 rank\n"
    assert re.fullmatch(line.format(1), output), output
    code, output, _ = typed(*words, "--epochs", 2)
    assert code == 0
    assert re.fullmatch("1 of 2 epochs were done already\n" + line.format(2), output), output
    code, output, _ = typed(*words, "--epochs", 2)
    assert (code, output) == (0, "2 of 2 epochs were done already\n")
    other = tmp_path / "b.pt"
    code, output, _ = typed(SCRIPT, *SMALL, "--epochs", 2, "--resume", path, "--checkpoint", other)
    assert (code, output) == (0, "2 of 2 epochs were done already\n")
    assert os.listdir(tmp_path) == ["a.pt"], (
        "nothing was trained, so nothing was written, and no part is left"
    )


def test_a_bar_in_the_terminal_by_one_rank(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, *TORCHRUN, str(SCRIPT), *SMALL, "--epochs", "1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # Linux says so that nobody holds the other end any more
        pass
    os.close(ours)
    assert process.wait(SECONDS) == 0, shown
    text = shown.decode()
    steps = [int(step) for step in re.findall(r"\repoch 1 \[[# ]{25}\] (\d+)/18\b", text)]
    assert steps == list(range(1, 19)), "each step once: of one rank"
    assert "\r\x1b[Kepoch 1: loss" in text, "the bar is gone when the results come"


def test_a_killed_rank_costs_an_epoch_and_changes_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    words = [*SMALL, "--epochs", 4, "--checkpoint"]
    code, _, errors = typed(*TORCHRUN, SCRIPT, *words, whole)
    assert code == 0, errors

    def kill_rank_1() -> None:
        wait_for(killed.exists, seconds=SECONDS)
        for process in psutil.process_iter():
            try:
                told = process.environ()
                if told.get("RANK") == "1" and str(killed) in process.cmdline():
                    process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue

    thread = threading.Thread(target=kill_rank_1)
    thread.start()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see course_lib/launcher/scripts.py
    try:
        code, output, errors = typed(
            TORCHRUN[0], TORCHRUN[1], "--max-restarts=1", *TORCHRUN[2:], SCRIPT, *words, killed
        )
    finally:
        del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
        thread.join()
    assert code == 0, errors
    assert "exitcode: -9" in errors, "it was killed"
    assert re.search(r"^[123] of 4 epochs were done already$", output, re.MULTILINE), output
    assert re.findall(r"^epoch (\d)", output, re.MULTILINE) == ["1", "2", "3", "4"]
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(killed)[name], tensor, rtol=0, atol=1e-5)
    assert sorted(os.listdir(tmp_path)) == ["killed.pt", "whole.pt"], "no part is left"


def test_on_two_nodes(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    run = torchrun(
        SCRIPT, *SMALL, "--epochs", 1, "--checkpoint", path, nnodes=2, nproc_per_node=1, dashboard=False
    )
    assert "on 2 ranks" in run.logs[0]
    assert run.logs[1] == ""
    assert [told["GROUP_RANK"] for told in run.environments] == ["0", "1"]
    accuracies = [series["accuracy"][-1] for series in run.metrics]
    assert accuracies[0] == accuracies[1] > 0.15, "18 steps: more than chance"
    assert torch.load(path, weights_only=True)["epoch"] == 1


# --- wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "0"], "argument --epochs: it is a whole number from 1 on, not '0'"),
        (["--epochs", "many"], "argument --epochs: it is a whole number from 1 on, not 'many'"),
        (["--epochs", "1.5"], "argument --epochs: it is a whole number from 1 on, not '1.5'"),
        (["--batch-size", "-4"], "argument --batch-size: it is a whole number from 1 on, not '-4'"),
        (["--batch-size"], "argument --batch-size: expected one argument"),
        (["--lr", "0"], "argument --lr: it is a number above 0, not '0'"),
        (["--lr", "nan"], "argument --lr: it is a number above 0, not 'nan'"),
        (["--lr", "fast"], "argument --lr: it is a number above 0, not 'fast'"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--local-rank=0"], "unrecognized arguments: --local-rank=0"),
        (["--checkpoint", "."], "argument --checkpoint: it is the name of a file, and '.' is a folder"),
        (
            ["--checkpoint", "no/such/a.pt"],
            "argument --checkpoint: the folder of 'no/such/a.pt' is not there or cannot be written",
        ),
        (["--resume", "no.pt"], "argument --resume: there is no file 'no.pt'"),
        (["--resume", "."], "argument --resume: there is no file '.'"),
    ],
)
def test_a_wrong_argument_is_told_in_a_line(
    words: list[str],
    said: str,
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", *words])
    with pytest.raises(SystemExit) as caught:
        program.parse_arguments()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"train_ddp.py: error: {said}"


def test_a_wrong_argument_in_a_terminal(tmp_path: Path) -> None:
    code, output, errors = typed(SCRIPT, "--checkpoint", tmp_path / "no" / "a.pt")
    assert (code, output) == (2, "")
    assert "Traceback" not in errors
    assert "is not there or cannot be written" in errors.splitlines()[-1]
    code, _, errors = typed(*TORCHRUN, SCRIPT, "--epochs", "many")
    assert code == 1
    assert "error: argument --epochs: it is a whole number from 1 on, not 'many'" in errors


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Touches(path.parent / "touched"), protocol=2))


class Touches:
    """What would run code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def write_half(path: Path) -> None:
    torch.save({"epoch": 1, "width": 2, "model": {}, "optimizer": {}}, path)
    path.write_bytes(path.read_bytes()[:-400])


BROKEN = {
    "empty": (lambda path: path.touch(), "is no checkpoint of this program: EOFError"),
    "a text": (lambda path: path.write_text("Hello"), "is no checkpoint of this program: UnpicklingError"),
    "half": (write_half, "is no checkpoint of this program: "),
    "code": (write_pickle, "is no checkpoint of this program: UnpicklingError"),
    "a list": (lambda path: torch.save([1], path), "is no checkpoint of this program: TypeError"),
    "another's": (
        lambda path: torch.save({"weights": 1}, path),
        "is no checkpoint of this program: KeyError",
    ),
    "of another width": (
        lambda path: torch.save({"epoch": 1, "width": 5, "model": {}, "optimizer": {}}, path),
        "is of a network of width 5; add --width 5",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_checkpoint_that_is_none(what: str, program: ModuleType, tmp_path: Path) -> None:
    write, said = BROKEN[what]
    path = tmp_path / "a.pt"
    write(path)
    with pytest.raises(SystemExit) as caught:
        program.load(path, 2)
    assert str(caught.value).startswith(f"{path} {said}"), caught.value
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["a.pt"], "nothing in it was run"


def test_a_broken_checkpoint_in_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_text("Hello")
    code, output, errors = typed(*TORCHRUN, SCRIPT, *SMALL, "--checkpoint", path)
    assert code == 1
    assert output == ""
    assert errors.count(f"{path} is no checkpoint of this program: UnpicklingError") == 1, errors
    assert path.read_text() == "Hello", "it is not written over"
