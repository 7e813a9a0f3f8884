"""A real Slurm of two nodes on this one machine, for as long as it is wanted (lesson 17).

    from slurm_here import two_nodes

    with two_nodes() as here:  # `sbatch`, `squeue`, … of this process and its children speak with it
        subprocess.run(["sbatch", "--wait", "train.sbatch"])

    python slurm_here.py sbatch --wait train.sbatch      the same for one command

It starts munged, slurmctld and two slurmd, the daemons of a cluster, with a key, a socket, ports and a folder
of their own; a Slurm that this machine belongs to is left alone. They listen at the address that the
machine's own name stands for (often 127.0.0.1), and take no message without a token of their munged's. A
keeper process (`slurm_keeper.py`) holds them, and ends them with all jobs when it is told to, or when its
parent is gone. It needs Linux with Debian's or Ubuntu's packages `slurm-wlm` and `munge`; root is needed to
install them, not here.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
START_SECONDS = 60.0  # until both nodes are idle: 2 s, on a busy machine more
KEEPER = Path(__file__).with_name("slurm_keeper.py")
TRIES = 3  # another process may take a port between its choice and its use


class NoSlurmHere(RuntimeError):
    """It cannot be started here; the message says what is missing."""


def path():
    """Where programs are, the daemons' folders included."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing():
    """Why no Slurm can be started on this machine, in one sentence; empty where it can."""
    if sys.platform != "linux":
        return f"a Slurm on one machine needs Linux, and this is {sys.platform}"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path()) is None]
    if absent:
        return (
            f"a Slurm on one machine needs {', '.join(absent)}: as root on Debian or Ubuntu, "
            f"apt-get install --no-install-recommends slurm-wlm munge"
        )
    return ""


class SlurmHere:
    """The cluster, once it is up.

    Attributes
    ----------
    folder : pathlib.Path
        Its configuration, its key and its logs; gone once it is stopped.
    environment : dict
        What a process must have in its environment to speak with it.
    nodes : list of str
        ``["node1", "node2"]``
    """

    def __init__(self, count=2, cpus=4, start_seconds=START_SECONDS):
        """As many nodes, each with so many CPUs (it claims them: the machine may have fewer).

        Raises
        ------
        NoSlurmHere
            Something is missing, or the daemons did not come up.
        """
        if reason := missing():
            raise NoSlurmHere(reason)
        self.nodes = [f"node{number}" for number in range(1, count + 1)]
        reason = ""
        for _ in range(TRIES):
            self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has 107 letters
            self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
            asked = {"parent": os.getpid(), "folder": str(self.folder), "path": path()}
            asked |= {"count": count, "cpus": cpus, "seconds": start_seconds}
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", KEEPER, json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is not for them
            )
            reason = self._keeper.stdout.readline().strip()
            if reason == "ready":
                return
            self.stop()
        raise NoSlurmHere(f"Slurm did not come up: {reason or 'its keeper was killed'}")

    def stop(self):
        """End it, and all of its jobs; no process is left, and no file."""
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def two_nodes(cpus=4):
    """A `SlurmHere` of two nodes; meanwhile the commands that this process starts speak with it."""
    here = SlurmHere(2, cpus)
    before = {name: os.environ.get(name) for name in here.environment}
    os.environ.update(here.environment)
    try:
        yield here
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        here.stop()


def main(words):
    if not words:
        print(__doc__)
        return 2
    try:
        with two_nodes():
            return subprocess.run(words).returncode
    except NoSlurmHere as reason:
        print(reason, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
