"""Allow the system calls that Python and PyTorch need in the sandbox, by a seccomp filter for bubblewrap.

Other calls do not exist there: those for keyrings, other processes' memory, other cores, and for System V
memory and files without a name (memfd), which count towards no limit. Calls that only root may make, such as
``mount``, are allowed, since the supervisor makes them; a session has no capabilities. A new user namespace
would give it all capabilities, and would expose more of the kernel to attack.
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
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, which lists a machine's interfaces
# The architecture; clone and unshare; socket and socketpair; all other calls that are allowed, "first-last"
MACHINES = {
    "x86_64": (
        0xC000003E,
        (56, 272),
        (41, 53),
        "0-28 32-63 72-100 102 104-133 137-138 140-148 157-158 160 162 165-166 186-202 204 213 217-219 "
        "221-226 228-235 237-239 247 257-271 273-274 277 280-281 283-293 295-297 299 302 306-307 309 315-316 "
        "318 322 324 326-328 332 334",
    ),
    "aarch64": (
        0xC00000B7,
        (220, 97),
        (198, 199),
        "5-17 19-25 29 32-40 43-50 52-57 59 61-73 78-88 90-91 93-96 98-103 107-111 113-115 118-121 123-141 "
        "143-160 163-169 172-179 200-216 221-223 226-227 232-233 235-237 240 242-243 260-261 267 269 275-276 "
        "278 281 283 285-287 291 293",
    ),
}
# pidfd_send_signal, pidfd_open, close_range, openat2, faccessat2, epoll_pwait2 and futex_waitv
EVERYWHERE = "424 434 436-437 439 441 449"


def seccomp_filter() -> bytes:
    """Return the filter as a classic BPF program; empty where the machine's call numbers are not known.

    A call that is not allowed fails as it would on a kernel that is too old to know it (ENOSYS).
    """
    if platform.machine() not in MACHINES:
        return b""
    architecture, makes_namespaces, makes_sockets, calls = MACHINES[platform.machine()]
    allow, deny = (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.ENOSYS)
    # An instruction: what to do, how many to skip if the test holds, how many if not, and the operand
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUALS, 1, 0, architecture), deny, (LOAD, 0, 0, NUMBER)]
    for number in makes_namespaces:
        program += [(EQUALS, 0, 4, number), (LOAD, 0, 0, FIRST_ARGUMENT)]
        program += [(HAS_BITS, 0, 1, CLONE_NEWUSER), deny, allow]
    for number in makes_sockets:
        program += [(EQUALS, 0, 2 + 2 * len(FAMILIES), number), (LOAD, 0, 0, FIRST_ARGUMENT)]
        for family in FAMILIES:
            program += [(EQUALS, 0, 1, family), allow]
        program += [(RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT)]
    for allowed in f"{calls} {EVERYWHERE}".split():  # in ascending order
        first, _, last = allowed.partition("-")
        program += [(AT_LEAST, 1, 0, int(first)), deny, (AT_LEAST, 1, 0, int(last or first) + 1), allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, deny])
