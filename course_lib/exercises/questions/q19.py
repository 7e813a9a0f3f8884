"""The questions of lesson 19: a hook that sends signs and makes up for it later, and local SGD."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.traffic import noting_bytes, noting_waits, record_traffic
from ..in_rank.work import in_group
from ..inputs import flat, network, settings, tensor, trainable
from ..judging import (
    Faults,
    by_call,
    far,
    first_fault,
    furthest,
    in_digits,
    nearest,
    place_of_furthest,
    with_two_world_sizes,
)
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

# --- 19.1 -------------------------------------------------------------------------------------------------

FIRST = "in the first backward pass: the mean over the ranks of their signs, times the scale"
FEEDBACK = "in all later ones, too: what was not sent is added to the next gradient of the same parameter"
BITS = "a rank sends a bit for each gradient, and little besides"
PROMISE = "no backward pass waits for other ranks: the hook returns at once"
PASSES = 5
# Where a number is next to 0, rounding decides its sign, and so changes the next pass's scale: by one part in
# 1,000 at most, as the smallest matrix has 2,000 numbers. Such places are not compared.
CLOSE = (1e-4, *[2e-3] * (PASSES - 1))  # by pass: of the scale, as all that follows
NEXT_TO_0 = 5e-3
FEW_DIGITS = 1e-2
SMALL_BUCKET = 0.03  # MB: two models' parameters fill several of these, or one of the default size
LATE = 0.03  # seconds by which a rank begins its backward pass later than the others


class _Given(nn.Module):
    """A nested model with the gradients that it is called with; it uses its parameters in a given order."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        a, b, c = widths
        inner = nn.Sequential(nn.Conv1d(a, b, 3, bias=False), nn.Linear(b, c, bias=False))
        frozen = nn.Linear(b, c).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.layers = nn.Sequential(nn.Linear(a, b, bias=False), frozen, inner, nn.Linear(c, a, bias=False))

    def forward(self, gradients: list[Tensor], order: list[int]) -> Tensor:
        trained, total = trainable(self), torch.zeros(())
        for i in order:
            total = total + (trained[i] * gradients[i].view_as(trained[i])).sum()
        return total


