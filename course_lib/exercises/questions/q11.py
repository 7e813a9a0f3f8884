"""The questions of lesson 11: accumulation over ranks, a step by all ranks or none, a schedule by samples."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from itertools import chain
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.retention import watch_retention
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, on_each_case, the_number
from ..inputs import flat, gradients_of, leave_one_in_evaluation, settings, tensor, trainable
from ..judging import by_call, far, furthest, nearest, place_of_furthest, with_two_world_sizes
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports
from ..wording import number

CLOSE = 1e-9  # the tensors are float64
NEAR = 3e-7  # tolerance: a share of the samples may be computed in float32
INPUTS, CLASSES = 9, 5


def _network(seed: int, frozen: int | None = None) -> nn.Sequential:
    """Build a nested model in float64; its first layer (0) or its last (2) may be frozen."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(14, 8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(INPUTS, 14), inner, nn.Linear(8, CLASSES)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


MODES: tuple[Callable[[Any], Any], ...] = (nn.Module.train, nn.Module.eval, leave_one_in_evaluation)
NUMBERS = sum(parameter.numel() for parameter in _network(0).parameters())
MOST = 1.9 * NUMBERS  # numbers that may travel: the gradients once, and counts of samples


# --- 11.1 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all samples of all ranks"
ONCE = "the gradients travel once"
PIECES = "one piece after the other: forward, backward, then the next"
PIECE = "Every piece has the same weight here, but a short one has fewer samples. Weight it by them."
RANK = "It is right on each rank, but the ranks have the same weight, with few samples or many."


@question(
    "11.1",
    "accumulate(ddp, pieces)",
    {GRADIENT: 2, ONCE: 1, PIECES: 1},
    rests={ONCE: GRADIENT, PIECES: GRADIENT},
)
@with_two_world_sizes()
def accumulate(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    weights = rng.randrange(2**31)
    first, second = _lengths(rng, ranks), _lengths(rng, ranks)
    while sum(map(sum, second)) == sum(map(sum, first)):
        second = _lengths(rng, ranks)
    calls = [(rng.randrange(2**31), lengths) for lengths in (first, second)]
    calls.append(calls[0])  # the same lists again
    by_calls = by_call(ask(_accumulated, weights, calls, nprocs=ranks))
    before = torch.zeros(NUMBERS, dtype=torch.float64)
    for call, ((seed, lengths), of_call) in enumerate(zip(calls, by_calls, strict=True)):
        yield _of_gradients([result["gradient"] for result in of_call], weights, seed, lengths, before, call)
        before = _all_samples(weights, seed, lengths)
    results = [result for of_call in by_calls for result in of_call]
    seen = "the model's forward pass runs in evaluation mode"
    hint = "These are training passes. Which mode is the model in before your call?"
    yield Finding(GRADIENT, all(result["trains"] for result in results), seen, hint)
    sent = max(result["sent"] for result in results)
    if any(result["gathered"] for result in results):
        hint = "A gather brings every rank's tensor separately. Is more than the sum needed?"
    elif sent > 0.9 * NUMBERS * min(len(lengths[0]) for _, lengths in calls):
        hint = "Every pass sends them. DDP decides when a forward begins: which passes need to send?"
    else:
        hint = "Something else travels that is as large as the gradients. "
        hint += "What does a rank need to know of the others?"
    seen = f"the model has {NUMBERS} gradients, and in one call {sent} numbers travelled"
    yield Finding(ONCE, sent <= MOST, seen, hint)
    seen = (
        "after your call a module of ddp is in another mode, a parameter is frozen or no longer frozen, the "
    )
    seen += "pieces have changed, or ddp's plain backward passes no longer average"
    hint = "Switch back at the end whatever you switch, and only read what you are given."
    yield Finding(ONCE, all(result["as_it_was"] for result in results), seen, hint)
    for (_, lengths), of_call in zip(calls, by_calls, strict=True):
        for rank, result in enumerate(of_call):
            longest, at_once, kept = max(lengths[rank]), result["at_once"], result["open"]
            if at_once > longest:
                seen = f"rank {rank}'s longest piece has {longest} samples,"
                seen += f" and {at_once} went forward at once"
                hint = "The pieces are small so that each fits into memory. Together they may not."
            else:
                seen = f"on rank {rank} the activations of {kept} forward passes were kept at the same time"
                hint = "What a forward pass keeps is freed by its backward. When does that come?"
            yield Finding(PIECES, at_once <= longest and kept <= 1, seen, hint)


def _lengths(rng: random.Random, ranks: int) -> list[list[int]]:
    """Draw the lengths of each rank's pieces: uneven within a rank, with a different sum on each rank."""
    pieces = rng.randint(3, 5)
    while True:
        lengths = [[rng.randint(1, 9) for _ in range(pieces)] for _ in range(ranks)]
        if len(set(map(sum, lengths))) == ranks and all(len(set(pieces)) > 1 for pieces in lengths):
            return lengths


def _drawn(seed: int, lengths: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the pieces of each rank, as pairs of inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(length, INPUTS, generator=generator, dtype=torch.float64),
                torch.randint(CLASSES, (length,), generator=generator),
            )
            for length in pieces
        ]
        for pieces in lengths
    ]


