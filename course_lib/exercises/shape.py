"""The shape of a work's report: written next to the work, checked when the report comes back.

A shape looks like the report, with types in place of values:

- ``bool``, ``str``, ``int`` (64 bits, not a bool) and ``float`` (finite: the work measured it);
- `NUMBER`: also nan and inf, which an answer may compute; `TENSOR`: nested lists of numbers, as in a tensor;
- ``object``: anything, where the judge only compares it with the right value;
- ``[a, b]``: a list of these two; ``[a, ...]``: any number of them; ``[a, a, ...]``: at least one;
- ``{"key": a}``: a dict with these keys; ``{str: a}``: with any keys;
- ``(a, b)``: one of these;
- any other value, such as None or ``"done"``: this value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

Reported = TypeVar("Reported", bound=Callable[..., Any])

NUMBER, TENSOR = "a number of an answer's", "the numbers of a tensor"
SHAPES: dict[Callable[..., Any], Callable[..., Any]] = {}  # by work


def reports(shape: Callable[..., Any]) -> Callable[[Reported], Reported]:
    """Decorate a work with the shape of its report, as a function of the arguments that the judge gives it.

    If the shape differs between ranks, that function returns a function of the rank. The shape stays with the
    judge: the ranks that run the work do not need it.
    """

    def register(work: Reported) -> Reported:
        SHAPES[work] = shape
        return work

    return register


def of_size(each: Any, *sizes: int) -> Any:
    """Return the shape of nested lists of these lengths, such as of a tensor."""
    for size in reversed(sizes):
        each = [each] * size
    return each


def shape_of(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the shape of a work's report for these arguments, or a function of the rank."""
    return SHAPES[work](*args) if work in SHAPES else object


def misfit(by_rank: list[Any], shape: Any) -> str:
    """Return, in words, where the first report without the shape differs from it; empty if all have it."""
    for rank, report in enumerate(by_rank):
        try:
            path = _first_misfit(report, shape(rank) if _is_function(shape) else shape)
        except RecursionError:  # lists in lists in lists
            path = ""
        if path is not None:
            return f"rank {rank}{f', at {path}' if path else ''}"
    return ""


def _first_misfit(value: Any, shape: Any) -> str | None:
    """Return the path to the first part without its shape, as in ``[2]['sum']``; None if all have it."""
    if isinstance(shape, tuple):
        paths = [_first_misfit(value, one) for one in shape]
        return None if None in paths else max(paths, key=lambda path: len(path or ""))
    if isinstance(shape, list) and isinstance(value, list):
        return _first_in_list(value, shape)
    if isinstance(shape, dict) and isinstance(value, dict):
        if str not in shape and value.keys() != shape.keys():
            return ""
        parts = [(f"[{key!r}]", part, shape.get(key, shape.get(str))) for key, part in value.items()]
        return _first_of(parts)
    return None if _is(value, shape) else ""


def _first_in_list(value: list[Any], shape: list[Any]) -> str | None:
    if shape[-1:] == [...]:
        *first, each, _ = shape
        shape = first + [each] * max(len(value) - len(first), 0)
    if len(value) != len(shape):
        return ""
    return _first_of([(f"[{i}]", *pair) for i, pair in enumerate(zip(value, shape, strict=True))])


def _first_of(parts: list[tuple[str, Any, Any]]) -> str | None:
    for at, value, shape in parts:
        if (path := _first_misfit(value, shape)) is not None:
            return at + path
    return None


def _is(value: Any, shape: Any) -> bool:
    if shape is object:
        return True
    if shape is TENSOR:
        return _sizes(value) is not None
    number = isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)
    if shape is NUMBER:
        return number
    if shape is float:
        return number and math.isfinite(value)
    if shape is int:
        return number and isinstance(value, int)
    if isinstance(shape, type):
        return isinstance(value, shape)
    return type(value) is type(shape) and bool(value == shape)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of nested lists of numbers or bools; None if they are not as regular as a tensor."""
    if not isinstance(value, list):
        return () if isinstance(value, bool) or _is(value, NUMBER) else None
    inner = {_sizes(item) for item in value}
    if None in inner or len(inner) > 1:
        return None
    return len(value), *(inner.pop() or () if inner else ())


def _is_function(shape: Any) -> bool:
    return callable(shape) and not isinstance(shape, type)
