"""Why is it not faster? One verdict on a run, with its evidence.

The time inside the `track` loops has four parts: waiting for the loader, computing, waiting for a core, and
waiting for all else. Of the last, four things are known: how much of it fell into collectives (by looks at
random moments), how much of that at most was spent on ranks that had not come yet (by the arrivals), whether
that was one rank again and again (`run.straggler`), and how long the threads that carry the collectives had
no core: it is why these take longer than their number and their bytes explain.

From these, each cause has a cost: the share of the time that would be saved without it. A cause is named
where it is large in the mean and in most steps, and where nothing larger is left unexplained. A wrong verdict
is worse than none: all else is "unknown", and the sentence says what is known.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..figures.tables import html_table, text_table
from ..hardware import cores
from ..run.meetings import meetings
from ..run.run import Run
from ..run.spent import FEWEST_LOOKS, SHORTEST, Parts, Step, parts_of, step_of
from ..run.straggler import Straggler, straggler

LARGE = 0.2  # of the time: a part that is worth a verdict
LATE = 0.08  # of a step: what a straggler costs that is worth one, where no part is large
CALL = 5e-4  # seconds: where the bytes of a collective take less than that, it is the calls that cost
SHORT = 0.01  # seconds: a step with little work in it, however evenly that is shared out
FULL = 2 / 3  # of the machine's cores at work for one rank: more ranks gain half as much again at most
SHOWN = {"loader": "loader", "computing": "computing", "no_core": "no core", "waiting": "waiting"}


@dataclass(frozen=True)
class Verdict:
    """What holds a run up, by the evidence beside it.

    Attributes
    ----------
    cause : str
        "loader", "communication", "little work", "straggler", "shared cores", "computing" (its own work alone
        takes the time), or "unknown" where the evidence does not suffice.
    sentence : str
        The same in words, with the figures, and what helps.
    parts : dict of int to Parts
        By rank, where its time went.
    """

    cause: str
    sentence: str
    parts: dict[int, Parts] = field(default_factory=dict)

    def table(self) -> list[dict[str, str]]:
        """A row for each rank: what share of its time went where."""
        return [
            {"rank": str(rank), "step": f"{1e3 * each.seconds / each.steps:,.1f} ms"}
            | {shown: f"{each.share(name):.0%}" for name, shown in SHOWN.items()}
            for rank, each in self.parts.items()
        ]

    def __repr__(self) -> str:
        return "\n".join(filter(None, [f"{self.cause}: {self.sentence}", text_table(self.table())]))

    def _repr_html_(self) -> str:
        words = f"<b>{html.escape(self.cause)}</b>: {html.escape(self.sentence)}"
        return f"<p>{words}</p>{html_table(self.table())}"


def why(run: Run, alone: Run | None = None) -> Verdict:
    """Why is it not faster? The largest part of a run's time that could be saved (lesson 14).

    Parameters
    ----------
    run
        It looped over ``track(loader)`` for at least a second.
    alone
        The same training on one rank: whether it left any core to a second one. Where it is no such run, the
        verdict does without, and says so.

    Returns
    -------
    Verdict
        On GPUs, where the host runs ahead of its device, the loader alone can be told; "unknown" otherwise.
    """
    verdict = _of_all_ranks(run)
    if alone is None:
        return verdict
    if unfit := _unfit(run, alone):
        return Verdict(verdict.cause, f"{verdict.sentence} (Without the run alone: {unfit}.)", verdict.parts)
    told = _of_one_rank(alone) if verdict.cause == "computing" else ""
    return Verdict("shared cores", told, verdict.parts) if told else verdict


def _of_all_ranks(run: Run) -> Verdict:
    met = meetings(run)
    known = {rank: parts_of(run, rank, met) for rank in range(run.world_size)}
    parts = {rank: each for rank, each in known.items() if each is not None}
    if len(parts) < len(known) or not parts:
        return Verdict("unknown", _too_little(known), parts)
    found = Evidence(run, parts, straggler(run), step_of(run, parts))
    blind, costs = found.blind(), found.costs()
    cause = max(costs, key=costs.__getitem__)
    rest = {} if blind else found.unexplained()
    largest = max(rest, key=rest.__getitem__) if rest else ""
    if costs[cause] >= LARGE and costs[cause] >= rest.get(largest, 0.0):
        return Verdict(found.refined(cause), SENTENCES[cause](found, costs[cause]), parts)
    if blind:
        return Verdict("unknown", f"the loader takes {costs['loader']:.0%} of the time; {blind}", parts)
    if rest[largest] >= LARGE:
        return Verdict("unknown", _of_the_unexplained(found, largest, rest[largest]), parts)
    if cause == "straggler" and costs[cause] >= LATE:
        return Verdict("straggler", _of_the_straggler(found, costs["straggler"]), parts)
    return _of_the_rest(parts)


@dataclass(frozen=True)
class Evidence:
    """What is known of a run, and what each cause would cost by that."""

    run: Run
    parts: dict[int, Parts]
    late: Straggler | None
    step: Step

    def blind(self) -> str:
        """Why no more than the loader can be told; empty where it can."""
        if any(str(self.run.facts(rank).get("device", "")).startswith("cuda") for rank in self.parts):
            return "on a GPU the host runs ahead of its device: take a profile for more."
        if any(np.isnan(each.no_core + each.computing) for each in self.parts.values()):
            return "this system does not say how long a thread worked and waited for a core."
        return ""

    def costs(self) -> dict[str, float]:
        """For each cause the share of the time that would be saved without it, in the mean and mostly."""
        mean, usual = self._costs(Parts.share), self._costs(Parts.usual)
        return {cause: min(mean[cause], usual[cause]) for cause in mean}

    def unexplained(self) -> dict[str, float]:
        """What no cause is named for, and the share of the time that it takes a rank."""
        mean, usual = self._costs(Parts.share), self._costs(Parts.usual)
        bursts = {cause: mean[cause] for cause in mean if usual[cause] < LARGE <= mean[cause]}
        return bursts | {
            "uneven": max(map(self.uneven, self.parts)),
            "elsewhere": max(map(self.waits_elsewhere, self.parts)),
        }

    def _costs(self, share: Callable[[Parts, str], float]) -> dict[str, float]:
        loader = [share(each, "loader") for each in self.parts.values()]
        # where each waits for its own, the ranks with the faster ones wait for the others besides
        costs = {"loader": float(max(loader) if min(loader) >= LARGE / 2 else np.mean(loader))}
        if not self.blind():
            communicates = min(self.communicates(rank, share) for rank in self.parts)
            starved = self.starved(communicates, share)
            no_core = [share(each, "no_core") for each in self.parts.values()]
            costs["shared cores"] = float(np.mean(no_core)) + starved
            costs["straggler"] = self.late.share if self.late else 0.0
            if self.step.calls:
                costs["communication"] = communicates - starved
        return costs

    def starved(self, communicates: float, share: Callable[[Parts, str], float]) -> float:
        """Of the time in collectives what calls and bytes do not explain; their threads got no core then."""
        without_core = max(share(each, "carriers_no_core") for each in self.parts.values())
        return max(0.0, min(without_core, communicates - self.step.at_most(self.run.world_size)))

    def communicates(self, rank: int, share: Callable[[Parts, str], float]) -> float:
        """A rank's time in collectives, less what was for others."""
        return max(0.0, self.in_collectives(rank, share) - self.for_ranks(rank, share))

    def in_collectives(self, rank: int, share: Callable[[Parts, str], float]) -> float:
        return share(self.parts[rank], "waiting") * (self.parts[rank].in_collectives or 0.0)

    def for_ranks(self, rank: int, share: Callable[[Parts, str], float]) -> float:
        """What a rank can have waited for others, at most."""
        return max(self.by_arrivals(rank, share), self.excused(rank, share))

    def uneven(self, rank: int) -> float:
        """For others by the arrivals, where it was no straggler, nor one without a core."""
        return max(0.0, self.by_arrivals(rank, Parts.share) - self.excused(rank, Parts.share))

    def by_arrivals(self, rank: int, share: Callable[[Parts, str], float]) -> float:
        """Where they are not known, all of it can be; but in a short step, more work helps in any case."""
        inside = self.in_collectives(rank, share)
        if self.parts[rank].for_others is None:
            return 0.0 if self.step.seconds < SHORT else inside
        return min(share(self.parts[rank], "for_others"), inside)

    def excused(self, rank: int, share: Callable[[Parts, str], float]) -> float:
        """What a rank waits for others by what else is known of these: one is late, or gets no core."""
        late = self.late.share if self.late and self.late.rank != rank else 0.0
        return max([late, *(share(each, "no_core") for other, each in self.parts.items() if other != rank)])

    def waits_elsewhere(self, rank: int) -> float:
        """Asleep, but in no collective; what makes a straggler late is explained."""
        waits = self.parts[rank].share("waiting") - self.in_collectives(rank, Parts.share)
        return waits - (self.late.share if self.late and self.late.rank == rank else 0.0)

    def refined(self, cause: str) -> str:
        """Communication whose bytes are few is too little work."""
        few = self.step.traffic_seconds(self.run.world_size) < CALL * self.step.calls
        return "little work" if cause == "communication" and few else cause


