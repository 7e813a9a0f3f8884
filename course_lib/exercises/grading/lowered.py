"""The first program behind the walls: takes its limits, which nothing after it can raise, and starts the next.

Run by its path, without the library: ``python -I -S lowered.py USER PROCESSES FILE_BYTES PROGRAM ARGUMENTS``.
USER is 0 where it stays who it is; else it becomes a user who owns nothing on this machine.
"""

import os
import resource
import sys

if __name__ == "__main__":
    user, processes, file_bytes = map(int, sys.argv[1:4])
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard < 0 else min(most, hard)
        resource.setrlimit(what, (most, most))
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.execv(sys.argv[4], sys.argv[4:])
