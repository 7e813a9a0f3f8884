"""A real Slurm of two nodes on this one machine, for as long as it is wanted (lesson 17).

    from slurm_here import two_nodes

    with two_nodes() as here:  # `sbatch`, `squeue`, … of this process and its children speak with it
        subprocess.run(["sbatch", "--wait", "train.sbatch"])

    python slurm_here.py sbatch --wait train.sbatch      the same for one command

It starts munged, slurmctld and two slurmd, the daemons of a cluster, with a key, a socket, ports and a folder
of their own; a Slurm that this machine belongs to is left alone. They listen at the address that the
machine's own name stands for (often 127.0.0.1), and take no message without a token of their munged's. A
keeper process holds them, and ends them with all jobs when it is told to, or when its parent is gone. It
needs Linux with Debian's or Ubuntu's packages `slurm-wlm` and `munge`; root is needed to install them, not
here.
"""

import contextlib
import json
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
START_SECONDS = 60.0  # until both nodes are idle: 2 s, on a busy machine more
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where the daemons are
TRIES = 3  # another process may take a port between its choice and its use

CONFIGURATION = """\
ClusterName=here
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# What is a job's is found by its parents, and no cgroup is asked for: a container may have none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Each node claims so many CPUs, whatever the machine has
SlurmdParameters=config_overrides
TaskProlog={folder}/prolog
ReturnToService=2
KillWait=5
# A job is looked for a place at once, and a killed one is gone soon
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
CompleteWait=0
# Jobs choose ports by their number, and two such Slurms on one machine must not choose the same
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=60
"""
NODE = "NodeName=node{number} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} RealMemory={mib}"
# What a program on such a node must know: the nodes share one machine, its GPUs and its loopback address.
PROLOG = """\
#!/bin/sh
echo export COURSE_NODES_HERE={count}
echo export GLOO_SOCKET_IFNAME=lo
echo export NCCL_SOCKET_IFNAME=lo
"""


class NoSlurmHere(RuntimeError):
    """It cannot be started here; the message says what is missing."""


def missing():
    """Why no Slurm can be started on this machine, in one sentence; empty where it can."""
    if sys.platform != "linux":
        return f"a Slurm on one machine needs Linux, and this is {sys.platform}"
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
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
            asked = {"folder": str(self.folder), "count": count, "cpus": cpus, "seconds": start_seconds}
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", __file__, "--keep", str(os.getpid()), json.dumps(asked)],
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


# --- the keeper: a process of its own ---------------------------------------------------------------------


def keep(parent, folder, count, cpus, seconds):
    """Start the daemons, say "ready" or what failed; stop when the parent is gone, or closes the pipe."""
    become_the_parent_of_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        watched = [sys.stdin.fileno(), os.pidfd_open(parent)]  # a fork of the parent may hold the pipe open
        try:
            daemons = start(Path(folder), count, cpus)
            reason = wait_until_idle(folder, count, seconds, daemons)
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{type(error).__name__}: {error}"
        print(reason or "ready", flush=True)
        if not reason:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes of jobs that are over go at once
            select.select(watched, [], [])
    finally:
        end_all()
        shutil.rmtree(folder, ignore_errors=True)


def become_the_parent_of_orphans():
    """slurmd leaves each job's processes to init; with this they come to the keeper, which can end them."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def die_with_the_keeper():
    """In a daemon before it begins: SIGKILL for it if the keeper is killed."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def start(folder, count, cpus):
    """Write the configuration, start munged, slurmctld and a slurmd for each node."""
    host = socket.gethostname().partition(".")[0]
    address = address_of(socket.gethostname())
    controller_port, *ports = free_ports(address, count + 1)
    mib = max(1000, psutil.virtual_memory().total // 2**20 // count)
    nodes = [
        NODE.format(number=i, host=host, address=address, port=port, cpus=cpus, mib=mib)
        for i, port in enumerate(ports, 1)
    ]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            user=pwd.getpwuid(os.geteuid()).pw_name,
            host=host,
            address=address,
            first_job=random.randrange(1, 60_000),
            controller_port=controller_port,
            folder=folder,
            nodes="\n".join(nodes),
        )
    )
    prolog = folder / "prolog"
    prolog.write_text(PROLOG.format(count=count))
    prolog.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    daemons = [daemon(folder, "munged", "--foreground", "--force", *munge)]
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "munge.socket").exists() and time.monotonic() < deadline:
        if daemons[0].poll() is not None:
            return daemons
        time.sleep(0.02)
    configuration = str(folder / "slurm.conf")
    daemons += [daemon(folder, "slurmctld", "-D", "-i", "-f", configuration)]
    for number in range(1, count + 1):
        daemons += [daemon(folder, "slurmd", "-D", "-N", f"node{number}", "-f", configuration)]
    return daemons


def daemon(folder, program, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with open(folder / f"{program}.out", "ab") as output:
        return subprocess.Popen(
            [shutil.which(program, path=PATH), *arguments],
            env=environment | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            preexec_fn=die_with_the_keeper,
        )


def address_of(host):
    """Where the daemons listen: what the machine's name stands for, which is all that they can be told."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise OSError(
            f"this machine does not know its own name, {host!r}: {error}; /etc/hosts can say it"
        ) from None


def free_ports(address, count):
    """Outside of those that systems give to whoever asks for any."""
    found = []
    while len(found) < count:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            found.append(port)
    return found


def wait_until_idle(folder, count, seconds, daemons):
    """Empty once all nodes are idle; what failed otherwise."""
    environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ended := [each.args[0] for each in daemons if each.poll() is not None]:
            return f"{Path(ended[0]).name} ended at once: {last_words(folder)}"
        asked = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if asked.stdout.split() == ["idle"] * count:
            return ""
        time.sleep(0.1)
    return f"the nodes were not idle after {seconds:g} s, but {asked.stdout.split()}: {last_words(folder)}"


def last_words(folder):
    """Of each daemon's log the last line, as one line."""
    lines = []
    for log in sorted([*Path(folder).glob("*.log"), *Path(folder).glob("*.out")]):
        lines += [f"{log.name}: {line}" for line in log.read_text(errors="replace").splitlines()[-1:]]
    return " | ".join(lines)


def end_all():
    """SIGKILL for all that came from the keeper, until nothing is left."""
    while family := psutil.Process().children(recursive=True):
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def main(words):
    if words[:1] == ["--keep"]:
        keep(int(words[1]), **json.loads(words[2]))
        return 0
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
