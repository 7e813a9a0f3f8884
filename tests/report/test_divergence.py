"""Since when ranks differ in what all should hold alike, where, and which one is the odd one out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from course_lib import Run, divergence, track
from course_lib.launcher.ask import report_on
from course_lib.launcher.dashboard import TerminalView, warning_html
from course_lib.rank import fingerprints
from course_lib.record.layout import RankFiles
from course_lib.record.series import Series
from course_lib.record.trace import Check
from course_lib.report import divergence as module
from course_lib.report.words import error_text
from tests.support.cells import quiet_launch

Checks = Mapping[tuple[int, ...], Mapping[str, int]]  # by (attempt,) pass and step: the fingerprints


def held(*by_rank: Checks) -> Run:
    """A run whose ranks wrote these fingerprints."""
    run = Run.create("train", len(by_rank))
    for rank, checks in enumerate(by_rank):
        series = Series(RankFiles(run.folder, rank), launched=0.0)
        for place, values in checks.items():
            attempt, number, step = (0, *place)[-3:]
            series.fingerprints((attempt, number, step), dict(values))
        series.close()
    return run


def steps(*values: int, number: int = 1) -> Checks:
    """The bias after steps 0, 1, 2, …, beside a weight that stays."""
    return {(number, step): {"weight": 5, "bias": value} for step, value in enumerate(values)}


SAME = steps(1, 2, 3, 4)
TWO = "of two ranks, nobody can tell which one is wrong"
CASES: dict[str, tuple[Sequence[Checks], str]] = {
    "equal": ([SAME, SAME], ""),
    "one rank": ([SAME], ""),
    "nothing was compared": ([{}, {}], ""),
    "one rank compares nothing": ([SAME, {}], ""),
    "from the start": ([SAME, steps(9, 2, 3, 4)], f"from the start: in bias; {TWO}"),
    "from one step on": ([SAME, steps(1, 2, 9, 9)], f"since step 2: in bias; {TWO}"),
    "two of five": (
        [SAME, steps(1, 9), steps(1, 8), SAME, SAME],
        "since step 1: in bias; ranks 1, 2 are the odd ones out",
    ),
    "two against two": (
        [SAME, steps(1, 9), SAME, steps(1, 9)],
        "since step 1: in bias; ranks 0, 2 and ranks 1, 3 each hold something else",
    ),
    "all of three": (
        [SAME, steps(1, 8), steps(1, 9)],
        "since step 1: in bias; no two ranks hold the same",
    ),
    "some steps in common": (
        [{(1, 0): {"a": 1}, (1, 2): {"a": 2}, (1, 4): {"a": 3}}, {(1, 0): {"a": 1}, (1, 4): {"a": 4}}],
        f"since a step between the start and step 4: in a; {TWO}",
    ),
    "between two passes": (
        [{**SAME, **steps(6, number=2)}, {**SAME, **steps(7, number=2)}],
        f"since a step between step 3 and the start of pass 2: in bias; {TWO}",
    ),
    "several": (
        [{(1, 3): {"x": 1, "a": 1, "b": 2, "c": 3}}, {(1, 3): {"x": 1, "a": 9, "b": 9, "c": 9}}],
        f"since step 3 or before: in a and 2 more; {TWO}",
    ),
    "another order, and one that a rank lacks": (
        [{(1, 0): {"a": 1, "b": 2, "c": 3}}, {(1, 0): {"b": 2, "a": 1}}],
        "",
    ),
    "restarted by torchrun": (
        [{(0, 1, 5): {"a": 1}, (1, 1, 2): {"a": 3}}, {(0, 1, 5): {"a": 1}, (1, 1, 2): {"a": 4}}],
        f"since step 2 or before: in a; {TWO}",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told(case: str) -> None:
    by_rank, told = CASES[case]
    run = held(*by_rank)
    assert str(divergence(run) or "").removeprefix("the ranks have differed ") == told
    run.record.end("done")
    assert str(divergence(Run.open(run.folder)) or "").removeprefix("the ranks have differed ") == told


def test_the_first_difference_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, only the latest rows are looked at, until they differ."""
    monkeypatch.setattr(module, "LATEST", 7)
    values = list(range(100))
    run = held(steps(*values), steps(*values[:60], *(value + 1000 for value in values[60:])))
    found = divergence(run)
    assert found is not None
    assert (found.tensors, found.groups) == (["bias"], [[0], [1]])
    assert (found.equal, found.check) == (Check(0, 1, 59), Check(0, 1, 60))


def test_a_file_that_is_cut_off_or_damaged() -> None:
    run = held(steps(1, 2, 3), steps(1, 2, 9))
    path = RankFiles(run.folder, 1).fingerprints
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert divergence(run) is None
    RankFiles(run.folder, 1).tensors.write_text("")
    path.write_bytes(whole)
    assert divergence(run) is None, "no names, nothing in common"


def test_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run, told = held(SAME, steps(1, 9)), f"the ranks have differed since step 1: in bias; {TWO}"
    view = TerminalView(run)
    view._look_again = 0
    view.update()
    assert capsys.readouterr().out == f"warning: {told}\n", "while it runs"
    view.update()
    view.finish()
    assert told not in capsys.readouterr().out, "once"
    assert f"<b>The ranks have diverged</b><br>{told}</div>" in warning_html(run)
    assert f"\n\n{told}" in error_text(run, report_on(run, {0: 1, 1: 1}, {}, timeout=3))


def test_ranks_that_diverge() -> None:
    """In the first pass some have fewer batches; in the second one changes what is its own."""

    def train() -> None:
        fingerprints.FREE = 60.0  # seconds: each step is looked at on a slow machine, too
        rank = int(os.environ["RANK"])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).requires_grad_(False)
        for number in range(2):
            model[1].bias.fill_(number)
            for step in track(range(4 - (rank if number == 0 else 0)), same=model):
                if (number, step, rank) == (1, 1, 1):
                    model[1].bias += 1e-3

    found = divergence(quiet_launch(train, nprocs=3))
    assert found is not None
    assert found.check == Check(0, 2, 2)
    told = "the ranks have differed since step 2 of pass 2: in 1.bias; rank 1 is the odd one out"
    assert str(found) == told
