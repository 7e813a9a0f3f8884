"""Run a notebook cell without a notebook, and launch without a dashboard."""

from __future__ import annotations

import functools
import itertools
import linecache
import textwrap
from types import SimpleNamespace
from typing import Any

from course_lib import launch

quiet_launch = functools.partial(launch, dashboard=False)
_numbers = itertools.count(1)


def cell(source: str, **names: Any) -> SimpleNamespace:
    """Run source like a notebook cell: its names belong to ``__main__``, and its lines are in no file.

    Returns
    -------
    SimpleNamespace
        What the cell defined, and ``filename``.
    """
    source = textwrap.dedent(source).lstrip("\n")
    filename = f"/nowhere/cell_{next(_numbers)}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    defined: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(source, filename, "exec"), defined)
    return SimpleNamespace(**{k: v for k, v in defined.items() if not k.startswith("__")}, filename=filename)
