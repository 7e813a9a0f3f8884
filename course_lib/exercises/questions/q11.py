"""The questions of lesson 11: accumulation over ranks, a step of all or none, a schedule by samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..asking import Ask, Finding, Refused, far, in_group, nearest, number, question

CLOSE = 1e-9  # the tensors are float64
NEAR = 1e-7  # a share of the samples may have been computed in float32
INPUTS, CLASSES = 9, 5


def _network(seed: int, frozen: bool = False) -> nn.Module:
    """A nested one, in float64; one layer of it may take no part in the training."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(14, 8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(INPUTS, 14), inner, nn.Linear(8, CLASSES)).double()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 2)
    inner.requires_grad_(not frozen)
    return model


NUMBERS = sum(each.numel() for each in _network(0).parameters())
MOST = 1.9 * NUMBERS  # that may travel: the gradients once, and counts of samples


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
    ranks, weights = rng.randint(2, 5), rng.randrange(2**31)
    calls = [(rng.randrange(2**31), _lengths(rng, ranks)) for _ in range(2)]
    found = ask(_accumulated, weights, calls, nprocs=ranks)
    before = torch.zeros(NUMBERS, dtype=torch.float64)
    for call, (seed, lengths) in enumerate(calls):
        yield _of_gradients([each[call]["gradient"] for each in found], weights, seed, lengths, before, call)
        before = _all_samples(weights, seed, lengths)
    sent = max(each["sent"] for rank in found for each in rank)
    if sent > 0.9 * NUMBERS * min(len(each[0]) for _, each in calls):
        hint = "Every pass sends them. DDP makes up its mind when a forward begins: which passes need it?"
    else:
        hint = (
            "Something else travels, and it is as large as the gradients. What has to be known of the others?"
        )
    seen = f"the model has {NUMBERS} gradients, and in one call {sent} numbers travelled"
    yield Finding(ONCE, sent <= MOST, seen, hint)
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
    """By rank, of its pieces: uneven on each rank, and the ranks have different numbers of samples."""
    pieces = rng.randint(3, 5)
    while True:
        lengths = [[rng.randint(1, 9) for _ in range(pieces)] for _ in range(ranks)]
        if len(set(map(sum, lengths))) == ranks and all(len(set(each)) > 1 for each in lengths):
            return lengths


