"""What `slurm_here` starts: it holds the daemons of a Slurm on this machine, and ends them (lesson 17).

A process of its own, since they must end with all jobs when who asked for them is gone. It is started by its
file alone, so it imports nothing of the course.
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
import time
from pathlib import Path

import psutil

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
# On a busy machine a killed process may take minutes to go: after 60 s Slurm would drain the node
UnkillableStepTimeout=600
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


def keep(parent, folder, path, count, cpus, seconds):
    """Start the daemons, say "ready" or what failed; stop when the parent is gone, or closes the pipe."""
    become_the_parent_of_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        watched = [sys.stdin.fileno(), os.pidfd_open(parent)]  # a fork of the parent may hold the pipe open
        try:
            daemons = start(Path(folder), path, count, cpus, seconds)
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

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_the_keeper():
    """In a daemon before it begins: SIGKILL for it if the keeper is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(folder, path, count, cpus, seconds):
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
    daemons = [daemon(folder, path, "munged", "--foreground", "--force", *munge)]
    deadline = time.monotonic() + seconds
    while not (folder / "munge.socket").exists() and time.monotonic() < deadline:
        if daemons[0].poll() is not None:
            return daemons
        time.sleep(0.02)
    configuration = str(folder / "slurm.conf")
    daemons += [daemon(folder, path, "slurmctld", "-D", "-i", "-f", configuration)]
    for number in range(1, count + 1):
        daemons += [daemon(folder, path, "slurmd", "-D", "-N", f"node{number}", "-f", configuration)]
    return daemons


def daemon(folder, path, program, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with open(folder / f"{program}.out", "ab") as output:
        return subprocess.Popen(
            [shutil.which(program, path=path), *arguments],
            env=environment | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path},
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


if __name__ == "__main__":
    keep(**json.loads(sys.argv[1]))
