"""The questions of lesson 16: a loss by tokens over ranks, reproducible masks, what survives a resume."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.retention import watch_retention
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, on_each_case, refuse_unless
from ..inputs import gradients_of, hash_of_process, leave_one_in_evaluation, settings
from ..judging import (
    Faults,
    by_call,
    far,
    first_fault,
    furthest,
    nearest,
    place_of_furthest,
    with_two_world_sizes,
)
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, TENSOR, reports
from ..wording import number, told

NEAR = 1e-7  # tolerance: a gradient's share of the tokens may be computed in float32
EXACT = 1e-9  # tolerance of a loss, which may not
WORDS = 11  # in the vocabulary
IGNORED = -100

# --- 16.1 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all asked tokens of all ranks"
LOSS = "every rank returns that mean loss"
SILENT = "a piece, a rank, or all ranks without a question: nothing is lost, and nothing is nan"
ONCE = "the gradients travel once"
WHICH: tuple[str, ...] = ("", "in the second call, ", "where a rank has no question, ")
WHICH += ("where nobody has a question, ", "where one token is asked for in all, ")
Piece = tuple[int, int, int]  # sentences, their length, number of tokens asked for
PIECE = "Every piece has the same weight here, whether it asks for one token or for twenty."
RANK = "It is right on each rank, but the ranks have the same weight, with few questions or many."


def _network(seed: int) -> nn.Module:
    """Build a nested model in float64, from ids (sentences, length) to scores (sentences, length, WORDS)."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(13, 8), nn.Tanh()))
    model = nn.Sequential(nn.Embedding(WORDS, 13), inner, nn.Linear(8, WORDS)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


NUMBERS = sum(parameter.numel() for parameter in _network(0).parameters())
MOST = 1.9 * NUMBERS  # numbers that may travel: the gradients once, and counts of tokens


@question(
    "16.1",
    "backward_by_tokens(ddp, pieces)",
    {GRADIENT: 2, LOSS: 1, SILENT: 1, ONCE: 1},
    rests={LOSS: GRADIENT, SILENT: GRADIENT, ONCE: GRADIENT},
)
@with_two_world_sizes()
def backward_by_tokens(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    weights = rng.randrange(2**31)
    plans = [_plan(rng, ranks, count) for count in rng.sample((3, 4), 2)]
    few, none, one = (_plan(rng, ranks, rng.randint(3, 4)) for _ in range(3))
    plans += [_with_silence(rng, few, False), _with_silence(rng, none, True), _with_one(rng, one)]
    calls = [(rng.randrange(2**31), plan) for plan in plans]
    results = by_call(ask(_accumulated, weights, calls, nprocs=ranks))
    for call, ((seed, plan), of_call) in enumerate(zip(calls, results, strict=True)):
        sums, losses = _sums(weights, seed, plan)
        tokens = sum(asked for pieces in plan for _, _, asked in pieces)
        truth: Any = sum(map(sum, sums)) / (tokens or 1)
        loss = sum(map(sum, losses)) / (tokens or 1)
        gradients, returned = ([result[name] for result in of_call] for name in ("gradient", "returned"))
        seen = f"{WHICH[call]}{ranks} ranks, {tokens} asked tokens: {{}}"
        if call < 2:
            yield _of_gradients(seen, gradients, sums, plan, truth)
        else:
            yield _of_silence(seen, gradients, truth, tokens)
        what = LOSS if call < 2 else SILENT
        yield _of_losses(what, seen, returned, loss, [sum(of_rank) for of_rank in losses], plan)
    sent = max(result["sent"] for result in results[0])
    hint = "DDP decides when a forward begins: which passes need to send? And what else travels?"
    if results[0][0]["gathered"]:
        hint = "A gather brings every rank's tensor separately. Is more than the sum needed?"
    seen = f"the model has {NUMBERS} gradients, and in one call {sent} numbers travelled"
    yield Finding(ONCE, sent <= MOST, seen, hint)
    for plan, of_call in zip(plans, results, strict=True):
        for pieces, result in zip(plan, of_call, strict=True):
            largest, places = sorted(n * length for n, length, _ in pieces)[-2:], result["places"]
            seen = (
                f"activations of {places} tokens are kept at once; the two largest pieces have {sum(largest)}"
            )
            hint = "A forward pass keeps what its backward needs. How long, and for how many pieces?"
            yield Finding(ONCE, places <= sum(largest), seen, hint)
    changed = [word for rank in zip(*results, strict=True) for result in rank for word in result["changed"]]
    hint = "Switch back at the end whatever you switch, and only read what you are given."
    yield Finding(ONCE, not changed, f"after your call {', '.join(changed[:1])}", hint)


def _plan(rng: random.Random, ranks: int, count: int) -> list[list[Piece]]:
    """Draw ``count`` pieces per rank; numbers of asked tokens differ within a rank and between ranks."""
    while True:
        plan = []
        for _ in range(ranks):
            sizes = [(rng.randint(1, 4), rng.randint(4, 9)) for _ in range(count)]
            plan.append([(n, length, rng.randint(1, n * length // 2)) for n, length in sizes])
        asked = [[asked for _, _, asked in pieces] for pieces in plan]
        if len(set(map(sum, asked))) == ranks and all(len(set(counts)) > 1 for counts in asked):
            return plan


def _with_silence(rng: random.Random, plan: list[list[Piece]], everywhere: bool) -> list[list[Piece]]:
    """Copy a plan without asked tokens on one rank and in the last piece of another, or on all ranks."""
    silent = rng.randrange(len(plan))
    copy = [list(pieces) for pieces in plan]
    for rank, pieces in enumerate(copy):
        if everywhere or rank == silent:
            copy[rank] = [(n, length, 0) for n, length, _ in pieces]
        elif rank == (silent + 1) % len(plan):
            pieces[-1] = (*pieces[-1][:2], 0)
    return copy


def _with_one(rng: random.Random, plan: list[list[Piece]]) -> list[list[Piece]]:
    """Copy a plan with one asked token over all ranks."""
    copy = _with_silence(rng, plan, everywhere=True)
    pieces = rng.choice(copy)
    at = rng.randrange(len(pieces))
    pieces[at] = (*pieces[at][:2], 1)
    return copy


def _drawn(seed: int, plan: list[list[Piece]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the pieces of each rank: ids, and labels that ask for some of them."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[tuple[Tensor, Tensor]]] = []
    for pieces in plan:
        batches.append([])
        for sentences, length, asked in pieces:
            ids = torch.randint(WORDS, (sentences, length), generator=generator)
            labels = torch.full((sentences * length,), IGNORED)
            at = torch.randperm(sentences * length, generator=generator)[:asked]
            labels[at] = torch.randint(WORDS, (asked,), generator=generator)
            batches[-1].append((ids, labels.view(sentences, length)))
    return batches


def _sums(weights: int, seed: int, plan: list[list[Piece]]) -> tuple[list[list[Tensor]], list[list[float]]]:
    """Return, for each rank and piece, the gradient of the sum of its losses, and that sum."""
    model = _network(weights)
    gradients: list[list[Any]] = []
    losses: list[list[float]] = []
    for pieces in _drawn(seed, plan):
        gradients.append([])
        losses.append([])
        for ids, labels in pieces:
            model.zero_grad()
            scores = model(ids).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum")
            loss.backward()
            gradients[-1].append(gradients_of(model))
            losses[-1].append(loss.item())
    return gradients, losses


def _of_gradients(
    seen: str, gradients: list[Any], sums: list[list[Tensor]], plan: list[list[Piece]], truth: Tensor
) -> Finding:
    if None in gradients:
        hint = "No backward pass ran there, or its gradients were cleared again. What fills .grad, and when?"
        words = f"rank {gradients.index(None)} holds no gradients, or not all"
        return Finding(GRADIENT, False, seen.format(words), hint)
    ranks = len(plan)
    of_pieces = [
        [gradient / asked for gradient, (_, _, asked) in zip(own, pieces, strict=True)]
        for own, pieces in zip(sums, plan, strict=True)
    ]
    asked_by = [sum(asked for _, _, asked in pieces) for pieces in plan]
    of_ranks = [sum(own) / asked for own, asked in zip(sums, asked_by, strict=True)]
    hint = nearest(
        gradients[0],
        (sum(map(sum, of_pieces)) / ranks / len(plan[0]), PIECE),
        (sum(of_ranks) / ranks, RANK),
        (truth / ranks, "It is too small by a factor of the number of ranks. What does DDP divide by?"),
        otherwise="What is each token's loss divided by, in every call, and which pass averages it?",
        within=NEAR,
    )
    rank, gap = furthest(far(gradient, truth) for gradient in gradients)
    place = place_of_furthest(gradients[rank], truth)
    words = f"one gradient of rank {rank} is {gradients[rank][place]:.6f}, and should be {truth[place]:.6f}"
    return Finding(GRADIENT, gap < NEAR, seen.format(words), hint)


def _of_losses(
    what: str, seen: str, returned: list[Any], loss: float, own: list[float], plan: list[list[Piece]]
) -> Finding:
    wrong = [rank for rank, own in enumerate(returned) if isinstance(own, str) or far(own, loss) > EXACT]
    got = returned[wrong[0]] if wrong else loss
    words = f"rank {wrong[0] if wrong else 0} returned {got if isinstance(got, str) else format(got, '.10f')}"
    asked_by = [sum(asked for _, _, asked in pieces) for pieces in plan]
    means = [total / (asked or 1) for total, asked in zip(own, asked_by, strict=True)]
    hint = "Which losses belong in it, and how many of them is it divided by?"
    if not isinstance(got, str) and math.isnan(got):
        hint = "That is 0 divided by 0. What does a mean over no token give, and what does a sum?"
    elif far(got, loss) < 1e-5:
        hint = "The first digits are right. Which number on the way has fewer digits than those of the model?"
    elif any(far(got, mean) < NEAR for mean in means):
        hint = "That is the mean of one rank's own tokens. What about the others' tokens?"
    return Finding(what, not wrong, seen.format(f"{words}, and the mean loss is {loss:.10f}"), hint)


def _of_silence(seen: str, gradients: list[Any], truth: Tensor, tokens: int) -> Finding:
    rank, gap = furthest(far(gradient, truth) for gradient in gradients)
    if gradients[rank] is None:
        words = "holds no gradients"
        hint = "It has no question, but it still has to take part in the average."
    elif any(math.isnan(value) for value in gradients[rank]):
        words, hint = "holds a nan", "That is 0 divided by 0. Where can a number of tokens be 0?"
    else:
        words = f"holds gradients that are off by {gap:.2g}"
        hint = "A rank without a question has a gradient of 0, and no token that counts."
        if tokens == 1:
            hint = "One token is a question, too. What is its loss divided by?"
    return Finding(SILENT, gap < NEAR, seen.format(f"rank {rank} {words}"), hint)


def _as_lists(pieces: list[tuple[Tensor, Tensor]]) -> list[list[Any]]:
    return [[tensor.tolist() for tensor in piece] for piece in pieces]


@reports(
    lambda weights, calls: (
        [
            {"gradient": ([NUMBER] * NUMBERS, None), "returned": (NUMBER, str), "sent": int, "gathered": bool}
            | {"changed": [str, ...], "places": int}
        ]
        * len(calls)
    )
)
@in_group
def _accumulated(answer: Any, weights: int, calls: list[tuple[int, list[list[Piece]]]]) -> list[Result]:
    model = _network(weights)
    ddp, kept = DistributedDataParallel(model), watch_retention(model, _places)
    results: list[Result] = []
    pieces: list[tuple[Tensor, Tensor]] = []  # the same list in each call, with other pieces
    for seed, plan in calls:
        pieces[:], known = (_drawn(seed, plan)[dist.get_rank()] for _ in range(2))
        (nn.Module.train, nn.Module.eval, leave_one_in_evaluation)[len(results) % 3](ddp)
        before = settings(ddp)
        kept.clear()
        # Profile the first call only: the profiler takes more time than all the rest.
        with nullcontext() if results else record_traffic() as travelled:
            returned = number(answer(ddp, pieces))
        sent = travelled.received() if travelled else results[0]["sent"]
        travels = travelled.calls if travelled else []
        still = {
            "a module of ddp is in another mode, or a parameter is frozen": settings(ddp) == before,
            "ddp's plain backward passes no longer average": ddp.require_backward_grad_sync,
            "the pieces have changed": _as_lists(pieces) == _as_lists(known),
        }
        changed = [word for word, holds in still.items() if not holds]
        results.append({"gradient": gradients_of(model), "returned": returned})
        results[-1] |= {"sent": sent, "changed": changed}
        results[-1]["gathered"] = any("gather" in name and count >= NUMBERS / 9 for name, count in travels)
        results[-1]["places"] = max(kept, default=0)
    return results


def _places(scores: Tensor) -> int:
    """Return the number of positions: sentences times their length."""
    return scores[..., 0].numel()


# --- 16.2 -------------------------------------------------------------------------------------------------

HIDDEN = "about 15 of 100 tokens are hidden, none of them special, and the labels hold what they were"
AGAIN = "the same four numbers draw the same masks, whatever was drawn in between"
OTHERS = "another seed, epoch, step or rank draws others"
MASK = 4  # the id of [MASK]; those below are special
FIRST = 5  # the first id that is not special
SENTENCES, LENGTH, FEW = 60, 50, 8
SIZES: tuple[int, ...] = (*(10**i for i in range(7)), 10**9, 16, 32, 64, 256, 1024, 4096, 2**16, 2**20, 2**32)
SIZES += (17, 31, 37, 97, 101, 997, 1009, 7919, 9973, 10007, 100003, 104729, 1000003, 1299709, 10**9 + 7)
Place = tuple[int, ...]  # seed, epoch, step, rank


@question(
    "16.2",
    "mask(ids, seed, epoch, step, rank)",
    {HIDDEN: 1, AGAIN: 1, OTHERS: 1},
    rests={AGAIN: HIDDEN, OTHERS: HIDDEN},
)
def mask(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    base = rng.randrange(5, 1000), rng.randrange(1, 9), rng.randrange(1, 90), rng.randrange(1, 8)
    a, b = rng.sample(range(4), 2)
    places: list[Place] = [base]
    # one number larger by 1
    places += [tuple(value + (i == at) for i, value in enumerate(base)) for at in range(4)]
    places.append(tuple(value + (i == a) - (i == b) for i, value in enumerate(base)))  # an equal sum
    swapped = [*base]
    swapped[a], swapped[b] = base[b] + 10, base[a] + 10
    plus = [*base]
    plus[a], plus[b] = base[a] + 10, base[b] + 10
    places += [tuple(swapped), tuple(plus)]  # an equal sum, the same numbers in other places
    places += [(1, 11, 1, 1), (11, 1, 1, 1), (1, 1, 11, 1)]  # the same digits, one after the other
    places = list(dict.fromkeys(places))
    places.append((2**40 + base[0], *base[1:]))  # a large seed
    # Weighted sums, as in 1000 * step + rank, collide where the ratio of two weights is that of two sizes.
    alone = [(0,) * at + (size,) + (0,) * (3 - at) for at in range(4) for size in SIZES]
    ids, other = _ids(rng.randrange(2**31))
    special = torch.where(ids[:1] < FIRST, ids[:1], rng.randrange(FIRST))
    texts = [ids.tolist(), other.tolist(), ids[:FEW].tolist(), special.tolist()]
    calls = [*((0, place) for place in [*places, base]), (1, base), *((2, place) for place in alone)]
    calls.append((3, base))
    (results,) = ask(_masks, texts, calls, rng.randrange(2**31))
    *results, of_special = results
    (once_more,) = ask(_masks, texts, [(0, base)], rng.randrange(2**31))
    few, results = results[len(places) + 2 :], results[: len(places) + 2]
    masks = [torch.tensor(result["labels"]) != IGNORED for result in results]
    for place, result, hidden in zip([*places, base], results, masks, strict=False):
        yield first_fault(HIDDEN, _of_one_mask(f"with {place} ", ids, result, hidden))
    if all(hidden.shape == ids.shape for hidden in masks):
        yield _of_all_masks(ids, masks[: len(places)])
    when = f"with {base} once more, and other words in the very same tensor, "
    yield first_fault(HIDDEN, _of_one_mask(when, other, results[-1], masks[-1]))
    fresh = torch.tensor(once_more[0]["labels"]) != IGNORED
    yield first_fault(HIDDEN, _of_one_mask(f"with {base} in a fresh process ", ids, once_more[0], fresh))
    hidden = torch.tensor(of_special["labels"]) != IGNORED
    yield first_fault(
        HIDDEN, _of_one_mask("in a sentence of special tokens alone ", special, of_special, hidden)
    )
    hint = "What do your random numbers depend on besides the four numbers?"
    for hidden, when in (
        (masks[-2], "later in the same process"),
        (fresh, "in a fresh process"),
        (masks[-1], "with other words in the same places"),
    ):
        seen = f"{base} once more, {when}: other tokens are hidden"
        yield Finding(AGAIN, torch.equal(hidden, masks[0]), seen, hint)
    yield Finding(
        AGAIN,
        all(result["rng_left"] for result in [*results, *few]),
        "torch.rand(1) after your call gives another number than without it",
        "Dropout draws from torch's own generator. Let your masks have one of theirs.",
    )
    alike: list[tuple[Any, Any]] = []
    for drawn in (zip(places, results, strict=False), zip(alone, few, strict=True)):
        by_labels: dict[str, Place] = {}
        for place, result in drawn:
            before = by_labels.setdefault(str(result["labels"]), place)
            alike += [(before, place)] if before != place else []
    seen = "(seed, epoch, step, rank) = {} and {} hide the same tokens".format(*(alike or [("", "")])[0])
    hint = "How do four numbers become one, so that no two quadruples become the same?"
    changed = [sum(x != y for x, y in zip(*pair, strict=True)) for pair in alike]
    if set(changed) == {1}:
        hint = "They differ in one of the four numbers only. Do your random numbers depend on all of them?"
    yield Finding(OTHERS, not alike, seen, hint)


def _ids(seed: int) -> tuple[Tensor, Tensor]:
    """Draw padded sentences with special ids at both ends and in between, and the same with other words."""
    generator = torch.Generator().manual_seed(seed)
    ids, other = torch.randint(FIRST, 400, (2, SENTENCES, LENGTH), generator=generator)
    kind = torch.rand(ids.shape, generator=generator)
    ids[kind < 0.2] = FIRST  # the first id that is not special is frequent
    ids[kind > 0.9] = torch.randint(1, FIRST, ids.shape, generator=generator)[kind > 0.9]
    for row, length in enumerate(torch.randint(LENGTH // 2, LENGTH + 1, (SENTENCES,), generator=generator)):
        ids[row, 0], ids[row, length - 1] = 2, 3
        ids[row, length:] = 0
    return ids, torch.where(ids < FIRST, ids, other)


def _of_all_masks(ids: Tensor, masks: list[Tensor]) -> Finding:
    """Check the share hidden of all tokens, and of those with the first id that is not special."""
    all_of = torch.stack(masks).double().mean(0)
    hint = "Each token that is not special is hidden with a probability of 0.15, whatever its id is."
    share, of_first = (all_of[words].mean().item() for words in (ids >= FIRST, ids == FIRST))
    seen = f"in all calls {share:.1%} of the tokens are hidden, and {of_first:.1%} of those with id {FIRST}"
    return Finding(HIDDEN, abs(share - 0.15) < 0.015 and abs(of_first - 0.15) < 0.03, seen, hint)


def _of_one_mask(seen: str, ids: Tensor, result: Result, hidden: Tensor) -> Faults:
    words, labels, inputs = ids > MASK, torch.tensor(result["labels"]), torch.tensor(result["inputs"])
    asked = tuple(ids.shape), "torch.int64"
    kinds = [(tuple(each.shape), kind) for each, kind in zip((inputs, labels), result["dtypes"], strict=True)]
    if kinds != [asked] * 2:
        seen += f"inputs are {kinds[0]}, labels {kinds[1]}, and ids {asked}"
        yield seen, "An embedding takes ids, and a cross entropy labels, of which shape and type?"
    if not result["ids_left"]:
        yield "ids have changed after your call", "Write into a copy: the loader hands out the same ones."
    if (hidden & ~words).any():
        yield seen + "a special token is hidden", "Ids below 5 are special: they cannot be guessed."
    if words.any() and not 0.1 < (share := hidden.sum().item() / words.sum().item()) < 0.2:
        seen += f"{share:.0%} of the tokens that are not special are hidden"
        yield seen, "Each of them is hidden with a probability of 0.15, independently of the others."
    right = torch.where(hidden, MASK, ids), torch.where(hidden, ids, IGNORED)
    if not (torch.equal(inputs, right[0]) and torch.equal(labels, right[1])):
        seen += "an input is not [MASK] where a label asks, or a label is not the id that was hidden there"
        yield seen, "Where a label asks, the input is 4; everywhere else it is what it was."


@reports(
    lambda texts, calls, _: (
        [{"inputs": TENSOR, "labels": TENSOR, "ids_left": bool, "rng_left": bool, "dtypes": [str, str]}]
        * len(calls)
    )
)
def _masks(answer: Any, texts: list[Any], calls: list[tuple[int, Place]], seed: int) -> list[Result]:
    results = []
    tensors: dict[int, Tensor] = {}  # by length: the same object for each text of that length
    numbers: dict[int, int] = {}
    torch.manual_seed(seed)
    for text, place in calls:
        ids = texts[text]
        given = tensors.setdefault(len(ids), torch.tensor(ids)).copy_(torch.tensor(ids))
        same = [numbers.setdefault(value, value) for value in place]
        state = torch.get_rng_state()
        expected = torch.rand(1)
        torch.set_rng_state(state)
        with patch("builtins.hash", partial(hash_of_process, hash, seed)):
            answered = answer(given, *same)
        two = isinstance(answered, tuple | list) and len(answered) == 2
        refuse_unless(two, "mask(…) returns two tensors, inputs and labels", answered)
        inputs, labels = answered
        if not all(isinstance(tensor, Tensor) and tensor.dim() == 2 for tensor in answered):
            raise Refused(f"inputs and labels are tensors of the shape of ids; these are {told(answered)}")
        dtypes = [str(inputs.dtype), str(labels.dtype)]
        inputs, labels = (tensor.tolist() for tensor in (inputs.long(), labels.long()))
        results.append({"inputs": inputs, "labels": labels, "ids_left": given.tolist() == ids})
        results[-1]["dtypes"] = dtypes
        results[-1]["rng_left"] = torch.equal(torch.rand(1), expected)
    return results


# --- 16.3 -------------------------------------------------------------------------------------------------

DECAY = "AdamW's weight decay is 0.01 for matrices, and 0 for vectors and single numbers"
PYTORCHS = "torch.optim.AdamW"
RATES = "the learning rate rises and falls over a rank's steps, also through a resume"
ONCE_MORE = "called once more with the very same model, whose last layer is a new one"
RESUMED = "Both states were saved and loaded into new objects. What part of the schedule is not in its state?"


class _Block(nn.Module):
    """A block with misleading names: a norm that is not called norm, a matrix called bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.full_layer_layer_norm = nn.LayerNorm(width)
        self.position_bias = nn.Embedding(7, width)
        self.dense = nn.Linear(width, width)
        self.neighbours = nn.Conv1d(width, width, 3)
        self.scale = nn.Parameter(torch.ones(()))


def _model(width: int, turned: bool) -> nn.ModuleDict:
    """Build a model with a matrix as its first parameter and a vector as its last, or the other way round."""
    words, out = nn.Embedding(9, width), nn.Linear(width, 9)
    out.weight = words.weight  # tied
    parts = {"words": words, "blocks": nn.ModuleList([_Block(width)]), "out": out}
    if turned:
        parts = {"norm_of_the_input": nn.LayerNorm(width), **parts, "pool": nn.Linear(width, 2, bias=False)}
    return nn.ModuleDict(parts)


def _with_another_end(model: nn.ModuleDict, width: int) -> nn.ModuleDict:
    """Give a model a last layer of its own, as for another task."""
    model["out"] = nn.Linear(width, 5)
    return model


@question("16.3", "prepare(model, lr, epochs, samples, batch_size, ranks)", {DECAY: 1, RATES: 1})
def prepare(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    calls: list[tuple[Any, ...]] = []
    turned = rng.random() < 0.5
    for turn, ranks in enumerate(rng.sample(range(2, 6), 3)):
        width, lr, epochs = rng.randint(3, 6), rng.uniform(1e-4, 1e-2), rng.randint(2, 4)
        batch_size = rng.randint(3, 6)
        # Once a multiple of ten, once more than five above: another rounding of a tenth is right in one alone
        in_tens = not calls
        steps = range(5, 11)  # per epoch; with any number of epochs, some of them fit
        if turn == 2:  # fewer than ten in all
            epochs, steps = 1, range(6, 10)
        fitting = [n for n in steps if (n * epochs % 10 == 0 if in_tens else n * epochs % 10 > 5)]
        # With a remainder, which is padded, and a short last batch
        samples = ranks * batch_size * (rng.choice(fitting) - 1) + 1 + rng.randrange(ranks - 1)
        a_rank = math.ceil(math.ceil(samples / ranks) / batch_size) * epochs
        form = width, turned != in_tens
        calls.append((form, (lr, epochs, samples, batch_size, ranks), a_rank, rng.randrange(1, a_rank - 2)))
    (all_found,) = ask(_prepared, calls)
    for result, (form, arguments, a_rank, _) in zip(all_found, calls, strict=True):
        yield _of_decay(result, _model(*form))
        yield _of_decay(result | result["again"], _with_another_end(_model(*form), form[0]), f"{ONCE_MORE}, ")
        seen = "after your call the model has other parameters, or numbers, or a module in another mode"
        yield Finding(DECAY, result["stays"], seen, "It is only read here; the training comes later.")
        lr, epochs, samples, batch_size, ranks = arguments
        right = [_rate(lr, step, a_rank) for step in range(a_rank)]
        for name, rates in (("", result["rates"]), ("resumed: ", result["resumed"])):
            # In each step, the group that is farthest off
            by_step = zip(rates, right, strict=True)
            rates = [max(groups, key=lambda rate: abs(rate - known)) for groups, known in by_step]
            step, gap = furthest(abs(rate - known) for rate, known in zip(rates, right, strict=True))
            seen = f"{name}{samples} samples, batch_size {batch_size}, {ranks} ranks, {epochs} epochs: "
            seen += f"in step {step} the learning rate is {rates[step]:.4g}, and should be {right[step]:.4g}"
            yield Finding(RATES, gap < 1e-6 * lr, seen, _of_rates(bool(name), rates, arguments))
        first = max(result["again"]["rates"], key=lambda rate: abs(rate - right[0]))
        seen = f"{ONCE_MORE}, the learning rate is {first:.4g} in step 0, and should be {right[0]:.4g}"
        hint = "Each call begins a new run. What of an earlier one is in what you return?"
        yield Finding(RATES, abs(first - right[0]) < 1e-6 * lr, seen, hint)
        seen = "a second optimizer holds the parameters in another order than the first"
        hint = "A state is loaded by the parameters' positions. What does your order come from?"
        yield Finding(RATES, result["same_order"], seen, hint)


def _rate(lr: float, step: int, steps: int) -> float:
    rising = 1 + steps // 10
    return lr * min((step + 1) / rising, (steps - step) / (steps - rising + 1))


def _of_decay(result: Result, model: nn.Module, when: str = "") -> Finding:
    parameters = [(name, parameter.ndim) for name, parameter in model.named_parameters()]
    if result["kind"] != PYTORCHS:
        seen = f"the optimizer is {result['kind']}"
        return Finding(DECAY, False, seen, "torch.optim has the one that is asked for, with its defaults.")
    wrong = [
        (name, ndim, decay)
        for (name, ndim), decay in zip(parameters, result["decays"], strict=True)
        if decay is None or not abs(decay - (0.01 if ndim > 1 else 0.0)) <= 1e-9  # nan, too
    ]
    name, ndim, decay = (wrong or [("", 0, 0.0)])[0]
    seen = f"{when}{name}, of {ndim} dimensions, "
    seen += "is in no group" if decay is None else f"decays by {decay}"
    hint = "Neither its name nor the kind of its module decides, only its shape."
    if decay is None:
        hint = "Every parameter belongs in one of the groups, or it is never trained."
    elif len(set(result["decays"])) == 1:
        hint = "All parameters have the same decay. "
        hint += "An optimizer takes groups of parameters, each with its own decay."
    return Finding(DECAY, not wrong, seen, hint)


def _of_rates(resumed: bool, rates: list[float], arguments: tuple[Any, ...]) -> str:
    lr, epochs, samples, batch_size, ranks = arguments
    if resumed:
        return RESUMED
    alone, floor = math.ceil(samples / batch_size) * epochs, samples // ranks // batch_size * epochs
    lines = [[_rate(lr, step, max(n, 1)) for step in range(len(rates))] for n in (alone, floor)]
    rest = "The remainder makes a step, too: a sampler pads, and a loader's last batch may be short."
    return nearest(
        rates,
        (lines[0], "That counts the steps that one rank would make alone. How long is a rank's loader?"),
        (lines[1], rest),
        otherwise="Which steps does it count, of how many epochs, and how many belong to the warm-up?",
        within=1e-6 * lr,
    )


def _seen_of(form: tuple[int, bool], steps: int) -> Result:
    models = _model(*form), _with_another_end(_model(*form), form[0])
    decays, others = ([(NUMBER, bool, None) for _ in model.parameters()] for model in models)
    rates = [float, float, ...]  # of a group at least
    again = {"decays": others, "rates": rates}
    seen = {"kind": str, "decays": decays, "again": again, "same_order": bool, "stays": bool}
    return seen | dict.fromkeys(("rates", "resumed"), [rates] * steps)


@reports(lambda calls: [_seen_of(form, steps) for form, _, steps, _ in calls])
@on_each_case
def _prepared(answer: Any, form: tuple[int, bool], arguments: list[Any], steps: int, stop: int) -> Result:
    orders, stays = [], []

    def begin(model: nn.ModuleDict | None = None) -> tuple[nn.ModuleDict, Any, Any]:
        torch.manual_seed(0)
        model = _model(*form) if model is None else model
        before = settings(model), [id(p) for p in model.parameters()], _numbers_of(model)
        answered = answer(model, *arguments)
        asked = "prepare(…) returns an optimizer and a schedule"
        refuse_unless(isinstance(answered, tuple | list) and len(answered) == 2, asked, answered)
        optimizer, schedule = answered
        fit = isinstance(optimizer, torch.optim.Optimizer) and hasattr(schedule, "state_dict")
        refuse_unless(fit, asked, answered)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        orders.append([names.get(id(p)) for group in optimizer.param_groups for p in group["params"]])
        stays.append(before == (settings(model), [id(p) for p in model.parameters()], _numbers_of(model)))
        return model, optimizer, schedule

    def go_on(optimizer: Any, schedule: Any, count: int) -> list[list[float]]:
        rates = []
        for _ in range(count):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        return rates

    def decays(model: nn.Module, optimizer: Any) -> list[float | None]:
        of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        return [of.get(id(p)) for p in model.parameters()]

    model, optimizer, schedule = begin()
    kind = _kind(optimizer)
    seen: Result = {"kind": kind, "decays": decays(model, optimizer)}
    seen["rates"] = go_on(optimizer, schedule, steps)
    _, optimizer, schedule = begin(_with_another_end(model, form[0]))
    orders.pop()  # of another model
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    seen["again"] = {"decays": decays(model, optimizer), "rates": rates}
    _, optimizer, schedule = begin()
    first = go_on(optimizer, schedule, stop)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    _, optimizer, schedule = begin()
    for restored, state in zip((optimizer, schedule), states, strict=True):
        restored.load_state_dict(state)
    seen["resumed"] = first + go_on(optimizer, schedule, steps - stop)
    return seen | {"same_order": all(order == orders[0] for order in orders), "stays": all(stays)}


def _numbers_of(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return PYTORCHS, or in words what the optimizer is instead."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return type(optimizer).__name__
    known = torch.optim.AdamW([nn.Parameter(torch.ones(()))]).defaults
    for group in optimizer.param_groups:
        for name in ("betas", "eps", "amsgrad", "maximize"):
            if group[name] != known[name]:
                return f"{PYTORCHS} with {name}={group[name]}"
    return PYTORCHS
