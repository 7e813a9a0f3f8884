"""`why`: try a training function with one possible cause of its slowness after the other taken away."""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..notebook import in_kernel
from ..report.failed import RankError, RankTimeout, Stopped
from ..report.verdict import (
    AS_IT_IS,
    LARGER_BATCH,
    ONE_RANK,
    Trial,
    Verdict,
    growth,
    verdict_on_run,
    verdict_on_trials,
)
from ..run.run import Run
from ..run_folder import NO_GRADIENT_SYNC, REPEATED_BATCHES, TRIAL
from .arguments import check_timeout, world_size_of
from .dashboard import View
from .launch import Launch, start

ROUNDS = 3
WARM_STEPS, WARM_SECONDS = 5, 0.3  # that each rank does before it is measured
FEWEST_STEPS = 5  # that are measured
ENOUGH = 1 / 3  # of a trial's seconds: what is over before is no measurement
EMPTY_PASSES = 20  # loops without a batch, as by drop_last: there will never be one
LEAST_GROWTH = 1.5  # of a step's samples, where four times are asked for
MOST_CHANGE = 0.1  # of a step's samples, where none is asked for


def why(
    training: Callable[..., Any] | Run,
    *args: Any,
    nprocs: int | None = None,
    device: str | None = None,
    timeout: float | None = 300.0,
    dashboard: bool = True,
    trial_seconds: float = 2.0,
    **kwargs: Any,
) -> Verdict:
    """Find out why a training run is not faster, by trying it (lesson 14).

    The function runs for a few seconds as it is, with the first batches of its loader again and again (no
    loader cost), without DDP's gradient synchronization, on one rank and, if it has a parameter
    ``batch_size``, with a batch four times as large: each way in three rounds. Then the ranks are killed, and
    nothing is kept. Only the time inside ``track(loader)`` is judged, from the sixth step on: what happens
    once in an epoch counts if a trial lasts for several.

    Parameters
    ----------
    training
        A function as for `launch`, which loops over ``track(loader)`` for some seconds at least. Or a `Run`:
        then nothing is run, and the verdict is what its records show, of its loader and of a straggler.
    args, nprocs, device, kwargs
        As for `launch`.
    timeout
        Seconds that a trial may take in all; after them its ranks are killed, as in `launch`.
    dashboard
        Show which trial is running; False prints nothing.
    trial_seconds
        For so long each rank is measured inside its loops, after its first steps.

    Returns
    -------
    Verdict
        Its cause, in a sentence, and the table of all trials.

    Raises
    ------
    RankError
        The unchanged training run failed. If it fails in another way, the table says so.
    ValueError
        It was over before it could be measured, or calls no `track`.
    TypeError
        The function does not take these arguments.
    """
    if isinstance(training, Run):
        return verdict_on_run(training)
    check_timeout(trial_seconds, "trial_seconds")
    asked = Launch(training, args, kwargs, nprocs=nprocs, device=device, timeout=timeout)
    ways, skipped = _ways(asked)
    trials: dict[str, list[Trial]] = {way: [] for way in ways}
    with _progress(dashboard) as show:
        for number in range(ROUNDS):
            for way in list(trials)[:: -1 if number % 2 else 1]:  # there and back: a machine gets warm
                show(f"why: round {number + 1} of {ROUNDS}, {way}")
                try:
                    trials[way].append(_trial(ways[way], trial_seconds))
                    if reason := _is_other_work(way, trials):
                        raise ValueError(reason)
                except (RankError, ValueError) as error:
                    if way == AS_IT_IS:
                        raise
                    if isinstance(error, RankError):
                        shutil.rmtree(error.run.folder, ignore_errors=True)
                    del trials[way]
                    skipped[way] = f"not known: {str(error).splitlines()[0]}"
    return verdict_on_trials(trials, skipped)


def _ways(asked: Launch) -> tuple[dict[str, Launch], dict[str, str]]:
    """Return what to launch for each way, and for each that is not tried the reason."""
    ways = {way: replace(asked, environment={TRIAL: way}) for way in (AS_IT_IS, REPEATED_BATCHES)}
    skipped = {}
    if world_size_of(asked.nprocs, asked.device) > 1:
        ways[NO_GRADIENT_SYNC] = replace(asked, environment={TRIAL: NO_GRADIENT_SYNC})
        ways[ONE_RANK] = replace(ways[NO_GRADIENT_SYNC], nprocs=1)
    given = _arguments(asked)
    if given and type(size := given.arguments.get("batch_size")) is int:
        given.arguments["batch_size"] = 4 * size
        ways[LARGER_BATCH] = replace(ways[REPEATED_BATCHES], args=given.args, kwargs=given.kwargs)
    else:
        skipped[LARGER_BATCH] = "not tried: the function has no whole number as batch_size"
    return ways, skipped


