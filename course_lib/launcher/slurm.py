"""`slurm`: run a script on the nodes of a cluster, and watch it, now or again later."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable
from typing import Any

from ..host import cluster
from ..record.layout import JOB_SCRIPT, PROGRAM, RankFiles
from ..run.run import Run
from .arguments import check_count, check_timeout, script_at
from .dashboard import view_of
from .job_script import gpus_of_a_node, job_script
from .scripts import shape_of
from .slurm_job import SlurmJob
from .watch import watch


def slurm(
    script: str | os.PathLike[str] | Run,
    *args: Any,
    nodes: int = 1,
    nproc_per_node: int | None = None,
    max_restarts: int = 0,
    timeout: float | None = None,
    setup: str | Iterable[str] = (),
    dashboard: bool = True,
    **options: Any,
) -> Run:
    """Run a script with torchrun on the nodes of a cluster, as a Slurm job, and watch it (lesson 17).

    It submits the job with ``sbatch`` and waits for its end. As with `torchrun` on one machine, you get a
    `Run` with the dashboard, logs, figures and reports of all ranks, here on all nodes. They come through the
    run's folder, which must be on a disk that the nodes share: your home usually is, and ``COURSE_HOME``
    names another place. (Over NFS, what a node writes may take half a minute to show up here.)

    The Stop button and the kernel's interrupt cancel the job. If the kernel dies, the job goes on, and
    ``slurm(Run.open())`` watches it again; if it has ended meanwhile, you get its report.

    A rank's times count from the job's start by its own node's clock. If the clocks of two nodes differ by
    5 ms, their curves are shifted by as much, and a rank may look late by as much. Clusters keep their clocks
    in sync to about a millisecond (NTP).

    Tested on Slurm 22.05 with two nodes that are one machine without GPUs; not yet on several machines.

    Parameters
    ----------
    script
        Its path, from the current folder, which the nodes must share, too. It runs unchanged: torchrun sets
        RANK, LOCAL_RANK, WORLD_SIZE… as on one machine. Or the run of a job whose kernel is gone: then only
        ``timeout`` and ``dashboard`` count.
    args, max_restarts
        As for `torchrun`.
    nodes
        Number of nodes that the job requests.
    nproc_per_node
        Ranks per node; by default the GPUs requested (``gpus_per_node=4``, ``gres="gpu:4"``), or 2.
    timeout
        Seconds from the job's start after which it is cancelled, with a report of where each rank was. (The
        cluster's own limit is an option of ``sbatch``: ``time="1:00:00"``.)
    setup
        Shell lines that the job's script runs before anything starts: ``"module load cuda"``.
    dashboard
        As for `launch`; it shows the queue, too.
    **options
        Options of ``sbatch``, by name: ``partition="gpu"``, ``time="1:00:00"``, ``account="me"``,
        ``gres="gpu:4"``, ``cpus_per_task=8``, ``exclusive=True``.

    Returns
    -------
    Run
        As for `torchrun`; also ``job``, the job's number, ``nodes``, and ``queued_seconds``, which are not
        part of ``seconds``. ``output`` has what Slurm and each node's torchrun printed, ``folder /
        "job.sbatch"`` the script that was submitted; ``command`` submits it by hand.

    Raises
    ------
    cluster.SlurmError
        There is no Slurm here, or it refused the job; the message has its own words.
    RankError, RankTimeout
        A rank failed, or Slurm ended the job; it was not done within ``timeout``.
    FileNotFoundError, ValueError
        As for `torchrun`; an option is not for sbatch; a run was not submitted to Slurm.
    """
    check_timeout(timeout)
    if isinstance(script, Run):
        return _watch_again(script, timeout, dashboard)
    path = script_at(script)
    check_count("nodes", nodes)
    if nproc_per_node is None:
        nproc_per_node = gpus_of_a_node(options) or 2
    shape, fresh_store = shape_of(nodes, nproc_per_node, max_restarts)
    cpus = options.get("cpus_per_task")
    if cpus is not None:
        check_count("cpus_per_task", cpus)
    exports = {"OMP_NUM_THREADS": str(max(1, (cpus or 1) // nproc_per_node)), **fresh_store}
    setup = [setup] if isinstance(setup, str) else setup
    text = job_script(path, args, nodes, shape, setup, options, exports)
    cluster.check_there()
    facts: dict[str, Any] = {"state": "queued", "submitted": time.time(), "max_restarts": max_restarts}
    run = Run.create(path.name, nodes * nproc_per_node, **facts)

    def submit() -> int:
        job = run.folder / JOB_SCRIPT
        job.write_text(text)
        (run.folder / "torchrun").mkdir()
        run.record.note(command=shlex.join(["sbatch", str(job)]))
        always = [f"--output={RankFiles(run.folder, PROGRAM).log}", "--export=ALL"]
        variables = {
            "COURSE_RUN": str(run.folder),
            "PYTHONUNBUFFERED": "1",
            "MPLBACKEND": "Agg",
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "16"),  # see environment.py
        }
        return cluster.submit(job, always, variables)

    return watch(run, lambda _: SlurmJob(run, submit), timeout, view_of(run, dashboard))


def _watch_again(run: Run, timeout: float | None, dashboard: bool) -> Run:
    """Watch the job of a run whose kernel is gone; if it has ended meanwhile, its report comes at once."""
    if run.job is None:
        raise ValueError(
            f"{run.name} was not submitted to Slurm: only a run of slurm() goes on without a kernel"
        )
    cluster.check_there()
    run.record.take_over()
    return watch(run, lambda _: SlurmJob(run), timeout, view_of(run, dashboard))
