"""What a learner asks a launcher for: refused in one sentence, with the value, before anything is started."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import math
import operator
import os
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import cloudpickle

from ..hardware import gpu_count


def world_size_of(nprocs: int | None, device: str | None) -> int:
    """How many ranks a `launch` starts: as many as asked for, or one for each GPU, or 2 without one."""
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
    """Refuse what is no number of seconds."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"{name} is a number of seconds above 0, or None for no limit; got {timeout!r}")


def packed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """(function, args, kwargs) as bytes; refused with the name of what cannot be sent."""
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
        with contextlib.suppress(TypeError, ValueError):  # no plain function; a name without a value yet
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


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, and more that cells have.

    By name go modules of a class of their own (``torch.backends.cudnn`` is one). By value go what
    `functools` caches, with an empty cache, and functions that it dispatches.
    """

    def reducer_override(self, obj: Any) -> Any:
        own_class = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if own_class and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools._lru_cache_wrapper) and not _has_a_name(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        if type(obj) is functools.cached_property:  # without its lock
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is weakref.WeakKeyDictionary:  # a singledispatch has one
            return weakref.WeakKeyDictionary, (dict(obj),)
        return super().reducer_override(obj)


def _has_a_name(obj: Any) -> bool:
    """Whether the ranks can import it."""
    if obj.__module__ == "__main__" or obj.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):  # made in a function
        return False


def dumps(value: Any) -> bytes:
    """What travels to a rank, functions of a notebook's cells by value."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def script_at(script: str | os.PathLike[str]) -> Path:
    """The path of a script that is there."""
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} in {Path.cwd()}")
    return path


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number from {least} on; got {value!r}")
