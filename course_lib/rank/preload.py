"""Load once, in the fork server, what each rank then has from its first millisecond."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os

if os.environ.get("COURSE_KERNEL") not in (None, str(os.getppid())):
    os._exit(1)  # the kernel was killed before it could tell its guard about this process

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
with contextlib.suppress(Exception):  # glibc: what the imports have freed is then not copied at each fork
    ctypes.CDLL(None).malloc_trim(0)
atexit.register(gc.unfreeze)  # when the server exits, or libraries would report leaks
