"""Functions and classes of a notebook as bytes, with the file and the lines that a report shows.

cloudpickle sends what a cell defines by value. Since version 3.1.3 it names the file of all code
``<dynamic-code>``; here code travels as Python's own `marshal` writes it, with its file and line numbers.
Both sides are the same Python on the same machine.
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
from typing import IO, Any

import cloudpickle

loads = pickle.loads


class Pickler(cloudpickle.Pickler):
    """cloudpickle, and more that cells have.

    By name go modules of a class of their own (``torch.backends.cudnn`` is one). By value go what
    `functools` caches, with an empty cache, and functions that it dispatches.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
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


def dump(value: Any, file: IO[bytes], protocol: int | None = None) -> None:
    """Write what `loads` makes the same value of in another process."""
    Pickler(file, protocol).dump(value)


def dumps(value: Any) -> bytes:
    """What `dump` writes."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()
