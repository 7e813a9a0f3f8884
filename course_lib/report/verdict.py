"""Find out why a training run is not faster: by trials of it, or by what a run has recorded.

A trial is the same run for a few seconds, with one possible cause taken away. All ways are tried in each
of several rounds. An effect counts if it is larger than the spread of the rounds.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..figures.tables import html_table, text_table
from ..run.run import Run
from ..run_folder import NO_GRADIENT_SYNC, REPEATED_BATCHES
from .straggler import straggler

AS_IT_IS, ONE_RANK, LARGER_BATCH = "as it is", "one rank", "first batches repeated, × 4"
LARGE = 0.1  # of the time: a cost that is worth a verdict
SHORTEST = 1.0  # seconds inside loops: a shorter run says nothing of its loader
MEETS = 0.5  # collectives in a step: with fewer, ranks hardly wait for each other
MOST_SHOWN = 4  # ranks whose rates stand in the table one by one
COLUMNS = ("way", "samples/s of each rank", "slowest rank, by round", "times as fast")
Rates = Sequence[Sequence[float]]  # samples per second, by round and rank


@dataclass(frozen=True)
class Verdict:
    """What slows a training run down, and the figures that say so.

    Attributes
    ----------
    cause : str
        "loader", "communication", "straggler", "sharing" (of cores or a device), "other ranks" (sharing, or
        waiting for them), "little work" (in a step), "computing" (none of these), or "unknown" if the figures
        do not suffice.
    sentence : str
        The same in words, with what helps.
    costs : dict of str to float
        By cause, its share of the time inside loops, from 0.1 to 1; smaller ones are left out.
    rates : dict of str to list
        Of trials: by way, samples per second by round and rank.
    rows : list of dict
        The table below the sentence.
    """

    cause: str
    sentence: str
    costs: dict[str, float] = field(default_factory=dict)
    rates: dict[str, Rates] = field(default_factory=dict)
    rows: list[dict[str, str]] = field(default_factory=list)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [f"{self.cause}: {self.sentence}", text_table(self.rows)]))

    def _repr_html_(self) -> str:
        words = f"<b>{html.escape(self.cause)}</b>: {html.escape(self.sentence)}"
        return f"<p>{words}</p>{html_table(self.rows)}"


# --- of a run that is over --------------------------------------------------------------------------------


def verdict_on_run(run: Run) -> Verdict:
    """Say what a run's own records show: how long each rank waited for its loader, and a straggler."""
    known = [_loader_share(run, rank) for rank in range(run.world_size)]
    shares = [share for share in known if share is not None]
    if len(shares) < len(known) or not known:
        words = f"less than {SHORTEST:g} s inside track(loader) is known of a rank: let it run for longer."
        return Verdict("unknown", words)
    late = straggler(run)
    costs = {"loader": min(shares), "straggler": late.share if late else 0.0}
    costs = {cause: share for cause, share in costs.items() if share >= LARGE}
    rows = [{"rank": str(rank), "waits for its loader": f"{share:.0%}"} for rank, share in enumerate(shares)]
    waits = _range([100 * share for share in shares], "{:.0f}")
    words = f"the ranks wait for their loaders for {waits} % of their time"
    cure = "make a sample cheaper, or let workers make the batches, if there are cores"
    told = [f"{words}: {cure}."] if "loader" in costs else []
    told += [f"{late}."] if late else []
    if not told:
        told = [f"{words}, and no rank is late again and again. why(function, …) tries what else it may be."]
    cause = max(costs, key=costs.__getitem__) if costs else "straggler" if late else "unknown"
    return Verdict(cause, " ".join(told[:: -1 if cause == "straggler" else 1]), costs, rows=rows)


def _loader_share(run: Run, rank: int) -> float | None:
    """Return the share of a rank's time in its loops that it waited for its loader, after the first step."""
    ticks = run.ticks(rank)
    begun = np.flatnonzero(ticks["steps"] > 0)
    if not len(begun) or np.ptp(ticks["tracked_seconds"][begun[0] :]) < SHORTEST:
        return None
    return float(np.ptp(ticks["loader_seconds"][begun[0] :]) / np.ptp(ticks["tracked_seconds"][begun[0] :]))


# --- of trials --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What one trial measured, after its first steps."""

    rates: list[float]  # samples per second inside `track` loops, by rank
    batch: float = 1.0  # samples in a step of rank 0
    meetings: float = 0.0  # collectives of all ranks in a step
    outside: float = 0.0  # share of rank 0's time outside of its loops


