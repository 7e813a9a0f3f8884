"""An honest submission that is judged beside those that do harm, behind walls of its own.

`python -m tests.exercises.grading.neighbour CORES…` judges it once for each line of a `LineProcess`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import cloudpickle

from course_lib.exercises.grading import score, walls
from tests.exercises.grading import toys
from tests.support.line_process import serve

HONEST = toys.notebook(toys.HONEST_FIRST, toys.check(1), toys.HONEST_SECOND, toys.check(2))


def main(cores: list[int]) -> None:
    if os.fork():  # the test that started it adopts orphans, but only once it has walls itself
        os._exit(0)
    score.answer_names()
    toys.register()
    cloudpickle.register_pickle_by_value(toys)
    with walls.Walls(cores) as there:

        def judge(_: dict[str, Any]) -> dict[str, Any]:
            found = score.score_notebook(HONEST, "99_toys.ipynb", "", 60.0, there)
            return {
                "points": [found.feedback[f"99.{place}"].points for place in (1, 2)],
                "said": found.trouble,
            }

        serve(judge)


if __name__ == "__main__":
    main([int(core) for core in sys.argv[1:]])