@question(
    "19.1",
    "send_signs(ddp)",
    {FIRST: 1, FEEDBACK: 2, BITS: 1, PROMISE: 1},
    rests={FEEDBACK: FIRST, BITS: FIRST, PROMISE: FIRST},
)
@with_two_world_sizes()
def send_signs(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    widths = rng.sample(range(44, 64), 3)
    plans = [_plan(rng, widths, cap) for cap in (SMALL_BUCKET, None)]
    rights = []
    for plan in plans:
        means, clear, zero = _simulate(plan, ranks)
        plan["places"] = _clear_places(rng, plan, clear, zero)
        rights.append(means)
    told = ask(_with_signs, plans, rng.randrange(ranks), nprocs=ranks)
    passes = by_call([result["passes"] for result in told])

    def faults(*steps: int) -> Faults:
        for (step, i), of_pass in zip(product(range(PASSES), range(len(plans))), passes, strict=True):
            if step in steps:
                gradients = [result["gradient"] for result in of_pass]
                yield from _signs_off(gradients, plans[i], i, step, rights[i][step])

    yield first_fault(FIRST, faults(0))
    yield first_fault(FEEDBACK, faults(*range(1, PASSES)))
    count = sum(_sizes(widths))
    most = count / 6  # bytes: a bit is an eighth
    results = [(rank, result) for of_pass in passes for rank, result in enumerate(of_pass)]
    rank, worst = max(results, key=lambda each: each[1]["sent"])
    travelled = max(result["numbers"] for result in told) / len(passes)  # of a byte or more
    sent = max(worst["sent"], travelled)
    seen = f"a model has {count:,} gradients, and in one pass rank {rank} sent {sent:,.0f} bytes to each of "
    if worst["sent"] <= most:
        seen = f"a model has {count:,} gradients, and in a pass {sent:,.0f} numbers (on average) went from a "
        seen += "rank to each of "
    seen += f"the others; {most:,.0f} bytes would do"
    hint = "The signs and the scales need less. What else travels, or is a byte only half full?"
    if sent > 3.5 * count:
        hint = "That is as much as without a hook. Which numbers travel, and what would do instead of them?"
    elif sent > 0.9 * count:
        hint = "A sign takes a byte or more. How many signs are there in a byte of `pack`?"
    yield Finding(BITS, sent <= most, seen, hint)
    waited = [rank for rank, result in results if result["waited"]]
    seen = f"rank {waited[0] if waited else 0} waited in its backward pass for something that it had started"
    hint = "Backward stands still meanwhile. What can the hook return before anything has arrived, and where "
    hint += "is what is left to do then done?"
    yield Finding(PROMISE, not waited, seen, hint)


def _plan(rng: random.Random, widths: list[int], cap: float | None) -> Result:
    """Draw a model's gradients, by a seed, and the order in which it uses its parameters."""
    size = len(_sizes(widths))
    orders = [rng.sample(range(size), size) for _ in range(9)]
    # Used from last to first, they would be in the model's order in all passes.
    order = next(order for order in orders if order != list(range(size))[::-1])
    lengths = [10 ** rng.uniform(-2, 0.5) for _ in range(size)]
    plan = {"widths": widths, "order": order, "lengths": lengths, "cap": cap}
    return plan | {"seed": rng.randrange(2**31), "places": []}


def _sizes(widths: list[int]) -> list[int]:
    a, b, c = widths
    return [1, a * b, 3 * a * b, b * c, c * a]


def _drawn(plan: Result, step: int, rank: int) -> list[Tensor]:
    """Draw a rank's gradients in a backward pass, by parameter; a few are 0."""
    sizes = _sizes(plan["widths"])
    numbers = tensor(plan["seed"] + 10 * step + rank, (sum(sizes),), torch.float32)
    low = numbers < -1.9
    low[0] = False  # of the parameter with one number
    numbers = numbers.masked_fill(low, 0.0)
    parts = numbers.split(sizes)
    return [part * length for part, length in zip(parts, plan["lengths"], strict=True)]


def _scales(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.abs().mean().expand(len(part)) for part in parts])


