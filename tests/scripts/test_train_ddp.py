"""lessons/scripts/train_ddp.py, as a learner starts it: alone, by torchrun, killed, with wrong arguments."""

from __future__ import annotations

import os
import pickle
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from tests.support.lesson_programs import SCRIPTS, SECONDS, TORCHRUN, changed, load, typed
from tests.support.processes import processes_marked
from tests.support.signals import signal_inside_a_signal
from tests.support.warm import ended

SCRIPT = SCRIPTS / "train_ddp.py"
SMALL = ["--width", "2", "--batch-size", "500"]


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
    return load("train_ddp")


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint."""
    return torch.load(path, weights_only=True)["model"]


def few(path: Path, lines: str = "") -> Path:
    """The program with 3,600 of the digits, and some more lines."""
    fewer = """
        every = program.digits
        program.digits = lambda train=True: program.Subset(every(train), range(3600 if train else 400))
        """
    return changed(path, textwrap.dedent(fewer) + textwrap.dedent(lines), "train_ddp")


def signals_at(path: Path, step: int, send: str) -> Path:
    """The same, which sends a signal once it has made so many steps, and makes the later ones slowly."""
    return few(
        path,
        f"""
        steps = 0

        def log(loss=None, **others):
            global steps
            steps += loss is not None
            if steps == {step}:
                {send}
            time.sleep(0.05 * (steps >= {step} and loss is not None))

        program.log = log
        """,
    )


def records(path: Path) -> Path:
    """The program with 1,000 samples, each its own number: it writes which it saw, and what it drew."""
    return changed(
        path,
        f"""
        from torch.utils.data import TensorDataset

        class Records(program.ConvNet):
            def forward(self, images):
                if self.training:
                    seen = [str(int(number)) for number in images[:, 0, 0, 0]]
                    with open({str(path.parent)!r} + "/seen", "a") as file:
                        file.write(" ".join([str(torch.rand(()).item()), *seen]) + "\\n")
                return super().forward(images)

        numbers = torch.arange(1000.0).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28)
        program.digits = lambda train=True: TensorDataset(numbers, torch.zeros(1000, dtype=torch.int64))
        program.ConvNet = Records
        """,
        "train_ddp",
    )


def recorded(folder: Path) -> tuple[list[str], list[int]]:
    """What `records` has drawn and seen since this was last asked."""
    lines = [line.split() for line in (folder / "seen").read_text().splitlines()]
    (folder / "seen").unlink()
    return [line[0] for line in lines], [int(number) for line in lines for number in line[1:]]


# --- as it should be --------------------------------------------------------------------------------------


def test_alone_and_then_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    words = [SCRIPT, *SMALL, "--checkpoint", path]
    code, output, errors = typed(*words, "--epochs", 1)
    assert (code, errors) == (0, ""), "no bar where no terminal is"
    line = r"epoch {}: loss \d\.\d{{3}}, held-out accuracy \d+\.\d%, [\d,]+ samples/s on 1 rank\n"
    assert re.fullmatch(line.format(1), output), output
    code, output, _ = ended(few(tmp_path / "few.py"), *words[1:], "--epochs", 2)
    assert code == 0
    assert re.fullmatch("1 of 2 epochs were done already\n" + line.format(2), output), output
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "few.py"], "no part is left"


def test_a_count_in_the_terminal_by_one_rank(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    lines = f"""
        for output in (1, 2):
            os.dup2(os.open({os.ttyname(theirs)!r}, os.O_WRONLY | os.O_NOCTTY), output)
        """
    script = few(tmp_path / "in_a_terminal.py", lines)
    code, *_ = ended(script, "--width", 2, "--batch-size", 100, "--epochs", 1, ranks=2)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # Linux says so that nobody holds the other end any more
        pass
    os.close(ours)
    assert code == 0, shown
    text = shown.decode()
    steps = [int(step) for step in re.findall(r"epoch 1: step (\d+)/18\r", text)]
    assert steps == list(range(1, 19)), "each step once: of one rank"
    assert "step 18/18\repoch 1: loss" in text, "the results are written over it"


def test_one_rank_and_its_worker_are_asked_to_end_and_all_save(tmp_path: Path) -> None:
    """Clusters signal all processes of a rank, and it needs its worker until it has saved."""
    whole, asked = tmp_path / "whole.pt", tmp_path / "asked.pt"
    words = ["--width", 2, "--batch-size", 50, "--epochs", 2, "--workers", 1, "--clip", 0.5, "--checkpoint"]
    undisturbed = few(tmp_path / "few.py")
    code, _, errors = ended(undisturbed, *words, whole, ranks=2)
    assert code == 0, errors

    pids = "[os.getpid(), *(each.pid for each in torch.multiprocessing.active_children())]"
    send = f'os.environ["RANK"] == "1" and [os.kill(pid, signal.SIGTERM) for pid in {pids}]'
    script = signals_at(tmp_path / "asked.py", 51, send)  # of 36 an epoch
    code, _, errors = ended(script, *words, asked, ranks=2)
    assert code == 1
    assert "DataLoader worker" not in errors
    state = torch.load(asked, weights_only=True)
    assert (state["epoch"], state["samples"]) == (1, 20 * 50 * 2), "at the next tenth step"
    code, output, errors = ended(undisturbed, *words, asked, ranks=2)
    assert code == 0, errors
    assert output.startswith("1 of 2 epochs were done already, and 2,000 samples of the next\n")
    after = weights(asked)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5)


def test_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """In the middle of an epoch: a step takes as many samples as before, and each sample comes once."""
    script, path = records(tmp_path / "records.py"), tmp_path / "a.pt"
    signals = signals_at(tmp_path / "asked.py", 5, "os.kill(os.getpid(), signal.SIGTERM)")
    both = tmp_path / "both.py"
    both.write_text(signals.read_text().partition("if __name__")[0] + script.read_text())
    words = ["--width", 2, "--epochs", 1, "--checkpoint", path]
    words += ["--batch-size", 50]
    code, _, errors = ended(both, *words)
    assert code == 128 + signal.SIGTERM, errors
    before, first = recorded(tmp_path)
    assert len(first) == 500
    code, output, errors = ended(script, *words, ranks=2)
    assert code == 0, errors
    first_lines = "0 of 1 epochs were done already, and 500 samples of the next\n"
    first_lines += "a step takes 50 samples as before: 25 on each rank\nepoch 1: loss "
    assert output.startswith(first_lines)
    assert "nan" not in output
    drawn, second = recorded(tmp_path)
    assert len(set(drawn)) == len(drawn) == 2 * 500 // 50, "steps, on two ranks, each with numbers of its own"
    assert not set(drawn) & set(before), "nor those of the epoch's first half"
    assert sorted(first + second) == list(range(1000))
    assert torch.load(path, weights_only=True)["global_batch"] == 50

    code, output, errors = ended(script, *words, ranks=3)
    assert (code, output) == (1, "")
    said = "takes 50 samples a step, which 3 ranks cannot share evenly: start fewer"
    assert errors.count(f"{path} {said}") == 1, errors


def test_a_restart_draws_what_the_training_would_have_drawn(tmp_path: Path) -> None:
    """And not the dropout masks of the first epoch once more."""
    script = records(tmp_path / "records.py")
    words = [script, "--width", 2, "--batch-size", 100, "--checkpoint"]
    assert ended(*words, tmp_path / "whole.pt", "--epochs", 2)[0] == 0
    whole, seen = recorded(tmp_path)
    assert len(set(whole)) == 20
    assert seen[:1000] != seen[1000:], "each epoch has an order of its own"
    drawn = []
    for epochs in (1, 2):
        assert ended(*words, tmp_path / "a.pt", "--epochs", epochs)[0] == 0
        drawn += recorded(tmp_path)[0]
    assert drawn == whole


# --- workers ----------------------------------------------------------------------------------------------


def test_a_worker_fails_and_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback keeps the loader: Python would end the other workers by SIGTERM, and wait for them."""
    monkeypatch.setenv("MARK_OF_A_TEST", str(tmp_path))
    lines = """
        class Fails(torch.utils.data.Dataset):
            def __len__(self):
                return 1000

            def __getitem__(self, number):
                raise ValueError("a file is missing")

        program.digits = Fails
        """
    script = changed(tmp_path / "fails.py", lines, "train_ddp")
    code, output, errors = typed(script, *SMALL, "--workers", 2)
    assert (code, output) == (1, "")
    assert errors.rstrip().endswith("ValueError: a file is missing"), "and nothing after it"
    assert processes_marked("MARK_OF_A_TEST", str(tmp_path)) == []


