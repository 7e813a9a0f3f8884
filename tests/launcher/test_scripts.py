"""python() and torchrun(): what they (and slurm) refuse, what they hand on, what to type in a terminal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from course_lib import RankError, launch, python, slurm, torchrun
from course_lib.launcher import environment, scripts


@pytest.mark.parametrize(
    ("start", "arguments", "words"),
    [
        (torchrun, {"nnodes": 0}, "nnodes is a whole number from 1 on; got 0"),
        (torchrun, {"nproc_per_node": "gpu"}, "nproc_per_node is a whole number from 1 on; got 'gpu'"),
        (torchrun, {"max_restarts": -1}, "max_restarts is a whole number from 0 on; got -1"),
        (torchrun, {"timeout": 0}, "timeout is a number of seconds above 0, or None for no limit; got 0"),
        (python, {"timeout": -1}, "timeout is a number of seconds above 0, or None for no limit; got -1"),
        (slurm, {"nodes": "2"}, "nodes is a whole number from 1 on; got '2'"),
        (slurm, {"cpus_per_task": 0}, "cpus_per_task is a whole number from 1 on; got 0"),
        (slurm, {"timeout": 0}, "timeout is a number of seconds above 0, or None for no limit; got 0"),
        (
            slurm,
            {"nnodes": 2},
            "slurm() decides about nnodes itself: say nodes=…, as sbatch does; got nnodes=2",
        ),
        (
            slurm,
            {"array": "1-3"},
            "slurm() decides about array itself: one run is one job; call slurm() for each; got array='1-3'",
        ),
        (
            slurm,
            {"time": "1\n#SBATCH --x"},
            "the value of an option is one line; got time='1\\n#SBATCH --x'",
        ),
        (slurm, {"Time": 1}, "an option of sbatch is a name such as partition or time; got 'Time'"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_starts(
    start: Any,
    arguments: dict[str, Any],
    words: str,
    script: str,
    course_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scripts, "loopback_store", lambda: pytest.fail("it opened a store"))
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *_, **__: pytest.fail("it started a process"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (its whole text follows)
        start(script, **arguments)
    assert str(caught.value) == words
    assert not (course_home / "runs").exists(), "no run is left"


@pytest.mark.parametrize("start", [torchrun, python, slurm])
def test_a_script_that_is_not_there(start: Any, script: str, tmp_path: Path, course_home: Path) -> None:
    for path in ("no.py", tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            start(path)
        assert str(caught.value) == f"there is no script {str(path)!r} in {tmp_path}"
    assert not (course_home / "runs").exists(), "no run is left"


def test_a_working_folder_that_is_gone(
    script: str, tmp_path: Path, course_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said of it, not of an argument: a relative path, which cannot be found then."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for start, what in ((torchrun, script), (torchrun, "no.py"), (python, script), (launch, print)):
        with pytest.raises(FileNotFoundError, match=r"^the working folder is gone .*os\.chdir"):
            start(what)  # type: ignore[operator]
    assert not (course_home / "runs").exists(), "no run is left"


def test_a_module_as_torchrun_and_python_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name after -m, from the working folder, with imports of its own package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/size.py").write_text("SIZE = 7\n")
    (tmp_path / "project/train.py").write_text(
        "import sys\nfrom course_lib import place\nfrom .size import SIZE\nplace()\n"
        "print(__name__, SIZE, sys.argv[1:], sys.argv[0] == __file__)\n[][int(sys.argv[1])]\n"
    )
    for start in (torchrun, python):
        with pytest.raises(RankError) as caught:
            start("-m", "project.train", 3, dashboard=False)
        run, marked = caught.value.run, "---->    6 [][int(sys.argv[1])]"
        assert "raised IndexError: list index out of range" in str(caught.value)
        assert f"{os.path.join('project', 'train.py')}, line 6, in <module>" in str(caught.value)
        assert marked in str(caught.value)
        assert "__main__ 7 ['3'] True" in "".join([run.output, *run.logs])
        assert run.name == "project.train"
        assert run.command.endswith(" -m project.train 3")
        with pytest.raises(FileNotFoundError, match=r"^there is no module 'project\.tain' in /"):
            start("-m", "project.tain")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[str]], list[dict[str, str]]]]:
    """What would have been started: commands and environments."""
    seen: list[Any] = []
    monkeypatch.setattr(
        scripts, "Program", lambda commands, environments, *_, **__: seen.append((commands, environments))
    )
    monkeypatch.setattr(scripts, "watch", lambda run, start, timeout, view: start(None) or run)
    return seen


def test_what_to_type_for_the_same(script: str, watched: list[Any]) -> None:
    args = (3, Path("da ta"), "--lr=0.1")
    quoted = "'a script.py' 3 'da ta' --lr=0.1"
    assert python(script, *args).command == f"python {quoted}"
    shape = "torchrun --nnodes={} --nproc-per-node={} --max-restarts={}"
    assert torchrun(script, *args, nproc_per_node=4).command == (
        shape.format(1, 4, 0) + f" --standalone {quoted}"
    )
    several = torchrun(script, *args, nproc_per_node=1, nnodes=3, max_restarts=2)
    assert several.command == (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
        + shape.format(3, 1, 2)
        + f" --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT {quoted}"
    )
    assert several.world_size == 3
    commands, environments = watched[-1]
    assert len(commands) == len(environments) == 3
    assert all(command[-4:] == [script, "3", "da ta", "--lr=0.1"] for command in commands)


@pytest.mark.parametrize(
    ("gpus", "nnodes", "ranks"), [(0, 1, 2), (0, 3, 2), (1, 1, 1), (8, 1, 8), (8, 2, 4), (2, 3, 1)]
)
def test_as_many_ranks_as_gpus(
    gpus: int, nnodes: int, ranks: int, script: str, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert torchrun(script, nnodes=nnodes).world_size == nnodes * ranks
    assert f"--nproc-per-node={ranks}" in watched[0][0][0]


@pytest.mark.parametrize(
    ("gpus", "visible", "nnodes", "each", "expected"),
    [
        (0, None, 2, 2, [{}, {}]),
        (8, None, 1, 4, [{}]),
        (1, None, 2, 1, [{"COURSE_NODES_HERE": "2"}] * 2),
        (2, None, 2, 2, [{"COURSE_NODES_HERE": "2"}] * 2),
        (2, None, 2, 1, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (8, None, 2, 4, [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]),
        (8, None, 2, 3, [{"CUDA_VISIBLE_DEVICES": "0,1,2"}, {"CUDA_VISIBLE_DEVICES": "3,4,5"}]),
        (2, "5,7", 2, 1, [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]),
    ],
)
def test_nodes_on_one_machine_share_out_its_gpus(
    gpus: int,
    visible: str | None,
    nnodes: int,
    each: int,
    expected: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [environment.gpus_of(node, each, nnodes) for node in range(nnodes)] == expected


def test_what_each_node_is_told(script: str, watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(environment, "cores", lambda: 12)
    monkeypatch.setenv("OF_THE_LEARNER", "kept")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    run = torchrun(script, nnodes=2, nproc_per_node=2, max_restarts=1)
    told = {
        "COURSE_RUN": str(run.folder),
        "COURSE_KERNEL": str(os.getpid()),
        "COURSE_NODES_HERE": "2",
        "OMP_NUM_THREADS": "3",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OF_THE_LEARNER": "kept",
        "GLOO_SOCKET_IFNAME": "eth7",
        "MPLBACKEND": "Agg",
        "PYTHON_COLORS": "0",
    }
    for given in watched[0][1]:
        assert given | told == given
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torchrun(script)
    assert watched.pop()[1][0]["OMP_NUM_THREADS"] == "5", "the learner's choice"
    torchrun(script)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in watched[1][1][0]


def test_a_program_is_run_as_python_alone_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the working folder are not Python's, what is forked is no rank, variables are left over."""
    monkeypatch.chdir(tmp_path)
    for name in ("random.py", "queue.py"):
        (tmp_path / name).write_text("raise RuntimeError('not this one')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "own.py").write_text("word = 'own'")
    (tmp_path / "scripts" / "train.py").write_text(
        "import os, random, sys\nimport own\nfrom course_lib import place\n"
        "if os.fork() == 0:\n    raise KeyError('of the forked one')\n"
        "os.wait()\nplace()\nprint(own.word, os.environ.get('RANK'), 'PYTHONSAFEPATH' in os.environ)\n"
    )
    logs = torchrun("scripts/train.py", dashboard=False).logs
    assert all(f"own {rank} False\n" in log for rank, log in enumerate(logs))
    for name, value in {"RANK": "3", "TORCHELASTIC_RUN_ID": "of a job", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert "own None False\n" in python("scripts/train.py", dashboard=False).logs[0]
