"""Deny system calls that nothing in the sandbox needs, by a seccomp filter for bubblewrap.

Keyrings pass through all other walls. A new user namespace gives every capability inside it, and so exposes
more of the kernel to attack. What is in a file without a name (memfd) counts towards no limit. Each sandbox
has cores of its own, and keeps to them.
"""

from __future__ import annotations

import errno
import platform
import struct

# From linux/audit.h, linux/filter.h, linux/seccomp.h and linux/sched.h
ARCHITECTURE, NUMBER, FIRST_ARGUMENT = 4, 0, 16  # offsets at which a filter finds them
LOAD, EQUALS, HAS_BITS, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000  # set in the call numbers of the x32 ABI
# The architecture; add_key, request_key, keyctl, memfd_create, bpf, userfaultfd, setns and sched_setaffinity;
# clone and unshare, which are needed, but not for user namespaces
MACHINES = {
    "x86_64": (0xC000003E, (248, 249, 250, 319, 321, 323, 308, 203), (56, 272)),
    "aarch64": (0xC00000B7, (217, 218, 219, 279, 280, 282, 268, 122), (220, 97)),
}
EVERYWHERE = (425, 435, 438)  # io_uring_setup; clone3, for which libc falls back to clone; pidfd_getfd


def seccomp_filter() -> bytes:
    """Return the filter as a classic BPF program; empty where the machine's call numbers are not known.

    A denied call fails as it would on a kernel that is too old to know it (ENOSYS).
    """
    if platform.machine() not in MACHINES:
        return b""
    architecture, denied, makes_namespaces = MACHINES[platform.machine()]
    allow, deny = (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.ENOSYS)
    # An instruction: what to do, how many to skip if the test holds, how many if not, and its number
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUALS, 1, 0, architecture), deny]
    program += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), deny]
    for number in (*denied, *EVERYWHERE):
        program += [(EQUALS, 0, 1, number), deny]
    for number in makes_namespaces:
        program += [(EQUALS, 0, 4, number), (LOAD, 0, 0, FIRST_ARGUMENT)]
        program += [(HAS_BITS, 0, 1, CLONE_NEWUSER), deny, allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, allow])