Trials = Mapping[str, Sequence[Trial]]  # by way, one in each round


@dataclass(frozen=True)
class Effect:
    """How much faster one way is than another: the medians of their rounds, in samples per second."""

    faster: float
    slower: float
    spread: float  # the larger range of the two

    @classmethod
    def of(cls, faster: Sequence[float], slower: Sequence[float]) -> Effect:
        spread = max(np.ptp(faster), np.ptp(slower))
        return cls(float(np.median(faster)), float(np.median(slower)), float(spread))

    @property
    def share(self) -> float:
        """The share of its time that the slower way loses; 0 if the spread may explain the difference."""
        return 1 - self.slower / self.faster if self.faster - self.slower > self.spread else 0.0

    @property
    def rates(self) -> str:
        return f"{self.faster:,.0f} samples/s instead of {self.slower:,.0f}"

    def __str__(self) -> str:
        seen = abs(self.faster - self.slower) > self.spread
        return f"× {self.faster / self.slower:.2f}" + ("" if seen else ", within the spread")


NONE = Effect(1.0, 1.0, 0.0)


@dataclass(frozen=True)
class Cost:
    """What a cause costs: a share of the time inside loops."""

    cause: str
    share: float
    sentence: str


def verdict_on_trials(trials: Trials, skipped: Mapping[str, str]) -> Verdict:
    """Judge the trials of a training function.

    Parameters
    ----------
    trials
        By way, a trial in each round.
    skipped
        By way that has no trials, why not.
    """
    effects = _effects(trials)
    costs = sorted(_costs(trials, effects), key=lambda cost: -cost.share)
    costs = [cost for cost in costs if cost.share >= LARGE]
    spread = max(float(np.ptp(rates) / np.median(rates)) for rates in map(_slowest, trials.values()))
    alone = NO_GRADIENT_SYNC in skipped or ONE_RANK in skipped  # what other ranks cost was not tried
    if costs:
        cause, sentence = costs[0].cause, costs[0].sentence
        if costs[1:]:
            sentence += f" Beside it: {', '.join(f'{cost.cause} ({cost.share:.0%})' for cost in costs[1:])}."
    elif spread >= LARGE:
        cause = "unknown"
        sentence = (
            f"no effect is larger than the spread of its rounds, which is up to {spread:.0%}. A quieter"
            " machine helps, or longer trials (trial_seconds=…)."
        )
    else:
        cause = "unknown" if alone else "computing"
        sentence = "nothing that was taken away makes it a tenth faster."
        sentence += " Not everything was tried: see below." if alone else " The time goes into computing."
    outside = float(np.median([trial.outside for trial in trials[AS_IT_IS]]))
    if outside >= LARGE:
        sentence += f" All this is about the time inside track(…); {outside:.0%} of the time is outside."
    rates: dict[str, Rates] = {way: [trial.rates for trial in rounds] for way, rounds in trials.items()}
    rows = [_row(way, rates[way], str(effects.get(way, ""))) for way in rates]
    rows += [_cells(way, "–", "–", reason) for way, reason in skipped.items()]
    return Verdict(cause, sentence, {cost.cause: cost.share for cost in costs}, rates, rows)


def growth(trials: Trials, way: str) -> float:
    """Return how many times as many samples a step has as in the unchanged run."""
    one, other = (float(np.median([trial.batch for trial in trials[each]])) for each in (AS_IT_IS, way))
    return other / one


def _slowest(rounds: Sequence[Trial]) -> list[float]:
    """Return the rate of the slowest rank in each round: where all wait for all, the others have it too."""
    return [min(trial.rates) for trial in rounds]


def _of_all_ranks(rounds: Sequence[Trial]) -> list[float]:
    """Return what all ranks do together in each round, in samples/s."""
    return [sum(trial.rates) for trial in rounds] or [0.0]


def _effects(trials: Trials) -> dict[str, Effect]:
    """Compare each way with the unchanged run, or with the way that differs from it in one thing."""
    than = {LARGER_BATCH: REPEATED_BATCHES}
    effects = {
        way: Effect.of(_slowest(rounds), _slowest(trials[than.get(way, AS_IT_IS)]))
        for way, rounds in trials.items()
        if way not in (AS_IT_IS, ONE_RANK) and than.get(way, AS_IT_IS) in trials
    }
    if ONE_RANK in trials:
        beside = trials.get(NO_GRADIENT_SYNC, trials[AS_IT_IS])
        alone = [[trial.rates[0] for trial in rounds] for rounds in (trials[ONE_RANK], beside)]
        effects[ONE_RANK] = Effect.of(*alone)
    return effects


