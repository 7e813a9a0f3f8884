"""What ranks may report instead of the truth: a report changed as a whole, or in one place.

A report has, for each time that a judge asked, what each rank said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Report = list[list[Any]]
Path = tuple[Any, ...]
Changes = dict[str, Callable[[Any], Any]]

CONSTANTS = (
    *([], {}, None, 0, 1, "", True, math.nan, [[]], [{}], [None] * 3, [[0, 0]] * 4),
    *("x" * 10_000, [0] * 10_000),
)
NUMBERS: Changes = {
    "nan": lambda _: math.nan,
    "None": lambda _: None,
    "inf": lambda _: math.inf,
    "0": lambda _: 0,
    "-1": lambda _: -1,
    "text": str,
    "no text": lambda _: "",
    "True": lambda _: True,
    "lists": lambda value: [value],
    "no lists": lambda _: [],
    "beyond a float": lambda _: 10**400,
}
OTHERS: Changes = {  # of bools and of text
    "None": lambda _: None,
    "0": lambda _: 0,
    "True": lambda _: True,
    "False": lambda _: False,
    "''": lambda _: "",
}
LISTS: Changes = {
    "emptied": lambda _: [],
    "without the last": lambda items: items[:-1],
    "of one item": lambda items: items[:1],
    "of the first item again and again": lambda items: items[:1] * len(items),
    "with one item more": lambda items: items + items[-1:],
    "None": lambda _: None,
    "dicts": lambda items: {str(i): item for i, item in enumerate(items)},
    "one deeper": lambda items: [items],
}
DICTS: Changes = {
    "emptied": lambda _: {},
    "None": lambda _: None,
    "lists": lambda value: list(value.values()),
    "with one key more": lambda value: value | {"more": 1},
}
ENDS = 6  # items at each end of a list
KINDS = (
    ("numbers", int | float, NUMBERS),
    ("bools", bool, OTHERS),
    ("text", str, OTHERS),
    ("dicts", dict, DICTS),
)


def constants(report: Report) -> Iterator[tuple[str, Report]]:
    """Yield reports in which all ranks say the same, whatever they were asked."""
    for constant in CONSTANTS:
        yield f"all say {constant!r:.20}", [[constant for _ in ranks] for ranks in report]


def of_a_whole(report: Report) -> Iterator[tuple[str, Report]]:
    """Yield a report, changed in all places that are alike, and in words how."""
    yield from ((words, forged) for words, forged in _of_a_whole(report) if forged != report)


def _of_a_whole(report: Report) -> Iterator[tuple[str, Report]]:
    yield "all say what rank 0 says", [ranks[:1] * len(ranks) for ranks in report]
    yield "each says what the one before it says", [ranks[-1:] + ranks[:-1] for ranks in report]
    yield "one deeper", [[[said] for said in ranks] for ranks in report]
    for kind, types, changes in KINDS:
        for name, change in changes.items():
            yield f"{kind}: {name}", _changed(report, partial(_if_of, types, change))
    paths = list(_paths(report))
    for depth, (name, change) in itertools.product(range(max(map(len, paths)) - 1), LISTS.items()):
        yield f"lists at depth {depth}: {name}", _changed(report, partial(_if_of, list, change), depth + 2)
    for key in sorted({step for path in paths for step in path if isinstance(step, str)}):
        yield f"without {key!r}", _changed(report, partial(_without, key))


def _if_of(types: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Change a value of these types; a bool is no int."""
    return (
        change(value)
        if isinstance(value, types) and (types is bool or not isinstance(value, bool))
        else value
    )


def _without(key: str, value: Any) -> Any:
    return {name: item for name, item in value.items() if name != key} if isinstance(value, dict) else value


def _changed(value: Any, change: Callable[[Any], Any], at: int | None = None, depth: int = 0) -> Any:
    """Return a report with all parts of what ranks say changed, inner ones first, or those at a depth.

    In the middle of a long list nothing is changed, which would take long.
    """
    if isinstance(value, list):
        ends = [*range(len(value))[:ENDS], *range(len(value))[-ENDS:]]
        value = value[:]
        for i in dict.fromkeys(ends):
            value[i] = _changed(value[i], change, at, depth + 1)
    elif isinstance(value, dict):
        value = {key: _changed(item, change, at, depth + 1) for key, item in value.items()}
    return change(value) if depth > 1 and at in (None, depth) else value


def of_one_place(report: Report) -> Iterator[tuple[str, Report]]:
    """Yield a report with one part gone, or nothing in its place: the first and last of those alike."""
    alike: dict[Path, list[Path]] = {}
    for path in _paths(report):
        if len(path) > 2:  # a part of what a rank says
            alike.setdefault(tuple("*" if isinstance(step, int) else step for step in path), []).append(path)
    for path in dict.fromkeys(path for paths in alike.values() for path in (paths[0], paths[-1])):
        for what in ("gone", None, math.nan, [], {}):
            forged = _with(report, path, what)
            if forged != report:
                yield f"{path}: {what}", forged


def _with(value: Any, path: Path, what: Any) -> Any:
    """Return a report with something else in one place; if that is "gone", the place is gone as well."""
    if not path:
        return what
    step, *below = path
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    if what == "gone" and not below:
        del changed[step]
    else:
        changed[step] = _with(value[step], tuple(below), what)
    return changed


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path to each part of a report."""
    yield path
    if isinstance(value, list | dict):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, step))
