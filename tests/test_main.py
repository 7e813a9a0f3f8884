"""``course doctor``."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib import __main__ as command


@pytest.mark.usefixtures("digits_are_there")
def test_doctor_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "course_lib", "doctor"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The course will use:" in done.stdout
    assert "✓ two ranks: they met over gloo and summed 1 and 2 to 3" in done.stdout
    assert done.stdout.rstrip().endswith("Everything is there.")
    assert done.stderr == ""


def test_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise ModuleNotFoundError("No module named 'ipywidgets'")

    monkeypatch.setattr(command, "CHECKS", {"good": lambda: "fine", "JupyterLab": broken})
    assert command.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "✓ good: fine" in printed
    assert "✗ JupyterLab: ModuleNotFoundError: No module named 'ipywidgets'" in printed
    assert printed.rstrip().endswith("1 of 2 checks failed; see ✗ above.")


def test_doctor_says_which_versions_differ_from_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numpy = importlib.metadata.version("numpy")
    monkeypatch.setattr(command, "TESTED", tmp_path / "constraints.txt")
    monkeypatch.setattr(command, "MAIN_PACKAGES", ("numpy", "absent"))
    command.TESTED.write_text(f"numpy==0.1 ; python_version < '3.0'\nnumpy=={numpy}\nabsent==1.0\n")
    assert command.versions() == "all as tested"
    command.TESTED.write_text("numpy==0.1\n")
    assert command.versions() == f"these differ from the tested versions: numpy {numpy} (tested: 0.1)"
    command.TESTED.write_text("")
    assert command.versions() == "all as tested", "who emptied it wanted others"


def test_the_pair_that_does_not_fit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.ops

    def refuse(*_: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision.ops, "nms", refuse)
    with pytest.raises(RuntimeError, match="nms does not exist"):
        command.CHECKS["torch and torchvision"]()
