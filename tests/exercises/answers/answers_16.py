"""What people answer in exercise 16, wrong and right (see `answers`)."""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

OTHERS = "another seed, epoch, step or rank hides other tokens"
AGAIN = "the same four numbers hide the same tokens, in every process"


def masked(ids, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & (ids > 4)
    return torch.where(chosen, 4, ids), torch.where(chosen, ids, -100)


@wrong("16.1", hint="one number")
def one_seed_for_all_ranks(ids, seed, epoch, step, rank):
    return masked(ids, hash((seed, epoch, step)))


@wrong("16.1", hint="alike")
def adds_them_up(ids, seed, epoch, step, rank):
    return masked(ids, seed + epoch + step + rank)


@wrong("16.1", hint="alike")
def by_powers_of_a_thousand(ids, seed, epoch, step, rank):
    return masked(ids, seed + 1000 * (epoch + 1000 * (step + 1000 * rank)))


@wrong("16.1", OTHERS, hint="by chance")
def by_the_hash_of_a_text(ids, seed, epoch, step, rank):
    return masked(ids, hash(f"{seed} {epoch} {step} {rank}"))


@wrong("16.1", OTHERS, hint="by chance")
def with_torchs_own_seed(ids, seed, epoch, step, rank):
    return masked(ids, hash((seed, epoch, step, rank, torch.initial_seed())))


@wrong("16.1", hint="returns two tensors")
def returns_the_inputs_alone(ids, seed, epoch, step, rank):
    return masked(ids, 1)[0]


@wrong("16.1", hint="leave the lines below yours")
def hides_nothing(ids, seed, epoch, step, rank):
    return ids, torch.full_like(ids, -100)


@right("16.1")
def by_a_digest(ids, seed, epoch, step, rank):
    text = f"{seed} {epoch} {step} {rank}".encode()
    return masked(ids, int.from_bytes(hashlib.sha256(text).digest()[:7]))


@right("16.1")
def with_the_rank_first(ids, seed, epoch, step, rank):
    return masked(ids, abs(hash((rank, (step, epoch), seed))))


# --- 16.2 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all asked tokens of all ranks"
LOSS = "every rank returns that mean loss"
SILENT = "where a rank asks nothing, or all ranks, nothing is lost, and nothing is nan"


def asked(pieces):
    return sum(int((labels != -100).sum()) for _, labels in pieces)


def of_all_ranks(number):
    number = torch.as_tensor(number, dtype=torch.float64).clone()
    dist.all_reduce(number)
    return number.item()


def by_pieces(ddp, pieces, divisor, once=True):
    """Each piece's sum over its divisor goes backward; return the sum of this rank's losses."""
    total = torch.zeros((), dtype=torch.float64)
    ddp.zero_grad()
    for i, (ids, labels) in enumerate(pieces):
        with nullcontext() if i == len(pieces) - 1 else ddp.no_sync():
            losses = F.cross_entropy(ddp(ids).flatten(0, 1), labels.flatten(), reduction="sum")
            (losses / divisor((ids, labels))).backward()
        total += losses.detach()
    return total.item()


def right_but(ddp, pieces, loss=lambda total, tokens: of_all_ranks(total) / tokens):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return loss(by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size()), tokens)


@wrong("16.2", hint="pieces")
def mean_of_the_means(ddp, pieces):
    return by_pieces(ddp, pieces, lambda piece: max(asked([piece]), 1) * len(pieces))


@wrong("16.2", hint="ranks")
def by_its_own_tokens(ddp, pieces):
    return by_pieces(ddp, pieces, lambda _: max(asked(pieces), 1))


@wrong("16.2", hint="ddp")
def forgets_that_ddp_divides(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return of_all_ranks(by_pieces(ddp, pieces, lambda _: tokens)) / tokens


@wrong("16.2", hint="counts")
def counts_every_token(ddp, pieces):
    tokens = of_all_ranks(sum(ids.numel() for ids, _ in pieces))
    return of_all_ranks(by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size())) / tokens


@wrong("16.2", hint="counts")
def counts_the_last_piece(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces[-1:])), 1)
    return of_all_ranks(by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size())) / tokens


@wrong("16.2", GRADIENT, hint="mean")
def returns_its_own_share(ddp, pieces):
    return right_but(ddp, pieces, lambda total, tokens: total / tokens)


@wrong("16.2", GRADIENT, SILENT, hint="mean")
def returns_the_mean_of_means(ddp, pieces):
    """Which is right where all ask alike, or nobody asks."""
    own = torch.tensor(max(asked(pieces), 1))
    mean = right_but(ddp, pieces, lambda total, tokens: (total, of_all_ranks(total) / tokens))
    everybody = of_all_ranks(asked(pieces) > 0) == dist.get_world_size()
    return of_all_ranks(mean[0] / own) / dist.get_world_size() if everybody else mean[1]


@wrong("16.2", GRADIENT, hint="mean")
def returns_what_ddp_was_given(ddp, pieces):
    return right_but(ddp, pieces) * dist.get_world_size()


@wrong("16.2", GRADIENT, LOSS, hint="nothing")
def divides_by_nothing(ddp, pieces):
    tokens = of_all_ranks(asked(pieces)) or math.nan
    return of_all_ranks(by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size())) / tokens


@right("16.2")
def average_by_hand(ddp, pieces):
    tokens = of_all_ranks(asked(pieces)) or 1
    with ddp.no_sync():
        total = by_pieces(ddp, pieces, lambda _: 1)
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= tokens
    return of_all_ranks(total) / tokens


@right("16.2")
def with_tensors(ddp, pieces):
    """As in the lesson: the count stays a tensor, and so does what comes back."""
    tokens = torch.tensor(asked(pieces))
    dist.all_reduce(tokens)
    tokens = tokens.clamp(min=1)
    total = by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size())
    total = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(total)
    return total / tokens
