"""The questions of lesson 19: the meetings of local SGD, and a hook that sends signs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.traffic import noting_bytes, noting_waits
from ..in_rank.work import in_group
from ..inputs import flat, network, tensor, trainable
from ..judging import Faults, by_call, far, first_fault, furthest, in_digits, nearest, place_of_furthest
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

# --- 19.1 -------------------------------------------------------------------------------------------------

MEAN = "at a meeting all ranks take the mean of what training has changed"
WHEN = "the ranks meet after every H-th step, after the last one, and at no other time"
HINTS_1 = {
    MEAN: {
        "sum": "That is the sum over the ranks.",
        "one rank": "That is what one rank has found alone. What should all ranks hold after a meeting?",
        "not the mean": "Each rank makes its own step, and then the tensors themselves are averaged.",
    },
    WHEN: {
        "no last": "The steps since the last meeting are each rank's own. They count, too.",
        "other steps": "Of five steps with every=2, which ones end with a meeting?",
    },
}
CLOSE = 1e-9  # the tensors are float64


@question(
    "19.1",
    "local_sgd(model, optimizer, batches, every)",
    {MEAN: 2, WHEN: 2},
    depends_on={WHEN: MEAN},
    hints=HINTS_1,
)
def local_sgd(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, every = rng.choice((2, 3, 4)), rng.randint(3, 4)
    turns = [(1, 1), (2 * every + 1, every), (every, every + 1), (every, every)]  # steps, H
    calls = [[rng.randrange(2**31), rng.randrange(2**31), steps, h] for steps, h in turns]
    results = by_call(ask(_locally, calls, nprocs=ranks))
    for call, held in zip(calls, results, strict=True):
        right = _simulated(call, ranks)
        rank, gap = furthest(far(own, right[0]) for own in held)
        place = place_of_furthest(held[rank], right[0])
        is_, should = in_digits(held[rank][place], right[0][place].item())
        seen = f"{ranks} ranks, {call[2]} steps, every={call[3]}: "
        seen += f"rank {rank} holds {is_} in the end, and should hold {should}"
        alone = _simulated(call, ranks, meets=lambda step, steps, every: False)
        known = [(sum(alone), "sum"), *((each, "one rank") for each in alone)]
        what, otherwise = (MEAN, "not the mean") if call is calls[0] else (WHEN, "other steps")
        if what == WHEN:
            no_last = _simulated(call, ranks, meets=lambda step, steps, every: step % every == 0)
            known = [(each, "no last") for each in no_last]
        yield Finding(what, gap < CLOSE, seen, nearest(held[rank], *known, otherwise=otherwise, within=CLOSE))


def _due(step: int, steps: int, every: int) -> bool:
    return step % every == 0 or step == steps


def _simulated(call: list[int], ranks: int, meets: Any = _due) -> list[Tensor]:
    """Return what each rank holds after a call."""
    _, _, steps, every = call
    both = [_training(call) for _ in range(ranks)]
    batches = [_batches(call, rank) for rank in range(ranks)]
    for step in range(1, steps + 1):
        for (model, optimizer), own in zip(both, batches, strict=True):
            x, y = own[step - 1]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if meets(step, steps, every):
            for of_ranks in zip(*(_changed(*each) for each in both), strict=True):
                mean = torch.stack(of_ranks).mean(0)
                for each in of_ranks:
                    each.copy_(mean)
    return [flat(_changed(*each)) for each in both]


def _training(call: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(call[0], call[0], outputs=3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batches(call: list[int], rank: int) -> list[tuple[Tensor, Tensor]]:
    drawn = tensor(call[1] + rank, (call[2], 5, 4)) + rank / 2
    return [(x, torch.arange(5).add(step) % 3) for step, x in enumerate(drawn)]


def _changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all floating-point tensors of a model and its optimizer's state."""
    state = [each for trained in trainable(model) for each in optimizer.state[trained].values()]
    found = [*model.parameters(), *model.buffers(), *state]
    return [each.detach() for each in found if torch.is_tensor(each) and each.is_floating_point()]


def _count(call: list[int]) -> int:
    model, optimizer = _training(call)
    return sum(map(torch.numel, [*_changed(model, optimizer), *trainable(model)]))  # and the momentum


@reports(lambda calls: [[NUMBER] * _count(call) for call in calls])
@in_group
def _locally(answer: Any, calls: list[list[int]]) -> list[list[float]]:
    results = []
    for call in calls:
        model, optimizer = _training(call)
        answer(model, optimizer, _batches(call, dist.get_rank()), call[3])
        results.append(flat(_changed(model, optimizer)).tolist())
    return results


# --- 19.2 -------------------------------------------------------------------------------------------------

FIRST = "in the first backward pass: the mean over the ranks of what they have sent"
FEEDBACK = "in all later ones, too: what was not sent is added to the next gradient of the same parameter"
BITS = "a rank sends its messages, and nothing else"
PROMISE = "no backward pass waits for other ranks: the hook returns at once"
HINTS_2 = {
    FIRST: {
        "sum": "That is the sum of what the ranks have sent. With a hook, DDP no longer divides it.",
        "plain": "That is the mean of the gradients themselves, as without a hook.",
        "apart": "The ranks hold different gradients. Has every message arrived by then, from every rank?",
        "read wrong": "What does `arriving` make of each message, and what of all of them together?",
    },
    FEEDBACK: {
        "no feedback": "These are the signs of this gradient alone. What was left unsent before is not "
        "added, or not found again after DDP has rebuilt its buckets.",
        "left wrong": "What stays unsent is the sum that was to be sent, minus what arrives of it: for this "
        "rank alone, by parameter, in a tensor of its own.",
    },
    BITS: {"too much": "The message has all that the others need. What else travels?"},
    PROMISE: {
        "waits": "Backward stands still meanwhile. What can the hook return before anything has arrived, and "
        "where does the rest of the work go?"
    },
}
PASSES = 3
SIZES = (16, 1, 32, 16, 32)  # powers of two: means of small whole numbers are exact, and their signs, too
BUCKET = 0.0002  # MB: two or three parameters


