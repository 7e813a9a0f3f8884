"""Whose line it is."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import course_lib
from course_lib.report import words
from course_lib.tracebacks import learner_code


def test_whose_a_line_is() -> None:
    assert learner_code.is_learners("/home/me/train.py")
    assert learner_code.is_learners("/tmp/ipykernel_7/123.py")
    for module in (json, torch, course_lib, learner_code):
        assert not learner_code.is_learners(module.__file__)
    assert not any(map(learner_code.is_learners, ("<string>", "<frozen os>")))
    assert [learner_code.is_ours(file) for file in (learner_code.__file__, json.__file__)] == [True, False]


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/.local/lib/python3.12/site-packages/torch/nn/modules/linear.py",  # %pip install on a hub
        "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py",
        "/usr/local/lib/python3.12/dist-packages/lightning/trainer.py",
        "/home/ana/Library/Python/3.12/lib/python/site-packages/six.py",
        r"C:\Users\me\AppData\Roaming\Python\Python312\site-packages\torch\nn\modules\linear.py",
        "/tmp/torchinductor_me/ab/cabc.py",  # what torch.compile makes of the learner's lines
        "<eval_with_key>.3",  # torch.fx
        "<attrs generated init x.Y>",
    ],
)
def test_installed_code_is_not_the_learners(file: str) -> None:
    assert not learner_code.is_learners(file)


@pytest.mark.parametrize(
    "file",
    [
        *("/home/me/site-packages-study/train.py", "/home/me/torch/train.py", "/home/me/.venv/train.py"),
        *("train.py", "<stdin>", "<ipython-input-3-ab1>", "<python-input-0>"),
    ],
)
def test_what_a_learner_has_written_is_the_learners(file: str) -> None:
    assert learner_code.is_learners(file)


def test_an_excerpt_ends_with_a_line_that_says_something(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def step():\n\n    fails()\n\n\n")
    shown = learner_code.with_source(str(path), 3, "step")["source"]
    assert shown == [[1, "def step():"], [2, ""], [3, "    fails()"]]


@pytest.fixture
def beside_torch(tmp_path: Path) -> Path:
    """A folder on PYTHONPATH: torch, a package and a module that pip has put there, and a learner's files."""
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    (tmp_path / "rich-1.0.dist-info").mkdir()
    record = "../../bin/rich,,\nrich/__init__.py,sha256=x,9\nsix.py,,\nrich-1.0.dist-info/RECORD,,\n"
    (tmp_path / "rich-1.0.dist-info" / "RECORD").write_text(record)
    for name in ("rich/__init__.py", "six.py", "rich_train.py", "torch_train.py", "project/model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def call(function):\n    return function()\n")
    (tmp_path / "project.egg-info").mkdir()  # a project that is installed to be edited leaves that
    (tmp_path / "project.egg-info" / "SOURCES.txt").write_text("project/model.py\n")
    return tmp_path


def test_torch_and_others_on_pythonpath(beside_torch: Path) -> None:
    """The learner's project lies in the same folder, and a report of a failure shows its lines alone."""
    code = (
        "import torch; from course_lib.tracebacks.learner_code import is_learners\n"
        "from course_lib.rank import failure\n"
        f"names = [name for name in {FILES} if is_learners({str(beside_torch)!r} + '/' + name)]\n"
        "try: import project.model; project.model.call(lambda: torch.nn.Linear(3, 3)(torch.zeros(2, 4)))\n"
        "except RuntimeError as error: shown = failure._frames(error)\n"
        "print([names, [frame['function'] for frame in shown]])\n"
    )
    root = str(Path(course_lib.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(beside_torch), root])}
    run = subprocess.run([sys.executable, "-"], input=code, env=environment, capture_output=True, text=True)
    assert run.stdout == str([LEARNERS, ["<module>", "call", "<lambda>"]]) + "\n", run.stderr


LEARNERS = ["rich_train.py", "torch_train.py", "project/model.py"]
FILES = ["torch/nn/modules/linear.py", "rich/__init__.py", "six.py", *LEARNERS]


def test_a_working_folder_that_is_gone_and_odd_entries_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every report asks whose a line is: that must not raise."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", "lib", b"bytes", [], None, tmp_path, *sys.path])
    assert learner_code.is_learners("/home/me/train.py")
    assert not learner_code.is_learners(torch.__file__)
    assert words.label("/home/me/train.py") == "train.py"


def test_no_garbage_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 may wait for ever there (issue 106883), which could not be forced here."""
    seen, look = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or look())
    frame = learner_code.frame_of(threading.get_ident())
    assert frame is not None
    assert learner_code.frame_of(None) is None
    assert gc.isenabled()
    assert seen == [sys.version_info >= (3, 12)] * 2
    gc.disable()
    try:
        learner_code.frame_of(None)
        assert not gc.isenabled(), "nor is it switched on where the learner has switched it off"
    finally:
        gc.enable()
