"""The questions of lesson 18: an optimizer in parts, one norm for all shards, another number of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..in_rank.retention import live_bytes
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, refuse_unless
from ..inputs import flat, network, seeds, tensor, trainable
from ..judging import Faults, by_call, far, first_fault, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, TENSOR, reports
from ..wording import number

CLOSE = 1e-9  # the tensors are float64
BYTES = 8  # of a float64

# --- 18.1 -------------------------------------------------------------------------------------------------

EQUAL = "after every step all ranks have the weights of one device, up to rounding"
PART = "between two steps a rank keeps its part of the optimizer's state, and no more"
ONCE = "in a step the gradients travel once, and the weights once"
KEPT = 4  # for each weight of a part: two averages, and copies of the weight and of its gradient
SLACK = 64  # numbers besides, such as counts of the steps
TRAVELS = 2.4  # how often all numbers of the model may travel: twice, and some padding
SMALL = 3e-8  # of the size of Adam's eps, so that a sum and a mean of gradients give different steps
WIDE = 150  # inputs of the first layer, which is trained
USED = (0, 1, 2, -1)  # trained parameters with a gradient on some rank; the others have none on any


def _net(kind: int, values: int = 0) -> nn.Module:
    """Build a nested model with a shared weight, a frozen one, and one that is larger than a part.

    Its forward pass is never called: the gradients are drawn.
    """
    return network(kind, values, inputs=WIDE, norm=False)


def _trained(kind: int) -> list[nn.Parameter]:
    return trainable(_net(kind))


def _count(kind: int) -> int:
    return sum(each.numel() for each in _trained(kind))


def _part(kind: int, ranks: int) -> int:
    """Return how many numbers of a model a rank owns at most: an n-th, and one more for each parameter."""
    return math.ceil(_count(kind) / ranks) + len(_trained(kind))


@question("18.1", "ShardedAdam(model, lr)", {EQUAL: 2, PART: 1, ONCE: 1}, rests={PART: EQUAL, ONCE: EQUAL})
@with_two_world_sizes()
def sharded_adam(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    models: list[dict[str, Any]] = []
    for rate in rng.sample((0.01, 0.02, 0.05), 2):
        kinds = iter(lambda: rng.randrange(2**31), None)
        kind = next(kind for kind in kinds if _count(kind) % ranks and _trained(kind)[0].shape[1] == WIDE)
        models.append({"kind": kind, "values": rng.randrange(2**31), "rate": rate})
    steps = [_drawn_step(rng, ranks, which) for which in (0, 0, 1, 0, 1)]
    results = by_call(ask(_sharded, models, steps, nprocs=ranks))
    right = _of_one_device(models, steps, ranks)
    for place, of_step in enumerate(results):
        yield _of_weights([each["weights"] for each in of_step], right[place], models, steps, place, ranks)
    for place, of_step in enumerate(results):
        known = {step["model"] for step in steps[: place + 1]}
        yield _of_kept([each["kept"] for each in of_step], [models[which] for which in known], place, ranks)
    for step, of_step in zip(steps, results, strict=True):
        count = _count(models[step["model"]]["kind"])
        rank, most = furthest(sum(each["travels"].values()) for each in of_step)
        seen = f"the model has {count} trained numbers, and in one step {most} travelled: "
        seen += ", ".join(f"{name} {numbers}" for name, numbers in of_step[rank]["travels"].items())
        seen += " (all_reduce counts twice)" * ("all_reduce" in of_step[rank]["travels"])
        hint = "Each sum is needed by one rank, and each new weight by all. "
        hint += "What brings a rank no more than that?"
        yield Finding(ONCE, most <= TRAVELS * count, seen, hint)


def _drawn_step(rng: random.Random, ranks: int, which: int) -> dict[str, Any]:
    """Draw a step of a model: the seeds of the ranks' gradients, and which of USED have none, by rank.

    Each of these has a gradient on some rank, and each rank has one; on some rank one is missing.
    """
    lacking: list[list[int]] = [[] for _ in range(ranks)]
    always = rng.choice(USED)  # all ranks have a gradient of this one
    for place in sorted({*USED} - {always}):
        for rank in rng.sample(range(ranks), rng.randrange(1, ranks)):
            lacking[rank].append(place)
    return {"model": which, "seeds": seeds(rng, ranks), "lacking": lacking}


def _gradients(kind: int, step: dict[str, Any], rank: int) -> list[Tensor | None]:
    """Draw a rank's gradients of a model's trained parameters, None for those that have none there."""
    trained = _trained(kind)
    drawn: list[Tensor | None] = [None] * len(trained)
    for place in {*USED}.difference(step["lacking"][rank]):
        values = tensor(step["seeds"][rank] + place, (trained[place].numel(),))
        values[::2] *= SMALL
        drawn[place] = values.view(trained[place].shape)
    return drawn


def _sums(kind: int, step: dict[str, Any], ranks: list[int]) -> list[Tensor | None]:
    """Return the sums of some ranks' gradients; where a rank has none, it adds nothing."""
    by_parameter = zip(*(_gradients(kind, step, rank) for rank in ranks), strict=True)
    there = [[each for each in of_one if each is not None] for of_one in by_parameter]
    return [torch.stack(of_one).sum(0) if of_one else None for of_one in there]


