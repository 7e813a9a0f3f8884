"""Check a launcher's arguments: a bad value is named and refused in one sentence, before anything starts."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from pathlib import Path
from typing import Any

from ..by_value import dumps
from ..hardware import gpu_count


def world_size_of(nprocs: int | None, device: str | None) -> int:
    """Return how many ranks a `launch` starts: ``nprocs``, or one per GPU, or 2 without a GPU."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is 'cpu', 'cuda', or left out to take what is there; got {device!r}")
    gpus = 0 if device == "cpu" else gpu_count()
    if device == "cuda" and gpus == 0:
        raise ValueError("device='cuda', but torch sees no CUDA GPU on this machine; leave device out")
    if nprocs is None:
        return gpus or 2
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs is the number of ranks, a whole number from 1 on; got {nprocs!r}")
    return nprocs


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Refuse a timeout that is not a positive, finite number of seconds; None is no limit."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"{name} is a number of seconds above 0, or None for no limit; got {timeout!r}")


def packed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle (function, args, kwargs) for the ranks; an error names what cannot be called or sent."""
    if not callable(function):
        raise TypeError(
            f"launch takes the function itself and then its arguments, launch(train, 3); its first argument "
            f"is {function!r:.60}, a {type(function).__name__}, which cannot be called"
        )
    with contextlib.suppress(ValueError):  # some builtins have no signature
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(function, "__name__", "the function")
            raise TypeError(f"{name} cannot be called with these arguments: {error}") from None
    try:
        return dumps((function, args, kwargs))
    except Exception as error:
        user = getattr(function, "__name__", type(function).__name__)
        named = {f"argument {i} of {user}": value for i, value in enumerate(args, 1)}
        named |= {f"argument {name}=": value for name, value in kwargs.items()}
        with contextlib.suppress(TypeError, ValueError):  # not a plain function; a name without a value
            variables = inspect.getclosurevars(function)
            used = {**variables.nonlocals, **variables.globals}
            named |= {f"{name}, which {user} uses,": value for name, value in used.items()}
        for name, value in named.items():
            try:
                dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"{name} cannot be sent to the ranks: it is {value!r:.80} ({reason}); "
                    f"make it inside the function instead"
                ) from None
        raise TypeError(f"{function!r:.80} cannot be sent to the ranks: {error}") from None


def script_at(script: str | os.PathLike[str]) -> Path:
    """Return a script's path; raise FileNotFoundError if there is no such file."""
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} in {Path.cwd()}")
    return path


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse a value that is not a whole number, or is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number from {least} on; got {value!r}")
