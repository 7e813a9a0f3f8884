"""What a learner sees: lines in a terminal, a widget in a notebook, and what stays there."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from typing import Any

import pytest

from course_lib import Run, log, track
from course_lib.figures.tables import text_table
from course_lib.host.cluster import JobStatus
from course_lib.launcher import dashboard
from course_lib.launcher.dashboard import (
    LINES_KEPT,
    MANY_RANKS,
    TERMINAL_BYTES,
    TerminalView,
    bars_html,
    printed_lines,
    view_of,
    warning_html,
)
from course_lib.report.straggler import Straggler
from course_lib.run.picture import RunFigure
from tests.support.cells import quiet_launch
from tests.support.front_end import FrontEnd
from tests.support.runs import made_run


def say(run: Run, rank: int | str, text: str) -> None:
    with open(run.folder / f"rank-{rank}.log", "a") as file:
        file.write(text)


def test_outside_a_notebook_lines_come_as_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create("train", 2)
    view = view_of(run, True)
    assert isinstance(view, TerminalView)
    say(run, 0, "first\nsec")
    view.update()
    assert capsys.readouterr().out == "[rank 0] first\n"
    say(run, 0, "ond\n")
    say(run, 1, "other")
    view.update()
    assert capsys.readouterr().out == "[rank 0] second\n"
    view.finish()
    assert capsys.readouterr().out == "[rank 1] other\n"


def test_a_job_in_the_queue_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Once for each reason, not at every look."""
    run = Run.create("train.py", 2, state="queued", submitted=time.time() - 5)
    view = view_of(run, True)
    view.update()
    run.record.note(job=12)
    run.record.note_job(JobStatus("PENDING", "Resources"))
    for _ in range(3):
        view.update()
    assert bars_html(run).count("queued") == 2
    run.record.note_job(JobStatus("RUNNING", "", "node[1-2]", 4.0))
    view.update()
    waits, reason, runs = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"train\.py: 2 ranks, submitting, \d+ s", waits)
    assert re.fullmatch(r"train\.py: 2 ranks, job 12 waits in the queue, \d+ s \(Resources\)", reason)
    assert re.fullmatch(r"train\.py: 2 ranks, running, \d+\.\d s \(before that 4 s in the queue\)", runs)


