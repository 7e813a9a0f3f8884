"""What people answer in exercise 19, wrong and right (see `answers`)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.exercises.answers import right, wrong

FIRST = "in the first backward pass: the mean over the ranks of their signs, times the scale"
FEEDBACK = "in all later ones, too: what was not sent is added to the next gradient of the same parameter"
BITS = "a rank sends a bit for each gradient, and little besides"
PROMISE = "no backward pass waits for other ranks: the hook returns at once"


def pack(flags):
    flags = F.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    return (flags << torch.arange(8)).sum(dim=1, dtype=torch.uint8)


def unpack(octets, count):
    return ((octets[:, None] >> torch.arange(8)) & 1).bool().flatten()[:count]


def mean_size(part):
    return part.abs().mean()


def read(message, sizes):
    """Numbers, from scales of 4 bytes and from bits."""
    scales = message[: 4 * len(sizes)].clone().view(torch.float32)
    negative = unpack(message[4 * len(sizes) :], sum(sizes))
    scales = scales.repeat_interleave(torch.tensor(sizes))
    return torch.where(negative, -scales, scales)


def written(wanted, sizes, size=mean_size):
    scales = torch.stack([size(part) for part in wanted.split(sizes)])
    return torch.cat([scales.view(torch.uint8), pack(wanted < 0)])


def by_parameter(unsent, parameters):
    return torch.cat([unsent.get(each, torch.zeros(each.numel())) for each in parameters])


def kept(wanted, sent, gradient):
    return wanted - sent


def world_size():
    return dist.get_world_size()


def signs_hook(size=mean_size, keep=kept, over=world_size, unsent=None, write=written):
    """A right hook, but for what is put in the place of its parts."""
    unsent = {} if unsent is None else unsent

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        gradient = bucket.buffer().clone()
        wanted = gradient + by_parameter(unsent, parameters)
        message = write(wanted, sizes, size)
        gathered = message.new_empty(count * len(message))
        future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()
        left = keep(wanted, read(message, sizes), gradient)
        unsent.update(zip(parameters, left.split(sizes), strict=True))
        return future.then(lambda _: sum(read(each, sizes) for each in gathered.chunk(count)) / over())

    return hook


def hooked(ddp, **parts):
    ddp.register_comm_hook(None, signs_hook(**parts))


@wrong("19.1", hint="That is the sum of what the ranks have sent.")
def the_sum(ddp):
    hooked(ddp, over=lambda: 1)


@wrong("19.1", FIRST, BITS, PROMISE, hint="what was left unsent before did not come")
def no_feedback(ddp):
    hooked(ddp, keep=lambda wanted, sent, gradient: 0 * wanted)


@wrong("19.1", FIRST, BITS, PROMISE, hint="What is kept of them")
def keeps_what_was_sent(ddp):
    hooked(ddp, keep=lambda wanted, sent, gradient: wanted)


@wrong("19.1", hint="which scale to which parameter")
def signs_alone(ddp):
    hooked(ddp, size=lambda part: torch.ones(()))


@wrong("19.1", hint="which scale to which parameter")
def one_scale_for_a_bucket(ddp):
    def write(wanted, sizes, size):
        scales = wanted.abs().mean().repeat(len(sizes))
        return torch.cat([scales.view(torch.uint8), pack(wanted < 0)])

    hooked(ddp, write=write)


@wrong("19.1", hint="Which bit belongs to which number")
def zero_is_negative(ddp):
    def write(wanted, sizes, size):
        return torch.cat([written(wanted, sizes)[: 4 * len(sizes)], pack(wanted <= 0)])

    hooked(ddp, write=write)


@wrong("19.1", hint="That is the mean of the gradients themselves")
def the_mean(ddp):
    ddp.register_comm_hook(None, allreduce_hook)


def by_index(check):
    """What is unsent is kept by the bucket's number; ``check`` says whether it fits."""

    def answer(ddp):
        unsent: dict[int, torch.Tensor] = {}

        def hook(state, bucket):
            sizes = [each.numel() for each in bucket.parameters()]
            wanted, count = bucket.buffer().clone(), dist.get_world_size()
            before = unsent.get(bucket.index())
            if before is not None and (not check or before.shape == wanted.shape):
                wanted += before
            message = written(wanted, sizes)
            gathered = message.new_empty(count * len(message))
            future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()
            unsent[bucket.index()] = wanted - read(message, sizes)
            return future.then(lambda _: sum(read(each, sizes) for each in gathered.chunk(count)) / count)

        ddp.register_comm_hook(None, hook)

    return answer


