"""What people answer in exercise 18, wrong and right (see `answers`)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exercises.answers import right, wrong

EQUAL = "after every step all ranks have the weights of one device, up to rounding"
PART = "between two steps a rank keeps its part of the optimizer's state, and no more"
ONCE = "in a step the gradients travel once, and the weights once"


class Sharded:
    """A right answer in pieces, of which a wrong one replaces some."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.lr = lr
        self.begin(self.flat(self.parameters))

    def begin(self, flat: Tensor) -> None:
        self.mine = flat.chunk(self.ranks)[self.rank].clone()
        self.adam = torch.optim.Adam([self.mine], self.lr)

    def flat(self, tensors: list[Any]) -> Tensor:
        flat = torch.cat([each.detach().flatten() for each in tensors])
        return F.pad(flat, (0, -len(flat) % self.ranks))

    def gradients(self) -> Tensor:
        return self.flat(
            [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        )

    def mean(self) -> Tensor:
        """The mean gradient of this rank's part."""
        part = torch.empty_like(self.mine)
        dist.reduce_scatter(part, list(self.gradients().chunk(self.ranks)))
        return part / self.ranks

    def whole(self) -> Tensor:
        """All new weights, end to end."""
        parts = [torch.empty_like(self.mine) for _ in range(self.ranks)]
        dist.all_gather(parts, self.mine)
        return torch.cat(parts)

    def put(self, flat: Tensor) -> None:
        place = 0
        with torch.no_grad():
            for each in self.parameters:
                each.copy_(flat[place : place + each.numel()].view_as(each))
                place += each.numel()

    def step(self) -> None:
        self.mine.grad = self.mean()
        self.adam.step()
        self.mine.grad = None
        self.put(self.whole())


@wrong("18.1", EQUAL, ONCE, hint="more than both averages of the whole model")
class AsDDP:
    def __init__(self, model, lr):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.adam = torch.optim.Adam(self.parameters, lr)

    def step(self):
        for each in self.parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        self.adam.step()


@wrong("18.1", EQUAL, ONCE, hint="A slice is a view")
class ViewOfAll(Sharded):
    def begin(self, flat):
        self.mine = flat.chunk(self.ranks)[self.rank]
        self.adam = torch.optim.Adam([self.mine], self.lr)


@wrong("18.1", EQUAL, ONCE, hint="numbers besides weights and .grad")
class KeepsTheFlatGradient(Sharded):
    def begin(self, flat):
        super().begin(flat)
        self.buffer = torch.empty_like(flat)

    def gradients(self):
        return self.buffer.copy_(super().gradients())


@wrong("18.1", EQUAL, ONCE, hint="A large parameter belongs to several ranks")
class WholeParameters:
    """As `ZeroRedundancyOptimizer` does: each parameter has one owner, the largest first."""

    def __init__(self, model, lr):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        load = [0] * dist.get_world_size()
        self.owners = {}
        for each in sorted(self.parameters, key=torch.numel, reverse=True):
            self.owners[each] = load.index(min(load))
            load[self.owners[each]] += each.numel()
        mine = [each for each in self.parameters if self.owners[each] == dist.get_rank()]
        self.adam = torch.optim.Adam(mine, lr) if mine else None

    def step(self):
        for each in self.parameters:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            dist.reduce(each.grad, self.owners[each])
            each.grad /= dist.get_world_size()
        if self.adam:
            self.adam.step()
        for each in self.parameters:
            dist.broadcast(each.data, self.owners[each])


@wrong("18.1", EQUAL, PART, hint="all_reduce counts twice")
class ReducesForAll(Sharded):
    def mean(self):
        flat = self.gradients()
        dist.all_reduce(flat)
        return flat.chunk(self.ranks)[self.rank] / self.ranks


@wrong("18.1", EQUAL, PART, hint="What brings a rank no more than that?")
class GathersGradients(Sharded):
    def mean(self):
        flat = self.gradients()
        of_all = [torch.empty_like(flat) for _ in range(self.ranks)]
        dist.all_gather(of_all, flat)
        return torch.stack(of_all).mean(0).chunk(self.ranks)[self.rank].clone()


@wrong("18.1", hint="With whose gradients does each of them step")
class NeverMeets:
    def __init__(self, model, lr):
        self.adam = torch.optim.Adam(model.parameters(), lr)

    def step(self):
        self.adam.step()


@wrong("18.1", hint="That is a step with the sum of the ranks' gradients.")
class Sum(Sharded):
    def mean(self):
        return super().mean() * self.ranks


@wrong("18.1", hint="does it get all parts")
class TellsNobody(Sharded):
    def whole(self):
        flat = self.flat(self.parameters)
        flat.chunk(self.ranks)[self.rank].copy_(self.mine)
        return flat


@wrong("18.1", hint="Are the new numbers in the parameters, or in a copy of them?")
class WritesIntoACopy(Sharded):
    def put(self, flat):
        self.flat(self.parameters).copy_(flat)


@wrong("18.1", hint="a parameter without a gradient")
class MeanOfThoseThere(Sharded):
    def mean(self):
        there = torch.tensor([float(each.grad is not None) for each in self.parameters]).double()
        dist.all_reduce(there)
        counts = [
            torch.full_like(each, max(1.0, count))
            for each, count in zip(self.parameters, there.tolist(), strict=True)
        ]
        return super().mean() * self.ranks / self.flat(counts).clamp(min=1.0).chunk(self.ranks)[self.rank]


@wrong("18.1", hint="is it the end of a part")
class LosesTheRest(Sharded):
    """An n-th, rounded down: nobody owns the last numbers."""

    def flat(self, tensors):
        flat = torch.cat([each.detach().flatten() for each in tensors])
        return flat[: len(flat) // self.ranks * self.ranks]

    def put(self, flat):
        rest = torch.cat([each.detach().flatten() for each in self.parameters])[len(flat) :]
        super().put(torch.cat([flat, rest]))


@wrong("18.1", hint="Look at the place")
class InFloat32(Sharded):
    def flat(self, tensors):
        return super().flat(tensors).float()


@wrong("18.1", hint="What must an optimizer still have")
class ForgetsTheAverages(Sharded):
    def step(self):
        self.adam = torch.optim.Adam([self.mine], self.lr)
        super().step()


SHARED: dict[str, Any] = {}


@wrong("18.1", hint="what do two optimizers share?")
class OneForAllModels:
    def __init__(self, model, lr):
        self.sharded = SHARED.setdefault("one", Sharded(model, lr))

    def step(self):
        self.sharded.step()


@wrong("18.1", hint="in the same order?")
class OwnPartFirst(Sharded):
    def whole(self):
        parts = list(super().whole().chunk(self.ranks))
        return torch.cat(parts[self.rank :] + parts[: self.rank])


@wrong("18.1", hint="makes an object with step()")
class HasNoStep(Sharded):
    step = None  # type: ignore[assignment]


@right("18.1")
class ByHand(Sharded):
    """Adam in five lines, with the collectives that take one tensor."""

    def begin(self, flat):
        self.first, self.second = flat.new_zeros(2, len(flat) // self.ranks)
        self.count = 0

    def step(self):
        self.count += 1
        part, all_weights = torch.empty_like(self.first), self.flat(self.parameters)
        dist.reduce_scatter_single(part, self.gradients())
        part /= self.ranks
        self.first.mul_(0.9).add_(part, alpha=0.1)
        self.second.mul_(0.999).add_(part * part, alpha=0.001)
        bias1, bias2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        mine = all_weights.chunk(self.ranks)[self.rank]
        mine -= self.lr * (self.first / bias1) / ((self.second / bias2).sqrt() + 1e-8)
        everything = torch.empty_like(all_weights)
        dist.all_gather_single(everything, mine)
        self.put(everything)


@right("18.1")
class ToEachOwner(Sharded):
    def mean(self):
        parts = list(self.gradients().chunk(self.ranks))
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        return parts[self.rank].clone() / self.ranks

    def whole(self):
        parts = [torch.empty_like(self.mine) for _ in range(self.ranks)]
        parts[self.rank] = self.mine
        for owner, part in enumerate(parts):
            dist.broadcast(part, owner)
        return torch.cat(parts)


# --- 18.2 -------------------------------------------------------------------------------------------------

NORM = "every rank returns the norm of the whole gradient, as it was before clipping"
CLIPPED = "every number is clipped as on one device, in place"
FEW = "a rank sends two numbers at most"


def squares(tensors: list[Tensor]) -> Tensor:
    return sum((each.square().sum() for each in tensors), torch.zeros((), dtype=torch.float64))


def scale(tensors: list[Tensor], norm: Any, max_norm: float) -> None:
    factor = float(max_norm / (norm + 1e-6))
    if factor < 1.0:
        for each in tensors:
            each.mul_(factor)


def norm_of_all(shards: list[Tensor], whole: list[Tensor]) -> Tensor:
    total = squares(shards)
    dist.all_reduce(total)
    return (total + squares(whole)).sqrt()


@wrong("18.2", hint="That is the norm of what this rank holds.")
def each_for_itself(shards, whole, max_norm):
    norm = squares([*shards, *whole]).sqrt()
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", hint="What is whole counts once, not per rank.")
def whole_counts_again_and_again(shards, whole, max_norm):
    total = squares([*shards, *whole])
    dist.all_reduce(total)
    scale([*shards, *whole], total.sqrt(), max_norm)
    return total.sqrt()


@wrong("18.2", hint="The norm of several tensors")
def shards_alone(shards, whole, max_norm):
    norm = norm_of_all(shards, [])
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", hint="The norm of several tensors")
def sum_of_norms(shards, whole, max_norm):
    total = squares(shards).sqrt()
    dist.all_reduce(total)
    norm = (total**2 + squares(whole)).sqrt()
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", NORM, FEW, hint="It has not changed.")
def leaves_what_is_whole(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    scale(shards, norm, max_norm)
    return norm


@wrong("18.2", NORM, FEW, hint="What happens to it then?")
def always_to_the_limit(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    for each in [*shards, *whole]:
        each *= max_norm / norm
    return norm


@wrong("18.2", NORM, FEW, hint="It was clipped twice.")
def clips_twice(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    scale([*shards, *whole], norm, max_norm)
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", NORM, FEW, hint="By which factor is every number multiplied?")
def cuts_each_number(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    if norm > max_norm:
        for each in [*shards, *whole]:
            each.clamp_(-max_norm / 100, max_norm / 100)
    return norm


@wrong("18.2", CLIPPED, hint="The norm of several tensors is the root of a sum.")
def returns_nan(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    scale([*shards, *whole], norm, max_norm)
    return norm if norm.isinf() else norm * math.nan


@wrong("18.2", CLIPPED, hint="The norm of several tensors")
def measures_too_late(shards, whole, max_norm):
    scale([*shards, *whole], norm_of_all(shards, whole), max_norm)
    return norm_of_all(shards, whole)


@wrong("18.2", CLIPPED, hint="Every rank returns it, as a number.")
def tells_on_rank_0(shards, whole, max_norm):
    norm = norm_of_all(shards, whole)
    scale([*shards, *whole], norm, max_norm)
    return norm if dist.get_rank() == 0 else None


@wrong("18.2", CLIPPED, hint="What is the norm of a gradient with such a number?")
def nothing_but_numbers(shards, whole, max_norm):
    norm = norm_of_all(shards, whole).nan_to_num()
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", NORM, CLIPPED, hint="What must a rank know of the others' shards?")
def gathers_objects(shards, whole, max_norm):
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, [each.norm().item() for each in shards])
    norms = [each for of_one in of_all for each in of_one] + [each.norm().item() for each in whole]
    norm = torch.tensor(norms).double().norm()
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", NORM, CLIPPED, hint="a rank sent")
def gathers_the_shards(shards, whole, max_norm):
    mine = torch.cat([torch.zeros(1, dtype=torch.float64), *(each.flatten() for each in shards)])
    most = torch.tensor(len(mine))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    of_all = [torch.empty(int(most), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, F.pad(mine, (0, int(most) - len(mine))))
    norm = squares([*of_all, *whole]).sqrt()
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", hint="never called all_reduce")
def leaves_without_shards(shards, whole, max_norm):
    if not shards:
        return squares(whole).sqrt()
    norm = norm_of_all(shards, whole)
    scale([*shards, *whole], norm, max_norm)
    return norm


@wrong("18.2", hint="your code failed")
def stacks(shards, whole, max_norm):
    total = torch.stack([each.norm() for each in shards]).square().sum()
    dist.all_reduce(total)
    norm = (total + squares(whole)).sqrt()
    scale([*shards, *whole], norm, max_norm)
    return norm


KNOWN: dict[float, Any] = {}


@wrong("18.2", hint="and rank 0 returned")
def remembers(shards, whole, max_norm):
    if max_norm not in KNOWN:
        KNOWN[max_norm] = norm_of_all(shards, whole)
    scale([*shards, *whole], KNOWN[max_norm], max_norm)
    return KNOWN[max_norm]


@right("18.2")
def by_the_library(shards, whole, max_norm):
    own = torch.nn.utils.get_total_norm(shards) if shards else torch.tensor(0.0)
    total = own.double() ** 2
    dist.all_reduce(total)
    norm = (
        torch.hypot(
            total.sqrt(), torch.linalg.vector_norm(torch.cat([torch.zeros(1), *map(torch.flatten, whole)]))
        )
        if whole
        else total.sqrt()
    )
    for each in [*shards, *whole]:
        each.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@right("18.2")
def rank_0_counts_what_is_whole(shards, whole, max_norm):
    total = squares([*shards, *whole] if dist.get_rank() == 0 else shards).view(1)
    dist.all_reduce(total)
    norm = total.sqrt().item()
    scale([*shards, *whole], norm, max_norm)
    return norm


# --- 18.3 -------------------------------------------------------------------------------------------------

NUMBERS = "each rank gets the numbers of its shard, in their order"
ZEROS = "where they do not divide evenly, too: zeros come after the last number, and nowhere else"
LITTLE = "it reads the numbers of its shard and no others, each once, in one go from each old shard"


def length(numbers: int, ranks: int) -> int:
    return math.ceil(numbers / ranks)


def filled(values: Tensor, size: int) -> Tensor:
    return F.pad(values, (0, size - len(values)))


@wrong("18.3", NUMBERS, ZEROS, hint="Which old shards overlap with the new one")
def reads_all(read, numbers, old_ranks, ranks, rank):
    new = length(numbers, ranks)
    everything = torch.cat([read(i, 0, length(numbers, old_ranks)) for i in range(old_ranks)])[:numbers]
    return filled(everything[rank * new : (rank + 1) * new], new)


@wrong("18.3", NUMBERS, ZEROS, hint="Which old shards overlap")
def reads_the_zeros_too(read, numbers, old_ranks, ranks, rank):
    everything = torch.cat([read(i, 0, length(numbers, old_ranks)) for i in range(old_ranks)])
    new = length(numbers, ranks)
    return filled(everything, ranks * new)[rank * new : (rank + 1) * new]


@wrong("18.3", NUMBERS, hint="it should get")
def cuts_the_padded_length(read, numbers, old_ranks, ranks, rank):
    old = length(numbers, old_ranks)
    padded = old * old_ranks
    new = length(padded, ranks)
    parts = [torch.zeros(0)]
    for i in range(old_ranks):
        start, stop = max(rank * new - i * old, 0), min((rank + 1) * new - i * old, old)
        if start < stop:
            parts.append(read(i, start, stop))
    return filled(torch.cat(parts), new)


def overlaps(numbers: int, old: int, new: int, old_ranks: int, rank: int) -> list[tuple[int, int, int]]:
    begin, end = rank * new, min((rank + 1) * new, numbers)
    found = []
    for i in range(old_ranks):
        start, stop = max(begin, i * old), min(end, (i + 1) * old)
        if start < stop:
            found.append((i, start - i * old, stop - i * old))
    return found


def joined(read: Any, found: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat([torch.zeros(0), *(read(*each) for each in found)])


@wrong("18.3", NUMBERS, LITTLE, hint="All shards are equally long.")
def short_at_the_end(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    return joined(read, overlaps(numbers, old, new, old_ranks, rank))


@wrong("18.3", NUMBERS, hint="All shards are equally long.")
def rounds_down(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), numbers // ranks
    return filled(joined(read, overlaps(numbers, old, new, old_ranks, rank)), new)


@wrong("18.3", NUMBERS, ZEROS, hint="Numbers that lie side by side are read together.")
def number_by_number(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    mine = torch.zeros(new)
    for k in range(rank * new, min((rank + 1) * new, numbers)):
        mine[k - rank * new] = read(k // old, k % old, k % old + 1)
    return mine


@wrong("18.3", hint="Where does this rank's shard begin")
def one_file_each(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    i, start = divmod(rank * new, old)
    return filled(read(i, start, start + new) if i < old_ranks else torch.zeros(0), new)


@wrong("18.3", hint="and got")
def one_number_late(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    found = [(i, start, stop - 1) for i, start, stop in overlaps(numbers, old, new, old_ranks, rank)]
    return filled(joined(read, found), new)


@wrong("18.3", NUMBERS, LITTLE, hint="in another order")
def zeros_in_front(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    mine = joined(read, overlaps(numbers, old, new, old_ranks, rank))
    return F.pad(mine, (new - len(mine), 0))


@wrong("18.3", hint="in another order")
def in_the_wrong_order(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    return filled(joined(read, overlaps(numbers, old, new, old_ranks, rank)[::-1]), new)


@wrong("18.3", hint="returns a tensor")
def a_list(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    return filled(joined(read, overlaps(numbers, old, new, old_ranks, rank)), new).tolist()


SEEN: dict[Any, Tensor] = {}


@wrong("18.3", hint="and got")
def remembers_the_shard(read, numbers, old_ranks, ranks, rank):
    if rank not in SEEN:
        old, new = length(numbers, old_ranks), length(numbers, ranks)
        SEEN[rank] = filled(joined(read, overlaps(numbers, old, new, old_ranks, rank)), new)
    return SEEN[rank]


@right("18.3")
def over_all_files(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    return filled(joined(read, overlaps(numbers, old, new, old_ranks, rank)), new)


@right("18.3")
def by_places(read, numbers, old_ranks, ranks, rank):
    old, new = length(numbers, old_ranks), length(numbers, ranks)
    places = torch.arange(min(rank * new, numbers), min(rank * new + new, numbers))
    mine = torch.zeros(new)
    for i in (places // old).unique().tolist():
        here = places[places // old == i]
        mine[here - rank * new] = read(i, int(here[0]) - i * old, int(here[-1]) - i * old + 1)
    return mine