def test_a_terminal_is_not_flooded(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create("train", 1)
    say(run, 0, "x" * 99 + "\n")
    say(run, 0, ("y" * 99 + "\n") * 100_000)
    view_of(run, True).update()
    printed = capsys.readouterr().out
    assert len(printed) < 2 * TERMINAL_BYTES
    assert "bytes more in" in printed


def test_a_progress_bar_is_one_line_and_whole_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create("train", 1)
    view = TerminalView(run)
    say(run, 0, "epoch 1\r\n")
    for done in range(2000):
        say(run, 0, f"\r{done} of 2000" + " " * 60)
        if done % 500 == 0:
            view.update()
    assert capsys.readouterr().out == "[rank 0] epoch 1\n", "no word of bytes left out"
    say(run, 0, "\rdone\nloss 0.5\n")
    view.update()
    view.finish()

    assert capsys.readouterr().out == "[rank 0] done\n[rank 0] loss 0.5\n"
    assert printed_lines(run) == ["rank 0 | epoch 1", "rank 0 | done", "rank 0 | loss 0.5"]
    assert run.logs[0] == "epoch 1\ndone\nloss 0.5\n"
    assert run.trace(0).files.log.read_bytes().count(b"\r") == 2002


def test_the_bars_show_step_values_and_last_line_and_no_markup_of_the_ranks() -> None:
    def work() -> None:
        print("<b>bold</b>")
        for step in track(range(7)):
            log(loss=step / 2)

    run = quiet_launch(work, nprocs=2)
    shown = bars_html(run)
    assert shown.count("<progress") == 2
    assert "pass 1, step 7/7 · loss 3" in shown
    assert "&lt;b&gt;bold" in shown
    assert "<b>" not in shown


def test_with_many_ranks_only_bars() -> None:
    run = Run.create("train", MANY_RANKS)
    assert bars_html(run).count("<progress") == MANY_RANKS
    assert "rank 3</td>" not in bars_html(run)


def test_only_the_last_lines_stay_under_the_cell() -> None:
    run = Run.create("train", 2)
    say(run, 0, "".join(f"line {i}\n" for i in range(100)))
    say(run, 1, "short\n")
    lines = printed_lines(run)
    assert lines[0] == "rank 0 | … (all of it: run.logs[0])"
    assert lines[1:] == [f"rank 0 | line {i}" for i in range(100 - LINES_KEPT, 100)] + ["rank 1 | short"]


def test_a_standstill_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, words = [100.0], [""]
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(dashboard, "stalled", lambda *_: words[0])
    view = TerminalView(Run.create("train", 2))

    def printed(seconds: int, what: str) -> str:
        words[0] = what
        for _ in range(20 * seconds):
            now[0] += 0.05
            view.update()
        return capsys.readouterr().out

    assert printed(9, "rank 0 waits") == "", "too soon to look"
    assert printed(20, "rank 0 waits") == "no progress:\nrank 0 waits\n"
    assert printed(20, "rank 0 waits for longer") == ""
    assert printed(20, "") == ""
    assert printed(20, "rank 1 waits") == "no progress:\nrank 1 waits\n"


def test_the_warning_is_text_and_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create("train", 2)
    assert warning_html(run) == ""
    record = {"since": time.time() - 60, "called": {}, "pending": [], "last": []}
    record["stack"] = [("/elsewhere/<b>.py", 3, "<i>"), ("/elsewhere/<script>.py", 7, "train")]
    (run.folder / "rank-1.where").write_text(json.dumps(record))

    shown = warning_html(run)
    assert "<b>No progress</b><br>rank 1 is at &lt;b&gt;.py, line 3</div>" in shown
    monkeypatch.setattr(dashboard, "stalled", lambda *_: "one & all\ntwo")
    assert "<br>one &amp; all<br>two</div>" in warning_html(run)


def test_a_look_opens_each_file_at_most_once() -> None:
    run = made_run(3)
    for rank in range(3):
        say(run, rank, "short\n")
    now, opened = run.snapshot(), list[str]()
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    shown = [now.headline(), warning_html(now), text_table(now.table()), bars_html(now)]
    RunFigure(live=True).update(now)
    assert "short" in shown[-1]
    times = Counter(path for path in opened if path.startswith(str(run.folder)))
    assert times[str(run.trace(1).files.ticks)] == 1
    assert {path for path in times if times[path] > 1} == set()


def test_a_straggler_is_named_while_it_lasts_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, late = made_run(2), Straggler(1, 0.02, 0.1)
    words = "rank 1 is late again and again: the others wait 20 ms for it in a step of 100 ms"
    TerminalView(run).finish()
    assert "straggler" not in capsys.readouterr().out

    monkeypatch.setattr(dashboard, "straggler", lambda run: late)

    assert f"<b>A straggler</b><br>{words}</div>" in warning_html(run)
    TerminalView(run).finish()
    assert capsys.readouterr().out.endswith(f"a straggler: {words}\n")
    monkeypatch.setattr(dashboard, "stalled", lambda *_: "rank 0 waits")
    assert "No progress" in warning_html(run)
    assert "straggler" not in warning_html(run), "one thing at a time"


CELLS = {
    "short": """
from course_lib import launch
import os
run = launch(lambda: print("I am", os.environ["RANK"]), nprocs=2)
""",
    "long": """
def train():
    import time
    from course_lib import log, track
    for step in track(range(30)):
        time.sleep(0.1)
        log(loss=1 / (step + 1))
run = launch(train, nprocs=2)
""",
    "in an older kernel": """
type(get_ipython().kernel).kernel_info = {"supported_features": ["debugger"]}  # as ipykernel 6 says
run = launch(train, nprocs=2)
""",
}


Outputs = dict[str, tuple[str, list[Any], list[Any]]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What each of CELLS prints, shows and has as widgets."""
    kept, front_end = {}, FrontEnd(tmp_path_factory.mktemp("kernel"))
    for name, code in CELLS.items():
        front_end.shown, front_end.widgets = [], {}
        printed = front_end.run(code)
        kept[name] = printed, front_end.shown, list(front_end.widgets.values())
    front_end.close()
    return kept


def test_a_short_run_leaves_its_lines_by_rank(outputs: Outputs) -> None:
    printed, shown, _ = outputs["short"]
    # the first launch may take long enough for a dashboard; nothing of it stays
    assert [each["data"] for each in shown] in ([], [{}])
    assert printed == "rank 0 | I am 0\nrank 1 | I am 1\n"


def test_a_run_that_lasts_leaves_a_picture_and_a_table_and_no_widget(outputs: Outputs) -> None:
    _, (picture, table), widgets = outputs["long"]
    assert widgets
    assert set(picture["data"]) == {"image/png", "text/plain"}
    assert "rank 1: peak memory" in picture["metadata"]["image/png"]["alt"]
    assert "<table>" in table["data"]["text/html"]
    assert "samples/s" in table["data"]["text/plain"]


def test_stop_is_there_where_it_works_and_says_what_to_do_where_it_does_not(outputs: Outputs) -> None:
    new, old = (outputs[name][-1] for name in ("long", "in an older kernel"))
    buttons = [[each for each in some if each["_model_name"] == "ButtonModel"] for some in (new, old)]
    assert [[each["description"] for each in some] for some in buttons] == [["Stop"], []]
    texts = [" ".join(str(each.get("value")) for each in some) for some in (new, old)]
    assert ["interrupt the cell" in text for text in texts] == [False, True]
