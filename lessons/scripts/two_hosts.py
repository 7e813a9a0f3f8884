"""Two machines inside this one, joined by a slow cable, for lesson 17.

    with TwoHosts(rate="400mbit") as hosts:
        print(hosts.run(0, ["hostname"]), hosts.run(1, ["ip", "-brief", "address"]))

Each host is a set of Linux *namespaces*, as a container is: a network of its own with an address of its own,
a name, its own processes, a folder of its own (`disk`). They share the processor, and all other folders. It
needs Linux and the programs ip, tc, unshare and nsenter; and root, or a system that lets its users make
namespaces. `why_not` says what is missing. Nothing is left behind, not even when the notebook's kernel is
killed: a host lives as long as a process that reads from the kernel's pipe.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("node0", "node1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CARD = "eth0"  # what both call their end of the cable
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "cat")
SECONDS = 10  # that a command about a host may take
# A host's first process prepares, and waits for its end. $1 is its name, $2 the names it knows, $3 its disk
BEGIN = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs own "$3" && ip link set lo up &&
echo ready && exec cat
"""


@functools.cache
def why_not():
    """Why there can be no hosts on this machine; empty where there can."""
    if sys.platform != "linux":
        return f"two hosts in one machine need Linux, and this is {sys.platform}"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return (
            f"{', '.join(missing)} is not installed (on Debian and Ubuntu: apt install iproute2 util-linux)"
        )
    try:
        with TwoHosts():
            return ""
    except HostsError as error:
        rights = "" if os.geteuid() == 0 else ", and you are not root"
        return f"this system makes no namespaces for you{rights}: {error}"


class HostsError(Exception):
    """A command about a host failed; the text is what it said."""


class TwoHosts:
    """Two hosts and a cable of a limited `rate`, in the words of tc: "400mbit" is 50 MB/s, each way.

    After a pause, the first bytes of a `burst` pass at once.
    """

    def __init__(self, rate="400mbit", burst="80kb"):
        self.rate, self.burst = rate, burst
        self._inits, self._holders = [], []

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="two-hosts-")
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        self.disk = folder / "disk"  # on each host another one
        self.disk.mkdir()
        try:
            for name in NAMES:
                known = folder / name
                others = [each for each in zip(ADDRESSES, NAMES, strict=True) if each[1] != name]
                # As Debian's installer writes it: the own name is an address that nobody else has
                rows = [("127.0.0.1", "localhost"), ("127.0.1.1", name), *others]
                known.write_text("".join(f"{address} {called}\n" for address, called in rows))
                self._begin(["sh", "-c", BEGIN, "sh", name, str(known), str(self.disk)])
            self._command(0, ["ip", "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns"], True)
            for host, address in enumerate(ADDRESSES):
                self.run(host, ["ip", "address", "add", f"{address}/24", "dev", CARD])
                limit = ["tbf", "rate", self.rate, "burst", self.burst, "latency", "50ms"]
                self.run(host, ["tc", "qdisc", "add", "dev", CARD, "root", *limit])
                self.run(host, ["ip", "link", "set", CARD, "up"])
            self._wait_for_the_cable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for holder in self._holders:
            holder.kill()  # and with it goes its child, the host's first process, and so all others
            holder.wait()
            holder.stdin.close()
            holder.stdout.close()
        self._folder.cleanup()

    def _begin(self, first):
        new = ["--mount", "--uts", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
        if os.geteuid() == 0:
            command = ["unshare", *new, *first]
        elif not self._inits:  # first a world in which we are root, then the host
            command = ["unshare", "--user", "--map-root-user", *new, *first]
        else:
            command = [*self._enter(0, "--user"), "unshare", *new, *first]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._holders.append(holder)
        said = holder.stdout.readline()
        if said != "ready\n":
            raise HostsError(said.strip() or f"{command[0]} ended with {holder.wait()}")
        self._inits.append(_last_child(holder.pid))

    def _wait_for_the_cable(self):
        until = time.monotonic() + SECONDS
        while not all(" UP " in self.run(host, ["ip", "-brief", "link", "show", CARD]) for host in (0, 1)):
            if time.monotonic() > until:
                raise HostsError(f"the cable between {NAMES[0]} and {NAMES[1]} did not come up")

    def _enter(self, host, *of):
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self._inits[host]}", *dict.fromkeys([*user, *of])]

    def _command(self, host, command, with_other=False):
        """A command in a host's network, but with the outer numbers of processes."""
        command = [*command, str(self._inits[1 - host])] if with_other else command
        _done([*self._enter(host, "--net"), *command])

    def within(self, host, command):
        """The command that runs another one on a host: for `subprocess`."""
        there = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # the same folder on the host
        return [*self._enter(host, "--mount", "--uts", "--net", "--pid"), *there, *map(str, command)]

    def run(self, host, command):
        """Run a command on a host, wait for its end, and return what it printed."""
        return _done(self.within(host, command))

    def start(self, host, command, **environment):
        """Start a command on a host; returns its `subprocess.Popen`, with all that it prints in `stdout`.

        It has this process's environment, without what names a network card there, and what is added.
        """
        here = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        here["PYTHON_COLORS"] = "0"  # a notebook asks its programs for colours
        return subprocess.Popen(
            self.within(host, command),
            env=here | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def sent(self, host):
        """Bytes that a host has put on the cable so far, with what TCP adds to them."""
        (card,) = json.loads(self.run(host, ["ip", "-json", "-statistics", "link", "show", CARD]))
        return card["stats64"]["tx"]["bytes"]

    def cut(self):
        """Pull the cable."""
        self.run(1, ["ip", "link", "set", CARD, "down"])

    def connect(self):
        """Plug it in again."""
        self.run(1, ["ip", "link", "set", CARD, "up"])


def _done(command):
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise HostsError(str(error)) from None
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stdout.strip()}")
    return done.stdout


def _last_child(pid):
    """The process at the end of a line of parents: unshare's, or nsenter's unshare's."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return pid
        pid = int(children[0])
    raise HostsError(f"the child of process {pid} was not found")
