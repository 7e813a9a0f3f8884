"""The questions of lesson 11: accumulation over ranks, a step by all ranks or none, a schedule by samples."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..asking import (
    Ask,
    Finding,
    Refused,
    far,
    in_group,
    nearest,
    number,
    question,
)
from ..drawn import with_two_numbers
from ..kept import watched
from ..traffic import traffic

CLOSE = 1e-9  # the tensors are float64
NEAR = 3e-7  # tolerance: a share of the samples may be computed in float32
INPUTS, CLASSES = 9, 5


def _network(seed: int, frozen: int | None = None) -> nn.Module:
    """Build a nested model in float64; its first layer (0) or its last (2) may be frozen."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(14, 8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(INPUTS, 14), inner, nn.Linear(8, CLASSES)).double()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 2)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


NUMBERS = sum(each.numel() for each in _network(0).parameters())
MOST = 1.9 * NUMBERS  # numbers that may travel: the gradients once, and counts of samples


def _flat(tensors: Any) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


# --- 11.1 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all samples of all ranks"
ONCE = "the gradients travel once"
PIECES = "one piece after the other: forward, backward, then the next"


@question(
    "11.1",
    "accumulate(ddp, pieces)",
    {GRADIENT: 2, ONCE: 1, PIECES: 1},
    rests={ONCE: GRADIENT, PIECES: GRADIENT},
)
def accumulate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_accumulation, ask, rng))