def _sums(weights: int, seed: int, lengths: list[list[int]]) -> list[list[Tensor]]:
    """Return, for each rank and piece, the gradient of the sum of its samples' losses."""
    model = _network(weights)
    sums: list[list[Any]] = []
    for pieces in _drawn(seed, lengths):
        sums.append([])
        for x, y in pieces:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            sums[-1].append(gradients_of(model))
    return sums


def _all_samples(weights: int, seed: int, lengths: list[list[int]]) -> Tensor:
    total: Any = sum(map(sum, _sums(weights, seed, lengths)))
    return total / sum(map(sum, lengths))


def _of_gradients(
    gradients: list[Any], weights: int, seed: int, lengths: list[list[int]], before: Tensor, call: int
) -> Finding:
    truth, ranks, samples = _all_samples(weights, seed, lengths), len(lengths), sum(map(sum, lengths))
    without = [rank for rank, gradient in enumerate(gradients) if gradient is None]
    if without:
        hint = "No backward pass ran there, or its gradients were cleared again. What fills .grad, and when?"
        if call == 2:
            hint = "It got the first call's pieces again. What did that call do to the list?"
        return Finding(GRADIENT, False, f"rank {without[0]} holds no gradients, or not all", hint)
    sums, pieces = _sums(weights, seed, lengths), len(lengths[0])
    means = [list(map(truediv, *both)) for both in zip(sums, lengths, strict=True)]
    of_means = sum(map(sum, means)) / ranks
    of_ranks = [sum(own) / sum(counts) for own, counts in zip(sums, lengths, strict=True)]
    rank, gap = furthest(far(gradient, truth) for gradient in gradients)
    if any(far(gradient, gradients[0]) > NEAR for gradient in gradients):
        hint = "The ranks hold different gradients. Which pass averages them? Does it run, and last?"
    elif call and far(gradients[0], truth + before) < NEAR:
        hint = "The first call is right, but a second one is not. What does it find in .grad?"
    else:
        hint = nearest(
            gradients[0],
            (of_means / pieces, PIECE),
            (of_means, "A sum of means. Weight each piece by its samples, as a share of all samples."),
            (sum(of_ranks) / ranks, RANK),
            (truth / ranks, "It is too small by a factor of the number of ranks. What does DDP divide by?"),
            (truth * samples / ranks, "A sum over the samples. How many are there, on all ranks?"),
            (
                truth * ranks,
                "It is too large by a factor of the number of ranks. Is it averaged, or added up?",
            ),
            otherwise="What is each sample's loss divided by? It is the same on every rank, in every piece.",
            within=NEAR,
        )
    place = place_of_furthest(gradients[rank], truth)
    seen = f"with {ranks} ranks and {samples} samples one gradient of rank {rank} is "
    seen += f"{gradients[rank][place]:.6f}, and should be {truth[place]:.6f}"
    seen += ("", ", in the second call", ", in the third call")[call]
    return Finding(GRADIENT, gap < NEAR, seen, hint)


