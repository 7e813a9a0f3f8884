"""What the fork server loads once, so that each rank has it from its first millisecond."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os

if os.environ.get("COURSE_KERNEL") not in (None, str(os.getppid())):
    os._exit(1)  # the kernel was killed before it could name this process to its guard

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from . import launched as entry  # noqa: F401

if os.environ.get("COURSE_LEAN") != "1":  # many kernels on one server: 90 MiB less for each of them
    with contextlib.suppress(Exception):  # only some lessons need it; a rank would say what is wrong with it
        import torchvision  # noqa: F401

for name in os.environ.get("COURSE_PRELOAD", "").split():  # what a notebook's ranks need besides (lesson 16)
    with contextlib.suppress(Exception):  # a rank that imports it will say what is wrong with it
        importlib.import_module(name)

# The ranks share these pages until they write to them, and a garbage collection writes to every object it
# looks at: frozen objects it leaves alone.
gc.collect()
gc.freeze()
with contextlib.suppress(Exception):  # glibc: what the imports have freed need not be copied at each fork
    ctypes.CDLL(None).malloc_trim(0)
atexit.register(gc.unfreeze)  # the server's own end; or libraries report leaks