def test_workers_draw_other_numbers_on_each_rank_after_a_restart_and_for_another_seed(tmp_path: Path) -> None:
    """What a data set of a learner's own draws, in the workers; they start before the model has its seed."""
    script = changed(
        tmp_path / "noise.py",
        f"""
        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, number):
                return torch.rand(1, 28, 28), 0

        def track(loader, total):
            for images, labels in loader:
                with open({str(tmp_path)!r} + "/drawn", "a") as file:
                    file.write("".join(f"{{image[0, 0, 0].item()}}\\n" for image in images))
                yield images, labels

        program.digits, program.track = lambda train=True: Noise(), track
        """,
        "train_ddp",
    )
    words = [script, "--width", 2, "--batch-size", 2, "--workers", 1, "--checkpoint"]
    drawn: list[str] = []
    for each in (["a.pt", "--epochs", 1], ["a.pt", "--epochs", 2], ["b.pt", "--epochs", 1, "--seed", 1]):
        code, _, errors = ended(*words, tmp_path / each[0], *each[1:], ranks=2)
        assert code == 0, errors
        drawn = (tmp_path / "drawn").read_text().split()
    assert len(drawn) == 3 * 8
    assert len(set(drawn)) == len(drawn)

    code, _, errors = ended(*words, tmp_path / "c.pt", "--epochs", 1, ranks=2)
    assert code == 0, errors
    assert set((tmp_path / "drawn").read_text().split()) == set(drawn), "the same seed, the same numbers"


