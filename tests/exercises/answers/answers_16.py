"""What people answer in exercise 16, wrong and right (see `answers`)."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

GRADIENT = "every rank holds the gradient of the mean loss over all asked tokens of all ranks"
LOSS = "every rank returns that mean loss"
SILENT = "a piece, a rank, or all ranks without a question: nothing is lost, and nothing is nan"
ONCE = "the gradients travel once"


def asked(pieces):
    return torch.tensor(sum(int((labels != -100).sum()) for _, labels in pieces))


def of_all_ranks(number):
    number = torch.as_tensor(number).clone()
    dist.all_reduce(number)
    return number.item()


def summed(ddp, piece):
    ids, labels = piece
    return F.cross_entropy(ddp(ids).flatten(0, 1), labels.flatten(), reduction="sum")


def by_pieces(ddp, pieces, divisor, once=True, clear=True):
    """The backward passes, each piece's sum over its divisor; and the sum of the losses of all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    if clear:
        ddp.zero_grad()
    for i, piece in enumerate(pieces):
        with ddp.no_sync() if once and i < len(pieces) - 1 else nullcontext():
            loss = summed(ddp, piece)
            (loss / divisor(piece)).backward()
        total += loss.detach()
    return of_all_ranks(total)


def right_but(ddp, pieces, **how):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size(), **how) / tokens


