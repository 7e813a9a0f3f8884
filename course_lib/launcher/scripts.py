"""`python` and `torchrun`: run a whole program, in a file, on several ranks."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from typing import Any

from ..host.hardware import gpu_count
from ..run.run import Run
from .arguments import check_count, check_timeout, program_of
from .dashboard import view_of
from .environment import gpus_of, loopback_store, of_a_program
from .processes import Program
from .watch import watch

# Ranks that torchrun restarts meet at the previous attempt's store, where they may read the dead ranks'
# addresses: every second restart failed this way, with gloo on torch 2.14. With this they open a new store.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENTRY = [sys.executable, "-m", "course_lib.rank.entry_script"]


def python(
    script: str | os.PathLike[str], *args: Any, timeout: float | None = None, dashboard: bool = True
) -> Run:
    """Run ``python script args…``, a program that starts its own ranks with ``mp.spawn``, and watch it.

    Its ranks show up once they call `place`, `track` or `log`. Failures are reported as for `launch`; results
    stay in the program (``run.output`` has what it printed outside its ranks). Lesson 04.

    Parameters
    ----------
    script
        Its path, from the current folder; ``"-m"`` for a module, whose name follows.
    args
        Its arguments; numbers and paths are converted to text.

    Raises
    ------
    FileNotFoundError
        There is no such script. Otherwise as for `launch`.
    """
    name, words = program_of(script, args)
    check_timeout(timeout)
    run = Run.create(name, 0, program=True, command=shlex.join(["python", *words]))
    commands, environments = [[*ENTRY, *words]], [of_a_program(run)]
    return watch(run, lambda _: Program(commands, environments, run), timeout, view_of(run, dashboard))


def torchrun(
    script: str | os.PathLike[str],
    *args: Any,
    nproc_per_node: int | None = None,
    nnodes: int = 1,
    max_restarts: int = 0,
    timeout: float | None = None,
    dashboard: bool = True,
) -> Run:
    """Run ``torchrun … script args…``, PyTorch's own launcher, and watch it (lesson 08).

    The agents meet at a store that this library opens on the loopback address. The store that torchrun itself
    opens for the ranks listens on every interface of the machine, without authentication, as on a cluster.

    Parameters
    ----------
    script, args
        As for `python`; the script reads RANK, LOCAL_RANK, WORLD_SIZE… from its environment
        (``run.environments`` has what torchrun set).
    nproc_per_node
        Ranks per node; by default the GPUs divided among the nodes, or 2 without a GPU.
    nnodes
        Number of nodes, each with an agent of its own; all are simulated on this machine.
    max_restarts
        How often torchrun may restart all ranks after one has failed; ``run.restarts`` counts.
    timeout, dashboard
        As for `launch`.

    Returns
    -------
    Run
        ``logs`` has what the ranks printed in all attempts; ``output`` what torchrun itself printed;
        ``command`` what to type in a terminal (on each node); ``folder / "torchrun"`` its log folders.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such script; a count is no whole number, or too small. Otherwise as for `launch`.
    """
    name, words = program_of(script, args)
    check_timeout(timeout)
    check_count("nnodes", nnodes)
    if nproc_per_node is None:
        nproc_per_node = max(1, gpu_count() // nnodes) if gpu_count() else 2
    shape, fresh_store = shape_of(nnodes, nproc_per_node, max_restarts)
    world_size = nnodes * nproc_per_node
    meet = ["--standalone"] if nnodes == 1 else ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:PORT"]
    command = shlex.join([*map("=".join, fresh_store.items()), "torchrun", *shape, *meet, *words])
    with loopback_store() as port:  # loads PyTorch: an interrupt meanwhile leaves no run
        run = Run.create(name, world_size, command=command, max_restarts=max_restarts)
        meeting = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={uuid.uuid4().hex[:8]}"]
        meeting += ["--rdzv-backend=c10d", "--rdzv-conf=is_host=0", "--local-addr=127.0.0.1"]
        commands, environments = [], []
        for node in range(nnodes):
            logs = ["--redirects=3", f"--log-dir={run.folder / 'torchrun' / f'node-{node}'}"]
            commands.append([*ENTRY, "--torchrun", *shape, *meeting, *logs, *ENTRY[1:], "--rank", *words])
            gpus = gpus_of(node, nproc_per_node, nnodes)
            environments.append(of_a_program(run, world_size) | fresh_store | gpus)
        return watch(run, lambda _: Program(commands, environments, run), timeout, view_of(run, dashboard))


def shape_of(nnodes: int, nproc_per_node: int, max_restarts: int) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's options for these nodes, ranks and restarts, and the variables that restarts need."""
    check_count("nproc_per_node", nproc_per_node)
    check_count("max_restarts", max_restarts, 0)
    options = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc_per_node}", f"--max-restarts={max_restarts}"]
    return options, FRESH_STORE if max_restarts else {}
