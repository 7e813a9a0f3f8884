"""What a cell defines arrives with its file and lines, whichever cloudpickle is installed."""

from __future__ import annotations

import linecache
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from course_lib.by_value import dumps, loads
from tests.support.cells import cell

# Each defines `work`, which raises at the line marked "# here".
DEFINES_WORK = {
    "a function": """
        def work():
            raise ValueError  # here
        """,
    "a closure": """
        def outer(number):
            def inner():
                return 1 / number  # here
            return inner

        work = outer(0)
        """,
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
    "a partial": """
        import functools

        def divide(numerator, denominator):
            return numerator / denominator  # here

        work = functools.partial(divide, 1, 0)
        """,
    "a dispatched function": """
        import functools

        @functools.singledispatch
        def of(value):
            pass

        @of.register
        def _(value: int):
            raise ValueError  # here

        def work():
            of(1)
        """,
    "a bound method": """
        class Model:
            def forward(self):
                raise ValueError  # here

        work = Model().forward
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
    "a class in a class, with a parent": """
        class Parent:
            class Inner:
                def __init__(self):
                    raise ValueError  # here

        class Child(Parent):
            pass

        work = Child.Inner
        """,
    "an instance that is called": """
        class Work:
            def __call__(self):
                raise ValueError  # here

        work = Work()
        """,
}
KEEPS_FILES, RENAMES_FILES = "as cloudpickle 3.1.2 does", "as cloudpickle 3.1.3 does"


def other_cloudpickle(filename: str) -> Any:
    """cloudpickle's own reducer of code objects, but for the file that it names."""
    original = cloudpickle.cloudpickle._code_reduce

    def reduce(code: Any) -> Any:
        make, arguments = original(code)
        named = [filename if each in (code.co_filename, "<dynamic-code>") else each for each in arguments]
        return make, tuple(named)

    return reduce


def where(function: Any) -> tuple[str, str]:
    """File and source line at which a function raises."""
    try:
        function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return last.filename, linecache.getline(last.filename, last.lineno or 0).strip()
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("version", ["as installed", KEEPS_FILES, RENAMES_FILES])
@pytest.mark.parametrize("kind", DEFINES_WORK)
def test_the_line_that_raises_is_known(kind: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defined = cell(DEFINES_WORK[kind])
    if version != "as installed":
        filename = defined.filename if version == KEEPS_FILES else "<dynamic-code>"
        table = dict(cloudpickle.Pickler.dispatch_table)
        table[type(where.__code__)] = other_cloudpickle(filename)
        monkeypatch.setattr(cloudpickle.Pickler, "dispatch_table", table)
    received = loads(dumps({"sent": [defined.work]}))["sent"][0]
    filename, line = where(received)
    assert filename == defined.filename, told(filename)
    assert line.endswith("# here")


def told(filename: str) -> str:
    version = cloudpickle.__version__
    return f"cloudpickle {version}: code that is sent by value arrives with the file name {filename!r}"


# --- a second cloudpickle on the path -----------------------------------------------------------------------

CHECK = """
import sys
sys.path.insert(0, {root!r})
import cloudpickle
from course_lib import RankError, launch

assert cloudpickle.__version__ == "3.1.3", cloudpickle.__file__

def work():
    raise ValueError("of this script")  # here

if __name__ == "__main__":
    try:
        launch(work, nprocs=1, device="cpu", dashboard=False)
    except RankError as error:
        print(error)
        marked = [line for line in str(error).splitlines() if line.startswith("---->")]
        if not (marked and marked[-1].endswith("# here")):
            sys.exit("the report does not show the line that failed")
"""
RENAMED = """
__version__ = "3.1.3"
_reduced = _code_reduce

def _code_reduce(code):
    make, arguments = _reduced(code)
    names = code.co_filename, "<dynamic-code>"
    return make, tuple("<dynamic-code>" if each in names else each for each in arguments)

Pickler._dispatch_table[types.CodeType] = _code_reduce
"""


def test_a_report_shows_the_line_with_another_cloudpickle(tmp_path: Path) -> None:
    package = tmp_path / "path" / "cloudpickle"
    shutil.copytree(Path(cloudpickle.__file__).parent, package)
    with (package / "cloudpickle.py").open("a") as file:
        file.write(RENAMED)
    with (package / "__init__.py").open("a") as file:
        file.write('\n__version__ = "3.1.3"\n')
    script = tmp_path / "script.py"
    script.write_text(CHECK.format(root=str(Path(__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