class _Given(nn.Module):
    """A model that gets the gradients it is called with; it uses its parameters in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size).view(-1, min(size, 8)) for size in SIZES)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, gradients: list[Tensor], order: list[int]) -> Tensor:
        parts = [(self.weights[i] * gradients[i].view_as(self.weights[i])).sum() for i in order]
        return torch.stack(parts).sum()


@question(
    "19.2",
    "send_signs(ddp)",
    {FIRST: 2, FEEDBACK: 2, BITS: 1, PROMISE: 1},
    depends_on={FEEDBACK: FIRST, BITS: FIRST, PROMISE: FIRST},
    hints=HINTS_2,
)
def send_signs(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, seed = rng.choice((2, 3, 4, 5)), rng.randrange(2**31)
    order = rng.choice(([3, 1, 2, 0, 4], [0, 1, 4, 3, 2]))  # so that DDP rebuilds its buckets in another one
    results = ask(_with_signs, seed, order, rng.randrange(ranks), nprocs=ranks)
    yield first_fault(FIRST, _of_passes(seed, ranks, by_call(each["gradients"] for each in results), [0]))
    later = [*range(1, PASSES)]
    yield first_fault(
        FEEDBACK, _of_passes(seed, ranks, by_call(each["gradients"] for each in results), later)
    )
    most = sum(4 + size // 8 + 1 for size in SIZES)  # bytes: of a scale, of the bits, and one not quite full
    rank, sent = furthest(max(each["sent"]) for each in results)
    seen = (
        f"in a pass rank {rank} sent {sent:.0f} bytes to each of the others; its messages have {most} at most"
    )
    yield Finding(BITS, 0 < sent <= most, seen, "too much")
    waited = [rank for rank, each in enumerate(results) if each["waited"]]
    yield Finding(PROMISE, not waited, f"rank(s) {waited} waited in a backward pass", "waits")


def _drawn(seed: int, step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 10 * step + rank)
    return [torch.randint(-8, 9, (size,), generator=generator).float() for size in SIZES]


def _sent(wanted: list[Tensor]) -> list[Tensor]:
    return [torch.where(each < 0, -each.abs().mean(), each.abs().mean()) for each in wanted]


def _of_passes(seed: int, ranks: int, passes: list[list[Any]], judged: list[int]) -> Faults:
    unsent: list[list[Tensor]] = [[torch.zeros(size) for size in SIZES] for _ in range(ranks)]
    for step, gradients in enumerate(passes):
        drawn = [_drawn(seed, step, rank) for rank in range(ranks)]
        wanted = [[a + b for a, b in zip(*both, strict=True)] for both in zip(drawn, unsent, strict=True)]
        sent = [_sent(each) for each in wanted]
        unsent = [[a - b for a, b in zip(*both, strict=True)] for both in zip(wanted, sent, strict=True)]
        right = torch.stack([torch.cat(each) for each in sent]).mean(0)
        rank, gap = furthest(far(each, right) for each in gradients)
        if gap < 1e-4 or step not in judged:
            continue
        place = place_of_furthest(gradients[rank], right)
        seen = (
            f"{ranks} ranks, pass {step + 1}: one gradient of rank {rank} is {gradients[rank][place]:.5f}, "
        )
        known = [
            (right * ranks, "sum"),
            (torch.stack([torch.cat(each) for each in drawn]).mean(0), "plain"),
        ]
        hint = nearest(gradients[rank], *known, otherwise="read wrong", within=1e-4)
        if hint == "read wrong" and any(far(each, gradients[0]) > 1e-4 for each in gradients):
            hint = "apart"
        if step:
            signs = torch.stack([torch.cat(_sent(each)) for each in drawn]).mean(0)
            hint = "no feedback" if far(gradients[rank], signs) < 1e-4 else "left wrong"
        yield f"{seen}and should be {right[place]:.5f}", hint


@reports(
    lambda seed, order, late: {
        "gradients": [[NUMBER] * sum(SIZES)] * PASSES,
        "sent": [float] * PASSES,
        "waited": bool,
    }
)
@in_group
def _with_signs(answer: Any, seed: int, order: list[int], late: int) -> Result:
    model, rank = _Given(), dist.get_rank()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET)
    answer(ddp)
    gradients, sent, waits = [], [], [False]
    for step in range(PASSES):
        model.zero_grad()
        loss = ddp(_drawn(seed, step, rank), order)
        dist.barrier()
        time.sleep(0.03 * (rank == late))  # a hook that waits would wait for it
        each = [0.0]
        with noting_bytes(each.append), noting_waits(partial(waits.append, True)):
            loss.backward()
        sent.append(sum(each))
        gradients.append(flat(p.grad for p in trainable(model) if p.grad is not None))
    return {"gradients": gradients, "sent": sent, "waited": any(waits)}