def _simulate(plan: Result, ranks: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return each pass's mean, and which numbers' signs no rounding decides, and which are 0 at first."""
    sizes = _sizes(plan["widths"])
    kept = [torch.zeros(sum(sizes), dtype=torch.float64)] * ranks
    clear = torch.ones(sum(sizes), dtype=torch.bool)
    zero, means = ~clear, []
    for step in range(PASSES):
        gradients = [torch.cat(_drawn(plan, step, rank)).double() for rank in range(ranks)]
        wanted = [gradient + own for gradient, own in zip(gradients, kept, strict=True)]
        scaled = [_scales(list(each.split(sizes))) for each in wanted]
        sent = [torch.where(each < 0, -own, own) for each, own in zip(wanted, scaled, strict=True)]
        means.append(torch.stack(sent).mean(0))
        for each, scales in zip(wanted, scaled, strict=True):
            exact = (each == 0) & (not step)
            zero |= exact
            clear &= (each.abs() >= NEXT_TO_0 * scales) | exact
        kept = [each - own for each, own in zip(wanted, sent, strict=True)]
    return means, clear, zero


def _clear_places(rng: random.Random, plan: Result, clear: Tensor, zero: Tensor) -> list[int]:
    """Draw places of each parameter where no rounding decides a sign: some with a gradient of 0 at first."""
    places, begin = [], 0
    for size in _sizes(plan["widths"]):
        for kind, count in ((clear & zero, 4), (clear, 10)):
            here: list[int] = (begin + kind[begin : begin + size].nonzero().flatten()).tolist()
            places += rng.sample(here, min(count, len(here)))
        begin += size
        places += [here[0], here[-1]]
    return places


def _signs_off(gradients: list[Any], plan: Result, i: int, step: int, right: Tensor) -> Faults:
    """Yield what is wrong with the gradients of a pass; all is compared in units of the scales."""
    ranks, places = len(gradients), torch.tensor(plan["places"])
    of_ranks = [_scales(_drawn(plan, step, rank)).double()[places] for rank in range(ranks)]
    scales = torch.stack(of_ranks).mean(0)

    def off(numbers: Any, truth: Tensor = right) -> float:
        return far(torch.as_tensor(numbers, dtype=torch.float64) / scales, truth[places] / scales)

    rank, gap = furthest(off(gradient) for gradient in gradients)
    if gap < CLOSE[step]:
        return
    numbers = torch.as_tensor(gradients[rank], dtype=torch.float64)
    place = place_of_furthest(numbers / scales, right[places] / scales)
    is_, should = in_digits(numbers[place].item(), right[places][place].item())
    model, passed = ("first", "second")[i], ("first", "second", "third", "fourth", "fifth")[step]
    seen = f"{ranks} ranks, {model} model, {passed} pass: one gradient of rank {rank} is {is_}, "
    seen += f"and should be {should}"
    if any(far(each, gradients[0]) > CLOSE[step] * scales.min() for each in gradients):
        hint = "The ranks hold different gradients. What makes the same of what all of them have sent, and "
        hint += "has all of it arrived by then?"
    elif gap < FEW_DIGITS:
        hint = "Only the last digits are off. In which dtype do the scales travel?"
    else:
        known = _known(plan, ranks, step, right)
        hint = next((hint for wrong, hint in known if off(numbers, wrong) < FEW_DIGITS), OTHERWISE[step > 0])
    yield seen, hint


OTHERWISE = (  # in the first pass, and in later ones
    "Which bit belongs to which number, and which scale to which parameter? Has all arrived by then, and "
    "does each model keep its own?",
    "The passes before are right. What is kept of them, and is it added to the gradient of the same "
    "parameter of the same model? DDP rebuilds its buckets after the first pass.",
)


def _known(plan: Result, ranks: int, step: int, right: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield wrong gradients, the same on all ranks, and a hint for each."""
    of_ranks = [[part.double() for part in _drawn(plan, step, rank)] for rank in range(ranks)]
    plain = [torch.cat(parts) for parts in of_ranks]
    yield right * ranks, "That is the sum of what the ranks have sent. With a hook, DDP no longer divides it."
    hint = "That is the mean of the gradients themselves, as without a hook. What is to travel instead?"
    yield torch.stack(plain).mean(0), hint
    if step:
        both = zip(plain, map(_scales, of_ranks), strict=True)
        signs = [torch.where(numbers < 0, -scales, scales) for numbers, scales in both]
        hint = "Signs of this pass's gradient alone: what was left unsent before did not come. Was it kept, "
        yield torch.stack(signs).mean(0), hint + "and is it found again when DDP has rebuilt its buckets?"


@reports(
    lambda plans, late: {
        "numbers": int,
        "passes": [
            {"gradient": [NUMBER] * len(plan["places"]), "sent": float, "waited": bool}
            for _ in range(PASSES)
            for plan in plans
        ],
    }
)
@in_group
def _with_signs(answer: Any, plans: list[Result], late: int) -> Result:
    rank, passes = dist.get_rank(), []
    ddps = []
    for plan in plans:
        # The second model's gradients are views of its buckets.
        model, views = _Given(plan["widths"]), plan["cap"] is None
        ddps.append(DistributedDataParallel(model, bucket_cap_mb=plan["cap"], gradient_as_bucket_view=views))
    for ddp in ddps:
        answer(ddp)
    with record_traffic() as travelled:
        for step, (i, plan) in product(range(PASSES), enumerate(plans)):
            model, sent, waited = ddps[i].module, [0.0], [False]
            model.zero_grad()
            loss = ddps[i](_drawn(plan, step, rank), plan["order"])
            dist.barrier()
            time.sleep(LATE * (rank == late and not i))
            with noting_bytes(sent.append), noting_waits(partial(waited.append, True)):
                loss.backward()
            gradients = flat(each.grad for each in trainable(model) if each.grad is not None)
            passes.append({"gradient": gradients[plan["places"]], "sent": sum(sent), "waited": any(waited)})
    exchanged = (count for name, count in travelled.calls if "gather" in name or "reduce" in name)
    return {"passes": passes, "numbers": sum(exchanged) + 8 * travelled.put}


# --- 19.2 -------------------------------------------------------------------------------------------------

WEIGHTS = "each rank steps for itself; after every H steps, and at the end, all hold the mean of the weights"
STATE = "and the mean of the optimizer's state and of the buffers: one rank's checkpoint is that of all"
ONCE = "at a meeting, what training changes travels once; else nothing does, and nothing else changes"
INPUTS, WIDE, CLASSES = 8, 24, 3
NEAR = 1e-9  # the tensors are float64
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain SGD": partial(torch.optim.SGD, lr=0.2),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-3, amsgrad=True),
}
KEPT = {  # by optimizer, what it keeps for each parameter that differs from rank to rank
    "plain SGD": (),
    "SGD with momentum": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}


