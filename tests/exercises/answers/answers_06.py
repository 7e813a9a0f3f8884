"""What people answer in exercise 06, wrong and right (see `answers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.answers import right, wrong

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over the samples of all ranks"


def trained(model):
    return [p for p in model.parameters() if p.grad is not None]


def over_all(samples):
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return total.item()


@wrong("06.1", AGREE, hint="That is the sum over the ranks")
def no_division(model, samples):
    for p in trained(model):
        dist.all_reduce(p.grad)


@wrong("06.1", AGREE, hint="That is the sum over all samples")
def weighs_and_forgets(model, samples):
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad)


@wrong("06.1", AGREE, hint="Each rank has the same weight there;")
def as_in_the_lesson(model, samples):
    for p in trained(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.1", hint="raised TypeError")
def word_for_word(model, samples):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.1", AGREE, hint="It is divided by 2")
def divided_by_two(model, samples):
    for p in trained(model):
        dist.all_reduce(p.grad)
        p.grad /= 2


@wrong("06.1", AGREE, hint="divided by the number of ranks")
def weighs_and_divides_by_ranks(model, samples):
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.1", AGREE, hint="divided once by their number")
def divided_twice(model, samples):
    total = over_all(samples)
    for p in trained(model):
        p.grad *= samples / total
        dist.all_reduce(p.grad)
        p.grad /= total


@wrong("06.1", hint="Once the ranks agree")
def divides_by_its_own(model, samples):
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad)
        p.grad /= samples


@wrong("06.1", hint="Do the others make the same calls, and get the same result?")
def only_rank_0(model, samples):
    total = over_all(samples)
    for p in trained(model):
        p.grad *= samples
        dist.reduce(p.grad, dst=0)
        p.grad /= total


@wrong("06.1", AGREE, hint="That is the gradient of one rank")
def rank_0s(model, samples):
    for p in trained(model):
        dist.broadcast(p.grad, src=0)


@wrong("06.1", hint="Which collective gives every rank a result that depends on all of them?")
def into_a_copy(model, samples):
    total = over_all(samples)
    for p in trained(model):
        mean = p.grad * samples
        dist.all_reduce(mean)
        mean /= total


@wrong("06.1", hint="What does it return?")
def takes_what_it_returns(model, samples):
    for p in trained(model):
        p.grad = dist.all_reduce(p.grad)


@wrong("06.1", hint="never called all_reduce (collective 1)")
def rank_0_alone(model, samples):
    if dist.get_rank() == 0:
        for p in trained(model):
            dist.all_reduce(p.grad)


@wrong("06.1", hint="other shapes")
def flattens(model, samples):
    for p in trained(model):
        p.data, p.grad = p.data.flatten(), None
        p.grad = torch.zeros_like(p)


@wrong("06.1", hint="Is it done for every parameter?")
def the_first_alone(model, samples):
    p = trained(model)[0]
    p.grad *= samples / over_all(samples)
    dist.all_reduce(p.grad)


@wrong("06.1", hint="without waiting for the end of it")
def never_waits(model, samples):
    total = over_all(samples)
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad, async_op=True)
        p.grad /= total


@wrong("06.1", AGREE, hint="which is what float32 keeps")
def in_single_precision(model, samples):
    total = over_all(samples)
    for p in trained(model):
        mean = p.grad.float() * samples
        dist.all_reduce(mean)
        p.grad.copy_(mean / total)


@wrong("06.1", AGREE, hint="an optimizer would use it.")
def gives_all_one(model, samples):
    total = over_all(samples)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad * samples
        dist.all_reduce(p.grad)
        p.grad /= total


totals = []


@wrong("06.1", AGREE, hint="What does it leave behind for a later one?")
def counts_once(model, samples):
    if not totals:
        totals.append(over_all(samples))
    for p in trained(model):
        p.grad *= samples / totals[0]
        dist.all_reduce(p.grad)


PARAMETERS, BUFFERS = "every rank has rank 0's parameters", "and rank 0's buffers"


@wrong("06.2", PARAMETERS, hint="What lists them?")
def parameters_alone(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


@wrong("06.2", hint="Which rank is the source?")
def from_the_last(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)


@wrong("06.2", hint="A copy needs no arithmetic.")
def the_mean_of_all(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()


@wrong("06.2", hint="Some tensors have arrived, but not all.")
def the_first_tensor(model):
    dist.broadcast(next(model.parameters()).data, src=0)


@wrong("06.2", PARAMETERS, hint="What else does a model hold, saved or not?")
def all_but_the_counter(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            dist.broadcast(tensor, src=0)


@wrong("06.2", PARAMETERS, hint="saved or not")
def what_is_saved(model):
    state = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])


@wrong("06.2", BUFFERS, hint="Some tensors have arrived, but not all.")
def what_is_trained(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)
    for b in model.buffers():
        dist.broadcast(b, src=0)


@wrong("06.2", hint="which is what float32 keeps")
def in_one_tensor_of_floats(model):
    tensors = [*model.parameters(), *model.buffers()]
    flat = torch.cat([each.detach().flatten().float() for each in tensors])
    dist.broadcast(flat, src=0)
    for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        each.data.copy_(part.view_as(each))


@wrong("06.2", hint="without waiting for the end of it")
def starts_it_all(model):
    for each in (*model.parameters(), *model.buffers()):
        dist.broadcast(each.data, src=0, async_op=True)


@wrong("06.2", hint="Nothing arrived in the model")
def the_same_seed(model):
    torch.manual_seed(0)


same: dict[int, Any] = {}


@wrong("06.2", hint="Nothing arrived in the model")
def once_for_each_model(model):
    if id(model) not in same:
        same[id(model)] = model
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


BEGINS = "all replicas begin with rank 0's parameters and buffers"
DURING = "after backward() alone, every rank holds the mean of the gradients"


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.begin()

    def begin(self) -> None:
        self.share()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.average)

    def share(self) -> None:
        for each in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(each.data, src=0)

    def trained(self) -> list[Any]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@wrong("06.3", BEGINS, hint="That is the sum over the ranks")
class SumsUp(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)


@wrong("06.3", hint="What has to be sent before the first step, and by which rank?")
class StartsApart(Wrapper):
    def begin(self) -> None:
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", BEGINS, hint="Nothing is called after backward():")
class WaitsToBeCalled(Wrapper):
    def begin(self) -> None:
        self.share()


@wrong("06.3", BEGINS, hint="each parameter needs a hook")
class HooksTheFirst(Wrapper):
    def begin(self) -> None:
        self.share()
        p = self.trained()[-1]
        p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", BEGINS, hint="Is the sum divided once?")
class DividesTwice(Wrapper):
    def average(self, p: Any) -> None:
        super().average(p)
        p.grad /= dist.get_world_size()


@wrong("06.3", BEGINS, hint="each parameter needs a hook that averages its own.")
class HooksOfTheLast(Wrapper):
    def begin(self) -> None:
        self.share()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(lambda _: self.of_the_last(p))  # noqa: B023

    def of_the_last(self, p: Any) -> None:
        if p.grad is not None:
            self.average(p)


@wrong("06.3", BEGINS, hint="Do all make the same calls, and is each finished when the hook returns?")
class DividesOnRank0(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        if dist.get_rank() == 0:
            p.grad /= dist.get_world_size()


@wrong("06.3", BEGINS, hint="a hook on each parameter has to average its .grad.")
class AveragesACopy(Wrapper):
    def average(self, p: Any) -> None:
        mean = p.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


@wrong("06.3", BEGINS, DURING, hint="what does the first leave?")
class WorksOnce(Wrapper):
    done = 0

    def average(self, p: Any) -> None:
        self.done += 1
        if self.done <= len(self.trained()):
            super().average(p)


@wrong("06.3", hint="fix that first")
class StartsWithTheMean(Wrapper):
    def begin(self) -> None:
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.average)


@wrong("06.3", hint="other shapes")
class HasMore(Wrapper):
    def begin(self) -> None:
        super().begin()
        self.more = nn.Parameter(torch.zeros(3))


@wrong("06.3", hint="this time you write it yourself")
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


@wrong("06.3", BEGINS, hint="What does it leave behind for a second one?")
class CountsItsModels(Wrapper):
    """Hooks for the first model alone."""

    def begin(self) -> None:
        self.share()
        if not models:
            super().begin()
        models.append(self.module)


models: list[Any] = []


@wrong("06.3", hint="A model has buffers, too")
class ForgetsBuffers(Wrapper):
    def share(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)


@wrong("06.3", hint="doesn't require gradient")
class HooksTheFrozen(Wrapper):
    def trained(self) -> list[Any]:
        return list(self.module.parameters())


@wrong("06.3", hint="without waiting for the end of it")
class NeverWaits(Wrapper):
    def average(self, p: Any) -> None:
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)


@wrong("06.3", BEGINS, DURING, hint="In the next, two backward() calls add up:")
class SumsTheMeansAgain(Wrapper):
    """What was there already is summed once more."""

    def average(self, p: Any) -> None:
        before = getattr(p, "before", None)
        super().average(p)
        if before is not None and p.grad is before:
            p.grad *= dist.get_world_size()
        p.before = p.grad


@wrong("06.1", AGREE, hint="A parameter without a gradient must stay without one:")
def zeros_for_none(model, samples):
    total = over_all(samples)
    for p in model.parameters():
        if p.requires_grad:
            mean = (torch.zeros_like(p) if p.grad is None else p.grad) * samples
            dist.all_reduce(mean)
            p.grad = mean / total


# --- right, in another style ---


@right("06.1")
def gathers_all(model, samples):
    total = over_all(samples)
    for p in trained(model):
        each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(each, p.grad * samples / total)
        p.grad = torch.stack(each).sum(0)


@right("06.1")
def in_one_tensor(model, samples):
    """The count travels with the gradients."""
    parameters = trained(model)
    flat = torch.cat([p.grad.flatten() for p in parameters] + [torch.ones(1, dtype=torch.float64)]) * samples
    dist.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    for p, part in zip(parameters, (flat[:-1] / flat[-1]).split(sizes), strict=True):
        p.grad = part.view_as(p)


@right("06.2")
def as_an_object(model):
    everything = [list(model.parameters()) + list(model.buffers())]
    dist.broadcast_object_list(everything, src=0)
    with torch.no_grad():
        for mine, theirs in zip((*model.parameters(), *model.buffers()), everything[0], strict=True):
            mine.copy_(theirs)


@right("06.2")
def as_ddp_does(model):
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 2**20, 0)


@right("06.3")
class HooksTheGradient(Wrapper):
    def begin(self) -> None:
        self.share()
        for p in self.trained():
            p.register_hook(self.mean)

    def mean(self, gradient: Any) -> Any:
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient


@right("06.3")
class WaitsInTheStep(Wrapper):
    """Hooks the nodes at which gradients accumulate."""

    def begin(self) -> None:
        self.share()
        self.nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in self.trained()]
        for node, p in zip(self.nodes, self.trained(), strict=True):
            node.register_hook(lambda *_, p=p: self.average(p))
