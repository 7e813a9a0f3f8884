"""`why`: run a training function again and again, each time without one possible cause of its slowness."""

from __future__ import annotations

import inspect
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..record.layout import NO_GRADIENT_SYNC, REPEATED_BATCHES, TRIAL
from ..report.failed import RankError, Stopped
from ..report.verdict import AS_IT_IS, LARGER_BATCH, ONE_RANK, Verdict, verdict_on_trials
from ..run.run import Run
from .arguments import check_timeout, world_size_of
from .dashboard import View
from .launch import Launch, start

ROUNDS = 3
WARM_STEPS, WARM_SECONDS = 5, 0.3  # each rank does both before it is measured
FEWEST_STEPS = 5  # to measure on each rank
ENOUGH = 1 / 3  # share of a trial's seconds: a function that ends earlier is not measured
TIMES_SAMPLES = {ONE_RANK: 1, LARGER_BATCH: 4}  # samples in a step, as a multiple of the unchanged run's
MOST_CHANGE = 0.2  # share by which that multiple may differ


def why(
    training: Callable[..., Any],
    *args: Any,
    nprocs: int | None = None,
    device: str | None = None,
    timeout: float | None = 300.0,
    dashboard: bool = True,
    trial_seconds: float = 2.0,
    **kwargs: Any,
) -> Verdict:
    """Find out by trials why a training run is not faster (lesson 14).

    Each trial runs the function for a few seconds: as it is, with the first batches of its loader repeated
    (no loader cost), without DDP's gradient synchronization, on one rank and, if it has a parameter
    ``batch_size``, with a batch four times as large. There are three rounds of trials. A trial's ranks are
    killed at its end, and nothing is kept. Only the time inside ``track(loader)`` counts, from the sixth step
    on; what happens once in an epoch counts if a trial lasts for several epochs.

    Parameters
    ----------
    training
        A function as for `launch` that loops over ``track(loader)`` for at least a few seconds.
    args, nprocs, device, kwargs
        As for `launch`.
    timeout
        Seconds that one trial may take, as in `launch`.
    dashboard
        Print what is tried in each round; False prints nothing.
    trial_seconds
        How long each rank is measured inside its loops, after its first steps.

    Returns
    -------
    Verdict
        The cause, in a sentence, and the table of all trials.

    Raises
    ------
    RankError
        The unchanged function failed, or was not measured within ``timeout`` seconds. If a changed one
        fails, the table says so.
    ValueError
        The function ended before it could be measured, or does not call `track`.
    TypeError
        The function does not take these arguments.
    """
    check_timeout(trial_seconds, "trial_seconds")
    ways = _ways(Launch(training, args, kwargs, nprocs=nprocs, device=device, timeout=timeout))
    rates: dict[str, list[list[float]]] = {way: [] for way in ways}
    skipped: dict[str, str] = {}
    samples = 0.0  # in a step of rank 0
    for number in range(ROUNDS):
        tried = list(rates)[:: -1 if number % 2 else 1]  # every other round backwards: machines heat up
        if dashboard:
            print(f"why: round {number + 1} of {ROUNDS}: {'; '.join(tried)}", flush=True)
        for way in tried:
            try:
                by_rank, batch = _trial(ways[way], trial_seconds)
                samples = samples or batch
                times, wanted = batch / samples, TIMES_SAMPLES.get(way)
                if wanted and abs(times / wanted - 1) > MOST_CHANGE:
                    raise ValueError(
                        f"a step of rank 0 has {times:.2g} times as many samples, and not {wanted}"
                    )
                rates[way].append(by_rank)
            except (RankError, ValueError) as error:
                if way == AS_IT_IS:
                    raise
                if isinstance(error, RankError):
                    shutil.rmtree(error.run.folder, ignore_errors=True)
                del rates[way]
                skipped[way] = f"not known: {str(error).splitlines()[0]}"
    return verdict_on_trials(rates, skipped)


def _ways(unchanged: Launch) -> dict[str, Launch]:
    ways = {way: replace(unchanged, environment={TRIAL: way}) for way in (AS_IT_IS, REPEATED_BATCHES)}
    if world_size_of(unchanged.nprocs, unchanged.device) > 1:
        ways[NO_GRADIENT_SYNC] = replace(unchanged, environment={TRIAL: NO_GRADIENT_SYNC})
        ways[ONE_RANK] = replace(ways[NO_GRADIENT_SYNC], nprocs=1)
    bound = inspect.signature(unchanged.function).bind(*unchanged.args, **unchanged.kwargs)
    bound.apply_defaults()
    if type(size := bound.arguments.get("batch_size")) is int:
        bound.arguments["batch_size"] = 4 * size
        ways[LARGER_BATCH] = replace(ways[REPEATED_BATCHES], args=bound.args, kwargs=bound.kwargs)
    return ways


def _trial(trial: Launch, seconds: float) -> tuple[list[float], float]:
    """Run a trial for ``seconds`` and return what `_measured` returns; raise ValueError if that is None."""
    is_measured = threading.Event()
    try:
        run = start(trial, lambda run: _UntilMeasured(run, seconds, is_measured))
    except Stopped as stopped:
        if not is_measured.is_set():
            raise
        run = stopped.run
    try:
        no_sync = trial.environment[TRIAL] == NO_GRADIENT_SYNC and trial.nprocs != 1
        if no_sync and not all(trace.facts.get("ddp") for trace in run.traces()):
            raise ValueError("the function makes no DistributedDataParallel")
        if found := _measured(run, ENOUGH * seconds):
            return found
        steps = min(trace.ticks["steps"].max(initial=0) for trace in run.traces())
        raise ValueError(
            f"after {run.seconds:.1f} s a rank had done {steps:.0f} steps inside track(…); to be"
            f" measured, it does {WARM_STEPS + FEWEST_STEPS} at least, for {WARM_SECONDS + seconds:g} s"
        )
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def _measured(run: Run, seconds: float) -> tuple[list[float], float] | None:
    """Return each rank's samples per second after its first steps, and the samples in a step of rank 0.

    Return None until each rank has been measured for ``seconds``.
    """
    rates, batches = [], []
    for trace in run.traces():
        ticks = trace.ticks
        warm = np.flatnonzero((ticks["steps"] >= WARM_STEPS) & (ticks["stepped_seconds"] >= WARM_SECONDS))
        if not len(warm):
            return None
        steps, samples, took = (
            float(np.ptp(ticks[name][warm[0] :])) for name in ("steps", "samples", "stepped_seconds")
        )
        if took < seconds or steps < FEWEST_STEPS or not samples:
            return None
        rates.append(samples / took)
        batches.append(samples / steps)
    return rates, batches[0]


class _UntilMeasured(View):
    """A view that shows nothing, and stops the run once each rank has been measured for long enough."""

    def __init__(self, run: Run, seconds: float, is_measured: threading.Event) -> None:
        super().__init__(run)
        self._seconds, self._is_measured = seconds, is_measured

    def update(self) -> None:
        if _measured(self.run, self._seconds):
            self._is_measured.set()
            self.stop.set()
