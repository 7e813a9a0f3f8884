"""Load in the fork server, once, what every rank needs from its first millisecond."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os

if os.environ.get("COURSE_KERNEL") not in (None, str(os.getppid())):
    os._exit(1)  # the kernel was killed before it could tell its guard about this process

import psutil
import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from . import entry_function  # noqa: F401

if os.environ.get("COURSE_LEAN") != "1":  # saves 90 MiB for each of many kernels on one server
    with contextlib.suppress(Exception):  # only some lessons need it; a rank will report any error
        import torchvision  # noqa: F401

for name in os.environ.get("COURSE_PRELOAD", "").split():  # what else a notebook's ranks need (lesson 16)
    with contextlib.suppress(Exception):  # a rank that imports it will report the error
        importlib.import_module(name)

# The ranks share these pages until they write to them, and the garbage collector writes to every object that
# it visits. It leaves frozen objects alone.
gc.collect()
gc.freeze()
# A fork copies the page table, and an exit walks through it: on huge pages both take a third of the time.
MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it
with contextlib.suppress(Exception):
    for memory in psutil.Process().memory_maps(grouped=False):
        start, end = (int(address, 16) for address in memory.addr.split("-"))
        if memory.path in ("[anon]", "[heap]"):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
atexit.register(gc.unfreeze)  # when the server exits, or libraries would report leaks