def _mean(parts: dict[int, Parts], name: str) -> float:
    return float(np.mean([each.share(name) for each in parts.values()]))


# --- in words ---------------------------------------------------------------------------------------------


def _too_little(known: Mapping[int, Parts | None]) -> str:
    ranks = [str(rank) for rank, each in known.items() if each is None]
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else "its ranks"
    return f"of {who} less than {SHORTEST:g} s inside track(loader) is known: let it run for longer."


def _of_the_unexplained(found: Evidence, what: str, cost: float) -> str:
    sleeper = found.parts[max(found.parts, key=found.waits_elsewhere)]
    if what == "uneven" and any(each.for_others is None for each in found.parts.values()):
        words = (
            "a rank waits in collectives, of which too few were seen to tell what of it is for other ranks."
        )
    elif what == "uneven":
        words = (
            "a rank waits in collectives for others, and it is not one rank that is late again and again: the"
        )
        words += " work is uneven, from step to step or from rank to rank."
    elif what == "elsewhere" and sleeper.in_collectives is None:
        words = f"a rank waits, and fewer than {FEWEST_LOOKS} looks do not tell where: let it run for longer."
    elif what == "elsewhere":
        words = (
            "a rank waits, in no collective of all ranks: for a file, a lock, another group, or it sleeps."
        )
    else:
        words = f"{NOW_AND_THEN[what]}, but not in most steps: something that happens now and then."
    return f"{cost:.0%} of the time {words}" + (f" And {found.late}." if found.late else "")


