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
    "a lambda": """
        work = lambda: (
            1 / 0  # here
        )
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
    "a comprehension": """
        def work():
            return [
                1 / number  # here
                for number in (1, 0)
            ]
        """,
    "a generator": """
        def numbers():
            yield 1
            raise ValueError  # here

        def work():
            return list(numbers())
        """,
    "a coroutine": """
        import asyncio

        async def fails():
            raise ValueError  # here

        def work():
            asyncio.run(fails())
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
    "a default argument": """
        def fails():
            raise ValueError  # here

        def work(function=fails):
            function()
        """,
    "a global that a function uses": """
        def fails():
            raise ValueError  # here

        def work():
            fails()
        """,
    "a method": """
        class Model:
            def forward(self):
                raise ValueError  # here

        def work():
            Model().forward()
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
    "a dataclass": """
        from dataclasses import dataclass

        @dataclass
        class Setting:
            rate: float

            def __post_init__(self):
                raise ValueError  # here

        def work():
            Setting(0.1)
        """,
    "an instance that is called": """
        class Work:
            def __call__(self):
                raise ValueError  # here

        work = Work()
        """,
    "a function in a list in a dict": """
        def fails():
            raise ValueError  # here

        FUNCTIONS = {"all": [print, fails]}

        def work():
            FUNCTIONS["all"][1]()
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

assert cloudpickle.__version__ == {version!r}, cloudpickle.__file__

def work():
    raise ValueError("of this script")  # here

if __name__ == "__main__":
    try:
        launch(work, nprocs=1, device="cpu", dashboard=False)
    except RankError as error:
        print(error)
        marked = [line for line in str(error).splitlines() if line.startswith("---->")]
        if not (marked and marked[-1].endswith("# here")):
            sys.exit("cloudpickle " + {version!r} + ": the report does not show the line that failed")
"""
RENAMED = """
__version__ = {version!r}
_made = _make_function

def _make_function(code, *arguments):
    return _made(code.replace(co_filename="<another-name>"), *arguments)
"""
REDUCED = """
__version__ = {version!r}
_reduced = _code_reduce

def _code_reduce(code):
    make, arguments = _reduced(code)
    names = code.co_filename, "<dynamic-code>"
    return make, tuple({name} if each in names else each for each in arguments)

Pickler._dispatch_table[types.CodeType] = _code_reduce
"""


@pytest.mark.parametrize(
    ("version", "added", "shows"),
    [
        ("3.1.2", REDUCED.replace("{name}", "code.co_filename"), True),
        ("3.1.3", REDUCED.replace("{name}", "'<dynamic-code>'"), True),
        ("99.0", RENAMED, False),  # gives code another file as it is received, which we cannot prevent
    ],
)
def test_a_report_shows_the_line_with_another_cloudpickle(
    version: str, added: str, shows: bool, tmp_path: Path
) -> None:
    package = tmp_path / "path" / "cloudpickle"
    shutil.copytree(Path(cloudpickle.__file__).parent, package)
    with (package / "cloudpickle.py").open("a") as file:
        file.write(added.format(version=version))
    with (package / "__init__.py").open("a") as file:
        file.write(f"\n__version__ = {version!r}\n")
    script = tmp_path / "script.py"
    script.write_text(CHECK.format(root=str(Path(__file__).parents[1]), version=version))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode == 0) == shows, done.stdout + done.stderr
    if not shows:
        assert done.stderr.strip() == "cloudpickle 99.0: the report does not show the line that failed"
