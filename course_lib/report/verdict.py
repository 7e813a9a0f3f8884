"""Find out why a training run is not faster, from trials of it.

A trial runs the function for a few seconds with one possible cause taken away. Each of several rounds tries
all ways. An effect counts if it is larger than the spread of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..figures.tables import text_table
from ..record.layout import NO_GRADIENT_SYNC, REPEATED_BATCHES

AS_IT_IS, ONE_RANK, LARGER_BATCH = "as it is", "one rank", "first batches repeated, × 4"
LARGE = 0.1  # of the time: a cost that is worth a verdict
COLUMNS = ("way", "samples/s of each rank", "slowest rank, by round", "times as fast")
Rates = Sequence[Sequence[float]]  # samples per second, by round and rank

# What each way is compared with: a way from which it differs in one thing
THAN = {
    REPEATED_BATCHES: AS_IT_IS,
    NO_GRADIENT_SYNC: AS_IT_IS,
    ONE_RANK: NO_GRADIENT_SYNC,
    LARGER_BATCH: REPEATED_BATCHES,
}
SENTENCES = {
    "loader": "with its first batches again and again a rank does {rates}: {share:.0%} of the time"
    " goes into the loader. Samples that cost less help, and more workers if there are cores for them.",
    "communication": "without gradient synchronization a rank does {rates}: {share:.0%} of the time"
    " goes into it, or into waiting there for whichever rank is late. More work between two all_reduces"
    " helps: a larger batch, or accumulation.",
    "straggler": "without gradient synchronization rank {rank} does {effect.slower:,.0f} samples/s, and the"
    " others {effect.faster:,.0f}: they wait for it.",
    "sharing": "alone rank 0 does {rates} beside the others: they share cores, memory or a device, or wait"
    " for each other. More cores help, or a device for each; fewer ranks or threads may do as well.",
    "little work": "with 4 times the batch a rank does {rates}, both without the loader: {share:.0%} of"
    " the time is what a step costs however little is in it, communication not counted. A larger batch for"
    " each rank helps.",
}


@dataclass(frozen=True)
class Verdict:
    """What slows a training run down, and the figures that say so."""

    cause: str  # one of `SENTENCES`, "computing" (none of these), or "unknown" if the figures do not suffice
    sentence: str  # the same in words, with what helps
    costs: dict[str, float]  # by cause: 0.1 or more of the time inside loops
    rows: list[dict[str, str]]  # the table below the sentence

    def __repr__(self) -> str:
        return "\n".join(filter(None, [f"{self.cause}: {self.sentence}", text_table(self.rows)]))


class Effect:
    """How much faster one way is than another: the medians of their rounds, in samples per second."""

    def __init__(self, faster: Sequence[float] = (1.0,), slower: Sequence[float] = (1.0,)) -> None:
        self.faster, self.slower = float(np.median(faster)), float(np.median(slower))
        spread = max(np.ptp(faster), np.ptp(slower))
        self._is_seen = abs(self.faster - self.slower) > spread
        self.rates = f"{self.faster:,.0f} samples/s instead of {self.slower:,.0f}"

    @property
    def share(self) -> float:
        """The share of its time that the slower way loses; 0 if the spread may explain the difference."""
        return max(0.0, 1 - self.slower / self.faster) if self._is_seen else 0.0

    def __str__(self) -> str:
        return f"× {self.faster / self.slower:.2f}" + ("" if self._is_seen else ", within the spread")


def verdict_on_trials(trials: Mapping[str, Rates], skipped: Mapping[str, str]) -> Verdict:
    """Judge the trials of a training function; ``skipped`` says why a way has no trials, by way."""
    effects = _effects(trials)
    rank, late = _slowest_rank(trials.get(NO_GRADIENT_SYNC, ()))
    loader, sync, alone, larger = (effects.get(way, Effect()) for way in THAN)
    by_cause = {
        "loader": (loader, loader.share),
        "communication": (sync, sync.share),
        "straggler": (late, (1 - sync.share) * late.share),
        "sharing": (alone, (1 - sync.share) * alone.share),
        "little work": (larger, (1 - loader.share) * min(1.0, 4 / 3 * larger.share) - sync.share),
    }
    costs = {cause: share for cause, (_, share) in by_cause.items() if share >= LARGE}
    spread = max(float(np.ptp(slowest) / np.median(slowest)) for slowest in map(_slowest, trials.values()))
    if costs:
        cause = max(costs, key=costs.__getitem__)
        effect, _ = by_cause[cause]
        sentence = SENTENCES[cause].format(effect=effect, rates=effect.rates, share=costs[cause], rank=rank)
    elif spread >= LARGE or skipped:
        cause = "unknown"
        sentence = (
            f"no trial saves a tenth of the time, and more than the spread of its rounds (up to {spread:.0%})"
            ". Longer trials (trial_seconds=…) or a quieter machine may show more."
        )
    else:
        cause = "computing"
        sentence = "no trial saves a tenth of the time inside track(…): it goes into computing."
    rows = []
    for way, rates in trials.items():
        medians = " · ".join(f"{rate:,.0f}" for rate in np.median(rates, axis=0))
        rows.append((way, medians, _range(_slowest(rates)), str(effects.get(way, ""))))
    rows += [(way, "–", "–", reason) for way, reason in skipped.items()]
    return Verdict(cause, sentence, costs, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def _effects(trials: Mapping[str, Rates]) -> dict[str, Effect]:
    """Compare each way with the one from which it differs in one thing."""
    effects = {}
    for way, than in THAN.items():
        if way == ONE_RANK and than not in trials:
            than = AS_IT_IS
        if way in trials and than in trials:
            ranks = 1 if way == ONE_RANK else None  # None: the slowest of all counts
            effects[way] = Effect(_slowest(trials[way], ranks), _slowest(trials[than], ranks))
    return effects


def _slowest(rounds: Rates, ranks: int | None = None) -> list[float]:
    """Return the slowest of the first ``ranks``' rates, by round; ranks that wait for each other share it."""
    return [min(by_rank[:ranks]) for by_rank in rounds]


def _slowest_rank(rounds: Rates) -> tuple[int, Effect]:
    """Return the rank that is slowest in the median, and how much faster the others are."""
    if not rounds:
        return 0, Effect()
    rates = np.array(rounds)
    rank = int(np.median(rates, axis=0).argmin())
    others = np.median(np.delete(rates, rank, axis=1), axis=1)
    return rank, Effect(others.tolist(), rates[:, rank].tolist())


def _range(values: Sequence[float]) -> str:
    """Write the least and the largest value, or one if both read the same."""
    least, largest = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return least if least == largest else f"{least} to {largest}"