def test_with_torch_alone(tmp_path: Path) -> None:
    """No course_lib, no NumPy, no psutil: what PyTorch asks for itself, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    asked, seen = ["torch"], set()
    while asked:
        name = re.split(r"[^\w.-]", asked.pop())[0]
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        asked += [need for need in found.requires or [] if "extra ==" not in need]
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    python = [sys.executable, "-S"]
    words = [*SMALL, "--bf16", "--workers", 1, "--checkpoint", tmp_path / "a.pt", "--epochs", 1]
    command = [*python, *TORCHRUN, "--no-python", *python, SCRIPT, *words]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^epoch 1: loss .* on 2 ranks$", done.stdout, re.MULTILINE), done.stdout
    assert not (site / "numpy").exists()


def test_train_spawn_draws_other_numbers_on_each_rank(tmp_path: Path) -> None:
    """Once DDP has the weights: or all would draw the same dropout masks."""
    lines = """
        class WithChance(program.ConvNet):
            def forward(self, images):
                print("drawn", torch.rand(()).item())
                return super().forward(images)

        program.ConvNet = WithChance
        """
    script = changed(tmp_path / "with_chance.py", lines, "train_spawn")
    code, output, errors = ended(script, *SMALL, "--epochs", 1, ranks=2)
    assert code == 0, errors
    drawn = re.findall("drawn (.+)", output)
    assert len(set(drawn)) == len(drawn) > 30


# --- wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "0"], "argument --epochs: it is a whole number from 1 on, not 0"),
        (["--lr", "nan"], "argument --lr: it is a number above 0, not nan"),
        (["--local-rank=0"], "unrecognized arguments: --local-rank=0"),
        (
            ["--checkpoint", "no/such/a.pt"],
            "'no/such/a.pt' must be a file, in a folder that is there and can be written",
        ),
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
    with pytest.raises(SystemExit, match="2"):
        program.parse_arguments()
    assert capsys.readouterr().err.splitlines()[-1] == f"train_ddp.py: error: {said}"


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Touches(path.parent / "touched"), protocol=2))


class Touches:
    """What would run code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