def _costs(trials: Trials, effects: Mapping[str, Effect]) -> Iterator[Cost]:
    loader, sync, larger, alone = (
        effects.get(way, NONE) for way in (REPEATED_BATCHES, NO_GRADIENT_SYNC, LARGER_BATCH, ONE_RANK)
    )
    yield Cost(
        "loader",
        loader.share,
        f"with its first batches again and again a rank does {loader.rates}: {loader.share:.0%} of the time"
        " goes into the loader. Samples that cost less help, and more workers if there are cores for them.",
    )
    yield Cost(
        "communication",
        sync.share,
        f"without gradient synchronization a rank does {sync.rates}: {sync.share:.0%} of the time goes into"
        " it, or into waiting there for whichever rank is late. More work between two all_reduces helps: a"
        " larger batch, or accumulation.",
    )
    left, beside = 1 - sync.share, trials.get(NO_GRADIENT_SYNC, ())
    if beside and float(np.median([trial.meetings for trial in beside])) < MEETS:
        if cost := _straggler(beside, left):
            yield cost
        one, together = (_of_all_ranks(trials.get(way, ())) for way in (ONE_RANK, AS_IT_IS))
        cure = (
            "More cores help, or a device for each."
            if min(together) > max(one)
            else "Fewer ranks or threads do as well; a device for each helps."
        )
        yield Cost(
            "sharing",
            left * alone.share,
            f"alone rank 0 does {alone.rates} beside the others without gradient synchronization; with it,"
            f" all together do {np.median(together):,.0f}: they share cores, memory or a device. {cure}",
        )
    else:  # they wait for each other still
        yield Cost(
            "other ranks",
            left * alone.share,
            f"alone rank 0 does {alone.rates} beside the others, whom it meets in each step: they share cores"
            " or a device, or wait for each other. Which of these, the trials cannot tell.",
        )
    if larger.share:
        times = growth(trials, LARGER_BATCH)
        fixed = min(1.0, times / (times - 1) * larger.share)  # of a step, what does not grow with its batch
        fixed = (1 - loader.share) * fixed - sync.share
        yield Cost(
            "little work",
            fixed,
            f"with {times:.3g} times the batch a rank does {larger.rates}, both without the loader:"
            f" {fixed:.0%} of the time is what a step costs however little is in it, communication not"
            " counted. A larger batch for each rank helps.",
        )


def _straggler(beside: Sequence[Trial], left: float) -> Cost | None:
    """Split ranks that do not wait for each other where their rates differ most: few slow ones hold up all.

    Their trials are ``left`` of the time of the unchanged run.
    """
    rates = np.array([trial.rates for trial in beside])
    order = np.argsort(np.median(rates, axis=0))
    cut = 1 + int(np.argmax(np.diff(np.median(rates, axis=0)[order])))
    late, others = sorted(order[:cut].tolist()), order[cut:]
    if len(late) > len(order) / 2:
        return None
    effect = Effect.of(rates[:, others].min(axis=1).tolist(), rates[:, late].min(axis=1).tolist())
    who = f"rank {late[0]} does" if len(late) == 1 else f"ranks {', '.join(map(str, late))} do"
    return Cost(
        "straggler",
        left * effect.share,
        f"without gradient synchronization {who} {effect.slower:,.0f} samples/s, and all others at least"
        f" {effect.faster:,.0f}: they wait for {'it' if len(late) == 1 else 'them'}.",
    )


def _row(way: str, rates: Rates, effect: str) -> dict[str, str]:
    by_rank = np.median(rates, axis=0)
    shown = " · ".join(f"{rate:,.0f}" for rate in by_rank) if len(by_rank) <= MOST_SHOWN else _range(by_rank)
    return _cells(way, shown, _range([min(by_rank) for by_rank in rates]), effect)


def _cells(*cells: str) -> dict[str, str]:
    return dict(zip(COLUMNS, cells, strict=True))


def _range(values: Sequence[float] | np.ndarray, form: str = "{:,.0f}") -> str:
    """Write the least and the largest value, or one if both read the same."""
    least, largest = form.format(min(values)), form.format(max(values))
    return least if least == largest else f"{least} to {largest}"
