"""What people answer in exercise 00, wrong and right (see `answers`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong


@wrong("00.1", hint="That is its own number")
def nothing_travels(number):
    return torch.tensor(float(number)).item()


@wrong("00.1", hint="That is the sum")
def no_division(number):
    tensor = torch.tensor(float(number))
    dist.all_reduce(tensor)
    return tensor.item()


@wrong("00.1", hint="right for two ranks")
def as_for_two(number):
    tensor = torch.tensor(float(number))
    dist.all_reduce(tensor)
    return tensor.item() / 2


@wrong("00.1", hint="Do all ranks make the same calls?")
def from_rank_0_alone(number):
    tensor = torch.tensor(float(number))
    dist.broadcast(tensor, src=0)
    return 2 * tensor.item()


@right("00.1")
def divides_first(number):
    tensor = torch.tensor(number / dist.get_world_size())
    dist.all_reduce(tensor)
    return tensor


@right("00.1")
def gathers(number):
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers) / len(numbers)