@reports(
    lambda weights, calls: (
        [
            {"gradient": ([NUMBER] * NUMBERS, None), "sent": int, "gathered": bool, "trains": bool}
            | {"at_once": int, "open": int, "as_it_was": bool}
        ]
        * len(calls)
    )
)
@in_group
def _accumulated(answer: Any, weights: int, calls: list[tuple[int, list[list[int]]]]) -> list[Result]:
    model = _network(weights)
    noted: Result = {}
    drawn: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def forward_begins(_: nn.Module, inputs: Any) -> None:
        noted["at_once"] = max(noted["at_once"], len(inputs[0]))
        noted["trains"] = noted["trains"] and (model.training or not before["the model.training"])

    model.register_forward_pre_hook(forward_begins)
    kept = watch_retention(model, lambda output: 1)
    ddp, results = DistributedDataParallel(model), []
    for (seed, lengths), set_mode in zip(calls, MODES, strict=True):
        pieces = drawn.setdefault(seed, _drawn(seed, lengths)[dist.get_rank()])
        set_mode(ddp)
        before = settings(ddp)
        noted.update(at_once=0, trains=True)
        kept.clear()
        with record_traffic() as travelled:
            answer(ddp, pieces)
        gathered = any("gather" in name and count >= NUMBERS / 9 for name, count in travelled.calls)
        results.append({"gradient": gradients_of(model), "sent": travelled.received(), **noted})
        results[-1] |= {"gathered": gathered, "open": max(kept, default=0)}
        known = _drawn(seed, lengths)[dist.get_rank()]
        same = len(known) == len(pieces) and all(map(torch.equal, chain(*known), chain(*pieces)))
        same = same and not any(x.requires_grad for x, _ in pieces)
        results[-1]["as_it_was"] = same and settings(ddp) == before and ddp.require_backward_grad_sync
    return results


# --- 11.2 -------------------------------------------------------------------------------------------------

STEP = "the step is that of one device: its gradient is the mean, clipped"
NORM = "every rank returns the norm of the mean, as it was before clipping"
ALL = "where the mean is not finite no rank steps, and the next step is right again"
# The mean's norm over the limit; each of the first two begins a training run
CALLS = (0.15, 2.5, 1.0, 1.0, 1.0)
AGAIN = 1  # this call's model, optimizer and limit come once more in the last call
SCALE = 40.0  # of the gradients: a large norm alone is no error
EARLY = "Each rank's gradient is clipped first and then averaged. It should be the other way round."


