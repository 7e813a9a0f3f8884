"""`make mutants`: change each solution in one place at a time, and let the judges find each change.

    make mutants                             all questions; three quarters of an hour on two busy cores
    make mutants ARGS="06.1 07"              one question, and all questions of a lesson
    make mutants ARGS="06.1 --seed 123"      with the random numbers of another run

A line for each question says how many mutants were made, caught (they lose points in one of three draws),
equivalent (`equivalent.toml` has the reason) and missed. Missed mutants are shown, and the command fails.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.answers import Answer, answers
from tests.mutants.mutate import Mutant, mutants
from tests.support.line_process import LineProcess

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
JUDGE = [sys.executable, "-W", "ignore", "-m", "tests.mutants.judge"]
DRAWS = 3
MOST_SECONDS = 120.0  # for all draws of a mutant; then it is killed and counts as caught
ENDED = {"caught": "the check did not end, or its process did", "seed": ""}
UNCHANGED = "the solution itself"


@dataclass
class Judged:
    """A mutant and why it was caught; the reason is empty if it was not."""

    number: str
    mutant: Mutant
    caught: str
    seed: str
    seconds: float


@dataclass
class Row:
    """The results for a question's mutants."""

    answer: Answer
    equivalent: dict[str, str]
    judged: list[Judged] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[Judged]:
        return [each for each in self.judged if not each.caught and each.mutant.change != UNCHANGED]

    @property
    def solution_fails(self) -> str:
        return next((each.caught for each in self.judged if each.mutant.change == UNCHANGED), "")

    def __str__(self) -> str:
        judged = [each for each in self.judged if each.mutant.change != UNCHANGED]
        caught = sum(bool(each.caught) for each in judged)
        made, seconds = len(judged) + len(self.equivalent), sum(each.seconds for each in self.judged)
        columns = (made, caught, len(self.equivalent), len(self.missed))
        return f"{self.answer.number:8}" + "".join(f"{each:12}" for each in columns) + f"{seconds:9.0f} s"


HEAD = f"{'question':8}" + "".join(f"{each:>12}" for each in ("made", "caught", "equivalent", "missed"))


def equivalent() -> dict[str, dict[str, str]]:
    """Return for each question the changes that leave its answer right, with the reasons."""
    kept = tomllib.loads(EQUIVALENT.read_text())
    return {
        number: {change: group["reason"] for group in groups for change in group["changes"]}
        for number, groups in kept.items()
    }


# --- the judges' processes --------------------------------------------------------------------------------


def judged(
    work: list[tuple[Answer, Mutant]], seed: str, side_by_side: int, draws: int = DRAWS
) -> Iterator[Judged]:
    """Judge mutants and yield the results as they come; the same seed gives each the same numbers."""
    waiting: queue.SimpleQueue[tuple[Answer, Mutant] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Judged | BaseException] = queue.SimpleQueue()
    for each in work:
        waiting.put(each)
    stop = threading.Event()

    def take(process: LineProcess) -> None:
        try:
            while not stop.is_set():
                answer, mutant = waiting.get_nowait()
                begin = time.perf_counter()
                seeds = [f"{seed} {answer.number} {mutant.change} {draw}" for draw in range(draws)]
                asked = {"number": answer.number, "before": answer.before, "name": answer.name}
                told = process.ask(asked | {"source": mutant.source, "seeds": seeds}) or ENDED
                took = time.perf_counter() - begin
                done.put(Judged(answer.number, mutant, told["caught"], told["seed"], took))
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)
        finally:
            process.end()

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as home:
        processes = [LineProcess(JUDGE, f"{home}/{i}", MOST_SECONDS) for i in range(side_by_side)]
        threads = [threading.Thread(target=take, args=[each], daemon=True) for each in processes]
        try:
            for thread in threads:
                thread.start()
            for _ in work:
                found = done.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stop.set()
            for process in processes:
                process.close()
            for thread in threads:
                thread.join()


# --- the command ------------------------------------------------------------------------------------------


def difference(before: str, after: str) -> str:
    """Return a small diff to read; empty if the answer is unchanged and a wrapper was put around it."""
    if after.startswith(before):
        return ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "".join(f"\n    {line}" for line in list(lines)[2:] if not line.startswith("@@"))


