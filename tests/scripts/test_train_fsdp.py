"""lessons/scripts/train_fsdp.py, as a learner starts it: on two ranks, then alone, as if never stopped."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.lesson_programs import SCRIPTS, TORCHRUN, load, typed
from tests.support.warm import ended


def test_it_goes_on_with_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "twice").mkdir()
    (tmp_path / "once").mkdir()
    monkeypatch.chdir(tmp_path / "twice")
    losses = []
    for start, last in (
        (partial(typed, *TORCHRUN), "after step 30: loss .*, ranks: 2"),
        (ended, "after step 60: loss .*, ranks: 1"),
    ):
        code, out, err = start(SCRIPTS / "train_fsdp.py")
        assert code == 0, err
        assert re.fullmatch(last, out.strip()), out
        losses.append(float(out.split()[4].rstrip(",")))
    assert losses[1] < 0.7 * losses[0]

    monkeypatch.chdir(tmp_path / "once")  # 60 steps in one go
    program = load("train_fsdp")
    monkeypatch.setattr(program, "STEPS", 60)
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    program.main()
    never_stopped = float(capsys.readouterr().out.split()[4].rstrip(","))
    assert losses[1] == pytest.approx(never_stopped, abs=2e-4)  # float32
