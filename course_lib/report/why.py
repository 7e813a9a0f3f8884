"""Why is it not faster? One verdict on a run, with its evidence.

The time inside the `track` loops has four parts: waiting for the loader, computing, waiting for a core, and
waiting for all else, which on CPU ranks is the collectives. What a straggler costs is known from the arrivals
(`run.straggler`). The verdict is the largest part that could be saved; where none is large it says so.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..figures.tables import html_table, text_table
from ..hardware import cores
from ..run.run import Run
from ..run.spent import SHORTEST, Parts, Step, parts_of, step_of
from ..run.straggler import Straggler, straggler

LARGE = 0.2  # of the time: a part that is worth a verdict
LATE = 0.08  # of a step: what a straggler costs that is worth one, where no part is large
CALL = 5e-4  # seconds: where the bytes of a collective take less than that, it is the calls that cost
FULL = 0.8  # of the machine's cores at work: a second rank finds none
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
        The same training on one rank: whether it left any core to a second one.

    Returns
    -------
    Verdict
        On GPUs, where the host runs ahead of its device, the loader alone can be told; "unknown" otherwise.
    """
    known = {rank: parts_of(run, rank) for rank in range(run.world_size)}
    parts = {rank: each for rank, each in known.items() if each is not None}
    if len(parts) < len(known) or not parts:
        return Verdict("unknown", _too_little(known), parts)
    found = Evidence(run, parts, straggler(run), step_of(run, parts))
    costs, blind = found.costs(), found.blind()
    cause = max(costs, key=costs.__getitem__)
    if costs[cause] >= LARGE:
        return Verdict(found.refined(cause), SENTENCES[cause](found, costs[cause]), parts)
    if blind:
        return Verdict("unknown", f"the loader takes {costs['loader']:.0%} of the time; {blind}", parts)
    if alone is not None and (told := _of_one_rank(alone)):
        return Verdict("shared cores", told, parts)
    if costs["straggler"] >= LATE:
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
        if any(np.isnan(each.no_core) for each in self.parts.values()):
            return "this system does not say how long a thread worked and waited for a core."
        return ""

    def costs(self) -> dict[str, float]:
        """For each cause the share of a step that would be saved without it."""
        costs = {"loader": self.mean("loader")}
        if not self.blind():
            costs["shared cores"] = self.mean("no_core")
            costs["straggler"] = self.late.share if self.late else 0.0
            if self.step.calls:
                costs["communication"] = min(map(self.waits_in_collectives, self.parts))
        return costs

    def waits_in_collectives(self, rank: int) -> float:
        """The share of a rank's time that it waited: more than for the straggler, or one that got no core.

        The rank with the least has the most honest figure: what others wait besides, they wait for ranks.
        """
        for_ranks = [each.share("no_core") for other, each in self.parts.items() if other != rank]
        for_ranks.append(self.late.share if self.late and self.late.rank != rank else 0.0)
        return max(0.0, self.parts[rank].share("waiting") - max(for_ranks))  # who waits, waits for the last

    def refined(self, cause: str) -> str:
        """Communication whose bytes are few is too little work."""
        few = self.step.traffic_seconds(self.run.world_size) < CALL * self.step.calls
        return "little work" if cause == "communication" and few else cause

    def mean(self, name: str) -> float:
        return _mean(self.parts, name)


def _mean(parts: dict[int, Parts], name: str) -> float:
    return float(np.mean([each.share(name) for each in parts.values()]))


# --- in words ---------------------------------------------------------------------------------------------


def _too_little(known: Mapping[int, Parts | None]) -> str:
    ranks = [str(rank) for rank, each in known.items() if each is None]
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else "its ranks"
    return f"of {who} less than {SHORTEST:g} s inside track(loader) is known: let it run for longer."


def _of_the_loader(found: Evidence, cost: float) -> str:
    itself = found.mean("loader_cpu") > found.mean("loader") / 2
    how = (
        "the ranks make their batches themselves, between two steps: let workers do it (num_workers)"
        if itself
        else "it does not keep up: more workers where there are cores for them, or samples that cost less"
    )
    return f"{cost:.0%} of the time the training waits for its loader; {how}."


def _of_cores(found: Evidence, cost: float) -> str:
    return (
        f"{cost:.0%} of the time a rank was ready for work and got no core: {found.run.world_size} ranks, and"
        f" all else that this machine does, share {cores():g} cores. Fewer ranks help, or fewer threads each."
    )


def _of_one_rank(alone: Run) -> str:
    parts = parts_of(alone, 0)
    if alone.world_size != 1 or parts is None or parts.cores < FULL * cores():
        return ""
    return (
        f"one rank alone kept {parts.cores:.1f} of {cores():g} cores busy with its threads: more ranks share"
        " the same cores, and can only be faster on more of them."
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
