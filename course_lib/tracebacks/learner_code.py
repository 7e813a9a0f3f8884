"""Tell the learner's own lines of code from all others, and read their source."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..host.notebook import shell

CONTEXT_LINES = 2  # source lines shown above and below the failing one
OURS = str(Path(__file__).parents[1]) + os.sep  # course_lib
STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# Where packages are installed (into an environment, for a user, by the system), and code of torch.compile
PACKAGES = re.compile(r"[/\\](site-packages|dist-packages|torchinductor_[^/\\]+)[/\\]")
TYPED_IN = re.compile(r"<(stdin|console|\w+-input)\b")
# Code that a library generates: its names are of this form, too
GENERATED = re.compile(r"<(attrs generated|decorator-gen|eval_with_key|lambdifygenerated|__array_function__)")
LONGEST_PROGRAM = 1_000_000  # characters: a longer text in a variable is data
Place = tuple[str, int, str]  # file, line, function


def is_learners(filename: str) -> bool:
    """Return whether a file is the learner's: not this package's, not Python's, not an installed one's."""
    if filename.startswith("<"):
        return bool(TYPED_IN.match(filename))
    elsewhere = _packages_elsewhere(tuple(map(str, sys.path)))  # an entry may be anything
    return not (filename.startswith((OURS, *STDLIB, *elsewhere)) or PACKAGES.search(filename))


@functools.lru_cache(maxsize=1)
def _packages_elsewhere(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return packages that lie in other folders on ``path``: torch, and what pip has installed there.

    A folder may hold installed packages beside a project (``pip install --target``, PYTHONPATH). pip lists
    the files of each package, but none of an editable project.
    """
    found = set[str]()
    with contextlib.suppress(Exception):  # there is no torch, or it is half imported
        torch = find_spec("torch")
        found |= {os.path.join(folder, "") for folder in torch.submodule_search_locations}  # type: ignore
    for entry in path:
        with contextlib.suppress(Exception):  # it is not there, cannot be read, or the working folder is gone
            folder = os.path.abspath(entry)
            for files in () if PACKAGES.search(folder + os.sep) else Path(folder).glob("*.dist-info/RECORD"):
                with contextlib.suppress(OSError):  # uninstalled meanwhile
                    names = set(re.findall(r"^[^/,]+/?", files.read_text(), re.MULTILINE)) - {"../"}
                    found |= {os.path.join(folder, name.replace("/", os.sep)) for name in names}
    return tuple(found)


def is_ours(filename: str) -> bool:
    """Return whether a file is this package's."""
    return filename.startswith(OURS)


def frame_of(thread: int | None) -> FrameType | None:
    """Return a thread's current frame, or None if there is no such thread. Hold it only for a moment."""
    return _read(sys._current_frames, thread)


def error_of(thread: int | None) -> BaseException | None:
    """Return the exception for which a thread is in an except or a finally, or None. Hold it only briefly."""
    found = _read(sys._current_exceptions, thread)
    return found[1] if isinstance(found, tuple) else found  # Python 3.11 adds type and traceback


def _read(of_threads: Callable[[], dict[int, Any]], thread: int | None) -> Any:
    """Return what Python knows of a thread.

    Before Python 3.12, no garbage may be collected in this call: another thread could then run, and both
    would deadlock if it started a thread (CPython issue 106883).
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return of_threads().get(thread or 0)
    finally:
        if collects:
            gc.enable()


def with_source(filename: str, line: int, function: str) -> dict[str, Any]:
    """Describe a frame together with the source lines around it, for a reader without the source."""
    lines = linecache.getlines(filename)
    first = max(1, line - CONTEXT_LINES)
    shown = lines[first - 1 : line + CONTEXT_LINES]
    while len(shown) > line - first + 1 and not shown[-1].strip():
        shown.pop()  # blank lines that follow a function say nothing
    return {
        "file": filename,
        "line": line,
        "function": function,
        "source": [[first + i, text.rstrip("\n")] for i, text in enumerate(shown)],
    }


def as_in_a_file(code: CodeType) -> CodeType:
    """Return code that `exec` or a cell's magic has compiled, under a file's name; other code as it is.

    A name such as ``<string>`` or ``<timed exec>`` says neither who wrote the lines nor where to read them.
    If a magic such as ``%%time`` begins the cell, the cell is the file, and lines are counted from its first.
    """
    name, ipython = code.co_filename, shell()
    own = name.startswith("<") and not (TYPED_IN.match(name) or GENERATED.match(name))
    if not own or "__create_fn__" in code.co_qualname:  # a dataclass's method
        return code
    cells = enumerate(ipython.history_manager.input_hist_raw if ipython else ())
    for number, cell in reversed(list(cells)):
        magics = re.match(r"(\s*%%.*\n)+", cell)
        if magics and code in _functions_in(ipython.transform_cell(cell[magics.end() :])):
            return _moved(code, ipython.compile.cache(cell, number), magics[0].count("\n"))
    for text in list(vars(sys.modules["__main__"]).values()):
        if isinstance(text, str) and len(text) < LONGEST_PROGRAM and code in _functions_in(text):
            file = f"/exec/{zlib.crc32(text.encode())}/{name}"
            linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
            return _moved(code, file, 0)
    return _moved(code, f"/exec/{name}", 0)


@functools.lru_cache(maxsize=100)
def _functions_in(text: str) -> set[CodeType]:
    """Return the code of all functions that a program defines, also where ``%%timeit`` has run it."""
    found = set[CodeType]()
    with contextlib.suppress(Exception):  # it is no program
        tree, timed = ast.parse(text), ast.parse("def inner(): ...")
        timed.body[0].body = tree.body  # type: ignore[attr-defined]
        left = [compile(each, "", "exec", dont_inherit=True) for each in (tree, timed)]
        while left:
            found.add(code := left.pop())
            left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _moved(code: CodeType, file: str, lines: int) -> CodeType:
    inner = (_moved(each, file, lines) if isinstance(each, CodeType) else each for each in code.co_consts)
    first = code.co_firstlineno + lines
    return code.replace(co_filename=file, co_firstlineno=first, co_consts=tuple(inner))
