"""`scripts/two_hosts.py`: two hosts with a cable: what they share, what not, that nothing of them is left."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import missing
from tests.support.processes import alive, wait_for

LESSONS = Path(__file__).parents[2] / "lessons"
LISTEN = """
import socket, time
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(65536):
        received += len(data)
    print(received, flush=True)
"""
SEND = """
import socket, time
with socket.create_connection(("node1", 5000), timeout=10) as connection:
    begin = time.perf_counter()
    connection.sendall(bytes(4_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until all has arrived: the system's own buffers take much of it at once
print(time.perf_counter() - begin)
"""
HOLD = """
import sys
sys.path.insert(0, sys.argv[1])
from scripts.two_hosts import TwoHosts
with TwoHosts() as hosts:
    hosts.start(0, ["sleep", "1000"])
    print(*hosts._inits, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def two_hosts() -> Any:
    sys.path.insert(0, str(LESSONS))
    try:
        module = importlib.import_module("scripts.two_hosts")
    finally:
        sys.path.remove(str(LESSONS))
    if reason := module.why_not():
        missing(f"two hosts in namespaces: {reason}")
    return module


@pytest.fixture(scope="module")
def hosts(two_hosts: Any) -> Iterator[Any]:
    with two_hosts.TwoHosts(rate="400mbit") as made:
        yield made


def test_each_has_its_name_its_address_and_its_disk(hosts: Any) -> None:
    for host, other in ((0, 1), (1, 0)):
        assert hosts.run(host, ["hostname"]).strip() == f"node{host}"
        assert f"10.77.0.{host + 1}/24" in hosts.run(host, ["ip", "-brief", "address", "show", "eth0"])
        names = dict(reversed(line.split()) for line in hosts.run(host, ["cat", "/etc/hosts"]).splitlines())
        assert names[f"node{host}"] == "127.0.1.1"
        assert names[f"node{other}"] == f"10.77.0.{other + 1}"
    hosts.run(0, ["touch", hosts.disk / "mine"])
    assert hosts.run(0, ["ls", hosts.disk]).split() == ["mine"]
    assert hosts.run(1, ["ls", hosts.disk]) == ""
    assert list(Path(hosts.disk).iterdir()) == [], "nor is it on this machine"
    assert hosts.run(1, ["pwd"]).strip() == os.getcwd()


def test_the_cable_is_as_slow_as_asked_counts_and_can_be_cut(hosts: Any) -> None:
    before = hosts.sent(0)
    receiver = hosts.start(1, [sys.executable, "-c", LISTEN])
    assert receiver.stdout.readline() == "listening\n"
    seconds = float(hosts.run(0, [sys.executable, "-c", SEND]))
    assert receiver.communicate(timeout=20)[0] == "4000000\n"
    assert seconds > 0.5 * 4 / 50, "50 MB/s"
    assert 4_000_000 <= hosts.sent(0) - before < 1.2 * 4_000_000
    hosts.cut()
    assert " UP " not in hosts.run(1, ["ip", "-brief", "link", "show", "eth0"])
    hosts.connect()
    assert "eth0" in hosts.run(1, ["ip", "-brief", "link", "show", "eth0"])


def test_a_command_there_has_no_colours(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel asks for them: the traceback of Python 3.13 then had them between its words."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = hosts.start(0, ["printenv"], ASKED="1").communicate(timeout=20)[0].splitlines()
    assert {"ASKED=1", "PYTHON_COLORS=0"} <= set(told)
    assert not [line for line in told if line.startswith("GLOO_")]
    raised = hosts.start(0, [sys.executable, "-c", "1 / 0"]).communicate(timeout=20)[0]
    assert raised.endswith("ZeroDivisionError: division by zero\n")


def test_they_are_gone_when_the_process_that_made_them_is_killed(two_hosts: Any) -> None:
    command = [sys.executable, "-c", HOLD, str(LESSONS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    inits = [int(pid) for pid in process.stdout.readline().split()]
    assert len(inits) == 2
    assert all(map(alive, inits))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(alive, inits)), what="their end")


def test_what_is_missing_is_said(two_hosts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    two_hosts.why_not.cache_clear()
    assert two_hosts.why_not().startswith("ip, tc, unshare, nsenter")
    two_hosts.why_not.cache_clear()
