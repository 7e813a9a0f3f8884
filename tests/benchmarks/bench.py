"""What the course promises about speed, measured side by side in one run.

    python tests/benchmarks/bench.py [--rounds 7]

1. From the call to the result of two ranks that join gloo, all-reduce and return: a warm `launch`, the first
   `launch` of a process, and a cold ``torchrun`` of the same work.
2. Throughput of a training on two ranks with the dashboard on and off, in a real kernel, in pairs.

Medians and ratios; the machine's other work disturbs the absolute numbers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel

WORK = textwrap.dedent(
    """
    import torch
    import torch.distributed as dist

    def work():
        dist.init_process_group("gloo")
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.tolist()
    """
)
FIRST = """
import time
begun = time.perf_counter()  # the import is part of a notebook's first launch
from course_lib import launch
from work import work
assert launch(work, nprocs=2).results == [[2.0] * 4] * 2
print(time.perf_counter() - begun)
"""
WARM = """
begun = time.perf_counter()
assert launch(work, nprocs=2).results == [[2.0] * 4] * 2
print(time.perf_counter() - begun)
"""
TRAINING = textwrap.dedent(
    """
    import torch
    import torch.distributed as dist
    import torch.nn as nn

    from course_lib import launch, log, place, track

    def train(steps):
        device, backend = place()
        dist.init_process_group(backend)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * 144, 128), nn.ReLU(), nn.Linear(128, 10),
        )
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        for batch in track([x] * steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), y)
            loss.backward()
            optimizer.step()
            log(loss=loss)
    """
)


class Kernel:
    """A real kernel that runs cells, as a notebook does."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "COURSE_HOME": str(folder / "home")}
        self._manager, self._client = start_new_kernel(kernel_name="python3", env=environment)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def number(self, code: str) -> float:
        """Run a cell; the number that it prints last (0 if it prints nothing)."""
        printed: list[str] = []

        def hook(message: dict) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(code, output_hook=hook, timeout=600)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return float(("".join(printed).split() or ["0"])[-1])


def start_times(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each way to start, taken in turns."""
    (folder / "work.py").write_text(WORK)
    (folder / "script.py").write_text("from work import work\nassert work() == [2.0] * 4\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    times: dict[str, list[float]] = {"torchrun, cold": [], "first launch": [], "warm launch": []}
    for _ in range(rounds):
        begun = time.perf_counter()
        subprocess.run(
            [*torchrun, str(folder / "script.py")], env=environment, check=True, capture_output=True
        )
        times["torchrun, cold"].append(time.perf_counter() - begun)
        with Kernel(folder) as kernel:
            times["first launch"].append(kernel.number(FIRST))
            times["warm launch"] += [kernel.number(WARM) for _ in range(5)]
    return times


def dashboard_ratios(rounds: int, folder: Path, steps: int = 400) -> list[float]:
    """Throughput with the dashboard over throughput without, of runs in pairs."""
    rate = "print(launch(train, {}, nprocs=2, dashboard={}).samples_per_second())"
    ratios = []
    with Kernel(folder) as kernel:
        kernel.number(TRAINING)
        kernel.number(rate.format(50, True))
        for i in range(rounds):
            order = [True, False] if i % 2 else [False, True]
            rates = {shown: kernel.number(rate.format(steps, shown)) for shown in order}
            ratios.append(rates[True] / rates[False])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="The course's promises about speed, measured.")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        times = start_times(rounds, Path(name))
        ratios = dashboard_ratios(rounds, Path(name))
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    print(f"two ranks, from the call to the result (medians of {rounds} rounds)")
    for way, seconds in medians.items():
        print(f"  {way:16} {seconds:7.3f} s   1/{medians['torchrun, cold'] / seconds:.1f} of torchrun")
    print(f"throughput with the dashboard on / off ({rounds} pairs)")
    print(f"  median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