def _of_accumulation(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    weights = rng.randrange(2**31)
    first, second = _lengths(rng, ranks), _lengths(rng, ranks)
    while sum(map(sum, second)) == sum(map(sum, first)):
        second = _lengths(rng, ranks)
    calls = [(rng.randrange(2**31), lengths) for lengths in (first, second)]
    calls.append(calls[0])  # the same lists again
    found = ask(_accumulated, weights, calls, nprocs=ranks)
    before = torch.zeros(NUMBERS, dtype=torch.float64)
    for call, (seed, lengths) in enumerate(calls):
        yield _of_gradients([each[call]["gradient"] for each in found], weights, seed, lengths, before, call)
        before = _all_samples(weights, seed, lengths)
    for each in (each for rank in found for each in rank):
        seen = "the model goes forward in evaluation mode"
        hint = "These passes are the training. Which mode is it in, before your call?"
        yield Finding(GRADIENT, each["trains"], seen, hint)
    sent = max(each["sent"] for rank in found for each in rank)
    if any(each["gathered"] for rank in found for each in rank):
        hint = "What is gathered comes from every rank, one by one. Is there a need for more than the sum?"
    elif sent > 0.9 * NUMBERS * min(len(each[0]) for _, each in calls):
        hint = "Every pass sends them. DDP makes up its mind when a forward begins: which passes need it?"
    else:
        hint = (
            "Something else travels, and it is as large as the gradients. What has to be known of the others?"
        )
    seen = f"the model has {NUMBERS} gradients, and in one call {sent} numbers travelled"
    yield Finding(ONCE, sent <= MOST, seen, hint)
    seen = "after your call ddp is in eval mode, or its plain backward passes do not average any more"
    hint = "What is switched for a while has to be switched back in the end."
    yield Finding(ONCE, all(each["as_it_was"] for rank in found for each in rank), seen, hint)
    for call, (_, lengths) in enumerate(calls):
        for rank, each in enumerate(found):
            longest, at_once, open_ = max(lengths[rank]), each[call]["at_once"], each[call]["open"]
            if at_once > longest:
                seen = (
                    f"rank {rank}'s longest piece has {longest} samples, and {at_once} went forward at once"
                )
                hint = "The pieces are small so that they fit into the memory. Put together they are not."
            else:
                seen = f"on rank {rank} the activations of {open_} forward passes were kept at the same time"
                hint = "What a forward pass keeps is freed by its backward. When does that come?"
            yield Finding(PIECES, at_once <= longest and open_ <= 1, seen, hint)


def _lengths(rng: random.Random, ranks: int) -> list[list[int]]:
    """Draw the lengths of each rank's pieces: uneven within a rank, with a different sum on each rank."""
    pieces = rng.randint(3, 5)
    while True:
        lengths = [[rng.randint(1, 9) for _ in range(pieces)] for _ in range(ranks)]
        if len(set(map(sum, lengths))) == ranks and all(len(set(each)) > 1 for each in lengths):
            return lengths


def _drawn(seed: int, lengths: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the pieces of each rank, as pairs of inputs and classes."""
    dice = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(length, INPUTS, generator=dice, dtype=torch.float64),
                torch.randint(CLASSES, (length,), generator=dice),
            )
            for length in each
        ]
        for each in lengths
    ]


def _sums(weights: int, seed: int, lengths: list[list[int]]) -> list[list[Tensor]]:
    """Return, for each rank and piece, the gradient of the sum of its samples' losses."""
    model, found = _network(weights), []
    for pieces in _drawn(seed, lengths):
        found.append([])
        for x, y in pieces:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            found[-1].append(_flat(each.grad for each in model.parameters()))
    return found


def _all_samples(weights: int, seed: int, lengths: list[list[int]]) -> Tensor:
    return sum(map(sum, _sums(weights, seed, lengths))) / sum(map(sum, lengths))


def _of_gradients(
    held: list[Any], weights: int, seed: int, lengths: list[list[int]], before: Tensor, call: int
) -> Finding:
    truth, ranks, samples = _all_samples(weights, seed, lengths), len(lengths), sum(map(sum, lengths))
    without = [rank for rank, each in enumerate(held) if each is None]
    if without:
        hint = "Nothing went backward there, or it was cleared again. Where do gradients come from?"
        if call == 2:
            hint = "It got the first call's pieces again. What has that call done to the list?"
        return Finding(GRADIENT, False, f"rank {without[0]} holds no gradients, or not all", hint)
    sums = _sums(weights, seed, lengths)
    means = [
        [each / length for each, length in zip(*both, strict=True)]
        for both in zip(sums, lengths, strict=True)
    ]
    pieces = len(lengths[0])
    of_means = sum(map(sum, means)) / ranks
    of_ranks = [sum(each) / sum(own) for each, own in zip(sums, lengths, strict=True)]
    gaps = [far(each, truth) for each in held]
    rank = gaps.index(max(gaps))
    if any(far(each, held[0]) > NEAR for each in held):
        hint = "The ranks hold different gradients. Which pass brings them together? Does it come, and last?"
    elif call and far(held[0], truth + before) < NEAR:
        hint = "The first call is right, and a second one is not. What does it find in .grad?"
    else:
        hint = nearest(
            held[0],
            (
                of_means / pieces,
                "Every piece counts alike here, and a short one has fewer samples. Weigh it.",
            ),
            (of_means, "A sum of means. Weigh each piece by its samples, among those of all."),
            (
                sum(of_ranks) / ranks,
                "It is right on each rank, and the ranks count alike, with few samples and with many.",
            ),
            (truth / ranks, "It is too small, by the number of ranks. What does DDP divide by?"),
            (truth * samples / ranks, "A sum over the samples. How many are there, on all ranks?"),
            (truth * ranks, "It is too large, by the number of ranks. Is it averaged, or added up?"),
            otherwise="By what is each sample's loss divided? The same on every rank, in every piece.",
            within=NEAR,
        )
    place = int(
        (torch.as_tensor(held[rank], dtype=torch.float64) - truth).abs().nan_to_num(math.inf).argmax()
    )
    seen = f"with {ranks} ranks and {samples} samples one gradient of rank {rank} is {held[rank][place]:.6f}"
    seen += f", and should be {truth[place]:.6f}" + ("", ", in the second call", ", in the third call")[call]
    return Finding(GRADIENT, max(gaps) < NEAR, seen, hint)


@in_group
def _accumulated(answer: Any, weights: int, calls: list[tuple[int, list[list[int]]]]) -> list[dict[str, Any]]:
    model, noted, drawn = _network(weights), {}, {}

    def forward_begins(_: nn.Module, inputs: Any) -> None:
        noted["at_once"] = max(noted["at_once"], len(inputs[0]))
        noted["trains"] = noted["trains"] and model.training

    model.register_forward_pre_hook(forward_begins)
    kept = watched(model, lambda output: 1)
    ddp, found = DistributedDataParallel(model), []
    for seed, lengths in calls:
        pieces = drawn.setdefault(seed, _drawn(seed, lengths)[dist.get_rank()])
        noted.update(at_once=0, trains=True)
        kept.clear()
        with traffic() as travelled:
            answer(ddp, pieces)
        gradients = [each.grad for each in model.parameters()]
        whole = None if any(each is None for each in gradients) else _flat(gradients)
        gathered = any("gather" in name and count >= NUMBERS / 9 for name, count in travelled.calls)
        found.append({"gradient": whole, "sent": travelled.came(), "gathered": gathered, **noted})
        found[-1]["open"] = max(kept, default=0)
        found[-1]["as_it_was"] = ddp.training and ddp.require_backward_grad_sync
    return found


# --- 11.2 -------------------------------------------------------------------------------------------------

STEP = "the step is that of one device: its gradient is the mean, clipped"
NORM = "every rank returns the norm of the mean, as it was before clipping"
ALL = "where the mean is not finite no rank steps, and the next step is right again"
CALLS = (0.15, 2.5, 1.0, 1.0, 1.0)  # the mean's norm over the limit; each of the first two begins a training
AGAIN = 1  # this call's model, optimizer and limit come once more in the last call
SCALE = 40.0  # of the gradients: a large norm alone is no error


@question("11.2", "step_together(model, optimizer, max_norm)", {STEP: 2, NORM: 1, ALL: 1}, rests={ALL: STEP})
def step_together(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_steps, ask, rng))


def _of_steps(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    broken = rng.randrange(1, ranks)  # not rank 0, which thus cannot know by itself
    # Clipping spreads a nan over the whole gradient. An inf stays in its layer: no layer alone may decide.
    fine = ("", 0)
    broken_at = rng.sample((("nan", rng.choice((0, -1))), ("inf", 0), ("inf", -1)), 3)
    calls: list[dict[str, Any]] = []
    layers = rng.sample((0, 2), 2)  # the frozen layer of the first training, and of the second
    for i, (kind, place) in enumerate([fine, fine, *broken_at, fine]):
        call = {"seed": rng.randrange(2**31), "kind": kind, "place": place, "weights": None}
        call["frozen"] = layers[bool(calls)]
        again = i == len(CALLS)
        limit = calls[AGAIN]["limit"] if again else _mean(call, ranks).norm().item() / CALLS[i]
        calls.append(call | {"limit": limit})
    for call in calls[:2]:
        call["weights"] = rng.randrange(2**31)
    found = ask(_stepped, calls, broken, nprocs=ranks)
    right = _steps_of_one_device(calls, ranks, 1e-6)
    exact = _steps_of_one_device(calls, ranks, 0.0)  # PyTorch adds 1e-6 to the norm

    def off(call: int, step: str = "right") -> list[float]:
        """Return, for each rank, how far its weights are from the right ones after this call."""
        return [min(far(each[call]["weights"], one[call][step]) for one in (right, exact)) for each in found]

    for call in (0, 1):
        gaps = off(call)
        rank = gaps.index(max(gaps))
        held = [torch.as_tensor(each[call]["weights"], dtype=torch.float64) for each in found]
        hint = _of_step(held, rank, gaps[rank], calls[call], ranks)
        seen = f"{ranks} ranks, the norm of their mean is {CALLS[call]} × the limit: "
        seen += f"rank {rank}'s weights are off by up to {gaps[rank]:.2g}"
        yield Finding(STEP, max(gaps) < CLOSE, seen, hint)
        norm = _mean(calls[call], ranks).norm().item()
        values = [each[call]["returned"] for each in found]
        wrong = [each for each in values if isinstance(each, str) or far(each, norm) > NEAR * norm]
        own = [_own(calls[call], rank).norm().item() for rank in range(ranks)]
        if wrong:
            seen = f"the mean's norm is {norm:.4f}, rank {values.index(wrong[0])} returned {_words(wrong[0])}"
        if any(isinstance(each, str) for each in wrong):
            hint = "Every rank returns it, as a number."
        elif any(far(each, norm**2) < 1e-6 * norm**2 for each in wrong):
            hint = "That is its square."
        elif any(far(each, norm * ranks) < 1e-6 for each in wrong):
            hint = "That is the norm of the sum over the ranks."
        elif far(values, own) < 1e-6:
            hint = "Each rank returns the norm of its own gradient. When is it measured?"
        elif any(far(each, min(norm, calls[call]["limit"])) < 1e-4 for each in wrong):
            hint = "That is the norm after clipping. What does the function that clips give back?"
        else:
            hint = "Which gradient is measured, at which moment?"
        yield Finding(NORM, not wrong, seen, hint)
    for call in range(2, len(calls)):
        gaps = off(call)
        rank = gaps.index(max(gaps))
        a_kind = {"nan": "a nan", "inf": "an inf"}.get(calls[call]["kind"])
        if a_kind:
            values = [each[call]["returned"] for each in found]
            finite = [each for each in values if isinstance(each, str) or math.isfinite(each)]
            if finite:
                seen = f"the mean holds {a_kind}, rank {values.index(finite[0])} returned {_words(finite[0])}"
            hint = "What is the norm of such a gradient? It is asked for then, too."
            yield Finding(NORM, not finite, seen, hint)
            if max(far(each[call]["weights"], each[call - 1]["weights"]) for each in found) == 0 < max(gaps):
                continue  # no rank stepped; what is off was off before
        if a_kind is None:
            seen = f"rank {rank}'s weights are off by {gaps[rank]:.2g} after the step that follows"
            hint = "What is left behind by a step that was not made?"
            if far(found[rank][call]["weights"], found[rank][call - 1]["weights"]) == 0:
                seen = f"rank {rank}'s weights have not moved in the step that follows"
                hint = "You have seen this model and this limit before; the gradients are new."
        elif min(gaps) < CLOSE:
            seen = f"rank {broken}'s gradient held {a_kind}: rank {rank} has other weights now"
            seen += f", and rank {gaps.index(min(gaps))} has not"
            hint = (
                "One rank knew it and the others did not. What do all of them hold, after it has travelled?"
            )
        else:
            seen = f"rank {broken}'s gradient held {a_kind}: all ranks have other weights now"
            hint = "It was replaced, or left out, and a step was made. What tells each rank to make none?"
            if min(off(call, "remembered")) < CLOSE:
                hint = "The optimizer remembers, and moves also where there is nothing new. Who calls it?"
            if any(math.isnan(value) for each in found for value in each[call]["weights"]):
                hint = "It went into the weights. Which number tells every rank of it, before the step?"
        yield Finding(ALL, max(gaps) < CLOSE, seen, hint)


def _words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _own(call: dict[str, Any], rank: int) -> Tensor:
    """Draw a rank's gradient for the trained layers, as one flat tensor."""
    trained = sum(each.numel() for each in _network(0, call["frozen"]).parameters() if each.requires_grad)
    dice = torch.Generator().manual_seed(call["seed"] + rank)
    return torch.randn(trained, generator=dice, dtype=torch.float64) * SCALE


def _mean(call: dict[str, Any], ranks: int) -> Tensor:
    return torch.stack([_own(call, rank) for rank in range(ranks)]).mean(0)


def _training(call: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model, and SGD with weight decay, which moves even a frozen weight if its gradient is 0."""
    model = _network(call["weights"], call["frozen"])
    groups = [{"params": part.parameters()} for part in model]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def _give(model: nn.Module, gradient: Tensor) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    parts = gradient.split([each.numel() for each in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.clone().view_as(parameter)


def _steps_of_one_device(calls: list[dict[str, Any]], ranks: int, epsilon: float) -> list[dict[str, Tensor]]:
    """Return the right weights after each call, and those that gradients of 0 in that call would give."""
    found = []
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
        found.append({"right": _flat(model.parameters()), "remembered": _flat(idle.parameters())})
    return found


def _of_step(held: list[Tensor], rank: int, gap: float, call: dict[str, Any], ranks: int) -> str:
    """Choose the hint for the weights after a training's first call, by the gradient that moved them."""
    limit = call["limit"]
    model, optimizer = _training(call)
    start, group = _flat(model.parameters()), optimizer.param_groups[0]
    trained = _flat(torch.full_like(each, each.requires_grad) for each in model.parameters()).bool()
    if gap < 1e-5:
        return "Only the last digits are off. Which type have the numbers on the way?"
    if far(held[rank], start) < CLOSE:
        return "The weights have not moved. Who makes the step, and with which gradients?"
    if any(far(each, held[0]) > CLOSE for each in held):
        return "The ranks have different weights now. Which gradient must all of them step with?"
    if far(held[rank][~trained], start[~trained]) > CLOSE:
        return "The frozen layer has moved. To have no gradient is not the same as a gradient of 0."
    moved = (start - held[rank]) / group["lr"] - group["weight_decay"] * start
    mean, each = _mean(call, ranks), [_own(call, other) for other in range(ranks)]
    early = torch.stack([own * min(1.0, limit / own.norm().item()) for own in each]).mean(0)
    sizes = [each.numel() for each in model.parameters() if each.requires_grad]
    long = mean.norm() > limit
    other = "Which moves does a step have? Which comes first, which next, and how often is each one made?"
    if _points_alike(moved[trained], mean):
        other = "It points where the mean points, and has another length. "
        other += "Of which numbers is the norm taken?" if long else "By what is the sum divided?"
    elif all(map(_points_alike, moved[trained].split(sizes), mean.split(sizes))):
        other = "Each parameter's gradient has a factor of its own. "
        other += "Of which numbers is the norm taken?" if long else "To which of them is what done?"
    return nearest(
        moved[trained],
        (mean, "The mean is longer than the limit, and all of it is used."),
        (mean * ranks, "That is the sum of the gradients."),
        (mean / ranks, "That is the mean, divided once more by the number of ranks."),
        (mean * (limit / mean.norm()), "It was shorter than the limit, and was made longer."),
        (
            early,
            "Each rank's gradient is made shorter first, and then they are averaged. The other way round.",
        ),
        (early * ranks, "Each rank's gradient is made shorter first, and then they are added up."),
        otherwise=other,
        within=1e-5,
    )


def _points_alike(one: Tensor, other: Tensor) -> bool:
    return torch.cosine_similarity(one, other, dim=0).item() > 1 - 1e-9


@in_group
def _stepped(answer: Any, calls: list[dict[str, Any]], broken: int) -> list[dict[str, Any]]:
    rank, found, limits = dist.get_rank(), [], {}
    for call in calls:
        if call["weights"] is not None:
            model, optimizer = _training(call)
        limit = limits.setdefault(call["limit"], call["limit"])  # the same object, if the limit comes again
        gradient = _own(call, rank)
        if call["kind"] and rank == broken:
            gradient[call["place"]] = float(call["kind"])
        _give(model, gradient)
        returned = answer(model, optimizer, limit)
        found.append({"returned": number(returned), "weights": _flat(model.parameters())})
    return found


# --- 11.3 -------------------------------------------------------------------------------------------------

SCALED = "after the warm-up: k times the batch, k times the learning rate"
WARM = "during the warm-up: in proportion to the samples that all ranks have seen"
RATE, BATCH, WARM_UP = 0.004, 48, 3840  # as the exercise says


@question(
    "11.3", "learning_rate(step, batch_size, ranks, pieces)", {SCALED: 1, WARM: 1}, rests={WARM: SCALED}
)
def learning_rate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    size, ranks, pieces = rng.choice((14, 22, 26)), rng.choice((2, 4)), rng.choice((3, 5))
    splits = [(size, ranks, pieces), (size + 8, ranks, pieces), (size, ranks + 3, pieces)]
    splits.append((size, ranks, pieces + 2))
    splits += [(8, 3, 2), (4, 3, 2), (1000, ranks, pieces)]  # k = 1, k < 1, a step beyond the warm-up
    after = WARM_UP + rng.randint(1, 99)  # past the warm-up, whatever is counted
    late = [(after, *each) for each in splits]
    early = [(step, *each) for each in splits for step in (0, WARM_UP // math.prod(each) // 2)]
    edge = [(max(0, WARM_UP // math.prod(each) + at), *each) for each in splits for at in (-1, 0)]
    (found,) = ask(_rates, [*late, *early, *edge])
    answers = dict(zip([*late, *early, *edge], found, strict=True))
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
    one = RATE / BATCH
    full, warm = one * size * ranks * pieces, size * ranks * pieces / WARM_UP
    return nearest(
        got,
        (RATE, "The learning rate is that of the small batch."),
        (
            one * size,
            "Counted is what one rank sends forward at once. What goes into one step of the optimizer?",
        ),
        (one * size * ranks, "The pieces are not counted. What goes into one step of the optimizer?"),
        (one * size * pieces, "The ranks are not counted. What goes into one step of the optimizer?"),
        (
            RATE * (one * size * ranks * pieces / RATE) ** 0.5,
            "That is the square root. Here k itself is asked for.",
        ),
        (RATE**2 / (one * size * ranks * pieces), "It becomes smaller with a larger batch. Which way round?"),
        *((full * share, "k is right. What ends the warm-up, and when?") for share in (warm, 2)),
        (full * (step + 1) * warm, "k is right, and the learning rate grows on. What ends the warm-up?"),
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
        (
            full * step * together / WARM_UP,
            "The samples of the step itself count, too: step 0 must move something.",
        ),
        (full * (step + 1) * size / WARM_UP, "Counted are the samples of one piece on one rank."),
        (full * (step + 1) * size * pieces / WARM_UP, "Counted are the samples of one rank alone."),
        (full * (step + 1) * size * ranks / WARM_UP, "The pieces are not counted here."),
        otherwise="Which share of the 3,840 samples have all ranks together seen, at the end of this step?",
        within=CLOSE,
    )


def _rates(answer: Any, calls: list[list[int]]) -> list[float]:
    found = []
    for arguments in calls:
        rate = number(answer(*arguments))
        if isinstance(rate, str):
            raise Refused(f"learning_rate(…) returns a number; it returned {rate}")
        found.append(rate)
    return found
