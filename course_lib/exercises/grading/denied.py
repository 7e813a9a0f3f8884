"""Deny system calls that nothing in the sandbox needs, by a seccomp filter for bubblewrap.

Keyrings pass through all other walls. A new user namespace gives every capability inside it, and so exposes
more of the kernel to attack. What is in a file without a name (memfd) counts towards no limit.
"""

from __future__ import annotations

import errno
import platform
import struct

# From linux/audit.h, linux/filter.h, linux/seccomp.h and linux/sched.h
ARCHITECTURE, NUMBER, FIRST_ARGUMENT = 4, 0, 16  # offsets at which a filter finds them
LOAD, GO, IS, HAS, AT_LEAST, RETURN = 0x20, 0x05, 0x15, 0x45, 0x35, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000  # set in the call numbers of the x32 ABI
NAMES = (
    "add_key",
    "request_key",
    "keyctl",
    "memfd_create",
    "bpf",
    "userfaultfd",
    "setns",
    "clone",
    "unshare",
)
NUMBERS = {
    "x86_64": (0xC000003E, (248, 249, 250, 319, 321, 323, 308, 56, 272)),
    "aarch64": (0xC00000B7, (217, 218, 219, 279, 280, 282, 268, 220, 97)),
}
EVERYWHERE = (425, 435, 438)  # io_uring_setup; clone3, for which libc falls back to clone; pidfd_getfd
MAKES_NAMESPACES = ("clone", "unshare")  # needed, but not for user namespaces


def system_calls() -> bytes:
    """Return the filter as a classic BPF program; empty where the machine's call numbers are not known.

    A denied call fails as it would on a kernel that is too old to know it (ENOSYS).
    """
    if platform.machine() not in NUMBERS:
        return b""
    architecture, given = NUMBERS[platform.machine()]
    numbers = dict(zip(NAMES, given, strict=True))
    denied = [number for name, number in numbers.items() if name not in MAKES_NAMESPACES]
    tests = [(AT_LEAST, X32, "deny"), *((IS, number, "deny") for number in (*denied, *EVERYWHERE))]
    tests += [(IS, numbers[name], "look") for name in MAKES_NAMESPACES]
    places = {"look": 5 + len(tests), "deny": 7 + len(tests)}
    program = [(LOAD, 0, 0, ARCHITECTURE), (IS, 1, 0, architecture), (GO, 0, 0, places["deny"] - 3)]
    program += [(LOAD, 0, 0, NUMBER)]
    for at, (test, value, where) in enumerate(tests, len(program)):
        program.append((test, places[where] - at - 1, 0, value))
    program += [(RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT), (HAS, 0, 1, CLONE_NEWUSER)]
    program += [(RETURN, 0, 0, ERROR | errno.ENOSYS), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *each) for each in program)