BROKEN = {
    "code": (write_pickle, "is no checkpoint of this program: UnpicklingError"),
    "of another width": (
        lambda path: torch.save({"epoch": 1, "samples": 0, "width": 5, "model": {}, "optimizer": {}}, path),
        "is of a network of width 5; add --width 5",
    ),
    "another's": (
        lambda path: torch.save({"weights": 1}, path),
        "is no checkpoint of this program: KeyError",
    ),
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("what", BROKEN)
def test_a_checkpoint_that_is_none(what: str, program: ModuleType, tmp_path: Path, alone: None) -> None:
    write, said = BROKEN[what]
    path = tmp_path / "a.pt"
    write(path)
    with pytest.raises(SystemExit) as caught:
        program.resume(path, 2, torch.device("cpu"))
    assert str(caught.value).startswith(f"{path} {said}"), caught.value
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["a.pt"], "nothing in it was run"


def test_ranks_with_disks_of_their_own_must_find_the_same_checkpoint(tmp_path: Path) -> None:
    """On two machines, each with a disk of its own.

    Where rank 0 lacks it, all would begin anew, and write over what another has. The weights of a rank with
    an old copy would stay others: DDP averages gradients alone.
    """
    lines = """
        parse = program.parse_arguments

        def parse_arguments():
            args = parse()
            args.checkpoint = Path(f"{args.checkpoint}.{os.environ['RANK']}")
            return args

        program.parse_arguments = parse_arguments
        """
    path = tmp_path / "a.pt"
    words = [few(tmp_path / "own_disk.py", lines), *SMALL, "--checkpoint", path, "--epochs"]
    assert ended(*words, 1, ranks=2)[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["a.pt.0", "own_disk.py"]
    os.rename(f"{path}.0", f"{path}.1")
    code, output, errors = ended(*words, 2, ranks=2)
    assert (code, output) == (1, "")
    assert errors.count(f"{path}.0 is not there, but on other ranks it is") == 1
    assert "a.pt.1" not in errors

    shutil.copy(f"{path}.1", f"{path}.0")
    code, output, errors = ended(*words, 2, ranks=2)
    assert code == 0, "the same on both"
    assert output.startswith("1 of 2 epochs were done already\nepoch 2: loss ")
    code, output, errors = ended(*words, 3, ranks=2)
    assert (code, output) == (1, "")
    said = "is not the same file on every rank: copy the newest to all machines, or use a shared folder"
    assert errors.count(f"{path}.1 {said}") == 1, errors
    assert "a.pt.0" not in errors


def test_a_second_signal_inside_the_first(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its handler is at work, at each of its lines."""
    handlers = []

    def install(_: int, handler: object) -> None:
        handlers.append(handler)
        raise InterruptedError

    some = TensorDataset(torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64))
    monkeypatch.setattr(program, "digits", lambda: some)
    monkeypatch.setattr(program, "signal", SimpleNamespace(signal=install, SIGTERM=signal.SIGTERM))
    monkeypatch.setattr(program.atexit, "register", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", "--width", "2", "--checkpoint", str(tmp_path / "a.pt")])
    try:
        with pytest.raises(InterruptedError):
            program.train(program.parse_arguments())
    finally:
        dist.destroy_process_group()

    signal_inside_a_signal(handlers[0])
