"""What people answer in exercise 19, wrong and right (see `answers`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.exercises.answers import right, wrong

MEAN = "at a meeting all ranks take the mean of what training has changed"
WHEN = "the ranks meet after every H-th step, after the last one, and at no other time"


def mean_of(each):
    dist.all_reduce(each)
    each /= dist.get_world_size()


def changed(model, optimizer):
    state = [each for of_one in optimizer.state.values() for each in of_one.values()]
    found = [*model.parameters(), *model.buffers(), *state]
    return [each.detach() for each in found if torch.is_tensor(each) and each.is_floating_point()]


def step_of(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def due(step, steps, every):
    return step % every == 0 or step == steps


def locally(model, optimizer, batches, every, meet=mean_of, when=due):
    for step, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if when(step, len(batches), every):
            for each in changed(model, optimizer):
                meet(each)


@wrong("19.1", hint="sum")
def the_sum(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, meet=dist.all_reduce)


@wrong("19.1", hint="one rank")
def as_rank_0(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, meet=lambda each: dist.broadcast(each, 0))


@wrong("19.1", hint="one rank")
def the_mean_of_a_copy(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, meet=lambda each: mean_of(each.clone()))


@wrong("19.1", MEAN, hint="no last")
def no_last_meeting(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, when=lambda step, steps, every: step % every == 0)


@wrong("19.1", MEAN, hint="other steps")
def only_at_the_end(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, when=lambda step, steps, every: step == steps)


@wrong("19.1", MEAN, hint="other steps")
def after_each_step(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, when=lambda *_: True)


@wrong("19.1", hint="not the mean")
def averages_gradients(model, optimizer, batches, every):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for each in model.parameters():
            if each.grad is not None:
                mean_of(each.grad)
        optimizer.step()


@right("19.1")
def in_rounds(model, optimizer, batches, every):
    while batches:
        now, batches = batches[:every], batches[every:]
        for x, y in now:
            step_of(model, optimizer, x, y)
        for each in changed(model, optimizer):
            mean_of(each)


@right("19.1")
def all_at_once(model, optimizer, batches, every):
    for step, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if step % every and step < len(batches):
            continue
        tensors = changed(model, optimizer)
        mean = torch.cat([each.flatten() for each in tensors]) / dist.get_world_size()
        dist.all_reduce(mean)
        for each, part in zip(tensors, mean.split([each.numel() for each in tensors]), strict=True):
            each.copy_(part.view_as(each))


# --- 19.2 -------------------------------------------------------------------------------------------------

FIRST = "in the first backward pass: the mean over the ranks of what they have sent"
FEEDBACK = "in all later ones, too: what was not sent is added to the next gradient of the same parameter"
BITS = "a rank sends its messages, and nothing else"
PROMISE = "no backward pass waits for other ranks: the hook returns at once"


def message_of(wanted, sizes):
    scales = torch.stack([part.abs().mean() for part in wanted.split(sizes)])
    flags = F.pad(wanted < 0, (0, -len(wanted) % 8)).view(-1, 8)
    return torch.cat([scales.view(torch.uint8), (flags << torch.arange(8)).sum(dim=1, dtype=torch.uint8)])


def arriving(message, sizes):
    scales = message[: 4 * len(sizes)].clone().view(torch.float32)
    scales = scales.repeat_interleave(torch.tensor(sizes))
    octets = message[4 * len(sizes) :]
    negative = ((octets[:, None] >> torch.arange(8)) & 1).bool().flatten()[: sum(sizes)]
    return torch.where(negative, -scales, scales)


def kept(wanted, sent, gradient):
    return wanted - sent


def registered(
    ddp, keep=kept, key=lambda bucket, parameter: parameter, gather=None, over=dist.get_world_size
):
    """Register a right hook, but for what is put in the place of its parts."""
    unsent = {}

    def gathered(message):
        found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        return found, dist.all_gather(found, message, async_op=True).get_future()

    def hook(state, bucket):
        sizes = [each.numel() for each in bucket.parameters()]
        keys = [key(bucket, each) for each in bucket.parameters()]
        before = [unsent.get(each) for each in keys]
        gradient = bucket.buffer().clone()
        wanted = gradient.clone()
        for part, old in zip(wanted.split(sizes), before, strict=True):
            if old is not None and old.shape == part.shape:
                part += old
        message = message_of(wanted, sizes)
        found, future = (gather or gathered)(message)
        left = keep(wanted, arriving(message, sizes), gradient)
        unsent.update(zip(keys, left.split(sizes), strict=True))
        return future.then(lambda _: sum(arriving(each, sizes) for each in found) / over())

    ddp.register_comm_hook(None, hook)


@wrong("19.2", hint="sum")
def the_sum_of_what_came(ddp):
    registered(ddp, over=lambda: 1)


@wrong("19.2", hint="plain")
def the_mean_of_gradients(ddp):
    ddp.register_comm_hook(None, allreduce_hook)


@wrong("19.2", hint="apart")
def keeps_it_to_itself(ddp):
    def gather(message):
        done = torch.futures.Future()
        done.set_result(None)
        return [message], done

    registered(ddp, gather=gather, over=lambda: 1)


@wrong("19.2", hint="read wrong")
def the_bits_of_rank_0(ddp):
    def gather(message):
        found = message.clone()
        return [found], dist.broadcast(found, 0, async_op=True).get_future()

    registered(ddp, gather=gather, over=lambda: 1)


@wrong("19.2", FIRST, BITS, PROMISE, hint="no feedback")
def no_feedback(ddp):
    registered(ddp, keep=lambda wanted, sent, gradient: 0 * wanted)


@wrong("19.2", FIRST, BITS, PROMISE, hint="left wrong")
def keeps_what_was_wanted(ddp):
    registered(ddp, keep=lambda wanted, sent, gradient: wanted)


@wrong("19.2", FIRST, BITS, PROMISE, hint="left wrong")
def by_its_place_in_the_bucket(ddp):
    def place(bucket, parameter):
        return bucket.index(), [each is parameter for each in bucket.parameters()].index(True)

    registered(ddp, key=place)


@wrong("19.2", FIRST, BITS, PROMISE, hint="left wrong")
def forgets_what_was_left_before(ddp):
    registered(ddp, keep=lambda wanted, sent, gradient: gradient - sent)


@wrong("19.2", FIRST, FEEDBACK, PROMISE, hint="too much")
def sends_the_gradients_as_well(ddp):
    def gather(message):
        found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        works = [dist.all_gather(found, message, async_op=True)]
        works.append(dist.all_reduce(torch.zeros(8 * len(message)), async_op=True))
        return found, torch.futures.collect_all([work.get_future() for work in works])

    registered(ddp, gather=gather)


@wrong("19.2", FIRST, FEEDBACK, BITS, hint="waits")
def waits_in_the_hook(ddp):
    def gather(message):
        found, done = (
            [torch.empty_like(message) for _ in range(dist.get_world_size())],
            torch.futures.Future(),
        )
        dist.all_gather(found, message)
        done.set_result(None)
        return found, done

    registered(ddp, gather=gather)


@right("19.2")
def in_one_tensor(ddp):
    def gather(message):
        found = message.new_empty(dist.get_world_size() * len(message))
        future = dist.all_gather_into_tensor(found, message, async_op=True).get_future()
        return found.chunk(dist.get_world_size()), future

    registered(ddp, gather=gather)


@right("19.2")
def in_the_buffer_itself(ddp):
    """The buffer is changed in place, and what is unsent lives on the parameters."""

    def hook(state, bucket):
        wanted, sizes = bucket.buffer(), [each.numel() for each in bucket.parameters()]
        for parameter, part in zip(bucket.parameters(), wanted.split(sizes), strict=True):
            part += getattr(parameter, "unsent", 0)
        message = message_of(wanted, sizes)
        found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        future = dist.all_gather(found, message, async_op=True).get_future()
        left = wanted - arriving(message, sizes)
        for parameter, part in zip(bucket.parameters(), left.split(sizes), strict=True):
            parameter.unsent = part

        def mean(done):
            done.wait()
            return wanted.copy_(torch.stack([arriving(each, sizes) for each in found]).mean(0))

        return future.then(mean)

    ddp.register_comm_hook(None, hook)