def _unfit(run: Run, alone: Run) -> str:
    """Why a run does not serve as the same training on one rank; empty where it does."""
    if alone.world_size != 1:
        return f"it has {alone.world_size} ranks, not one"
    if alone.name != run.name:
        return f"it ran {alone.name}, not {run.name}"
    if alone.state == "failed":
        return "it failed"
    if parts_of(alone, 0) is None:
        return f"less than {SHORTEST:g} s of it inside track(loader) is known"
    return ""


def _of_the_loader(found: Evidence, cost: float) -> str:
    itself = _mean(found.parts, "loader_cpu") > _mean(found.parts, "loader") / 2
    how = (
        "the ranks make their batches themselves, between two steps: let workers do it (num_workers)"
        if itself
        else "it does not keep up: more workers where there are cores for them, or samples that cost less"
    )
    return f"{cost:.0%} of the time the training waits for its loader; {how}."


def _of_cores(found: Evidence, cost: float) -> str:
    return (
        f"{cost:.0%} of the time a rank, or a thread that carries its collectives, was ready for work and got"
        f" no core: {found.run.world_size} ranks, and all else that this machine does, share {cores():g}"
        " cores. Fewer ranks help, or fewer threads each."
    )


def _of_one_rank(alone: Run) -> str:
    parts = parts_of(alone, 0)
    if parts is None or parts.cores < FULL * cores():
        return ""
    return (
        f"one rank alone kept {parts.cores:.1f} of {cores():g} cores busy with its threads: more ranks share"
        f" the same cores, and can be about {cores() / parts.cores:.1f} times as fast."
    )


def _of_the_straggler(found: Evidence, cost: float) -> str:
    late = found.late
    others = {rank: each for rank, each in found.parts.items() if rank != late.rank}
    own = {name: found.parts[late.rank].share(name) for name in ("loader", "computing", "no_core")}
    more = {name: share - _mean(others, name) for name, share in own.items()}
    name = max(more, key=more.__getitem__)
    if more[name] <= late.share / 2:
        return f"{late}. It neither computes nor loads longer: it sleeps, or waits for something of its own."
    does = f"takes {own[name]:.0%} of its time, and {_mean(others, name):.0%} of theirs"
    return f"{late}. {SHOWN[name].capitalize()} {does}."


def _of_collectives(found: Evidence, cost: float) -> str:
    step, traffic = found.step, found.step.traffic_seconds(found.run.world_size)
    return (
        f"a step of {_ms(step.seconds)} computes for {_ms(step.computing)} and waits"
        f" {_ms(cost * step.seconds)} for its collectives ({step.calls:.1f} of them, {_size(step.bytes)} in"
        f" all, which alone take about {_ms(traffic)}). More work between two all_reduces helps: a larger"
        " batch for each rank, or accumulation (lesson 11)."
    )


SENTENCES = {
    "loader": _of_the_loader,
    "shared cores": _of_cores,
    "straggler": _of_the_straggler,
    "communication": _of_collectives,
}


NOW_AND_THEN = {
    "loader": "the training waits for its loader",
    "shared cores": "a rank is ready for work and gets no core",
    "communication": "the ranks wait in their collectives",
}


def _of_the_rest(parts: dict[int, Parts]) -> Verdict:
    computing, waiting = _mean(parts, "computing"), _mean(parts, "waiting")
    if computing >= 1 - 2 * LARGE:
        words = f"{computing:.0%} of the time the ranks compute: nothing else holds them up."
        return Verdict("computing", words, parts)
    words = f"{computing:.0%} of the time the ranks compute, {waiting:.0%} they wait, and no cause is large."
    return Verdict("unknown", words, parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _size(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
