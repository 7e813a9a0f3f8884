"""Pickle a notebook's functions and classes, with the file names and line numbers that reports show.

cloudpickle pickles by value what a cell defines, and names all code ``<dynamic-code>`` since version 3.1.3.
Python's own `marshal` keeps the code's file and line numbers: both sides run the same Python.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import importlib
import io
import marshal
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

import cloudpickle

from .compat import CachedFunction
from .tracebacks.learner_code import as_in_a_file

loads = pickle.loads
GIVEN: list[Any] = []  # in a rank: what `dumps_and_shared` left out
CALLS = types.FunctionType | functools.partial | types.MethodType | classmethod | staticmethod | property
ATTRIBUTES = (  # of `CALLS`
    *("__defaults__", "__kwdefaults__", "func", "args", "keywords"),
    *("__self__", "__func__", "fget", "fset", "fdel"),
)


class Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, extended to more of what cells contain.

    It pickles modules with a class of their own (such as ``torch.backends.cudnn``) by name. It pickles by
    value `functools.singledispatch` functions, and what `functools` caches, with an empty cache.
    """

    shared: list[Any] | None = None  # collects what processes share, to be sent beside the rest

    def reducer_override(self, obj: Any) -> Any:
        if self.shared is not None and _is_shared(obj):
            self.shared.append(obj)
            return _given, (len(self.shared) - 1,)
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(as_in_a_file(obj)),)
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CachedFunction) and not _has_a_name(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        if type(obj) is functools.cached_property:  # without its lock
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is weakref.WeakKeyDictionary:  # part of a singledispatch function
            return weakref.WeakKeyDictionary, (dict(obj),)
        return super().reducer_override(obj)


def _is_shared(obj: Any) -> bool:
    """Return whether it is a tensor in shared memory, or a queue, event, value… of multiprocessing."""
    torch = sys.modules.get("torch")
    if torch and type(obj) in (torch.Tensor, torch.nn.Parameter):
        return obj.layout is torch.strided and obj.device.type == "cpu" and obj.is_shared()
    return type(obj).__module__.startswith(("multiprocessing.", "torch.multiprocessing."))


def _given(number: int) -> Any:
    return GIVEN[number]


def _has_a_name(obj: Any) -> bool:
    """Return whether the ranks can import it."""
    if obj.__module__ == "__main__" or obj.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):  # defined in a function
        return False


def serve_multiprocessing() -> None:
    """Have `multiprocessing` send by value what a cell defines, to and from a DataLoader's workers.

    Python pickles functions and classes by name. A worker that was not forked (by spawn, or by forkserver,
    Python 3.14's default) cannot find a cell's names, nor can a rank in what even a forked worker returns.
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
    dump(value, file := io.BytesIO())
    return file.getvalue()


def dumps_and_shared(value: Any) -> tuple[bytes, list[Any]]:
    """Return what `dump` writes and, apart from it, what processes share, which multiprocessing sends."""
    pickler = Pickler(file := io.BytesIO())
    pickler.shared = []
    pickler.dump(value)
    popen: Any = types.SimpleNamespace(DupFd=int, duplicate_for_child=int)
    context.set_spawning_popen(popen)  # as if a process were starting: else it may be refused
    try:
        ForkingPickler.dumps(pickler.shared)
    finally:
        context.set_spawning_popen(None)
    return file.getvalue(), pickler.shared


def culprit(name: str, value: Any, dumps: Callable[[Any], object] = dumps) -> tuple[str, str] | None:
    """Return which part of a value cannot be pickled, if any: where it is; what it is, and why not."""
    users, seen, reason = "", set[int](), _refusal(value, dumps)
    while reason and id(value) not in seen:
        seen.add(id(value))
        for step, part in _parts(value):
            if id(part) not in seen and (why := _refusal(part, dumps)):
                if step.isidentifier():  # a function uses it by this name
                    users, name = f", which {name} uses{users}", step
                else:
                    name += step
                value, reason = part, why
                break
    what = " ".join(repr(value).split())
    return (name + (users and f"{users},"), f"{what:.80} ({reason})") if reason else None


def _refusal(value: Any, dumps: Callable[[Any], object]) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a value, each after a variable's name or a suffix such as ``[0]``."""
    if isinstance(value, types.FunctionType):
        for name, variable in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value
                yield name, variable.cell_contents
        used = _globals_of(value.__code__) & value.__globals__.keys()
        yield from ((name, value.__globals__[name]) for name in sorted(used))
    elif isinstance(value, type):
        hidden = "__dict__", "__weakref__"
        yield from ((f".{name}", part) for name, part in vars(value).items() if name not in hidden)
    elif isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    if isinstance(value, CALLS):
        yield from ((f".{name}", getattr(value, name, None)) for name in ATTRIBUTES)
    with contextlib.suppress(Exception):  # its own method refuses
        state = value.__getstate__()
        for names in state if isinstance(state, tuple) else (state,):  # the second one has what is in slots
            yield from ((f".{name}", part) for name, part in (names or {}).items())
        yield ".__class__", type(value)


def _globals_of(code: types.CodeType) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, types.CodeType)))