def _arguments(asked: Launch) -> inspect.BoundArguments | None:
    """Return the function's arguments by name; None for a function in C that has no signature."""
    try:
        signature = inspect.signature(asked.function)
    except ValueError:
        return None
    given = signature.bind(*asked.args, **asked.kwargs)
    given.apply_defaults()
    return given


def _is_other_work(way: str, trials: dict[str, list[Trial]]) -> str:
    """Say why a way is no comparison with the unchanged run; empty if it is one."""
    if not trials[AS_IT_IS] or way not in (ONE_RANK, LARGER_BATCH):
        return ""
    times = growth(trials, way)
    if way == LARGER_BATCH and times < LEAST_GROWTH:
        return f"a step has only {times:.2g} times as many samples"
    if way == ONE_RANK and abs(times - 1) > MOST_CHANGE:
        return f"alone, a step of rank 0 has {times:.2g} times as many samples"
    return ""


def _trial(asked: Launch, seconds: float) -> Trial:
    """Run one trial, and measure it for so many seconds.

    Raises
    ------
    ValueError
        It was over too soon, or does not do what is to be tried.
    """
    views: list[_Measured] = []

    def view(run: Run) -> View:
        views.append(_Measured(run, seconds))
        return views[0]

    try:
        run = start(asked, view)
    except Stopped:
        run = views[0].run
        if not views[0].is_measured and not _runs_empty(run):
            raise
    except RankTimeout as error:
        if error.run.tracked:
            raise
        run = error.run
    try:
        no_sync = asked.environment[TRIAL] == NO_GRADIENT_SYNC and asked.nprocs != 1
        if no_sync and not all(run.facts(rank).get("ddp") for rank in range(run.world_size)):
            raise ValueError("the function makes no DistributedDataParallel")
        trial = _measured(run, ENOUGH * seconds)
        if trial is None:
            steps = min(run.ticks(rank)["steps"].max(initial=0) for rank in range(run.world_size))
            raise ValueError(
                f"after {run.seconds:.1f} s a rank had done {steps:.0f} steps inside track(…); to be"
                f" measured, it does {WARM_STEPS + FEWEST_STEPS} at least, for {WARM_SECONDS + seconds:g} s"
            )
        return trial
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def _measured(run: Run, seconds: float) -> Trial | None:
    """Return what a run shows after its first steps; None before each rank has been seen for ``seconds``."""
    rates: list[float] = []
    for rank in reversed(range(run.world_size)):  # of rank 0, which is last, more is said below
        ticks = run.ticks(rank)
        first = WARM_STEPS + run.facts(rank).get("queued_batches", 0)
        warm = np.flatnonzero((ticks["steps"] >= first) & (ticks["stepped_seconds"] >= WARM_SECONDS))
        if not len(warm):
            return None
        gained = {name: float(column[-1] - column[warm[0]]) for name, column in ticks.items()}
        if gained["stepped_seconds"] < seconds or gained["steps"] < FEWEST_STEPS or not gained["samples"]:
            return None
        rates.insert(0, gained["samples"] / gained["stepped_seconds"])
    arrivals = run.trace(0).arrivals()
    seen = arrivals["seconds"] >= ticks["seconds"][warm[0]]
    called = np.ptp(arrivals["number"][seen]) if seen.any() else 0.0
    meets = float(arrivals["meets"][seen].mean()) if seen.any() else 0.0
    return Trial(
        rates,
        batch=gained["samples"] / gained["steps"],
        meetings=float(called) * meets / gained["steps"],
        outside=1 - gained["tracked_seconds"] / gained["seconds"],
    )


def _runs_empty(run: Run) -> bool:
    """Return whether a rank goes through its loop again and again, and finds no batch in it."""
    ticks = [run.ticks(rank) for rank in range(run.world_size)]
    return any(rank["passes"].max(initial=0) >= EMPTY_PASSES and not rank["steps"].any() for rank in ticks)


class _Measured(View):
    """A view that shows nothing, and stops the run once each rank has been measured for long enough."""

    def __init__(self, run: Run, seconds: float) -> None:
        super().__init__(run)
        self._seconds = seconds
        self.is_measured = False

    def update(self) -> None:
        self.is_measured = _measured(self.run, self._seconds) is not None
        if self.is_measured or _runs_empty(self.run):
            self.stop.set()


@contextlib.contextmanager
def _progress(shown: bool) -> Any:
    """Yield a function that shows one line of text: in a notebook in the same place each time."""
    if not shown:
        yield lambda text: None
    elif in_kernel():
        from IPython.display import display

        line = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield lambda text: line.update({"text/plain": text}, raw=True)
        finally:
            line.update({}, raw=True)
    else:
        yield lambda text: print(text, flush=True)