def _adam(model: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = _net(model["kind"], model["values"])
    return net, torch.optim.Adam(trainable(net), model["rate"])


def _stepped(pair: tuple[nn.Module, torch.optim.Optimizer], sums: list[Tensor | None], by: float) -> Tensor:
    """Make a step with sums of gradients, divided; return all weights, end to end."""
    net, optimizer = pair
    for parameter, total in zip(trainable(net), sums, strict=True):
        parameter.grad = None if total is None else total / by
    optimizer.step()
    return flat(net.parameters())


def _of_one_device(models: list[dict[str, Any]], steps: list[dict[str, Any]], ranks: int) -> list[Tensor]:
    alone = [_adam(model) for model in models]
    right = []
    for step in steps:
        sums = _sums(models[step["model"]]["kind"], step, list(range(ranks)))
        right.append(_stepped(alone[step["model"]], sums, ranks))
    return right


def _of_weights(weights: Any, right: Tensor, models: Any, steps: Any, place: int, ranks: int) -> Finding:
    step = steps[place]
    model = models[step["model"]]
    rank, gap = furthest(far(own, right) for own in weights)
    own = torch.as_tensor(weights[rank], dtype=torch.float64)
    start = flat(_net(model["kind"], model["values"]).parameters())
    off = ((own - right).abs().nan_to_num(math.inf) >= CLOSE).nonzero().flatten().tolist() or [0]
    seen = f"{ranks} ranks, step {_ordinal(steps, place)} of the {('first', 'second')[step['model']]} model: "
    seen += f"{len(off)} of rank {rank}'s {len(own)} weights are off, the first in {_name(model, off[0])}"
    seen += f": {own[off[0]]:.7f}, and should be {right[off[0]]:.7f}"
    hint = "Look at the place where it goes wrong: is it the end of a part, or a parameter without a "
    hint += "gradient? Every rank must cut at the same places."
    if place and gap >= CLOSE:
        hint = "The steps before were right. What must an optimizer still have in the next step, and what do "
        hint += "two optimizers share?"
    elif all(far(each, start) < CLOSE for each in weights):
        hint = "The weights have not moved. Are the new numbers in the parameters, or in a copy of them?"
    elif any(far(each, weights[0]) > CLOSE for each in weights):
        hint = "The ranks have different weights now. With whose gradients does each of them step, and does "
        hint += "it get all parts, in the same order?"
    elif far(own, _stepped(_adam(model), _sums(model["kind"], step, [*range(ranks)]), 1.0)) < CLOSE:
        hint = "That is a step with the sum of the ranks' gradients."
    return Finding(EQUAL, gap < CLOSE, seen, hint)


def _ordinal(steps: Any, place: int) -> int:
    """Return which step of its model this one is, counted from 1."""
    return [step["model"] for step in steps[: place + 1]].count(steps[place]["model"])


def _name(model: Any, place: int) -> str:
    """Return the name of the parameter at a place of all weights, laid end to end."""
    for name, each in _net(model["kind"]).named_parameters():
        if place < each.numel():
            return name
        place -= each.numel()
    return "none of the model's"


def _allowed(models: Any, ranks: int) -> int:
    return KEPT * sum(_part(model["kind"], ranks) for model in models) + SLACK


def _of_kept(kept: list[int], models: Any, place: int, ranks: int) -> Finding:
    whole = sum(_count(model["kind"]) for model in models)
    rank, most = furthest(kept)
    allowed = _allowed(models, ranks)
    seen = f"{ranks} ranks, {whole} trained numbers in {len(models)} model{'s' * (len(models) > 1)}: after "
    seen += f"step {place + 1} rank {rank} keeps {most:.0f} numbers besides weights and .grad; it may keep "
    seen += str(allowed)
    hint = "A rank needs the averages of its own part only. What else, or whose, does it keep?"
    if max(kept) > 1.5 * min(kept):
        hint = f"Rank {kept.index(min(kept))} keeps {min(kept)}, so the parts are unequal. A large parameter "
        hint += "belongs to several ranks: where is it cut?"
    elif most >= 2 * whole:
        hint = "That is more than both averages of the whole model. Of which weights does a rank need them?"
    elif most >= whole:
        hint = "Something as large as the model is kept. (A slice is a view: while it lives, so do all "
        hint += "numbers of the tensor that it was cut from.)"
    return Finding(PART, most <= allowed, seen, hint)


@reports(
    lambda models, steps: [
        {"weights": [NUMBER] * _in_all(models[step["model"]]), "kept": int, "travels": {str: int}}
        for step in steps
    ]
)
@in_group
def _sharded(answer: Any, models: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Result]:
    rank, results = dist.get_rank(), []
    nets = [_net(model["kind"], model["values"]) for model in models]
    _stepped(_adam(models[0]), _sums(models[0]["kind"], steps[0], [rank]), 1.0)  # whatever torch loads by it
    weights = [torch.empty(_in_all(models[step["model"]]), dtype=torch.float64) for step in steps]
    optimizers: dict[int, Any] = {}
    before = live_bytes()
    for step, after in zip(steps, weights, strict=True):
        which = step["model"]
        net, model = nets[which], models[which]
        if which not in optimizers:
            optimizers[which] = answer(net, model["rate"])
            has_step = callable(getattr(optimizers[which], "step", None))
            refuse_unless(has_step, "ShardedAdam(model, lr) makes an object with step()", optimizers[which])
        _backward(net, _gradients(model["kind"], step, rank))
        with record_traffic() as seen:
            optimizers[which].step()
        gradients = sum(each.grad.numel() for each in net.parameters() if each.grad is not None)
        allowed = _allowed([models[which] for which in optimizers], dist.get_world_size())
        until = monotonic() + 1
        while (kept := (live_bytes() - before) // BYTES - gradients) > allowed and monotonic() < until:
            sleep(0.01)  # gloo's threads let go of what they have sent when they get to it
        own = flat(net.parameters())
        if len(own) != len(after):
            raise Refused("the model has other parameters now, or not all of them are its own")
        after.copy_(own)
        del own  # it would be counted in the next step
        results.append({"kept": kept, "travels": seen.travels()})
        net.zero_grad()
    return [{"weights": after.tolist()} | result for after, result in zip(weights, results, strict=True)]


def _in_all(model: dict[str, Any]) -> int:
    return sum(each.numel() for each in _net(model["kind"]).parameters())


def _backward(net: nn.Module, gradients: list[Tensor | None]) -> None:
    """Let a backward pass give a model these gradients."""
    pairs = zip(trainable(net), gradients, strict=True)
    torch.stack([(each * given).sum() for each, given in pairs if given is not None]).sum().backward()


# --- 18.2 -------------------------------------------------------------------------------------------------

NORM = "every rank returns the norm of the whole gradient, as it was before clipping"
CLIPPED = "every number is clipped as on one device, in place"
FEW = "a rank sends two numbers at most"
NEAR = 1e-6  # relative tolerance: PyTorch adds 1e-6 to the norm, and a sum may be one of float32
# The norm over the limit; None: it comes again, with other numbers in the same tensors
RATIOS = (2.5, 0.4, 1.7, None)


@question("18.2", "clip_sharded(shards, whole, max_norm)", {NORM: 1, CLIPPED: 1, FEW: 1}, rests={FEW: NORM})
@with_two_world_sizes()
def clip_sharded(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    calls: list[dict[str, Any]] = []
    nobody, kinds = rng.randrange(ranks), rng.sample(("inf", "nan"), 2)
    for place, ratio in enumerate(RATIOS):
        cut: dict[str, Any] = {
            "shards": [_rows(rng, 1 if place else 2) for _ in range(ranks)],
            "whole": _rows(rng, 1),
            "kind": "",
        }
        if place == 1:
            cut["shards"][nobody] = []  # a rank that has none
        if place == 2:
            cut["whole"] = []
        if ratio is None:
            cut = calls[0] | {"again": True}
        call = cut | {"seeds": seeds(rng, ranks), "seed": rng.randrange(2**31)}
        call["limit"] = calls[0]["limit"] if ratio is None else _norms(call)[0] / ratio
        calls.append(call)
    for kind in kinds:
        broken = {"kind": kind, "broken": rng.randrange(1, ranks), "seeds": seeds(rng, ranks), "again": False}
        calls.append(calls[0] | broken)
    results = by_call(ask(_clipped, calls, nprocs=ranks))
    for call, of_call in zip(calls, results, strict=True):
        yield first_fault(NORM, _of_norm(call, [each["returned"] for each in of_call]))
        if not call["kind"]:
            yield _of_clipped(call, of_call)
        sent = max(each["sent"] for each in of_call)
        hint = "What must a rank know of the others' shards? With many tensors it is no more than with one."
        yield Finding(FEW, sent <= 2, f"a rank sent {sent} numbers", hint)


def _rows(rng: random.Random, least: int) -> list[list[int]]:
    """Draw the shapes of some tensors; a tensor may have no rows."""
    shapes = [[rng.randint(0, 3), rng.randint(2, 5)] for _ in range(rng.randint(1, 3))]
    return [*shapes, *[[rng.randint(2, 4), rng.randint(2, 5)] for _ in range(least)]]


def _drawn(call: dict[str, Any], rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Draw a rank's shards, and the tensors that are the same on all ranks."""
    shards = [tensor(call["seeds"][rank] + i, (a, b)) * 3 for i, (a, b) in enumerate(call["shards"][rank])]
    whole = [tensor(call["seed"] + i, (a, b)) * 3 for i, (a, b) in enumerate(call["whole"])]
    return shards, whole


def _norms(call: dict[str, Any]) -> tuple[float, list[float], float]:
    """Return the norm of all, the norms of the ranks' shards, and the norm of what is whole."""
    ranks = len(call["seeds"])
    of_shards = [_norm(_drawn(call, rank)[0]) for rank in range(ranks)]
    of_whole = _norm(_drawn(call, 0)[1])
    return math.hypot(*of_shards, of_whole), of_shards, of_whole


def _norm(tensors: list[Tensor]) -> float:
    return math.hypot(*(each.norm().item() for each in tensors))


def _of_norm(call: dict[str, Any], returned: list[Any]) -> Faults:
    norm, of_shards, of_whole = _norms(call)
    ranks = len(returned)
    for rank, value in enumerate(returned):
        if isinstance(value, str):
            yield f"rank {rank} returned {value}", "Every rank returns it, as a number."
        elif call["kind"]:
            if str(value) != call["kind"]:
                seen = f"rank {call['broken']}'s shard holds {call['kind']}, rank {rank} returned {value:.4g}"
                yield seen, "What is the norm of a gradient with such a number? All ranks return the same."
        elif not abs(value - norm) <= NEAR * norm:  # it may be nan
            shards = math.hypot(*of_shards)
            known = [
                (math.hypot(of_shards[rank], of_whole), "That is the norm of what this rank holds."),
                (math.hypot(shards, math.sqrt(ranks) * of_whole), "What is whole counts once, not per rank."),
            ]
            hint = "The norm of several tensors is the root of a sum. Of what, and over whom?"
            hint = nearest(value, *known, otherwise=hint, within=NEAR * norm)
            yield f"{ranks} ranks, the norm is {norm:.4f}, and rank {rank} returned {value:.4f}", hint


def _of_clipped(call: dict[str, Any], results: list[Result]) -> Finding:
    norm = _norms(call)[0]
    factor = min(1.0, call["limit"] / norm)
    for rank, result in enumerate(results):
        both = zip(("a shard", "a whole gradient"), ("shards", "whole"), _drawn(call, rank), strict=True)
        for what, key, drawn in both:
            had = flat([*drawn, torch.zeros(1)]).double()[:-1]
            got = torch.tensor(result[key], dtype=torch.float64)
            gap = far(got, had * factor)
            if gap < 10 * NEAR:
                continue
            place = int((got - had * factor).abs().nan_to_num(math.inf).argmax())
            seen = (
                f"the norm is {norm / call['limit']:.2g} × the limit; of {what} on rank {rank} a number was "
            )
            seen += f"{had[place]:.4f}, should be {had[place] * factor:.4f}, and is {got[place]:.4f}"
            hint = "By which factor is every number multiplied? It is the same on all ranks."
            if far(got, had) < CLOSE:
                hint = (
                    "It has not changed. All ranks must do it, on the tensors themselves, whole or sharded."
                )
            elif factor == 1.0:
                hint = "The gradient was shorter than the limit. What happens to it then?"
            elif far(got, had * factor**2) < 10 * NEAR:
                hint = "It was clipped twice."
            return Finding(CLIPPED, False, seen, hint)
    return Finding(CLIPPED, True)


@reports(
    lambda calls: (
        lambda rank: [
            {"returned": (NUMBER, str), "sent": int}
            | {"shards": [NUMBER] * _total(call["shards"][rank]), "whole": [NUMBER] * _total(call["whole"])}
            for call in calls
        ]
    )
)
@in_group
def _clipped(answer: Any, calls: list[dict[str, Any]]) -> list[Result]:
    rank, results = dist.get_rank(), []
    kept: Any = None  # the lists and the limit of the first call, which come again
    for call in calls:
        shards, whole = _drawn(call, rank)
        limit = call["limit"]
        if call.get("again"):
            for old, new in zip([*kept[0], *kept[1]], [*shards, *whole], strict=True):
                old.copy_(new)
            shards, whole, limit = kept
        if call["kind"] and rank == call["broken"]:
            shards[-1][0, 0] = float(call["kind"])
        kept = kept or (shards, whole, limit)
        given = [*shards], [*whole]
        with record_traffic() as seen:
            returned = number(answer(*given, limit))
        sent = sum(count for name, count in seen.calls if name != "recv") + seen.put
        result: dict[str, Any] = {"returned": returned, "sent": sent}
        for key, tensors in (("shards", shards), ("whole", whole)):
            result[key] = [value for each in tensors for value in each.flatten().tolist()]
        results.append(result)
    return results


def _total(shapes: list[list[int]]) -> int:
    return sum(map(math.prod, shapes))


# --- 18.3 -------------------------------------------------------------------------------------------------

NUMBERS = "each rank gets the numbers of its shard, in their order"
ZEROS = "where they do not divide evenly, too: zeros come after the last number, and nowhere else"
LITTLE = "it reads the numbers of its shard and no others, each once, in one go from each old shard"


@question(
    "18.3",
    "load_shard(read, numbers, old_ranks, ranks, rank)",
    {NUMBERS: 1, ZEROS: 1, LITTLE: 1},
    rests={ZEROS: NUMBERS, LITTLE: NUMBERS},
)
def load_shard(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    fits = [(4, 6), (6, 4), (3, 3), (1, 4), (5, 1), (2, 8), (6, 2)]
    cases = [(old * new * rng.randint(1, 2), old, new) for old, new in fits]
    uneven = [
        (rng.choice((17, 19, 23, 29, 31)), old, new) for old, new in [(4, 3), (3, 5), (8, 3), (2, 5), (6, 6)]
    ]
    pairs = [rng.sample((4, 5, 6, 7, 8), 2) for _ in range(2)]
    uneven += [(rng.choice((13, 17, 19)), old, new) for old, new in pairs]
    # so few that some ranks, old ones or new ones, have zeros only
    uneven += [(5, 4, 2), (5, 4, 3), (3, 2, 7), (4, 6, 3), (1, 3, 4), (9, 8, 6), (1, 1, 3)]
    drawn = [dict(zip(("numbers", "old", "new"), case, strict=True)) for case in [*cases, *uneven]]
    for case in drawn:
        case["seed"] = rng.randrange(2**31)
    (results,) = ask(_loaded, drawn)
    for case, of_case in zip(drawn, results, strict=True):
        even = case["numbers"] % case["old"] == case["numbers"] % case["new"] == 0
        yield first_fault(NUMBERS if even else ZEROS, _of_shards(case, of_case))
        yield first_fault(LITTLE, _of_reads(case, [each["reads"] for each in of_case]))


def _values(case: dict[str, int]) -> Tensor:
    """Draw whole numbers, no two of them alike, and none of them 0."""
    return torch.tensor(random.Random(case["seed"]).sample(range(1, 1000), case["numbers"])).float()


def _cut(values: Tensor, ranks: int) -> list[Tensor]:
    """Cut numbers into shards of equal length, with zeros after the last number."""
    length = math.ceil(len(values) / ranks)
    padded = torch.cat([values, values.new_zeros(ranks * length - len(values))])
    return list(padded.split(length))


def _of_shards(case: dict[str, int], results: list[Result]) -> Faults:
    right = _cut(_values(case), case["new"])
    for rank, result in enumerate(results):
        if far(result["got"], right[rank]) == 0:
            continue
        seen = f"{case['numbers']} numbers, saved by {case['old']} ranks, for rank {rank} of {case['new']}: "
        seen += f"it should get {_listed(right[rank].tolist())}, and got {_listed(result['got'])}"
        hint = "Where does this rank's shard begin, among all numbers? In which old shard is that?"
        got = result["got"]
        if isinstance(got, list) and len(got) != len(right[rank]):
            hint = "All shards are equally long. How long, and what fills the last ones up?"
        elif isinstance(got, list) and set(map(str, got)) == set(map(str, right[rank].tolist())):
            hint = "These are its numbers, in another order."
        yield seen, hint


def _listed(values: Any) -> str:
    if not (isinstance(values, list) and all(isinstance(each, int | float) for each in values)):
        return "something of another shape"
    words = [f"{value:g}" for value in values]
    return f"[{', '.join(words[:8])}{', …' * (len(words) > 8)}]"


def _of_reads(case: dict[str, int], results: list[list[list[int]]]) -> Faults:
    """Yield what a rank read too much, or cannot have known, from its reads: (shard, start, stop)."""
    old, new = (math.ceil(case["numbers"] / case[key]) for key in ("old", "new"))
    words = f"{case['numbers']} numbers, saved by {case['old']} ranks, for rank "
    for rank, reads in enumerate(results):
        needed = set(range(rank * new, min((rank + 1) * new, case["numbers"])))
        read = [shard * old + place for shard, start, stop in reads for place in range(start, stop)]
        seen = f"{words}{rank} of {case['new']}: its shard has {len(needed)} numbers, and it read {len(read)}"
        if not needed <= set(read):
            yield (
                f"{seen}, and not all of its own",
                "Each call is for other files: what must each of them read?",
            )
        elif len(read) > new or len(set(read)) < len(read):
            yield seen, "Which old shards overlap with the new one, and from where to where?"
        elif len({shard for shard, *_ in reads}) < len(reads):
            seen = f"{words}{rank} of {case['new']}: it read {len(reads)} times, more than once from a shard"
            yield seen, "Numbers that lie side by side are read together."


@reports(lambda cases: [[{"got": TENSOR, "reads": [[int, int, int], ...]}] * case["new"] for case in cases])
def _loaded(answer: Any, cases: list[dict[str, int]]) -> list[list[Result]]:
    results: list[list[Result]] = []
    for case in cases:
        shards = _cut(_values(case), case["old"])
        results.append([])
        for rank in range(case["new"]):
            reads: list[list[int]] = []
            got = answer(_reader(shards, reads), case["numbers"], case["old"], case["new"], rank)
            refuse_unless(isinstance(got, Tensor), "load_shard(…) returns a tensor", got)
            results[-1].append({"got": got.detach().clone(), "reads": reads})
    return results


def _reader(shards: list[Tensor], reads: list[list[int]]) -> Any:
    """Return a function that reads a slice of a shard, and notes in ``reads`` what it has read."""

    def read(shard: int, start: int, stop: int) -> Tensor:
        if not 0 <= shard < len(shards):
            raise IndexError(f"there is no shard {shard}: {len(shards)} were saved")
        first, last, _ = slice(start, stop).indices(len(shards[shard]))
        if first < last:
            reads.append([int(shard), first, last])
        return shards[shard][start:stop].clone()

    return read