def _drawn(seed: int, lengths: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank its pieces; each pair is an input and the classes."""
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
    """By rank, of each piece: the gradient of the sum of its samples' losses."""
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
        hint = "The ranks hold different gradients. Which pass brings them together, and is it left out, too?"
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
    seen += f", and should be {truth[place]:.6f}" + (", in the second call" if call else "")
    return Finding(GRADIENT, max(gaps) < NEAR, seen, hint)


@in_group
def _accumulated(answer: Any, weights: int, calls: list[tuple[int, list[list[int]]]]) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    model, noted = _network(weights), {}

    def forward_begins(_: nn.Module, inputs: Any) -> None:
        noted["at_once"] = max(noted["at_once"], len(inputs[0]))

    def forward_ends(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            noted["now"] += 1
            noted["open"] = max(noted["open"], noted["now"])
            output.register_hook(backward_begins)

    def backward_begins(_: Tensor) -> None:
        noted["now"] -= 1

    model.register_forward_pre_hook(forward_begins)
    model.register_forward_hook(forward_ends)
    ddp, found = DistributedDataParallel(model), []
    for seed, lengths in calls:
        pieces = _drawn(seed, lengths)[dist.get_rank()]
        noted.update(at_once=0, open=0, now=0)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            answer(ddp, pieces)
        gradients = [each.grad for each in model.parameters()]
        whole = None if any(each is None for each in gradients) else _flat(gradients)
        found.append({"gradient": whole, "sent": _travelled(profiler), **noted})
    return found


def _travelled(profiler: Any) -> int:
    """Numbers that come to this rank in its collectives; the profiler names them, with their sizes."""
    count = 0
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            size = sum(math.prod(shape) for shape in event.input_shapes if shape)
            count += size * (dist.get_world_size() if "gather" in event.name else 1)
    return count


# --- 11.2 -------------------------------------------------------------------------------------------------

STEP = "the step is that of one device: its gradient is the mean, clipped"
NORM = "every rank returns the norm of the mean, as it was before clipping"
ALL = "where the mean is not finite no rank steps, and the next step is right again"
CALLS = (0.15, 2.5, None, 1.7)  # the norm of the mean over the limit; None: one rank's gradient is broken


@question("11.2", "step_together(model, optimizer, max_norm)", {STEP: 2, NORM: 1, ALL: 1}, rests={ALL: STEP})
def step_together(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, weights = rng.randint(2, 5), rng.randrange(2**31)
    broken, kind = rng.randrange(ranks), rng.choice(("nan", "inf"))
    a_kind = f"a{'n' * (kind == 'inf')} {kind}"
    calls = []
    for factor in CALLS:
        seed = rng.randrange(2**31)
        limit = _mean(seed, ranks).norm().item() / (factor or 1.0)
        calls.append((seed, limit, factor is None))
    found = ask(_stepped, weights, calls, broken, kind, nprocs=ranks)
    start, *right = _steps_of_one_device(weights, calls, ranks, 1e-6)
    _, *exact = _steps_of_one_device(weights, calls, ranks, 0.0)  # PyTorch adds 1e-6 to the norm

    def off(call: int) -> list[float]:
        """By rank, how far its weights are from those that are right after this call."""
        return [min(far(each[call]["weights"], one[call]) for one in (right, exact)) for each in found]

    for call in (0, 1):
        gaps = off(call)
        rank = gaps.index(max(gaps))
        held = [torch.as_tensor(each[call]["weights"], dtype=torch.float64) for each in found]
        earlier = (start, start) if call == 0 else (start, right[0])
        hint = _of_step(held, rank, gaps[rank], earlier, calls[call], ranks)
        seen = f"{ranks} ranks, the norm of their mean is {CALLS[call]} × the limit: "
        seen += f"rank {rank}'s weights are off by up to {gaps[rank]:.2g}"
        yield Finding(STEP, max(gaps) < CLOSE, seen, hint)
        norm = _mean(calls[call][0], ranks).norm().item()
        values = [each[call]["returned"] for each in found]
        wrong = [each for each in values if far(each, norm) > NEAR * norm or isinstance(each, str)]
        own = [_own(calls[call][0], rank).norm().item() for rank in range(ranks)]
        seen = f"the mean's norm is {norm:.4f}, and returned was {_words(wrong[0]) if wrong else ''}"
        if any(far(each, norm * ranks) < 1e-6 for each in wrong):
            hint = "That is the norm of the sum over the ranks."
        elif far(values, own) < 1e-6:
            hint = "Each rank returns the norm of its own gradient. When is it measured?"
        elif any(far(each, min(norm, calls[call][1])) < 1e-4 for each in wrong):
            hint = "That is the norm after clipping. What does the function that clips give back?"
        else:
            hint = "Which gradient is measured, at which moment?"
        yield Finding(NORM, not wrong, seen, hint)
    for call in (2, 3):
        gaps = off(call)
        rank = gaps.index(max(gaps))
        if call == 3:
            seen, hint = (
                f"rank {rank}'s weights are off by {gaps[rank]:.2g} after the step that follows",
                "What is left behind by a step that was not made?",
            )
        elif min(gaps) < CLOSE:
            seen = f"rank {broken}'s gradient held {a_kind}: rank {rank} has other weights now"
            seen += f", and rank {gaps.index(min(gaps))} has not"
            hint = (
                "One rank knew it and the others did not. What do all of them hold, after it has travelled?"
            )
        else:
            seen = f"rank {broken}'s gradient held {a_kind}: all ranks have other weights now"
            hint = "The optimizer remembers, and moves also where there is nothing new. Who calls it?"
            if any(math.isnan(value) for each in found for value in each[call]["weights"]):
                hint = "It went into the weights. Which number tells every rank of it, before the step?"
        yield Finding(ALL, max(gaps) < CLOSE, seen, hint)


def _words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _own(seed: int, rank: int) -> Tensor:
    """A rank's gradient, of the layers that are trained, end to end."""
    trained = sum(each.numel() for each in _network(0, frozen=True).parameters() if each.requires_grad)
    dice = torch.Generator().manual_seed(seed + rank)
    return torch.randn(trained, generator=dice, dtype=torch.float64)


def _mean(seed: int, ranks: int) -> Tensor:
    return torch.stack([_own(seed, rank) for rank in range(ranks)]).mean(0)


def _training(weights: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _network(weights, frozen=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _give(model: nn.Module, gradient: Tensor) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    parts = gradient.split([each.numel() for each in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.clone().view_as(parameter)


def _steps_of_one_device(
    weights: int, calls: list[tuple[int, float, bool]], ranks: int, epsilon: float
) -> list[Tensor]:
    """The weights at the start and after each call."""
    model, optimizer = _training(weights)
    found = [_flat(model.parameters())]
    for seed, limit, is_broken in calls:
        if not is_broken:
            mean = _mean(seed, ranks)
            _give(model, mean * min(1.0, limit / (mean.norm().item() + epsilon)))
            optimizer.step()
        found.append(_flat(model.parameters()))
    return found


def _of_step(
    held: list[Tensor],
    rank: int,
    gap: float,
    earlier: tuple[Tensor, Tensor],
    call: tuple[int, float, bool],
    ranks: int,
) -> str:
    """The hint for the weights after a call, by what the mean became."""
    (before, start), (seed, limit, _) = earlier, call
    if gap < 1e-6:
        return "Only the last digits are off. Which type have the numbers on the way?"
    if far(held[rank], start) < CLOSE:
        return "The weights have not moved. Who makes the step?"
    if any(far(each, held[0]) > CLOSE for each in held):
        return "The ranks have different weights now. Which gradient must all of them step with?"
    model, optimizer = _training(0)
    (group,) = optimizer.param_groups
    trained = _flat(torch.full_like(each, each.requires_grad) for each in model.parameters()).bool()
    moved, velocity = (((a - b) / group["lr"])[trained] for a, b in ((start, held[rank]), (before, start)))
    mean, each = _mean(seed, ranks), [_own(seed, other) for other in range(ranks)]
    early = torch.stack([own * min(1.0, limit / own.norm().item()) for own in each]).mean(0)
    return nearest(
        moved - group["momentum"] * velocity,
        (mean, "The mean is longer than the limit, and all of it is used."),
        (mean * ranks, "That is the sum of the gradients."),
        (mean * (limit / mean.norm()), "It was shorter than the limit, and was made longer."),
        (early, "Each rank's gradient is made shorter first, and then they are averaged. Turn it round."),
        (early * ranks, "Each rank's gradient is made shorter first, and then they are added up."),
        otherwise="Average over the ranks first. Then measure, then make it shorter, then step.",
        within=1e-5,
    )


@in_group
def _stepped(
    answer: Any, weights: int, calls: list[tuple[int, float, bool]], broken: int, kind: str
) -> list[dict[str, Any]]:
    rank, (model, optimizer) = dist.get_rank(), _training(weights)
    found = []
    for seed, limit, is_broken in calls:
        gradient = _own(seed, rank)
        if is_broken and rank == broken:
            gradient[len(gradient) // 2] = float(kind)
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
    splits = [(rng.choice((10, 14, 22)), rng.choice((2, 4, 6)), rng.choice((3, 5))) for _ in range(3)]
    splits.append((8, 3, 2))  # the batch that the rate was found for
    late = [(WARM_UP + rng.randint(1, 99), *each) for each in splits]  # over, whatever is counted
    early = [(step, *each) for each in splits for step in (0, WARM_UP // math.prod(each) // 2)]
    edge = [(WARM_UP // math.prod(each) - 1, *each) for each in splits if WARM_UP % math.prod(each) == 0]
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
    return Finding(what, far(got, right) < CLOSE, seen, hints(arguments, got))


def _of_scale(arguments: tuple[int, ...], got: float) -> str:
    _, size, ranks, pieces = arguments
    one = RATE / BATCH
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
