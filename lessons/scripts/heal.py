"""Lesson 20, deeper: two replica groups of torchft, on two hosts; one is killed, started again and healed.

    python -m scripts.heal lighthouse 10.77.0.1:29510
    python -m scripts.heal group 0 10.77.0.1 http://10.77.0.1:29510

A group is one rank here. It prints a line for each step: which step, how many groups took
part, and a checksum of the weights.
"""

import hashlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from .many_machines import Listener
from .two_hosts import ADDRESSES

# Group 1 kills itself in step 20, and is started again when group 0 has done 35
STEPS, DIES_AT, BACK_AT = 120, 20, 35
SHARE = 16  # samples of a group in a step
PORT = 29510
SECONDS = 200  # that a group may take
NOT_THERE = "torchft is not installed (in the course's folder: .venv/bin/pip install -e '.[heal]')"


def why_not():
    """Why torchft cannot run here; empty where it can."""
    return "" if importlib.util.find_spec("torchft") else NOT_THERE


def lighthouse(address):
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=address, min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1500
    )
    print("the lighthouse listens on", address, flush=True)
    threading.Event().wait()  # until it is killed
    server.shutdown()


def group(number, address, lighthouse_address, dies_at=None):
    """Train until `STEPS` steps are committed."""
    import torch
    import torch.distributed as dist
    import torchft
    from torch import nn

    torch.manual_seed(number)  # another start in each group: the first quorum makes them equal
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # a store for each group

    def load(state):
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=load,
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        lighthouse_addr=lighthouse_address,
        replica_id=f"group{number}",
        hostname=address,
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        use_async_quorum=False,  # a group that comes back takes part in its first step
    )
    optimizer = torchft.Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # asks the lighthouse who takes part, and heals
        step = manager.current_step()  # not before: a group that was healed has skipped steps
        generator = torch.Generator().manual_seed(2 * step + number)
        x = torch.randn(SHARE, 64, generator=generator)
        nn.functional.cross_entropy(net(x), x[:, :10].argmax(dim=1)).backward()
        for place, parameter in enumerate(net.parameters()):
            if step == dies_at and place == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # the other group is in this all_reduce
            manager.allreduce(parameter.grad).wait()  # an error is noted, not raised
        optimizer.step()  # only if all went well; then current_step() is one more
        time.sleep(0.1)  # a larger model
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
        now = {"committed": manager.current_step(), "groups": manager.num_participants()}
        now["weights"] = hashlib.sha256(weights).hexdigest()[:8]
        print(json.dumps({"group": number, "step": step, "time": time.time()} | now), flush=True)
    manager.shutdown(wait=False)


def lose_and_heal(hosts):
    """Run both groups on `hosts`, kill one, start it again; returns what they printed, and who began when."""
    url = f"http://{ADDRESSES[0]}:{PORT}"
    lessons = str(Path(__file__).parents[1])  # a deeper notebook does not run there
    begun, listeners = [], []

    def start(host, *words):
        command = [sys.executable, "-W", "ignore", "-m", "scripts.heal", *map(str, words)]
        begun.append(time.time())
        there = {"OTEL_SDK_DISABLED": "true", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "eth0"}
        there["PYTHONPATH"] = os.pathsep.join(filter(None, [lessons, os.environ.get("PYTHONPATH")]))
        listeners.append(Listener(hosts.start(host, command, **there), time.monotonic()))
        return listeners[-1]

    if not start(0, "lighthouse", f"{ADDRESSES[0]}:{PORT}").wait_for("listens"):
        raise RuntimeError(f"the lighthouse ended: {listeners[-1].last_words()}")
    first = start(0, "group", 0, ADDRESSES[0], url)
    second = start(1, "group", 1, ADDRESSES[1], url, DIES_AT)
    second.join(SECONDS)
    if not first.wait_for(f'"committed": {BACK_AT},', seconds=SECONDS):
        raise RuntimeError(f"group 0 did not go on alone: {first.last_words(SECONDS)}")
    third = start(1, "group", 1, ADDRESSES[1], url)
    for group_ends in (first, third):
        group_ends.join(SECONDS)
        if group_ends.ended is None or group_ends.ended[1] != 0:
            raise RuntimeError(f"a group did not come to its end: {group_ends.last_words(SECONDS)}")
    lines = [line for each in (first, second, third) for _, line in each.lines if line.startswith("{")]
    return {"begun": begun[1:], "lines": [json.loads(line) for line in lines]}


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "lighthouse":
        lighthouse(*words)
    else:
        group(int(words[0]), *words[1:3], *map(int, words[3:]))
