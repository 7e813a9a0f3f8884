"""Pickle a notebook's functions and classes, with the file names and line numbers that reports show.

cloudpickle pickles by value what a cell defines. Since version 3.1.3 it names the file of all code
``<dynamic-code>``; here Python's own `marshal` writes the code, which keeps its file and line numbers.
Both sides run the same Python on the same machine.
"""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import operator
import pickle
import sys
import types
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

import cloudpickle

from .private_names import CachedFunction

loads = pickle.loads


class Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, extended to more of what cells contain.

    It pickles modules with a class of their own (such as ``torch.backends.cudnn``) by name, and by value what
    `functools` caches, with an empty cache, and `functools.singledispatch` functions.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        own_class = type(obj) is not types.ModuleType
        if isinstance(obj, types.ModuleType) and own_class and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CachedFunction) and not _has_a_name(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        if type(obj) is functools.cached_property:  # without its lock
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is weakref.WeakKeyDictionary:  # part of a singledispatch function
            return weakref.WeakKeyDictionary, (dict(obj),)
        return super().reducer_override(obj)


def _has_a_name(obj: Any) -> bool:
    """Return whether the ranks can import it."""
    if obj.__module__ == "__main__" or obj.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):  # defined in a function
        return False


def serve_multiprocessing() -> None:
    """Have `multiprocessing`, too, send by value what a cell defines: to and from a DataLoader's workers.

    Python pickles functions and classes by name. A worker that was not forked (by spawn, or by forkserver,
    Python 3.14's default) finds none of a cell there, nor does its rank in what even a forked worker returns.
    """
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduced


def _reduced(pickler: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, type | types.FunctionType | CachedFunction) and not _has_a_name(obj):
        return _received, (dumps(obj),)
    return NotImplemented


def _received(data: bytes) -> Any:
    """Restore what another process sent by value, and answer in the same way."""
    serve_multiprocessing()
    return loads(data)


def dump(value: Any, file: IO[bytes], protocol: int | None = None) -> None:
    """Write a value so that `loads` can restore it in another process."""
    Pickler(file, protocol).dump(value)


def dumps(value: Any) -> bytes:
    """Return what `dump` writes."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()