@question(
    "19.2",
    "local_sgd(model, optimizer, batches, every)",
    {WEIGHTS: 2, STATE: 2, ONCE: 1},
    rests={STATE: WEIGHTS, ONCE: WEIGHTS},
)
@with_two_world_sizes()
def local_sgd(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    calls = _calls(rng, ranks)
    right = _trained(calls, ranks)
    results = by_call(ask(_locally, calls, nprocs=ranks))

    def faults(what: str) -> Faults:
        for c, (of_call, truth) in enumerate(zip(results, right, strict=True)):
            if what == (STATE if calls[c]["tells"] else WEIGHTS):
                yield from _weights_off(calls, c, [result["weights"] for result in of_call], truth["weights"])
            for part in ("state", "buffers") if what == STATE else ():
                yield from _state_off(part, calls[c], [result[part] for result in of_call], truth[part])
            if what == ONCE:
                yield from _sending(calls[c], of_call)

    for what in (WEIGHTS, STATE, ONCE):
        yield first_fault(what, faults(what))


def _calls(rng: random.Random, ranks: int) -> list[Result]:
    """Draw calls: with a rest or without, of one meeting or several, of a model that is met once more."""
    some = rng.randint(2, 3)
    turns = [  # an optimizer, steps, H, and whether the state of an earlier meeting tells on the weights
        ("plain SGD", 2 * some + rng.randint(1, some - 1), some, False),
        ("SGD with momentum", 4, 4, False),
        ("SGD with momentum", 4, 2, True),
        ("Adam", 3, rng.randint(4, 6), False),
        ("Adam", 5, 2, True),
        ("plain SGD", 2, 1, False),
    ]
    kinds = {name: (rng.randrange(2**31), rng.randrange(2**31)) for name in OPTIMIZERS}
    return [
        {"optimizer": name, "steps": steps, "every": every, "tells": tells, "kind": kinds[name][0]}
        | {"weights": kinds[name][1], "seed": rng.randrange(2**31)}
        | {"sizes": [[rng.randint(3, 7) for _ in range(steps)] for _ in range(ranks)]}
        for name, steps, every, tells in turns
    ]


def _training(call: Result) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a nested model whose first layer, the largest, is frozen, and its optimizer."""
    base, seed = nn.Linear(INPUTS, WIDE).double().requires_grad_(False), call["weights"]
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(tensor(seed, tuple(parameter.shape)) / 2)
    body = network(call["kind"], seed, inputs=WIDE, outputs=CLASSES, frozen=False)
    model = nn.Sequential(OrderedDict(base=base, act=nn.Tanh(), body=body))
    groups = [{"params": list(part.parameters())} for part in (base, body)]
    return model, OPTIMIZERS[call["optimizer"]](groups)


def _batches(call: Result, rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(call["seed"] + rank)
    return [
        (
            torch.randn(size, INPUTS, generator=generator, dtype=torch.float64) + rank / 2,
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in call["sizes"][rank]
    ]


def _leave_gradients(model: nn.Module, call: Result, rank: int) -> None:
    """Fill ``.grad`` as a step before the call has left it."""
    for i, parameter in enumerate(trainable(model)):
        parameter.grad = tensor(call["seed"] + 100 * rank + i, tuple(parameter.shape))


def _floats(tensors: Any) -> list[Tensor]:
    return [each for each in tensors if each.is_floating_point()]


def _kept(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> list[Tensor] | None:
    """Return the optimizer's state of all trained parameters; None if a part is not there."""
    states = [optimizer.state.get(parameter, {}) for parameter in trainable(model)]
    parts = [state.get(key) for state in states for key in KEPT[name]]
    return parts if all(isinstance(part, Tensor) for part in parts) else None


def _held(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Result:
    """Return all numbers of a model, and of its optimizer's state."""
    kept = _kept(model, optimizer, name)
    nothing = torch.zeros(0, dtype=torch.float64)
    return {
        "weights": flat(model.parameters()),
        "buffers": flat(each.double() for each in model.buffers()),
        "state": None if kept is None else flat(kept) if kept else nothing,
    }


def _trained(calls: list[Result], ranks: int, how: str = "") -> list[Result]:
    """Return what each rank should hold after each call, or what rank 0 holds after one of WAYS."""
    runs: dict[str, list[tuple[nn.Module, torch.optim.Optimizer]]] = {}
    after = []
    for call in calls:
        name, steps, every = call["optimizer"], call["steps"], call["every"]
        if name not in runs:
            runs[name] = [_training(call) for _ in range(ranks)]
        both = runs[name]
        batches = [_batches(call, rank) for rank in range(ranks)]
        for rank, (model, _) in enumerate(both):
            _leave_gradients(model, call, rank)
        for step in range(1, steps + 1):
            for (model, optimizer), own in zip(both, batches, strict=True):
                x, y = own[step - 1]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            if how == "gradients":
                _average([[p.grad for p in trainable(model) if p.grad is not None] for model, _ in both])
            for _, optimizer in both:
                optimizer.step()
            last = step == steps and how != "no last"
            if how not in ("alone", "gradients") and (step % every == 0 or last):
                _average([[each.detach() for each in trainable(model)] for model, _ in both])
                _average([(_kept(*each, name) or []) + _floats(each[0].buffers()) for each in both])
        after.append(_held(*both[0], name))
    return after


def _average(parts: list[list[Tensor]]) -> None:
    for of_ranks in zip(*parts, strict=True):
        mean = torch.stack(of_ranks).mean(0)
        for each in of_ranks:
            each.copy_(mean)


WAYS = {
    "alone": "That is a rank's own training, without the others. What should they agree on, and when?",
    "no last": "The last steps are this rank's own: they are fewer than H, and they count, too.",
    "gradients": "That is what averaged gradients give, or a meeting after each step. When is one due?",
}


def _weights_off(calls: list[Result], c: int, weights: list[Any], right: Any) -> Faults:
    call, ranks = calls[c], len(weights)
    rank, gap = furthest(far(own, right) for own in weights)
    if gap < NEAR:
        return
    seen = f"{_case(call)}, {ranks} ranks: one weight of {_is_and_should(rank, weights[rank], right)}"
    if gap < 1e-6:
        yield seen, "Only the last digits are off. Which dtype do the numbers have on the way?"
    elif call["tells"]:
        hint = (
            "The call before was right. In this one a step goes on from what the meeting before it has left. "
        )
        yield seen, hint + "Which numbers does a meeting average, and does each of them?"
    else:
        hint = "What belongs to a rank's step? Then which numbers are averaged, and after which steps?"
        mine = torch.as_tensor(weights[0], dtype=torch.float64)  # a way gives what rank 0 holds
        known = ((_trained(calls, ranks, how)[c]["weights"], hint) for how, hint in WAYS.items())
        yield seen, nearest(mine, *known, otherwise=hint, within=1e-6 * (1 + mine.abs().max().item()))


def _case(call: Result) -> str:
    return f"{call['optimizer']}, {call['steps']} steps with H = {call['every']}"


def _is_and_should(rank: int, numbers: Any, right: Tensor) -> str:
    place = place_of_furthest(numbers, right)
    is_, should = in_digits(numbers[place], right[place].item())
    return f"rank {rank} is {is_}, and should be {should}"


def _state_off(part: str, call: Result, held: list[Any], right: Tensor) -> Faults:
    if None in held:
        seen = f"rank {held.index(None)}'s optimizer lacks its state: {', '.join(KEPT[call['optimizer']])}"
        yield seen, "It should be averaged, and then be there for the next step."
        return
    rank, gap = furthest(far(own, right) for own in held)
    if gap < NEAR:
        return
    name = "the optimizer's state" if part == "state" else "the model's buffers"
    seen = f"{_case(call)}, {len(held)} ranks: in {name} one number of "
    hint = "Which of these numbers are averaged, and into which tensors does their mean go?"
    if any(far(own, held[0]) > NEAR for own in held):
        hint = "The ranks hold different numbers there. What else, besides the weights, has training "
        hint += "changed, and where does its mean go?"
    yield seen + _is_and_should(rank, held[rank], right), hint


def _sending(call: Result, of_call: list[Result]) -> Faults:
    model, _ = _training(call)
    trained = [parameter.numel() for parameter in trainable(model)]
    changed = sum(trained) * (1 + len(KEPT[call["optimizer"]]))
    changed += sum(each.numel() for each in _floats(model.buffers()))
    frozen = sum(parameter.numel() for parameter in model.parameters()) - sum(trained)
    meetings = -(-call["steps"] // call["every"])
    counters = meetings * (len(trained) + 2)  # an optimizer may count its steps in a tensor
    sent = max(result["sent"] for result in of_call)
    if sent > meetings * changed + counters:
        hint = (
            "Something else travels, or they travel more often. When is a meeting due, and what does it need?"
        )
        if any(result["gathered"] for result in of_call):
            hint = "A gather brings every rank's numbers separately. Is more than their sum needed?"
        elif meetings * frozen <= sent - meetings * changed <= meetings * frozen + counters:
            hint = "What is frozen is the same on all ranks and stays so. Does it need to travel?"
        times = "meeting" if meetings == 1 else f"{meetings} meetings"
        seen = f"{_case(call)}, {changed} numbers that training changes: in the {times} of this call "
        yield f"{seen}{sent} numbers travelled", hint
    if not all(result["as_it_was"] for result in of_call):
        seen = (
            "after your call a module is in another mode, a parameter is frozen or no longer frozen, or the "
        )
        hint = "Switch back at the end whatever you switch, and only read the batches."
        yield seen + "batches have changed", hint


def _shape(call: Result) -> Result:
    model, _ = _training(call)
    state = sum(parameter.numel() for parameter in trainable(model)) * len(KEPT[call["optimizer"]])
    counts = {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "buffers": sum(buffer.numel() for buffer in model.buffers()),
    }
    numbers = {name: [NUMBER] * count for name, count in counts.items()}
    return numbers | {"state": ([NUMBER] * state, None), "sent": int, "gathered": bool, "as_it_was": bool}


@reports(lambda calls: [_shape(call) for call in calls])
@in_group
def _locally(answer: Any, calls: list[Result]) -> list[Result]:
    rank, results = dist.get_rank(), []
    runs: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for call in calls:
        name = call["optimizer"]
        if name not in runs:
            runs[name] = _training(call)
        model, optimizer = runs[name]
        batches, before = _batches(call, rank), settings(model)
        modes = [(module, module.training) for module in model.modules()]
        trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        _leave_gradients(model, call, rank)
        with record_traffic() as travelled:
            answer(model, optimizer, batches, call["every"])
        as_it_was = settings(model) == before
        for module, mode in modes:
            module.training = mode
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        held = _held(model, optimizer, name)
        known = _batches(call, rank)
        same = len(known) == len(batches) and all(map(torch.equal, chain(*known), chain(*batches)))
        gathered = any("gather" in kind and count > len(trainable(model)) for kind, count in travelled.calls)
        results.append(held | {"sent": travelled.received(), "gathered": gathered})
        results[-1]["as_it_was"] = same and as_it_was
    return results
