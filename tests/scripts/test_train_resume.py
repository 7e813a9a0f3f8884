"""lessons/scripts/train_resume.py, as a user runs it: killed, resumed, and with all that can be wrong."""

from __future__ import annotations

import os
import random
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import load_checkpoint
from tests.support.processes import free_port, wait_for
from tests.support.warm import Warm, ended

pytestmark = pytest.mark.usefixtures("digits_are_there")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "lessons/scripts/train_resume.py"
# 20 steps an epoch on one rank, 21 on three; many more than are made before the kill, which may come late
ALONE = ["--samples", 320, "--batch-size", 16, "--epochs", 12, "--save-every", 7, "--width", 4]
ON_THREE = ["--samples", 630, "--batch-size", 10, "--epochs", 6, "--save-every", 8, "--width", 4]


def files(folder: Path, name: str) -> list[str]:
    return ["--checkpoint", str(folder / f"{name}.pt"), "--history", str(folder / f"{name}.csv")]


def steps_in(history: Path) -> int:
    return len(history.read_text().splitlines()) if history.exists() else 0


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, all the way down."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_a_loss_that_is_not_finite_ends_it_and_is_not_saved(tmp_path: Path) -> None:
    """Such a checkpoint would be whole, load, and be useless."""
    words = [*files(tmp_path, "run"), *ALONE, "--lr", "1e20", "--save-every", 50]
    code, _, err = ended(SCRIPT, *words)
    assert code == 1
    assert err.startswith("stopped: the loss of step "), err
    assert "nan" in err or "inf" in err
    assert not (tmp_path / "run.pt").exists()


def test_killed_then_asked_to_end_and_resumed_alone(tmp_path: Path) -> None:
    """To the last digit: the losses, and all that the last checkpoint holds. Asked to end, it saves first."""
    assert ended(SCRIPT, *files(tmp_path, "calm"), *ALONE) == (0, "done: 240 steps on 1 rank\n", "")
    first, second = random.randrange(8, 40), random.randrange(90, 120)
    print(f"to be killed at step {first}, and asked to end at step {second}")
    history, said = tmp_path / "killed.csv", []
    for step, sent, code in (
        (first, signal.SIGKILL, -signal.SIGKILL),
        (second, signal.SIGTERM, 128 + signal.SIGTERM),
    ):
        process = Warm(SCRIPT, *files(tmp_path, "killed"), *ALONE)
        wait_for(lambda step=step: steps_in(history) >= step, 200, f"step {step}")
        process.send_signal(sent)
        said.append(process.communicate()[0])
        assert process.returncode == code, "before its end"
    after = int(said[1].split()[3])
    assert said[1].startswith(f"resumed after step {after} from killed.pt")
    assert (after % 7, after > first - 14) == (0, True)
    steps = steps_in(history)
    code, out, err = ended(SCRIPT, *files(tmp_path, "killed"), *ALONE)

    assert (code, err) == (0, "")
    assert out.startswith(f"resumed after step {steps} from killed.pt\n"), "no step was lost"
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "calm.csv").read_bytes()
    assert equal(load_checkpoint(tmp_path / "killed.pt"), load_checkpoint(tmp_path / "calm.pt"))
    losses = [float(line.split(",")[1]) for line in (tmp_path / "calm.csv").read_text().splitlines()]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), "it learns"
    left = {path.name for path in tmp_path.iterdir()} - {"course-home"}
    assert left == {"calm.pt", "calm.csv", "killed.pt", "killed.csv"}

    again = ended(SCRIPT, *files(tmp_path, "killed"), *ALONE)
    assert again == (0, "resumed after step 240 from killed.pt\ndone: 240 steps on 1 rank\n", "")


def test_a_rank_of_three_is_killed_and_all_are_started_again(tmp_path: Path) -> None:
    """Three, since the order in which two numbers are added up does not matter. Lesson 10 has torchrun."""
    assert ended(SCRIPT, *files(tmp_path, "calm"), *ON_THREE, ranks=3)[0] == 0
    step, rank = random.randrange(9, 30), random.randrange(3)
    print(f"rank {rank} to be killed at step {step}")
    killed = tmp_path / "killed.py"
    killed.write_text(
        textwrap.dedent(f"""
            import os, signal, sys
            sys.path.insert(0, {str(SCRIPT.parent)!r})
            import course_lib, train_resume
            steps = 0

            def log(**_):
                global steps
                steps += 1
                if (steps, os.environ["RANK"]) == ({step}, "{rank}"):
                    os.kill(os.getpid(), signal.SIGKILL)

            course_lib.log = log
            train_resume.train(train_resume.parse_arguments())
        """)
    )
    assert ended(killed, *files(tmp_path, "killed"), *ON_THREE, ranks=3)[0] == 1
    code, out, err = ended(SCRIPT, *files(tmp_path, "killed"), *ON_THREE, ranks=3)
    assert (code, err) == (0, "")
    assert "resumed after step" in out
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "calm.csv").read_bytes()
    calm, killed = (load_checkpoint(tmp_path / f"{name}.pt") for name in ("calm", "killed"))
    assert equal(calm, killed)
    first, second, _ = (state["torch"] for state in calm["random"])
    assert not torch.equal(first, second), "each rank has its own"


def test_only_rank_0_sees_the_checkpoint(tmp_path: Path) -> None:
    """On two machines, say, whose disks are their own: it decides, and tells the others."""
    port = free_port()
    short = ["--checkpoint", "a.pt", *ON_THREE, "--epochs", 1]
    for told in ("done: 32 steps", "resumed after step 32 from a.pt\ndone: 32 steps"):
        ranks = []
        for rank in range(2):
            (tmp_path / f"disk of {rank}").mkdir(exist_ok=True)
            group = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environment = {name: str(value) for name, value in group.items()}
            ranks.append(Warm(SCRIPT, *short, cwd=tmp_path / f"disk of {rank}", **environment))
        said = [rank.communicate() for rank in ranks]
        assert said == [(f"{told} on 2 ranks\n", ""), ("", "")]
    assert os.listdir(tmp_path / "disk of 1") == []
