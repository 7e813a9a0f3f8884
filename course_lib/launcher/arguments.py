"""Check a launcher's arguments: a bad value is named and refused in one sentence, before anything starts."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..host.hardware import gpu_count
from ..pickling import culprit, dumps_and_shared

INSTEAD = "make it inside the function or, for processes to share it, by multiprocessing.get_context('spawn')"


def world_size_of(nprocs: int | None, device: str | None) -> int:
    """Return how many ranks a `launch` starts: ``nprocs``, or one per GPU, or 2 without a GPU."""
    check_folder()
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is 'cpu', 'cuda', or left out to take what is there; got {device!r}")
    gpus = 0 if device == "cpu" else gpu_count()
    if device == "cuda" and gpus == 0:
        raise ValueError("device='cuda', but torch sees no CUDA GPU on this machine; leave device out")
    if nprocs is None:
        return gpus or 2
    check_count("nprocs", nprocs)
    return nprocs


def check_folder() -> None:
    """Refuse to start anything in a working folder that is gone: there, PyTorch's libraries fail to load."""
    try:
        os.getcwd()
    except OSError as error:
        raise FileNotFoundError(
            f"the working folder is gone ({error.strerror}): it was removed, or replaced by another of its "
            f"name; change to one that is there, by os.chdir(…) or %cd"
        ) from None


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Refuse a timeout that is not a positive, finite number; None is no limit."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"{name} is a number of seconds above 0, or None for no limit; got {timeout!r}")


def packed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """Pickle (function, args, kwargs) for the ranks, without what they share; an error names the culprit."""
    if not callable(function):
        raise TypeError(
            f"launch takes the function itself and then its arguments, launch(train, 3); its first argument "
            f"is {function!r:.60}, a {type(function).__name__}, which cannot be called"
        )
    with contextlib.suppress(ValueError):  # some builtins have no signature
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name_of(function)} cannot be called with these arguments: {error}") from None
    try:
        return dumps_and_shared((function, args, kwargs))
    except Exception as error:
        cannot = "cannot be sent to the ranks"
        given = {f"argument {i} of {name_of(function)}": value for i, value in enumerate(args, 1)}
        given |= {f"argument {name}=": value for name, value in kwargs.items()}
        for argument, value in given.items():
            if found := culprit("it", value, dumps_and_shared):
                raise TypeError(f"{argument} {cannot}: {' is '.join(found)}; {INSTEAD}") from None
        if found := culprit(name_of(function), function, dumps_and_shared):
            raise TypeError(f"{found[0]} {cannot}: it is {found[1]}; {INSTEAD}") from None
        raise TypeError(f"{function!r:.80} {cannot}: {error}") from None


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def script_at(script: str | os.PathLike[str]) -> Path:
    """Return a script's path; raise FileNotFoundError if there is no such file."""
    check_folder()
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} in {Path.cwd()}")
    return path


def program_of(script: str | os.PathLike[str], args: tuple[Any, ...]) -> tuple[str, list[str]]:
    """Return the name and the command line of a script or, after ``-m``, of a module that is there."""
    words = [str(script), *map(str, args)]
    if words[0] != "-m" or not args:
        return script_at(script).name, words
    check_folder()
    name, path = "", ["", *sys.path]
    for part in words[1].split("."):  # without importing the packages
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            raise FileNotFoundError(f"there is no module {words[1]!r} in {Path.cwd()}, nor an installed one")
        path = list(spec.submodule_search_locations or ())
    return name, words


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse a value that is not a whole number, or is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number from {least} on; got {value!r}")
