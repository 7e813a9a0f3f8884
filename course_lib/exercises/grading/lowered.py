"""The first program in the sandbox: set limits, which nothing after it can raise, and start the next program.

Run by its path, without the library: ``python -I -S lowered.py USER PROCESSES FILE_BYTES DATA_BYTES PROGRAM``
and the program's arguments. With USER 0 the user stays the same; else it becomes USER, who owns nothing here.
"""

import os
import resource
import sys

if __name__ == "__main__":
    user, processes, file_bytes, data_bytes = map(int, sys.argv[1:5])
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, data_bytes),
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
    os.execv(sys.argv[5], sys.argv[5:])