@wrong("19.1", hint="must match the size")
def by_bucket(ddp):
    by_index(check=False)(ddp)


@wrong("19.1", FIRST, BITS, PROMISE, hint="it found again when DDP has rebuilt its buckets")
def by_bucket_if_it_fits(ddp):
    by_index(check=True)(ddp)


@wrong("19.1", FIRST, BITS, PROMISE, hint="the gradient of the same parameter")
def in_one_long_tensor(ddp):
    """What is unsent is kept in the order of the first pass's bucket."""
    total = sum(each.numel() for each in ddp.parameters() if each.requires_grad)
    unsent = torch.zeros(total)

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        begin = hook.begin
        wanted = bucket.buffer() + unsent[begin : begin + sum(sizes)]
        message = written(wanted, sizes)
        gathered = message.new_empty(count * len(message))
        future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()
        unsent[begin : begin + sum(sizes)] = wanted - read(message, sizes)
        hook.begin = 0 if bucket.is_last() else begin + sum(sizes)
        return future.then(lambda _: sum(read(each, sizes) for each in gathered.chunk(count)) / count)

    hook.begin = 0
    ddp.register_comm_hook(None, hook)


ALL_MODELS: dict[int, torch.Tensor] = {}


@wrong("19.1", hint="Which bit")
def one_memory_for_all_models(ddp):
    """By the parameter's name, which both models have."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}

    class Named(dict):
        def get(self, parameter, default):
            return ALL_MODELS.get(names[parameter], default)

        def update(self, pairs):
            ALL_MODELS.update((names[parameter], part) for parameter, part in pairs)

    hooked(ddp, unsent=Named())


@wrong("19.1", FIRST, FEEDBACK, PROMISE, hint="How many signs are there in a byte")
def a_byte_for_each(ddp):
    signs_by(ddp, lambda wanted: (wanted < 0).to(torch.uint8), lambda bits, count: bits.bool())


@wrong("19.1", FIRST, FEEDBACK, PROMISE, hint="a byte only half full")
def two_bits_for_each(ddp):
    def both(wanted):
        return torch.cat([pack(wanted < 0), pack(wanted >= 0)])

    signs_by(ddp, both, unpack)


def signs_by(ddp, pack, unpack, times=False):
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        scales = torch.stack([part.abs().mean() for part in wanted.split(sizes)])
        bits = pack(wanted)
        all_scales = [torch.empty_like(scales) for _ in range(count)]
        all_bits = [torch.empty_like(bits) for _ in range(count)]
        futures = [
            dist.all_gather(all_scales, scales, async_op=True).get_future(),
            dist.all_gather(all_bits, bits, async_op=True).get_future(),
        ]

        def numbers(scales, bits):
            each = scales.repeat_interleave(torch.tensor(sizes))
            if times:
                return each * bits
            return torch.where(unpack(bits, sum(sizes)), -each, each)

        unsent.update(zip(parameters, (wanted - numbers(scales, bits)).split(sizes), strict=True))
        both = torch.futures.collect_all(futures)
        return both.then(lambda _: torch.stack([*map(numbers, all_scales, all_bits)]).mean(0))

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, FEEDBACK, PROMISE, hint="as much as without a hook")
def adds_up_whole_numbers(ddp):
    """The mean of what would be sent, by an all_reduce of float32."""
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        sent = read(written(wanted, sizes), sizes)
        unsent.update(zip(parameters, (wanted - sent).split(sizes), strict=True))
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / count)

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, FEEDBACK, BITS, hint="What can the hook return before anything has arrived")
def waits_in_the_hook(ddp):
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        message = written(wanted, sizes)
        gathered = message.new_empty(count * len(message))
        dist.all_gather_into_tensor(gathered, message)
        unsent.update(zip(parameters, (wanted - read(message, sizes)).split(sizes), strict=True))
        done = torch.futures.Future()
        done.set_result(sum(read(each, sizes) for each in gathered.chunk(count)) / count)
        return done

    ddp.register_comm_hook(None, hook)


@wrong("19.1", hint="The ranks hold different gradients.")
def keeps_it_to_itself(ddp):
    def hook(state, bucket):
        sizes = [each.numel() for each in bucket.parameters()]
        done = torch.futures.Future()
        done.set_result(read(written(bucket.buffer(), sizes), sizes))
        return done

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, BITS, PROMISE, hint="What is kept of them")
def keeps_the_difference_from_the_mean(ddp):
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        message = written(wanted, sizes)
        gathered = message.new_empty(count * len(message))
        future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()

        def mean(_):
            result = sum(read(each, sizes) for each in gathered.chunk(count)) / count
            unsent.update(zip(parameters, (wanted - result).split(sizes), strict=True))
            return result

        return future.then(mean)

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, BITS, PROMISE, hint="What is kept of them")
def forgets_a_tenth(ddp):
    hooked(ddp, keep=lambda wanted, sent, gradient: 0.9 * (wanted - sent))


@wrong("19.1", hint="In which dtype do the scales travel?")
def scales_in_bfloat16(ddp):
    hooked(ddp, size=lambda part: part.abs().mean().bfloat16().float())


@wrong("19.1", hint="That is the mean of the gradients themselves, as without a hook")
def returns_its_hook(ddp):
    return signs_hook()


@wrong("19.1", FIRST, BITS, PROMISE, hint="What is kept of them")
def keeps_a_view_of_the_buffer(ddp):
    """What is left is computed in the buffer itself, which DDP uses again."""
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer()
        wanted += by_parameter(unsent, parameters)
        message = written(wanted, sizes)
        gathered = message.new_empty(count * len(message))
        future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()
        wanted -= read(message, sizes)
        unsent.update(zip(parameters, wanted.split(sizes), strict=True))
        return future.then(lambda _: sum(read(each, sizes) for each in gathered.chunk(count)) / count)

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, BITS, PROMISE, hint="What is kept of them")
def adds_what_is_left_up(ddp):
    """What was left is in the sum already, and is counted again."""
    hooked(ddp, keep=lambda wanted, sent, gradient: (wanted - gradient) + (wanted - sent))


@wrong("19.1", hint="arrived")
def reads_before_it_has_arrived(ddp):
    def hook(state, bucket):
        sizes, count = [each.numel() for each in bucket.parameters()], dist.get_world_size()
        message = written(bucket.buffer(), sizes)
        gathered = torch.zeros(count * len(message), dtype=torch.uint8)
        hook.works.append(dist.all_gather_into_tensor(gathered, message, async_op=True).get_future())
        done = torch.futures.Future()
        done.set_result(sum(read(each, sizes) for each in gathered.chunk(count)) / count)
        return done

    hook.works = []
    ddp.register_comm_hook(None, hook)


@wrong("19.1", hint="which scale to which parameter")
def scale_is_the_median(ddp):
    hooked(ddp, size=lambda part: part.abs().median())


@wrong("19.1", hint="The ranks hold different gradients.")
def the_first_scale_for_all_ranks(ddp):
    """Each rank reads the others' bits with its own scales."""
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        message = written(wanted, sizes)
        scales, bits = message[: 4 * len(sizes)], message[4 * len(sizes) :].clone()
        gathered = bits.new_empty(count * len(bits))
        future = dist.all_gather_into_tensor(gathered, bits, async_op=True).get_future()
        unsent.update(zip(parameters, (wanted - read(message, sizes)).split(sizes), strict=True))
        of_ranks = gathered.chunk(count)
        return future.then(lambda _: sum(read(torch.cat([scales, b]), sizes) for b in of_ranks) / count)

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, FEEDBACK, BITS, hint="Backward stands still meanwhile.")
def waits_by_a_barrier(ddp):
    inner = signs_hook()

    def hook(state, bucket):
        dist.barrier()
        return inner(state, bucket)

    ddp.register_comm_hook(None, hook)


