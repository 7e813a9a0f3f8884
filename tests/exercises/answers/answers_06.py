"""What people answer in exercise 06, wrong and right (see `answers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.answers import right, wrong

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over all ranks"


@wrong("06.1", AGREE, hint="That is the sum")
def no_division(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


@wrong("06.1", AGREE, hint="Where does a rank learn how many there are?")
def divided_by_two(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2


@wrong("06.1", AGREE, hint="Add up over the ranks first, then divide, once")
def divided_twice(model):
    for p in model.parameters():
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.1", hint="Do the others do the same")
def only_rank_0(model):
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()


@wrong("06.1", AGREE, hint="That is the gradient of one rank")
def rank_0s(model):
    for p in model.parameters():
        dist.broadcast(p.grad, src=0)


@wrong("06.1", hint="Which call gives every rank")
def into_a_copy(model):
    for p in model.parameters():
        mean = p.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


@wrong("06.1", hint="Which call gives every rank")
def the_weights_instead(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@wrong("06.1", hint="Which call gives every rank")
def divides_alone(model):
    for p in model.parameters():
        p.grad /= dist.get_world_size()


@wrong("06.1", hint="What does it return?")
def takes_what_it_returns(model):
    for p in model.parameters():
        p.grad = dist.all_reduce(p.grad)


@wrong("06.1", hint="Do the others do the same")
def rank_0_divides(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        if dist.get_rank() == 0:
            p.grad /= dist.get_world_size()


@wrong("06.1", hint="never called all_reduce (collective 1)")
def rank_0_alone(model):
    if dist.get_rank() == 0:
        for p in model.parameters():
            dist.all_reduce(p.grad)


@wrong("06.1", hint="other shapes")
def flattens(model):
    for p in model.parameters():
        p.data, p.grad = p.data.flatten(), None
        p.grad = torch.zeros_like(p)


@wrong("06.1", hint="Is it done for every parameter?")
def the_first_alone(model):
    p = next(model.parameters())
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


@wrong("06.1", hint="never called all_reduce")
def one_rank_stays_away(model):
    if dist.get_rank():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


PARAMETERS, BUFFERS = "every rank has rank 0's parameters", "and rank 0's buffers"


@wrong("06.2", PARAMETERS, hint="What lists them?")
def parameters_alone(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


@wrong("06.2", hint="Which rank is the source?")
def from_the_last(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)


@wrong("06.2", hint="Nothing needs to be computed for a copy")
def the_mean_of_all(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()


@wrong("06.2", hint="A model has many")
def the_first_tensor(model):
    dist.broadcast(next(model.parameters()).data, src=0)


@wrong("06.2", PARAMETERS, hint="The first one arrived")
def all_but_the_counter(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            dist.broadcast(tensor, src=0)


@wrong("06.2", hint="Nothing arrived in the model")
def another_model(model):
    objects = [model]
    dist.broadcast_object_list(objects, src=0)
    model = objects[0]


@wrong("06.2", hint="Nothing arrived in the model")
def the_same_seed(model):
    torch.manual_seed(0)


@wrong("06.2", hint="Nothing arrived in the model")
def into_copies(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor.clone(), src=0)


BEGINS = "all replicas begin with rank 0's parameters"
DURING = "after backward() alone, every rank holds the mean of the gradients"
FULL = "three steps give the weights of one device with the whole batch"


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.begin()

    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.average)

    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@wrong("06.3", BEGINS, hint="That is the sum over the ranks")
class SumsUp(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)


@wrong("06.3", hint="What has to travel before the first step")
class StartsApart(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", BEGINS, hint="Nobody calls anything after backward()")
class WaitsToBeCalled(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)


@wrong("06.3", BEGINS, hint="a hook on each parameter")
class HooksTheFirst(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)
        p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", BEGINS, hint="Is it divided once, after the sum?")
class DividesTwice(Wrapper):
    def average(self, p: Any) -> None:
        super().average(p)
        p.grad /= dist.get_world_size()


@wrong("06.3", BEGINS, hint="Nobody calls anything after backward()")
class AveragesInForward(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)

    def forward(self, *args: Any) -> Any:
        for p in self.module.parameters():
            if p.grad is not None:
                self.average(p)
        return self.module(*args)


@wrong("06.3", BEGINS, hint="for its own")
class HooksOfTheLast(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(lambda _: self.of_the_last(p))  # noqa: B023

    def of_the_last(self, p: Any) -> None:
        if p.grad is not None:
            self.average(p)


@wrong("06.3", BEGINS, hint="Do all do the same")
class DividesOnRank0(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        if dist.get_rank() == 0:
            p.grad /= dist.get_world_size()


@wrong("06.3", BEGINS, hint="to its .grad")
class AveragesACopy(Wrapper):
    def average(self, p: Any) -> None:
        mean = p.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


@wrong("06.3", BEGINS, DURING, hint="What does the first leave behind?")
class WorksOnce(Wrapper):
    done = 0

    def average(self, p: Any) -> None:
        self.done += 1
        if self.done <= len(list(self.parameters())):
            super().average(p)


@wrong("06.3", hint="that comes first")
class StartsWithTheMean(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
            p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", hint="other shapes")
class HasMore(Wrapper):
    def begin(self) -> None:
        super().begin()
        self.more = nn.Parameter(torch.zeros(3))


@wrong("06.3", hint="this time it is yours")
class LetsDDPDoIt(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = nn.parallel.DistributedDataParallel(module)

    def forward(self, x: Any) -> Any:
        return self.module(x)


@wrong("06.3", hint="raised AttributeError")
class ForgetsSuper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        self.module = module


# --- right, in another style ---


@right("06.1")
def gathers_all(model):
    for p in model.parameters():
        each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(each, p.grad)
        p.grad = torch.stack(each).mean(0)


@right("06.1")
def sends_all_at_once(model):
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    for p in model.parameters():
        p.grad.div_(dist.get_world_size())


@right("06.1")
def in_one_tensor(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)


@right("06.1")
def by_rank_0(model):
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        dist.broadcast(p.grad, src=0)
        p.grad /= dist.get_world_size()
    dist.destroy_process_group()


@right("06.2")
def one_after_the_other(model):
    for p in model.parameters():
        dist.broadcast(p, src=0)
    for b in model.buffers():
        dist.broadcast(b, 0)


@right("06.2")
def as_an_object(model):
    state = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])


@right("06.3")
class HooksTheGradient(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_hook(self.mean)

    def mean(self, gradient: Any) -> Any:
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient


@right("06.3")
class WaitsAtTheEnd(Wrapper):
    def average(self, p: Any) -> None:
        p.grad /= dist.get_world_size()
        work = dist.all_reduce(p.grad, async_op=True)
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)


@right("06.3")
class AllInTheLastHook(Wrapper):
    ready = 0

    def average(self, p: Any) -> None:
        self.ready += 1
        if self.ready % len(list(self.parameters())) == 0:
            for each in self.parameters():
                super().average(each)