@question("11.2", "step_together(model, optimizer, max_norm)", {STEP: 2, NORM: 1, ALL: 1}, rests={ALL: STEP})
@with_two_world_sizes()
def step_together(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    broken = rng.randrange(1, ranks)  # not rank 0, which thus cannot know by itself
    # Clipping spreads a nan over the whole gradient. An inf stays in its layer: no layer alone may decide.
    fine = ("", 0)
    broken_at = rng.sample((("nan", rng.choice((0, -1))), ("inf", 0), ("inf", -1)), 3)
    calls: list[dict[str, Any]] = []
    layers = rng.sample((0, 2), 2)  # the frozen layer of the first training, and of the second
    for i, (kind, place) in enumerate([fine, fine, *broken_at, fine]):
        drawn = {"seed": rng.randrange(2**31), "kind": kind, "place": place, "weights": None}
        drawn["frozen"] = layers[bool(calls)]
        again = i == len(CALLS)
        limit = calls[AGAIN]["limit"] if again else _mean(drawn, ranks).norm().item() / CALLS[i]
        calls.append(drawn | {"limit": limit})
    for begin in calls[:2]:
        begin["weights"] = rng.randrange(2**31)
    results = ask(_stepped, calls, broken, nprocs=ranks)
    right = _steps_of_one_device(calls, ranks, 1e-6)
    exact = _steps_of_one_device(calls, ranks, 0.0)  # PyTorch adds 1e-6 to the norm

    def off(call: int, step: str = "right") -> list[float]:
        """Return, for each rank, how far its weights are from the right ones after this call."""
        weights = [result[call]["weights"] for result in results]
        return [min(far(own, one[call][step]) for one in (right, exact)) for own in weights]

    for call in (0, 1):
        rank, gap = furthest(off(call))
        weights = [torch.as_tensor(result[call]["weights"], dtype=torch.float64) for result in results]
        hint = _of_step(weights, rank, gap, calls[call], ranks)
        seen = f"{ranks} ranks, the norm of their mean is {CALLS[call]} × the limit: "
        seen += f"rank {rank}'s weights are off by up to {gap:.2g}"
        yield Finding(STEP, gap < CLOSE, seen, hint)
        norm = _mean(calls[call], ranks).norm().item()
        values = [result[call]["returned"] for result in results]
        wrong = [value for value in values if isinstance(value, str) or far(value, norm) > NEAR * norm]
        own = [_own(calls[call], rank).norm().item() for rank in range(ranks)]
        if wrong:
            seen = f"the mean's norm is {norm:.4f}, rank {values.index(wrong[0])} returned {_words(wrong[0])}"
        hint = "Which gradient is measured, at which moment?"
        if any(isinstance(value, str) for value in wrong):
            hint = "Every rank returns it, as a number."
        elif any(far(value, norm**2) < 1e-6 * norm**2 for value in wrong):
            hint = "That is its square."
        elif any(far(value, norm * ranks) < 1e-6 for value in wrong):
            hint = "That is the norm of the sum over the ranks."
        elif far(values, own) < 1e-6:
            hint = "Each rank returns the norm of its own gradient. When is it measured?"
        elif any(far(value, min(norm, calls[call]["limit"])) < 1e-4 for value in wrong):
            hint = "That is the norm after clipping. What does the function that clips return?"
        yield Finding(NORM, not wrong, seen, hint)
    for call in range(2, len(calls)):
        gaps = off(call)
        rank, gap = furthest(gaps)
        a_kind = {"nan": "a nan", "inf": "an inf"}.get(calls[call]["kind"])
        if a_kind:
            values = [result[call]["returned"] for result in results]
            wrong = [value for value in values if isinstance(value, str) or str(value) != calls[call]["kind"]]
            if wrong:
                seen = f"the mean holds {a_kind}, rank {values.index(wrong[0])} returned {_words(wrong[0])}"
            hint = "What is the norm of such a gradient? It is asked for then, too."
            yield Finding(NORM, not wrong, seen, hint)
            moves = (far(result[call]["weights"], result[call - 1]["weights"]) for result in results)
            if max(moves) == 0 < gap:
                continue  # no rank stepped; what is off was off before
        if a_kind is None:
            seen = f"rank {rank}'s weights are off by {gap:.2g} after the step that follows"
            hint = "What is left behind by a step that was not made?"
            if far(results[rank][call]["weights"], results[rank][call - 1]["weights"]) == 0:
                seen = f"rank {rank}'s weights have not moved in the step that follows"
                hint = "You have seen this model and this limit before; the gradients are new."
        elif min(gaps) < CLOSE:
            seen = f"rank {broken}'s gradient held {a_kind}: rank {rank} has other weights now"
            seen += f", and rank {gaps.index(min(gaps))} has not"
            hint = "One rank knew it and the others did not. "
            hint += "What do all of them hold, after it has travelled?"
        else:
            seen = f"rank {broken}'s gradient held {a_kind}: all ranks have other weights now"
            hint = "It was replaced, or left out, and a step was made. What tells each rank to make none?"
            if min(off(call, "remembered")) < CLOSE:
                hint = "With momentum, the optimizer moves by a gradient of 0, too. When is it called?"
            if any(math.isnan(value) for result in results for value in result[call]["weights"]):
                hint = "It went into the weights. Which number tells every rank of it, before the step?"
        yield Finding(ALL, gap < CLOSE, seen, hint)
        if a_kind is None:
            norm = _mean(calls[call], ranks).norm().item()
            values = [result[call]["returned"] for result in results]
            wrong = [value for value in values if far(value, norm) > NEAR * norm]
            seen = f"in the step that follows, the mean's norm is {norm:.4f}"
            seen += f", and a rank returned {_words(wrong[0])}" if wrong else ""
            yield Finding(ALL, not wrong, seen, "What is left behind by a step that was not made?")


def _words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _own(call: dict[str, Any], rank: int) -> Tensor:
    """Draw a rank's gradient for the trained layers, as one flat tensor."""
    trained = sum(parameter.numel() for parameter in trainable(_network(0, call["frozen"])))
    return tensor(call["seed"] + rank, (trained,)) * SCALE


def _mean(call: dict[str, Any], ranks: int) -> Tensor:
    return torch.stack([_own(call, rank) for rank in range(ranks)]).mean(0)


def _training(call: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model, and SGD with weight decay, which moves even a frozen weight if its gradient is 0."""
    model = _network(call["weights"], call["frozen"])
    groups = [{"params": part.parameters()} for part in model]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def _give(model: nn.Module, gradient: Tensor) -> None:
    trained = trainable(model)
    parts = gradient.split([parameter.numel() for parameter in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.clone().view_as(parameter)


def _steps_of_one_device(calls: list[dict[str, Any]], ranks: int, epsilon: float) -> list[dict[str, Tensor]]:
    """Return the right weights after each call, and those that gradients of 0 in that call would give."""
    results = []
    for call in calls:
        if call["weights"] is not None:
            model, optimizer = _training(call)
        mean = _mean(call, ranks)
        idle, remembers = copy.deepcopy((model, optimizer))
        _give(idle, 0 * mean)
        remembers.step()
        if not call["kind"]:
            _give(model, mean * min(1.0, call["limit"] / (mean.norm().item() + epsilon)))
            optimizer.step()
        results.append({"right": flat(model.parameters()), "remembered": flat(idle.parameters())})
    return results


def _of_step(weights: list[Tensor], rank: int, gap: float, call: dict[str, Any], ranks: int) -> str:
    """Choose the hint for the weights after the first call of a training run, by what moved them."""
    limit = call["limit"]
    model, optimizer = _training(call)
    start, group = flat(model.parameters()), optimizer.param_groups[0]
    trained = flat(torch.full_like(p, p.requires_grad) for p in model.parameters()).bool()
    if gap < 1e-5:
        return "Only the last digits are off. Which dtype do the numbers have on the way?"
    if far(weights[rank], start) < CLOSE:
        return "The weights have not moved. What makes the step, and with which gradients?"
    if any(far(own, weights[0]) > CLOSE for own in weights):
        return "The ranks have different weights now. Which gradient must all of them step with?"
    if far(weights[rank][~trained], start[~trained]) > CLOSE:
        return "The frozen layer has moved. No gradient is not the same as a gradient of 0."
    moved = (start - weights[rank]) / group["lr"] - group["weight_decay"] * start
    mean, gradients = _mean(call, ranks), [_own(call, other) for other in range(ranks)]
    early = torch.stack([own * min(1.0, limit / own.norm().item()) for own in gradients]).mean(0)
    sizes = [parameter.numel() for parameter in trainable(model)]
    long = mean.norm() > limit
    other = "What belongs to a step? What comes first, what next, and how often is each of them done?"
    if _points_alike(moved[trained], mean):
        other = "It has the mean's direction, but another length. "
        other += "Of which numbers is the norm taken?" if long else "What is the sum divided by?"
    elif all(map(_points_alike, moved[trained].split(sizes), mean.split(sizes))):
        other = "Each parameter's gradient has a factor of its own. "
        other += "Of which numbers is the norm taken?" if long else "What is done to each of them?"
    return nearest(
        moved[trained],
        (mean, "The mean is longer than the limit, and is used unclipped."),
        (mean * ranks, "That is the sum of the gradients."),
        (mean / ranks, "That is the mean, divided once more by the number of ranks."),
        (mean * (limit / mean.norm()), "It was shorter than the limit, but was scaled up to it."),
        (early, EARLY),
        (early * ranks, "Each rank's gradient is clipped first and then added up."),
        otherwise=other,
        within=1e-5,
    )


def _points_alike(one: Tensor, other: Tensor) -> bool:
    return torch.cosine_similarity(one, other, dim=0).item() > 1 - 1e-9


@reports(lambda calls, _: [{"returned": (NUMBER, str), "weights": [NUMBER] * NUMBERS}] * len(calls))
@in_group
def _stepped(answer: Any, calls: list[dict[str, Any]], broken: int) -> list[Result]:
    rank, results = dist.get_rank(), []
    limits: dict[float, float] = {}
    for call in calls:
        if call["weights"] is not None:
            model, optimizer = _training(call)
        limit = limits.setdefault(call["limit"], call["limit"])  # the same object, if the limit comes again
        gradient = _own(call, rank)
        if call["kind"] and rank == broken:
            gradient[call["place"]] = float(call["kind"])
        _give(model, gradient)
        returned = answer(model, optimizer, limit)
        results.append({"returned": number(returned), "weights": flat(model.parameters())})
    return results


# --- 11.3 -------------------------------------------------------------------------------------------------

SCALED = "after the warm-up: k times the batch, k times the learning rate"
WARM = "during the warm-up: in proportion to the samples that all ranks have seen"
RATE, BATCH, WARM_UP = 0.004, 48, 3840  # as the exercise says
OF_THE_STEP = "The samples of the step itself count, too: step 0 must move something."
OF_A_STEP = "What goes into one step of the optimizer?"


@question(
    "11.3", "learning_rate(step, batch_size, ranks, pieces)", {SCALED: 1, WARM: 1}, rests={WARM: SCALED}
)
def learning_rate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    size, ranks, pieces = rng.choice((14, 22, 26)), rng.choice((2, 4)), rng.choice((3, 5))
    splits = [(size, ranks, pieces), (size + 8, ranks, pieces), (size, ranks + 3, pieces)]
    splits.append((size, ranks, pieces + 2))
    splits += [(8, 3, 2), (4, 3, 2), (1000, ranks, pieces)]  # k = 1, k < 1, a step beyond the warm-up
    after = WARM_UP + rng.randint(1, 99)  # past the warm-up, whatever is counted
    late = [(after, *split) for split in splits]
    early = [(step, *split) for split in splits for step in (0, WARM_UP // math.prod(split) // 2)]
    edge = [(max(0, WARM_UP // math.prod(split) + at), *split) for split in splits for at in (-1, 0)]
    (rates,) = ask(_rates, [*late, *early, *edge])
    answers = dict(zip([*late, *early, *edge], rates, strict=True))
    for arguments in late:
        yield _rate(SCALED, arguments, answers[arguments], _of_scale)
    for arguments in [*early, *edge]:
        yield _rate(WARM, arguments, answers[arguments], _of_warm_up)


def _rate(what: str, arguments: tuple[int, ...], got: float, hints: Any) -> Finding:
    step, *split = arguments
    k = math.prod(split) / BATCH
    right = RATE * k * min(1.0, (step + 1) * math.prod(split) / WARM_UP)
    words = "step {}, batch_size {}, {} ranks, {} pieces".format(*arguments)
    seen = f"{words}: the learning rate should be {right:.6g}, and is {got:.6g}"
    return Finding(what, far(got, right) < 1e-6 * right, seen, hints(arguments, got))  # float32 is enough


def _of_scale(arguments: tuple[int, ...], got: float) -> str:
    step, size, ranks, pieces = arguments
    one, full, warm = RATE / BATCH, RATE / BATCH * size * ranks * pieces, size * ranks * pieces / WARM_UP
    return nearest(
        got,
        (RATE, "The learning rate is that of the small batch."),
        (one * size, f"That counts what one rank sends forward at once. {OF_A_STEP}"),
        (one * size * ranks, f"The pieces are not counted. {OF_A_STEP}"),
        (one * size * pieces, f"The ranks are not counted. {OF_A_STEP}"),
        (RATE * (full / RATE) ** 0.5, "That is the square root. Here k itself is asked for."),
        (RATE**2 / full, "It shrinks as the batch grows. Which way round?"),
        *((full * share, "k is right. What ends the warm-up, and when?") for share in (warm, 2)),
        (full * (step + 1) * warm, "k is right, but the learning rate keeps growing. What ends the warm-up?"),
        otherwise="How many times as large as 48 is the batch of one optimizer step? That is k.",
        within=CLOSE,
    )


def _of_warm_up(arguments: tuple[int, ...], got: float) -> str:
    step, size, ranks, pieces = arguments
    together = size * ranks * pieces
    full = RATE * together / BATCH
    return nearest(
        got,
        (full, "The full learning rate, from the start."),
        (full * step * together / WARM_UP, OF_THE_STEP),
        (full * (step + 1) * size / WARM_UP, "That counts the samples of one piece on one rank."),
        (full * (step + 1) * size * pieces / WARM_UP, "That counts the samples of one rank alone."),
        (full * (step + 1) * size * ranks / WARM_UP, "The pieces are not counted here."),
        otherwise="Which share of the 3,840 samples have all ranks together seen, at the end of this step?",
        within=CLOSE,
    )


@reports(lambda cases: [NUMBER] * len(cases))
@on_each_case
def _rates(answer: Any, *arguments: int) -> float:
    return the_number(answer(*arguments), "learning_rate(…) returns a number")