@wrong("19.1", FIRST, FEEDBACK, hint="How many signs are there in a byte")
def gathers_objects(ddp):
    unsent = {}

    def hook(state, bucket):
        parameters, count = bucket.parameters(), dist.get_world_size()
        sizes = [each.numel() for each in parameters]
        wanted = bucket.buffer() + by_parameter(unsent, parameters)
        scales = [part.abs().mean() for part in wanted.split(sizes)]
        others = [None] * count
        dist.all_gather_object(others, ((wanted < 0).tolist(), scales))
        means = []
        for negative, of_rank in others:
            each = torch.stack(of_rank).repeat_interleave(torch.tensor(sizes))
            means.append(torch.where(torch.tensor(negative), -each, each))
        unsent.update(zip(parameters, (wanted - means[dist.get_rank()]).split(sizes), strict=True))
        done = torch.futures.Future()
        done.set_result(sum(means) / count)
        return done

    ddp.register_comm_hook(None, hook)


HOOKED: list[nn.Module] = []


@wrong("19.1", hint="as without a hook")
def the_hook_is_of_the_first_model(ddp):
    if not HOOKED:
        HOOKED.append(ddp)
        hooked(ddp)


@right("19.1")
def in_the_buffer_itself(ddp):
    """The buffer is changed in place, and what is unsent lives on the parameters."""

    def hook(state, bucket):
        wanted, group = bucket.buffer(), dist.group.WORLD
        sizes = [each.numel() for each in bucket.parameters()]
        for parameter, part in zip(bucket.parameters(), wanted.split(sizes), strict=True):
            part += getattr(parameter, "unsent", 0)
        message = written(wanted, sizes)
        gathered = torch.empty(group.size(), len(message), dtype=torch.uint8)
        future = dist.all_gather_into_tensor(gathered.view(-1), message, async_op=True).get_future()
        left = wanted - read(message, sizes)
        for parameter, part in zip(bucket.parameters(), left.split(sizes), strict=True):
            parameter.unsent = part

        def mean(done):
            done.wait()
            return wanted.copy_(torch.stack([read(each, sizes) for each in gathered]).mean(0))

        return future.then(mean)

    ddp.register_comm_hook(None, hook)