def asked_for(numbers: list[str]) -> list[Answer]:
    """Return the answers to the questions, or lessons, with these numbers; without numbers, all answers."""
    return [
        each for each in answers() if not numbers or {each.number, each.number.split(".")[0]} & set(numbers)
    ]


def run(
    chosen: list[Answer],
    seed: str,
    side_by_side: int,
    tell: Callable[[str], None] = print,
    sources: Callable[[str], list[Mutant]] = mutants,
    note: Callable[[Judged], None] = lambda _: None,
) -> list[Row]:
    """Judge all mutants of some answers; report a line for each question as soon as it is done."""
    known = equivalent()
    rows, work, open_ = {}, [], {}
    for answer in chosen:
        made = sources(answer.source)
        its = known.get(answer.number, {})
        names = {each.change for each in made}
        row = rows[answer.number] = Row(answer, {name: its[name] for name in its if name in names})
        row.stale = [name for name in its if name not in names]
        mine = [(answer, Mutant(UNCHANGED, answer.source))]
        mine += [(answer, each) for each in made if each.change not in its]
        open_[answer.number] = len(mine)
        work += mine
    tell(HEAD)
    for found in judged(work, seed, side_by_side):
        row = rows[found.number]
        row.judged.append(found)
        note(found)
        open_[found.number] -= 1
        if not open_[found.number]:
            tell(str(row))
    return list(rows.values())


def faults(rows: list[Row]) -> Iterator[str]:
    """Yield, in words, what is wrong: each missed mutant, and all that makes the counts meaningless."""
    for row in rows:
        if row.solution_fails:
            yield f"{row.answer.number}: the solution itself has not all points: {row.solution_fails}"
        for name in row.stale:
            yield f"{row.answer.number}: {EQUIVALENT.name} knows a change that is not made any more: {name}"
        for each in row.missed:
            yield f"{row.answer.number} missed: {each.mutant.change}" + difference(
                row.answer.source, each.mutant.source
            )


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description="Changes each solution, and lets the judges find each change."
    )
    parser.add_argument("questions", nargs="*", help="as 06.1, or 06 for a lesson; all without one")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**9)), help="of the draws")
    parser.add_argument("--only-solutions", action="store_true", help="judge the solutions alone")
    parser.add_argument("--side-by-side", type=int, default=2, metavar="N", help="judges at once (2)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="a line for each mutant, and why it is caught"
    )
    asked = parser.parse_args(arguments)
    chosen = asked_for(asked.questions)
    if not chosen:
        parser.error(f"no question is {' or '.join(asked.questions)}")
    print(f"seed {asked.seed}: the same numbers are drawn again with --seed {asked.seed}", flush=True)
    begin = time.perf_counter()
    try:
        with open(asked.json or os.devnull, "w", buffering=1) as file:
            rows = run(
                chosen,
                asked.seed,
                asked.side_by_side,
                lambda line: print(line, flush=True),
                sources=(lambda _: []) if asked.only_solutions else mutants,
                note=lambda each: print(json.dumps(_plain(each)), file=file),
            )
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    for fault in (found := list(faults(rows))):
        print(f"\n{fault}")
    total = [sum(column) for column in zip(*(_counts(row) for row in rows), strict=True)]
    words = "{} mutants: {} caught, {} equivalent, {} missed".format(*total)
    print(f"\n{words}, in {time.perf_counter() - begin:.0f} s.")
    return 1 if found else 0


def _counts(row: Row) -> tuple[int, int, int, int]:
    judged = [each for each in row.judged if each.mutant.change != UNCHANGED]
    caught = sum(bool(each.caught) for each in judged)
    return len(judged) + len(row.equivalent), caught, len(row.equivalent), len(row.missed)


def _plain(each: Judged) -> dict[str, Any]:
    plain = {"number": each.number, "change": each.mutant.change, "caught": each.caught}
    return plain | {"seed": each.seed, "seconds": round(each.seconds, 2), "source": each.mutant.source}


if __name__ == "__main__":
    sys.exit(main())
