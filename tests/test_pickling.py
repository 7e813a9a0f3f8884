"""What a cell defines arrives with its file and lines; cloudpickle 3.1.3 alone would lose them."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import cloudpickle
import pytest

from course_lib.pickling import dumps, loads
from tests.support.cells import cell

# Each defines `work`, which raises at the line marked "# here".
DEFINES_WORK = {
    "a function inside a function": """
        def work():
            def inner():
                raise ValueError  # here
            inner()
        """,
    "a decorated function": """
        import functools

        def decorator(function):
            @functools.wraps(function)
            def wrapper():
                return function()
            return wrapper

        @decorator
        def work():
            raise ValueError  # here
        """,
    "a cached function": """
        import functools

        @functools.lru_cache
        def work():
            raise ValueError  # here
        """,
    "a dispatched function": """
        import functools

        @functools.singledispatch
        def of(value):
            pass

        @of.register
        def _(value: int):
            raise ValueError  # here

        of(None)  # which it remembers

        def work():
            of(1)
        """,
    "a static method, a class method and a property": """
        class Model:
            @staticmethod
            def first():
                Model.second()

            @classmethod
            def second(cls):
                cls().third

            @property
            def third(self):
                raise ValueError  # here

        work = Model.first
        """,
    "a cached property": """
        import functools

        class Model:
            @functools.cached_property
            def size(self):
                raise ValueError  # here

        def work():
            Model().size
        """,
}


def where(function: Any) -> tuple[str, str]:
    """File and source line at which a function raises."""
    try:
        function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return last.filename, linecache.getline(last.filename, last.lineno or 0).strip()
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("kind", DEFINES_WORK)
def test_the_line_that_raises_is_known(kind: str) -> None:
    defined = cell(DEFINES_WORK[kind])
    received = loads(dumps({"sent": [defined.work]}))["sent"][0]
    filename, line = where(received)
    assert filename == defined.filename, f"cloudpickle {cloudpickle.__version__}"
    assert line.endswith("# here")