@right("19.1")
def each_parameter_by_itself(ddp):
    """A message for each parameter, and its shape kept; the rest of a byte is wasted each time."""
    unsent = {each: torch.zeros_like(each) for each in ddp.parameters() if each.requires_grad}

    def of_one(parameter, gradient):
        wanted = (gradient + unsent[parameter]).flatten()
        message = written(wanted, [len(wanted)])
        unsent[parameter] = (wanted - read(message, [len(wanted)])).view_as(gradient)
        others = message.new_empty(dist.get_world_size() * len(message))
        future = dist.all_gather_into_tensor(others, message, async_op=True).get_future()
        parts = others.chunk(dist.get_world_size())
        return future.then(lambda _: torch.stack([read(each, [len(wanted)]) for each in parts]).mean(0))

    def hook(state, bucket):
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        futures = torch.futures.collect_all([of_one(*pair) for pair in pairs])
        return futures.then(lambda done: torch.cat([each.value() for each in done.value()]))

    ddp.register_comm_hook(None, hook)


# --- 19.2 ---

WEIGHTS = "each rank steps for itself; after every H steps, and at the end, all hold the mean of the weights"
STATE = "and the mean of the optimizer's state and of the buffers: one rank's checkpoint is that of all"
ONCE = "at a meeting, what training changes travels once; else nothing does, and nothing else changes"


