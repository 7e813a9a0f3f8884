"""The threads of a rank beside its main thread: where they are, and what ended them."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from course_lib.rank.threads import MOST_ERRORS, note_exceptions, other_threads


def ended_by(error: BaseException, name: str = "helper") -> None:
    def work() -> None:
        raise error

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The facts that were noted; each exception still reaches the hook that was there before."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append({"before": args.exc_value}))
    note_exceptions(lambda **facts: told.append(facts))
    return told


def test_what_ends_a_thread_is_noted_and_goes_its_way(noted: list[dict[str, Any]]) -> None:
    error = OSError("no such file")
    ended_by(error, "prefetch")
    told, gone_on = noted
    (fact,) = told["thread_errors"]
    assert (fact["thread"], fact["type"], fact["message"]) == ("prefetch", "OSError", "no such file")
    assert [frame["function"] for frame in fact["frames"]] == ["work"]
    assert gone_on == {"before": error}


def test_an_exit_is_no_error_and_many_are_not_all_noted(noted: list[dict[str, Any]]) -> None:
    ended_by(SystemExit(0))
    ended_by(ValueError("ours"), "course-recorder")
    assert [list(each) for each in noted] == [["before"]] * 2
    for number in range(MOST_ERRORS + 2):
        ended_by(ValueError(number))
    facts = [each["thread_errors"] for each in noted if "thread_errors" in each]
    assert [len(each) for each in facts] == list(range(1, MOST_ERRORS + 1))


def test_an_error_in_a_fork_is_not_the_ranks(
    noted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ended_by(ValueError("in a DataLoader's worker"))
    assert [list(each) for each in noted] == [["before"]]


def test_the_threads_that_are_told() -> None:
    end = threading.Event()

    def waits() -> None:
        end.wait()

    threads = [
        threading.Thread(target=waits, name="the learner's", daemon=True),
        threading.Thread(target=end.wait, name="a library's", daemon=True),
        threading.Thread(target=end.wait, name="waited for at the end", daemon=False),
    ]
    names = {thread.name for thread in threads}
    for thread in threads:
        thread.start()
    try:
        told = {each["name"]: each for each in other_threads() if each["name"] in names}
    finally:
        end.set()
    assert {name: each["daemon"] for name, each in told.items()} == {
        "the learner's": True,
        "waited for at the end": False,
    }
    functions = [function for _, _, function in told["the learner's"]["stack"]]
    assert functions.index("waits") > functions.index("wait"), "innermost first"
    for thread in threads:
        thread.join()