@wrong("16.1", hint="Every piece has the same weight here, whether it asks for one token or for twenty.")
def mean_of_the_means(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return by_pieces(ddp, pieces, lambda piece: max(asked([piece]), 1) * len(pieces)) / tokens


@wrong(
    "16.1", hint="It is right on each rank, but the ranks have the same weight, with few questions or many."
)
def by_its_own_tokens(ddp, pieces):
    own = max(asked(pieces).item(), 1)
    return by_pieces(ddp, pieces, lambda _: own) / own


@wrong("16.1", hint="What does DDP divide by?")
def forgets_that_ddp_divides(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return by_pieces(ddp, pieces, lambda _: tokens) / tokens


@wrong("16.1", hint="What is each token's loss divided by")
def counts_every_token(ddp, pieces):
    tokens = of_all_ranks(sum(ids.numel() for ids, _ in pieces))
    return by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size()) / tokens


@wrong("16.1", hint="What is each token's loss divided by")
def written_for_two_ranks(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    return by_pieces(ddp, pieces, lambda _: tokens / 2 * 1.5) / tokens


@wrong("16.1", hint="in every call")
def leaves_the_old_ones(ddp, pieces):
    return right_but(ddp, pieces, clear=False)


@wrong("16.1", hint="which pass averages it")
def through_the_side_door(ddp, pieces):
    return right_but(ddp.module, pieces, once=False)


@wrong("16.1", GRADIENT, SILENT, ONCE, hint="one rank's own tokens")
def returns_its_own_loss(ddp, pieces):
    loss, own = right_but(ddp, pieces), asked(pieces).item()
    everywhere = of_all_ranks(torch.tensor(int(own > 0))) == dist.get_world_size()
    if not everywhere:
        return loss
    with torch.no_grad():
        return sum(summed(ddp.module, piece) for piece in pieces).item() / own


@wrong("16.1", GRADIENT, ONCE, hint="how many of them is it divided by")
def returns_what_ddp_was_given(ddp, pieces):
    return right_but(ddp, pieces) * dist.get_world_size()


@wrong("16.1", GRADIENT, LOSS, ONCE, hint="That is 0 divided by 0.")
def divides_by_nothing(ddp, pieces):
    tokens = of_all_ranks(asked(pieces).double())
    tokens = tokens or math.nan
    return by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size()) / tokens


@wrong("16.1", GRADIENT, LOSS, SILENT, hint="which passes need to send?")
def averages_every_piece(ddp, pieces):
    return right_but(ddp, pieces, once=False)


@wrong("16.1", GRADIENT, LOSS, SILENT, hint="And what else travels?")
def by_hand_and_by_ddp(ddp, pieces):
    loss = right_but(ddp, pieces)
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return loss


@wrong("16.1", GRADIENT, LOSS, SILENT, hint="and for how many pieces?")
def goes_backward_once_for_all(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    ddp.zero_grad()
    losses = []
    for i, piece in enumerate(pieces):
        with ddp.no_sync() if i < len(pieces) - 1 else nullcontext():
            losses.append(summed(ddp, piece))
    (sum(losses) * dist.get_world_size() / tokens).backward()
    return of_all_ranks(sum(losses).detach()) / tokens


@wrong(
    "16.1",
    GRADIENT,
    LOSS,
    SILENT,
    hint="Switch back at the end whatever you switch, and only read what you are given.",
)
def begins_with_train(ddp, pieces):
    ddp.train()
    return right_but(ddp, pieces)


@wrong("16.1", GRADIENT, ONCE, hint="The first digits are right")
def loss_in_float32(ddp, pieces):
    return torch.tensor(right_but(ddp, pieces) / 3).item() * 3


@wrong("16.1", hint="without waiting for the end of it")
def a_loss_for_the_log_that_nobody_waits_for(ddp, pieces):
    loss = right_but(ddp, pieces)
    dist.all_reduce(torch.tensor(loss), async_op=True)
    return loss


@wrong("16.1", hint="ranks")
def synchronises_every_third(ddp, pieces):
    tokens = max(of_all_ranks(asked(pieces)), 1)
    total = torch.zeros((), dtype=torch.float64)
    ddp.zero_grad()
    for i, piece in enumerate(pieces, start=1):
        with nullcontext() if i % 3 == 0 else ddp.no_sync():
            loss = summed(ddp, piece)
            (loss * dist.get_world_size() / tokens).backward()
        total += loss.detach()
    return of_all_ranks(total) / tokens


LOSSES = {}


@wrong("16.1", hint="in every call")
def remembers_the_list(ddp, pieces):
    if id(pieces) not in LOSSES:
        LOSSES[id(pieces)] = pieces, right_but(ddp, pieces)
    return LOSSES[id(pieces)][1]


@wrong("16.1", GRADIENT, LOSS, ONCE, hint="One token is a question, too")
def takes_one_for_none(ddp, pieces):
    tokens = of_all_ranks(asked(pieces))
    tokens = tokens if tokens > 1 else math.inf
    return by_pieces(ddp, pieces, lambda _: tokens / dist.get_world_size()) / tokens


class ByTokens:
    @functools.cached_property
    def ranks(self):
        return dist.get_world_size()

    def __call__(self, ddp, pieces):
        from torch.distributed import all_reduce

        work = all_reduce(count := asked(pieces), async_op=True)
        ddp.zero_grad(set_to_none=False)
        work.wait()
        tokens = max(1, int(count))
        return by_pieces(ddp, pieces, lambda _: tokens / self.ranks, clear=False) / tokens


right("16.1")(ByTokens())


@right("16.1")
def average_by_hand(ddp, pieces):
    tokens = of_all_ranks(asked(pieces))
    ddp.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        with ddp.no_sync():
            loss = summed(ddp, piece)
            loss.backward()
        total += loss.detach()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= tokens or 1
    return of_all_ranks(total) / (tokens or 1)


@right("16.1")
def the_mean_times_its_tokens(ddp, pieces):
    """With one all_reduce for both numbers, at the beginning, and a tensor that comes back."""
    counts = torch.tensor([0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        for piece in pieces:
            counts += torch.stack([summed(ddp.module, piece), asked([piece]).double()])
    dist.all_reduce(counts)
    for parameter in ddp.parameters():
        parameter.grad = None
    ddp.require_backward_grad_sync = False
    for i, (ids, labels) in enumerate(pieces):
        ddp.require_backward_grad_sync = i == len(pieces) - 1
        chosen = labels != -100
        losses = F.cross_entropy(ddp(ids)[chosen], labels[chosen], reduction="none")
        (losses.sum() * dist.get_world_size() / counts[1].clamp(min=1)).backward()
    return counts[0] / counts[1].clamp(min=1)


# --- 16.2 -------------------------------------------------------------------------------------------------

HIDDEN = "about 15 of 100 tokens are hidden, none of them special, and the labels hold what they were"
AGAIN = "the same four numbers draw the same masks, whatever was drawn in between"
OTHERS = "another seed, epoch, step or rank draws others"


def with_generator(ids, generator, chance=0.15):
    chosen = (torch.rand(ids.shape, generator=generator) < chance) & (ids > 4)
    return torch.where(chosen, 4, ids), torch.where(chosen, ids, -100)


def generator(number):
    return torch.Generator().manual_seed(number % 2**63)


@wrong("16.2", HIDDEN, AGAIN, hint="become the same?")
def adds_them_up(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(seed + epoch + step + rank))


@wrong("16.2", HIDDEN, AGAIN, hint="depend on all of them?")
def forgets_the_step(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(hash((seed, epoch, rank))))


@wrong("16.2", HIDDEN, OTHERS, hint="besides the four numbers")
def by_the_hash_of_a_text(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(hash(f"{seed} {epoch} {step} {rank}")))


@wrong("16.2", HIDDEN, OTHERS, hint="have one of theirs")
def seeds_torch_as_before(ids, seed, epoch, step, rank):
    before = torch.initial_seed()
    found = seeds_all_of_torch(ids, seed, epoch, step, rank)
    torch.manual_seed(before)
    return found


@wrong("16.2", hint="whatever its id is")
def takes_five_for_special(ids, seed, epoch, step, rank):
    inputs, labels = with_generator(ids, generator(hash((seed, epoch, step, rank))), chance=0.19)
    return torch.where(ids == 5, ids, inputs), torch.where(ids == 5, -100, labels)


@wrong("16.2", HIDDEN, OTHERS, hint="have one of theirs")
def seeds_all_of_torch(ids, seed, epoch, step, rank):
    torch.manual_seed(hash((seed, epoch, step, rank)) % 2**63)
    return with_generator(ids, None)


@wrong("16.2", hint="cannot be guessed")
def hides_special_tokens(ids, seed, epoch, step, rank):
    chosen = torch.rand(ids.shape, generator=generator(hash((seed, epoch, step, rank)))) < 0.15
    return torch.where(chosen, 4, ids), torch.where(chosen, ids, -100)


@wrong("16.2", hint="with a probability of 0.15")
def half_of_them(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(hash((seed, epoch, step, rank))), chance=0.5)


@wrong("16.2", hint="everywhere else it is what it was")
def asks_for_all(ids, seed, epoch, step, rank):
    inputs, labels = with_generator(ids, generator(hash((seed, epoch, step, rank))))
    return inputs, torch.where(labels == -100, -100, inputs)


@wrong("16.2", hint="Write into a copy")
def writes_into_the_ids(ids, seed, epoch, step, rank):
    inputs, labels = with_generator(ids, generator(hash((seed, epoch, step, rank))))
    return ids.copy_(inputs), labels


@wrong("16.2", hint="returns two tensors")
def returns_the_inputs_alone(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(1))[0]


@wrong("16.2", HIDDEN, AGAIN, hint="become the same?")
def by_prime_numbers(ids, seed, epoch, step, rank):
    return with_generator(ids, generator(seed + 7919 * epoch + 104729 * step + 1299709 * rank))


@wrong("16.2", hint="independently of the others")
def the_same_places_of_each_sentence(ids, seed, epoch, step, rank):
    columns = torch.rand(ids.shape[1], generator=generator(hash((seed, epoch, step, rank)))) < 0.15
    chosen = columns.expand(ids.shape) & (ids > 4)
    return torch.where(chosen, 4, ids), torch.where(chosen, ids, -100)


@wrong("16.2", hint="everywhere else it is what it was")
def eighty_ten_ten(ids, seed, epoch, step, rank):
    """As BERT's."""
    own = generator(hash((seed, epoch, step, rank)))
    inputs, labels = with_generator(ids, own)
    other = torch.rand(ids.shape, generator=own)
    return torch.where((labels != -100) & (other > 0.8), ids, inputs), labels


@right("16.2")
def by_a_digest(ids, seed, epoch, step, rank):
    import hashlib

    text = f"{seed} {epoch} {step} {rank}".encode()
    return with_generator(ids, generator(int.from_bytes(hashlib.sha256(text).digest()[:7])))


@functools.cache
def dice_of(*place):
    """One for each place; its state is put back."""
    made = generator(hash(place))
    return made, made.get_state()


@right("16.2")
def by_pythons_own_dice(ids, seed, epoch, step, rank):
    import random

    own = random.Random(f"{seed}/{epoch}/{step}/{rank}")
    inputs, labels = ids.tolist(), [[-100] * ids.shape[1] for _ in ids]
    for row, answers in zip(inputs, labels, strict=True):
        for at, token in enumerate(row):
            if token > 4 and own.random() < 0.15:
                row[at], answers[at] = 4, token
    return torch.tensor(inputs), torch.tensor(labels)


MASKS = {}


@wrong("16.2", hint="in the very same tensor")
def remembers_the_tensor(ids, *place):
    if (ids, place) not in MASKS:
        MASKS[ids, place] = with_generator(ids, generator(hash(place)))
    return MASKS[ids, place]


# --- 16.3 -------------------------------------------------------------------------------------------------

DECAY = "AdamW's weight decay is 0.01 for matrices, and 0 for vectors and single numbers"
RATES = "the learning rate rises and falls over a rank's steps, also through a resume"


def by_shape(model, lr, kind=torch.optim.AdamW):
    parts = [[each for each in model.parameters() if (each.ndim > 1) == many] for many in (True, False)]
    return kind([{"params": p, "weight_decay": d} for p, d in zip(parts, (0.01, 0.0), strict=True)], lr=lr)


def linear(optimizer, n):
    w = 1 + n // 10
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / w, (n - s) / (n - w + 1)))


def steps_of(epochs, samples, batch_size, ranks):
    return math.ceil(math.ceil(samples / ranks) / batch_size) * epochs


@wrong("16.3", RATES, hint="only its shape")
def by_the_kind_of_module(model, lr, epochs, samples, batch_size, ranks):
    spared = {
        id(p) for each in model.modules() if isinstance(each, torch.nn.Embedding) for p in each.parameters()
    }
    decays = [0.01 if p.ndim > 1 and id(p) not in spared else 0.0 for p in model.parameters()]
    groups = [
        {
            "params": [p for p, d in zip(model.parameters(), decays, strict=True) if d == each],
            "weight_decay": each,
        }
        for each in (0.01, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


@wrong("16.3", RATES, hint="takes groups of parameters")
def all_alike(model, lr, epochs, samples, batch_size, ranks):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


@wrong("16.3", RATES, hint="never trained")
def forgets_single_numbers(model, lr, epochs, samples, batch_size, ranks):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


@wrong("16.3", RATES, hint="has the one that is asked for")
def adam_without_w(model, lr, epochs, samples, batch_size, ranks):
    optimizer = by_shape(model, lr, torch.optim.Adam)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


@wrong("16.3", DECAY, hint="How long is a rank's loader?")
def steps_of_one_rank_alone(model, lr, epochs, samples, batch_size, ranks):
    optimizer = by_shape(model, lr)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, 1))


@wrong("16.3", DECAY, hint="The remainder makes a step, too:")
def leaves_out_the_rest(model, lr, epochs, samples, batch_size, ranks):
    optimizer = by_shape(model, lr)
    return optimizer, linear(optimizer, samples // (ranks * batch_size) * epochs)


def with_a_warm_up(model, lr, n, w):
    optimizer = by_shape(model, lr)
    line = [min((s + 1) / w, (n - s) / (n - w + 1)) for s in range(n)] + [0.0]
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: line[s])


@wrong("16.3", DECAY, hint="how many belong to the warm-up")
def a_tenth_rounded_up(model, lr, epochs, samples, batch_size, ranks):
    n = steps_of(epochs, samples, batch_size, ranks)
    return with_a_warm_up(model, lr, n, math.ceil(n / 10))


class AdamW(torch.optim.Adam):
    """It has the name alone: its decay goes through the gradient."""


@wrong("16.3", RATES, hint="is in no group")
def without_the_norms(model, lr, epochs, samples, batch_size, ranks):
    held = [
        p
        for part in model.modules()
        if not isinstance(part, torch.nn.LayerNorm)
        for p in part.parameters(False)
    ]
    held = list(dict.fromkeys(held))
    parts = [[p for p in held if (p.ndim > 1) == many] for many in (True, False)]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(parts, (0.01, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


class MyAdamW(torch.optim.AdamW):
    """One with another default."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, weight_decay=0.01)


@right("16.3")
def by_a_class_of_its_own(model, lr, epochs, samples, batch_size, ranks):
    few = [p for p in model.parameters() if p.ndim < 2]
    many = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = MyAdamW([{"params": few, "weight_decay": 0.0}, {"params": many}], lr)
    return optimizer, linear(optimizer, steps_of(epochs, samples, batch_size, ranks))


@right("16.3")
def in_two_lines(model, lr, epochs, samples, batch_size, ranks):
    n = steps_of(epochs, samples, batch_size, ranks)
    return with_a_warm_up(model, lr, n, 1 + n // 10)


@wrong("16.3", DECAY, hint="of how many epochs")
def one_epoch(model, lr, epochs, samples, batch_size, ranks):
    optimizer = by_shape(model, lr)
    return optimizer, linear(optimizer, steps_of(1, samples, batch_size, ranks))


@wrong("16.3", DECAY, hint="not in its state")
def counts_in_a_variable(model, lr, epochs, samples, batch_size, ranks):
    optimizer, n, made = by_shape(model, lr), steps_of(epochs, samples, batch_size, ranks), []

    def factor(_):
        made.append(1)
        s, w = (len(made) - 1) // 2, 1 + n // 10  # it is called for both groups
        return min((s + 1) / w, (n - s) / (n - w + 1))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@wrong("16.3", DECAY, hint="Which steps does it count")
def one_group_alone_rises(model, lr, epochs, samples, batch_size, ranks):
    optimizer = by_shape(model, lr)
    factor = linear(optimizer, steps_of(epochs, samples, batch_size, ranks)).lr_lambdas[0]
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [factor, lambda s: 1.0])


@wrong("16.3", hint="returns an optimizer and a schedule")
def the_optimizer_alone(model, lr, epochs, samples, batch_size, ranks):
    return by_shape(model, lr)


@right("16.3")
def each_in_its_own_group(model, lr, epochs, samples, batch_size, ranks):
    groups = [{"params": [p], "weight_decay": 0.01 * (p.ndim >= 2)} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    sampler = torch.utils.data.DistributedSampler([0] * samples, num_replicas=ranks, rank=0)
    loader = torch.utils.data.DataLoader([0] * samples, batch_size, sampler=sampler)
    return optimizer, linear(optimizer, len(loader) * epochs)


PREPARED = {}


@wrong("16.3", hint="called once more with the very same model")
def remembers_the_model(model, lr, epochs, samples, batch_size, ranks):
    given = model, lr, epochs, samples, batch_size, ranks
    if given not in PREPARED:
        PREPARED[given] = in_two_lines(*given)
    return PREPARED[given]


@wrong("16.3", DECAY, hint="Each call begins a new run.")
def goes_on_with_the_steps(model, lr, epochs, samples, batch_size, ranks):
    """With those that the same model has made before."""
    optimizer, schedule = in_two_lines(model, lr, epochs, samples, batch_size, ranks)
    if model in PREPARED:
        schedule.load_state_dict(PREPARED[model].state_dict())
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
    PREPARED[model] = schedule
    return optimizer, schedule


# --- the result is right, and it was not done as asked ---


@wrong("16.1", GRADIENT, LOSS, SILENT, hint="A gather brings every rank's tensor separately.")
def gathers_the_gradients(ddp, pieces):
    tokens, total = max(of_all_ranks(asked(pieces)), 1), torch.zeros((), dtype=torch.float64)
    ddp.zero_grad()
    with ddp.no_sync():
        for piece in pieces:
            loss = summed(ddp, piece)
            loss.backward()
            total += loss.detach()
    for parameter in ddp.parameters():
        of_ranks = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, parameter.grad)
        parameter.grad.copy_(sum(of_ranks) / tokens)
    return of_all_ranks(total) / tokens


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("16.1", GRADIENT, LOSS, SILENT, hint="a module of ddp is in another mode")
def in_one_mode_afterwards(ddp, pieces):
    mode = ddp.training
    ddp.train()
    loss = the_mean_times_its_tokens(ddp, pieces)
    ddp.train(mode)
    return loss


def masked(ids, seed, epoch, step, rank):
    generator = torch.Generator().manual_seed(hash((seed, epoch, step, rank)) % 2**63)
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & (ids > 4)
    return torch.where(chosen, 4, ids), torch.where(chosen, ids, -100)


@wrong("16.2", hint="of which shape and type?")
def as_floats(ids, seed, epoch, step, rank):
    inputs, labels = masked(ids, seed, epoch, step, rank)
    return inputs.float(), labels.float()


@wrong("16.2", hint="a special token is hidden")
def at_least_one(ids, seed, epoch, step, rank):
    inputs, labels = (tensor.clone() for tensor in masked(ids, seed, epoch, step, rank))
    if (labels == -100).all():
        inputs[0, 0], labels[0, 0] = 4, ids[0, 0]
    return inputs, labels


def prepared(model, lr, epochs, samples, batch_size, ranks, warm_up=lambda n: 1 + n // 10, **options):
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    n = math.ceil(math.ceil(samples / ranks) / batch_size) * epochs
    w = warm_up(n)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / w, (n - s) / (n - w + 1)))
    return optimizer, rate


@wrong("16.3", RATES, hint="with its defaults")
def uphill(model, lr, epochs, samples, batch_size, ranks):
    return prepared(model, lr, epochs, samples, batch_size, ranks, maximize=True)


@wrong("16.3", RATES, hint="It is only read here")
def freezes_the_vectors(model, lr, epochs, samples, batch_size, ranks):
    found = prepared(model, lr, epochs, samples, batch_size, ranks)
    for each in model.parameters():
        each.requires_grad_(each.ndim > 1)
    return found


@wrong("16.3", DECAY, hint="how many belong to the warm-up")
def two_steps_at_least(model, lr, epochs, samples, batch_size, ranks):
    return prepared(model, lr, epochs, samples, batch_size, ranks, lambda n: max(2, 1 + n // 10))