def step_of(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(model):
    return [each for each in model.parameters() if each.requires_grad]


def state_of(optimizer):
    """All floats of the optimizer's state, in the order of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for each in optimizer.state.get(parameter, {}).values():
                if torch.is_tensor(each) and each.is_floating_point():
                    yield each


def buffers_of(model):
    return [each for each in model.buffers() if each.is_floating_point()]


def average(tensors, over=None):
    tensors = list(tensors)
    mean = torch.cat([each.detach().flatten() for each in tensors]) / (over or dist.get_world_size())
    dist.all_reduce(mean)
    for each, part in zip(tensors, mean.split([each.numel() for each in tensors]), strict=True):
        each.detach().copy_(part.view_as(each))


def average_all(model, optimizer):
    average([*trained(model), *buffers_of(model), *state_of(optimizer)])


def locally(model, optimizer, batches, every, meet=average_all):
    for i, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if i % every == 0 or i == len(batches):
            meet(model, optimizer)


@wrong("19.2", hint="Then which numbers are averaged")
def the_sum_of_weights(model, optimizer, batches, every):
    def meet(model, optimizer):
        average([*trained(model), *buffers_of(model), *state_of(optimizer)], over=1)

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", hint="That is a rank's own training")
def never_meets(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, lambda *_: None)


@wrong("19.2", hint="The last steps are this rank's own")
def no_last_average(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if i % every == 0:
            average_all(model, optimizer)


@wrong("19.2", hint="That is a rank's own training")
def as_rank_0(model, optimizer, batches, every):
    def meet(model, optimizer):
        for each in [*trained(model), *buffers_of(model), *state_of(optimizer)]:
            dist.broadcast(each.detach(), 0)

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", hint="That is what averaged gradients give")
def averages_gradients(model, optimizer, batches, every):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average([each.grad for each in trained(model)])
        optimizer.step()


@wrong("19.2", WEIGHTS, ONCE, hint="What else, besides the weights, has training changed")
def weights_alone(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, lambda *_: average(trained(model)))


@wrong("19.2", WEIGHTS, ONCE, hint="The ranks hold different numbers there")
def no_buffers(model, optimizer, batches, every):
    locally(model, optimizer, batches, every, lambda *_: average([*trained(model), *state_of(optimizer)]))


@wrong("19.2", WEIGHTS, ONCE, hint="lacks its state")
def state_anew(model, optimizer, batches, every):
    def meet(model, optimizer):
        average([*trained(model), *buffers_of(model)])
        optimizer.state.clear()

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, ONCE, hint="and does each of them?")
def state_in_the_last_meeting(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if i == len(batches):
            average_all(model, optimizer)
        elif i % every == 0:
            average([*trained(model), *buffers_of(model)])


@wrong("19.2", WEIGHTS, STATE, hint="When is a meeting due")
def a_last_average_always(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        if i % every == 0:
            average_all(model, optimizer)
    average_all(model, optimizer)


@wrong("19.2", WEIGHTS, STATE, hint="What is frozen is the same on all ranks")
def the_frozen_layer_too(model, optimizer, batches, every):
    def meet(model, optimizer):
        average([*model.parameters(), *buffers_of(model), *state_of(optimizer)])

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, STATE, hint="A gather brings")
def by_a_gather(model, optimizer, batches, every):
    def meet(model, optimizer):
        for each in [*trained(model), *buffers_of(model), *state_of(optimizer)]:
            own = each.detach().contiguous()
            others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(others, own)
            own.copy_(torch.stack(others).mean(0))

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, STATE, hint="they travel more often")
def the_gradients_as_well(model, optimizer, batches, every):
    def meet(model, optimizer):
        average_all(model, optimizer)
        average([each.grad for each in trained(model)])

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, STATE, hint="Switch back at the end")
def in_training_mode(model, optimizer, batches, every):
    locally(model, optimizer, batches, every)
    model.train()


@wrong("19.2", hint="Only the last digits are off.")
def in_float32(model, optimizer, batches, every):
    def meet(model, optimizer):
        tensors = [*trained(model), *buffers_of(model), *state_of(optimizer)]
        copies = [each.detach().float() for each in tensors]
        average(copies)
        for each, copied in zip(tensors, copies, strict=True):
            each.detach().copy_(copied)

    locally(model, optimizer, batches, every, meet)


STEPS = []


@wrong("19.2", hint="Then which numbers are averaged, and after which steps?")
def counts_the_steps_of_all_calls(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        step_of(model, optimizer, x, y)
        STEPS.append(i)
        if len(STEPS) % every == 0 or i == len(batches):
            average_all(model, optimizer)


@wrong("19.2", hint="What belongs to a rank's step?")
def averages_before_the_step(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if i % every == 0 or i == len(batches):
            average_all(model, optimizer)
        optimizer.step()


@wrong("19.2", hint="Then which numbers are averaged")
def weighs_by_samples(model, optimizer, batches, every):
    def meet(model, optimizer):
        share = torch.tensor(float(sum(len(y) for _, y in batches)))
        own = share.item()
        dist.all_reduce(share)
        tensors = [*trained(model), *buffers_of(model), *state_of(optimizer)]
        for each in tensors:
            each.detach().mul_(own / share.item())
        average(tensors, over=1)

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, ONCE, hint="Which of these numbers are averaged")
def buffers_of_rank_0(model, optimizer, batches, every):
    """As DDP does."""

    def meet(model, optimizer):
        average([*trained(model), *state_of(optimizer)])
        for each in buffers_of(model):
            dist.broadcast(each, 0)

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", WEIGHTS, ONCE, hint="into which tensors does their mean go?")
def the_state_is_0(model, optimizer, batches, every):
    def meet(model, optimizer):
        average([*trained(model), *buffers_of(model)])
        for each in state_of(optimizer):
            each.zero_()

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", hint="and after which steps?")
def drops_the_rest(model, optimizer, batches, every):
    """As if a last, shorter round did not count."""
    locally(model, optimizer, batches[: len(batches) // every * every], every)


@wrong("19.2", hint="or a meeting after each step")
def meets_after_each_step(model, optimizer, batches, every):
    locally(model, optimizer, batches, 1)


@wrong("19.2", WEIGHTS, ONCE, hint="and where does its mean go?")
def averages_a_copy_of_the_state(model, optimizer, batches, every):
    """state_dict() gives the tensors themselves, but a copy of them is averaged."""

    def meet(model, optimizer):
        state = copy.deepcopy(optimizer.state_dict())
        values = [value for each in state["state"].values() for value in each.values()]
        average([*trained(model), *buffers_of(model), *filter(floats, values)])

    locally(model, optimizer, batches, every, meet)


@wrong("19.2", hint="What belongs to a rank's step?")
def averages_gradients_at_a_meeting(model, optimizer, batches, every):
    for i, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        due = i % every == 0 or i == len(batches)
        if due:
            average([each.grad for each in trained(model)])
        optimizer.step()
        if due:
            average_all(model, optimizer)


@right("19.2")
def with_the_counters(model, optimizer, batches, every):
    """All tensors, whole numbers, too, which are the same on all ranks; and a barrier."""

    def meet(model, optimizer):
        state = [each for of_one in optimizer.state.values() for each in of_one.values()]
        average([*trained(model), *model.buffers(), *filter(torch.is_tensor, state)])
        dist.barrier()

    locally(model, optimizer, batches, every, meet)


@torch.no_grad()
def each_by_itself(model, optimizer):
    for each in [*trained(model), *buffers_of(model), *state_of(optimizer)]:
        dist.all_reduce(each)
        each /= dist.get_world_size()


@right("19.2")
def coalesced(model, optimizer, batches, every):
    def meet(model, optimizer):
        tensors = [each.detach() for each in [*trained(model), *buffers_of(model), *state_of(optimizer)]]
        for kind in {each.dtype for each in tensors}:
            of_kind = [each for each in tensors if each.dtype == kind]
            dist.all_reduce_coalesced(of_kind)
            for each in of_kind:
                each /= dist.get_world_size()

    while batches:
        now, batches = batches[:every], batches[every:]
        for x, y in now:
            step_of(model, optimizer, x, y)
        meet(model, optimizer)


def floats(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point() and value.dim() > 0
