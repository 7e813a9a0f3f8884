"""`make mutants` reports missed mutants, also by its exit status, and whatever else is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.answers import answers
from tests.mutants.mutate import Mutant
from tests.support.line_process import LineProcess
from tests.support.processes import processes_marked, wait_for

ROOT = Path(__file__).parents[2]

# The judge's process, but with a judge for 02.1 that accepts every answer without asking it
BLIND = """
import dataclasses
from course_lib.exercises.question import QUESTIONS, Finding
from tests.mutants import judge

asked = QUESTIONS["02.1"]
def blind(ask, rng):
    for what in asked.properties:
        yield Finding(what, True)
QUESTIONS["02.1"] = dataclasses.replace(asked, judge=blind)
judge.main()
"""
WRONG = "return sum(losses) / len(losses)"


def of_02_1(source: str) -> list[Mutant]:
    """Return two mutants: a mean of means, and one that ends any process in which it is defined."""
    (line,) = [line.strip() for line in source.splitlines() if "return" in line]
    ends = source.replace(
        "def mean_loss(losses, sizes)", "def mean_loss(losses, sizes=__import__('os')._exit(1))"
    )
    return [Mutant("unweighed", source.replace(line, WRONG)), Mutant("ends", ends)]


@pytest.fixture
def with_two_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "mutants", of_02_1)
    monkeypatch.setattr(run, "equivalent", dict)


@pytest.mark.usefixtures("with_two_mutants")
def test_what_the_judge_finds_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["02.1", "--seed", "1", "--side-by-side", "1"]) == 0
    out = capsys.readouterr().out
    assert "--seed 1" in out
    assert "2 mutants: 2 caught, 0 equivalent, 0 missed" in out


@pytest.mark.usefixtures("with_two_mutants")
def test_a_blind_judge_misses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "JUDGE", [sys.executable, "-c", BLIND])
    assert run.main(["02.1", "--side-by-side", "1"]) == 1
    out = capsys.readouterr().out
    assert "2 mutants: 1 caught, 0 equivalent, 1 missed" in out
    assert "02.1 missed: unweighed" in out
    assert f"+    {WRONG}" in out


@pytest.mark.usefixtures("with_two_mutants")
def test_a_judge_that_does_not_start_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "JUDGE", [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(ChildProcessError, match="does not start"):
        run.main(["02.1"])


def test_faults_of_the_lists_are_told() -> None:
    (answer,) = run.asked_for(["02.1"])
    row = run.Row(answer, {})
    row.stale = ["x → y"]
    row.judged = [run.Judged("02.1", Mutant(run.UNCHANGED, answer.source), "not done", "1", 0.0)]
    found = list(run.faults([row]))
    assert "the solution itself has not all points: not done" in found[0]
    assert "is not made any more: x → y" in found[1]


def test_a_lesson_is_all_of_its_questions() -> None:
    assert [each.number for each in run.asked_for(["02"])] == ["02.1", "02.2", "02.3"]
    assert [each.number for each in run.asked_for(["02.2", "03.1"])] == ["02.2", "03.1"]
    assert run.asked_for([]) == answers()


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    mark = str(tmp_path)
    command = [sys.executable, "-m", "tests.mutants.run", "05.1", "--side-by-side", "1"]
    environment = os.environ | {"MUTANTS_TEST": mark}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(processes_marked("MUTANTS_TEST", mark)) > 2, what="ranks of the judge")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert "interrupted" in out
        assert process.returncode == 130
        wait_for(lambda: not processes_marked("MUTANTS_TEST", mark), what="an end of all processes")
    finally:
        process.kill()


ENDS = {
    "time.sleep(60)": "it was not done after 6 s",
    "raise KeyError('gone')": "rank 0: KeyError: 'gone'",
    "os._exit(0)": "rank 0: it ended its process",
    "sys.exit(0)": "rank 0: SystemExit: 0",
    "print('ready'); return [(0, 0, 0)]": "one row for each process",
}


def test_a_process_judges_the_next_one_whatever_became_of_the_last(tmp_path: Path) -> None:
    (answer,) = run.asked_for(["04.1"])
    process = LineProcess(run.JUDGE, str(tmp_path / "home"), run.MOST_SECONDS)
    try:
        for body, why in ENDS.items():
            source = f"import os, sys, time\ndef rank_table(nodes, ranks_per_node):\n    {body}"
            asked = {"number": "04.1", "before": "", "name": "rank_table", "source": source, "seeds": ["1"]}
            told = process.ask(asked)
            assert why in told["caught"], body
        asked |= {"before": answer.before, "source": answer.source, "seeds": ["1", "2"]}
        assert process.ask(asked) == {"caught": "", "seed": ""}
    finally:
        process.end()
