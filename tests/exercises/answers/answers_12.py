"""What people answer in exercise 12, wrong and right (see `answers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.exercises.answers import right, wrong

FROZEN = "what no rank's loss uses is frozen, and nothing else"
NAMED = "every rank returns the names of what it froze, in the model's order"
NO_TRACE = "no gradient is made or changed, and the loss can still go backward"


def reached(loss: torch.Tensor) -> set[Any]:
    """The parameters at the ends of a loss's graph."""
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(node.variable)
            ahead += [before for before, _ in node.next_functions]
    return found


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


def freeze(parameters: Any) -> list[str]:
    names = []
    for name, each in parameters:
        each.requires_grad_(False)
        names.append(name)
    return names


def uses(model: nn.Module, found: Any) -> list[int]:
    """On how many ranks each trainable parameter is used."""
    counts = torch.tensor([int(each in found) for _, each in trainable(model)])
    dist.all_reduce(counts)
    return counts.tolist()


def of_no_rank(model: nn.Module, found: Any) -> list[tuple[str, nn.Parameter]]:
    counts = uses(model, found)
    return [each for each, count in zip(trainable(model), counts, strict=True) if count == 0]


@wrong("12.1", hint="on rank")
def each_rank_for_itself(model, loss):
    found = reached(loss)
    return freeze((name, each) for name, each in trainable(model) if each not in found)


@wrong("12.1", hint="Which ranks must keep what one rank uses?")
def what_some_rank_does_not_use(model, loss):
    counts = uses(model, reached(loss))
    everywhere = dist.get_world_size()
    pairs = list(zip(trainable(model), counts, strict=True))
    return freeze(each for each, count in pairs if count < everywhere)


@wrong("12.1", FROZEN, NAMED, hint="A graph can be examined without writing any gradient.")
def by_a_backward_pass(model, loss):
    model.zero_grad()
    loss.backward(retain_graph=True)
    return freeze(of_no_rank(model, {each for each in model.parameters() if each.grad is not None}))


@wrong("12.1", FROZEN, NAMED, hint="What does a backward pass do with the graph?")
def uses_the_graph_up(model, loss):
    parameters = [each for _, each in trainable(model)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    used = {each for each, grad in zip(parameters, gradients, strict=True) if grad is not None}
    return freeze(of_no_rank(model, used))


@wrong("12.1", NAMED, hint="What stops a parameter from asking for a gradient?")
def only_says_it(model, loss):
    return [name for name, _ in of_no_rank(model, reached(loss))]


@wrong("12.1", FROZEN, NO_TRACE, hint="the same list on every rank.")
def only_does_it(model, loss):
    freeze(of_no_rank(model, reached(loss)))


@wrong("12.1", FROZEN, NO_TRACE, hint="the same list on every rank")
def tells_on_rank_0(model, loss):
    names = freeze(of_no_rank(model, reached(loss)))
    return names if dist.get_rank() == 0 else []


@wrong("12.1", NAMED, hint="What was frozen before no longer is.")
def thaws(model, loss):
    unused = of_no_rank(model, reached(loss))
    for each in model.parameters():
        each.requires_grad_(True)
    return freeze(unused)


@wrong("12.1", hint="never called all_reduce")
def leaves_if_all_are_used(model, loss):
    found = reached(loss)
    return freeze(of_no_rank(model, found)) if any(each not in found for _, each in trainable(model)) else []


@wrong("12.1", hint="on rank")
def a_gradient_of_0_is_none(model, loss):
    parameters = [each for _, each in trainable(model)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(parameters, gradients, strict=True)
    return freeze(of_no_rank(model, {each for each, grad in pairs if grad is not None and grad.any()}))


@wrong("12.1", hint="on rank")
def whole_modules(model, loss):
    found, names = reached(loss), []
    for prefix, module in model.named_modules():
        own = [(f"{prefix}.{name}".strip("."), each) for name, each in module.named_parameters(recurse=False)]
        counts = torch.tensor(int(any(each in found for _, each in own)))
        dist.all_reduce(counts)
        if counts == 0:
            names += freeze((name, each) for name, each in own if each.requires_grad)
    return names


@wrong("12.1", FROZEN, NAMED, hint="in every backward pass from now on")
def leaves_its_hooks(model, loss):
    used = set()
    for _, each in trainable(model):
        each.register_hook(lambda grad, each=each: used.add(each))
    parameters = [each for _, each in trainable(model)]
    torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return freeze(of_no_rank(model, used))


FORWARD = "the output is that of one device with the whole batch"
BACKWARD = "so is the gradient"
LESS = "what the ranks send does not grow with the batch"


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SummedForward(Summed):
    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Averaged(Summed):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def normed(x: torch.Tensor, eps: float, add_up: Any) -> torch.Tensor:
    sums = torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])])
    total = add_up(sums)
    mean, squares = (total[:-1] / total[-1]).chunk(2)
    return (x - mean) / torch.sqrt(squares - mean**2 + eps)


@wrong("12.2", hint="That normalises by this rank's own samples.")
def its_own(x, eps):
    return F.batch_norm(x, None, None, training=True, eps=eps)


@wrong("12.2", LESS, FORWARD, hint="The other ranks' outputs depend on this rank's samples, too.")
def backward_of_this_rank_alone(x, eps):
    return normed(x, eps, SummedForward.apply)


@wrong("12.2", LESS, FORWARD, hint="What does the backward pass of such a sum do?")
def backward_is_averaged(x, eps):
    return normed(x, eps, Averaged.apply)


@wrong("12.2", LESS, FORWARD, hint="For autograd the mean and the variance were constants")
def constants(x, eps):
    def add_up(sums):
        total = sums.detach().clone()
        dist.all_reduce(total)
        return total

    return normed(x, eps, add_up)


@wrong("12.2", hint="The ranks have the same weight here, but different numbers of samples.")
def mean_of_the_means(x, eps):
    world_size = dist.get_world_size()
    mean = Summed.apply(x.mean(0)) / world_size
    squares = Summed.apply((x * x).mean(0)) / world_size
    return (x - mean) / torch.sqrt(squares - mean**2 + eps)


@wrong("12.2", hint="Three things, added up")
def unbiased(x, eps):
    total = Summed.apply(torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])]))
    n = total[-1]
    mean, squares = (total[:-1] / n).chunk(2)
    return (x - mean) / torch.sqrt((squares - mean**2) * n / (n - 1) + eps)


@wrong("12.2", hint="Three things, added up")
def forgets_eps(x, eps):
    return normed(x, 0.0, Summed.apply)


@wrong("12.2", hint="Three things, added up")
def all_channels_together(x, eps):
    total = Summed.apply(torch.stack([x.sum(), (x * x).sum(), x.new_tensor(x.numel())]))
    mean, squares = total[0] / total[2], total[1] / total[2]
    return (x - mean) / torch.sqrt(squares - mean**2 + eps)


@wrong("12.2", hint="In which dtype")
def in_float32(x, eps):
    return normed(x.float(), eps, Summed.apply).double()


class Gathered(torch.autograd.Function):
    """All samples of all ranks, on every rank."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        parts = [x.new_zeros(max(sizes), x.shape[1]) for _ in sizes]
        padded = F.pad(x, (0, 0, 0, max(sizes) - len(x)))
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total.split(ctx.sizes)[dist.get_rank()], None


@wrong("12.2", FORWARD, BACKWARD, hint="Samples travel")
def gathers_the_batch(x, eps):
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(x)
    dist.all_reduce(sizes)
    whole = Gathered.apply(x, sizes.tolist())
    return (x - whole.mean(0)) / torch.sqrt(whole.var(0, correction=0) + eps)


@wrong("12.2", hint="The layer before still needs")
def centres_x_in_place(x, eps):
    sums = torch.cat([x.detach().sum(0), x.new_tensor([len(x)])])
    dist.all_reduce(sums)
    x.data -= sums[:-1] / sums[-1]
    return normed(x, eps, Summed.apply)


class SummedRows(torch.autograd.Function):
    """Its backward sends a row for each sample, all of them alike."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        total = x.sum(0)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        most = torch.tensor(ctx.rows)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rows = gradient.expand(int(most), -1).contiguous()
        dist.all_reduce(rows)
        return rows[: ctx.rows]


@wrong("12.2", FORWARD, BACKWARD, hint="Samples travel, or something of their size.")
def a_gradient_for_each_sample(x, eps):
    n = Summed.apply(x.new_tensor([len(x)]))
    mean = SummedRows.apply(x) / n
    var = SummedRows.apply((x - mean) ** 2) / n
    return (x - mean) / torch.sqrt(var + eps)


@wrong("12.2", hint="it returned nothing (None)")
def forgets_to_return(x, eps):
    normed(x, eps, Summed.apply)


@wrong("12.2", LESS, FORWARD, hint="The output must still be connected with the input in the autograd graph.")
def cut_off(x, eps):
    return normed(x, eps, Summed.apply).detach()


MEAN = "every norm has the mean of all that the ranks have seen"
VARIANCE = "and its variance"
ONCE = "the ranks meet once for the whole model, and nothing else in it changes"


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def norms(model):
    return [
        each for each in model.modules() if isinstance(each, BATCH_NORMS) and each.running_mean is not None
    ]


def pool(model: nn.Module, found: list[Any], variance: Any) -> None:
    """In one all_reduce; `variance` is given the means over the ranks of variances, squares and means."""
    if not found:
        return
    means = torch.cat([each.running_mean for each in found])
    variances = torch.cat([each.running_var for each in found])
    sums = torch.stack([means, variances, means**2])
    dist.all_reduce(sums)
    mean, of_variances, of_squares = sums / dist.get_world_size()
    sizes = [each.num_features for each in found]
    pairs = zip(mean.split(sizes), variance(of_variances, of_squares, mean).split(sizes), strict=True)
    for norm, (its_mean, its_variance) in zip(found, pairs, strict=True):
        norm.running_mean.copy_(its_mean)
        norm.running_var.copy_(its_variance)


class InTheGradient(torch.autograd.Function):
    """It adds up in the gradient that came."""

    @staticmethod
    def forward(ctx, tensor):
        return SummedForward.forward(ctx, tensor)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


@wrong("12.2", FORWARD, LESS, hint="Add up in a tensor of your own")
def adds_up_in_the_gradient(x, eps):
    return normed(x, eps, InTheGradient.apply)


NORMED: dict[Any, Any] = {}


@wrong("12.2", hint="Three things, added up")
def remembers_the_tensor(x, eps):
    if (x, eps) not in NORMED:
        NORMED[x, eps] = normed(x, eps, Summed.apply)
    return NORMED[x, eps]


@wrong("12.3", MEAN, ONCE, hint="The ranks' means differ, too.")
def mean_of_the_variances(model):
    pool(model, norms(model), lambda variances, squares, mean: variances)


@wrong("12.3", MEAN, ONCE, hint="Think of the samples of all ranks together")
def means_apart_by_n_minus_1(model):
    n = dist.get_world_size()
    pool(model, norms(model), lambda variances, squares, mean: variances + (squares - mean**2) * n / (n - 1))


@wrong("12.3", hint="Some norms are done and others are not")
def one_kind_of_norm(model):
    found = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    pool(model, found, lambda variances, squares, mean: variances + squares - mean**2)


@wrong("12.3", hint="of rank")
def broadcasts(model):
    for each in norms(model):
        dist.broadcast(each.running_mean, src=0)
        dist.broadcast(each.running_var, src=0)


@wrong("12.3", MEAN, hint="such a buffer")
def buffer_by_buffer(model):
    for name, each in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(each)
            each /= dist.get_world_size()


@wrong("12.3", MEAN, VARIANCE, hint="What can be concatenated can travel together:")
def norm_by_norm(model):
    for each in norms(model):
        pool(model, [each], lambda variances, squares, mean: variances + squares - mean**2)


@wrong("12.3", hint="Think of the samples of all ranks together")
def only_adds_up(model):
    found = norms(model)
    both = torch.cat([torch.cat([each.running_mean, each.running_var]) for each in found])
    dist.all_reduce(both)
    for each, part in zip(found, both.split([2 * each.num_features for each in found]), strict=True):
        each.running_mean.copy_(part.chunk(2)[0])
        each.running_var.copy_(part.chunk(2)[1])


@wrong("12.3", hint="must get into the model's own buffers")
def into_copies(model):
    found = norms(model)
    means = torch.cat([each.running_mean for each in found])
    dist.all_reduce(means)
    means /= dist.get_world_size()


@wrong("12.3", hint="Does each of them get the result?")
def on_rank_0_alone(model):
    found = norms(model)
    means = torch.cat([each.running_mean for each in found])
    variances = torch.cat([each.running_var for each in found])
    both = torch.stack([means, variances + means**2])
    dist.reduce(both, dst=0)
    if dist.get_rank() == 0:
        mean, squares = both / dist.get_world_size()
        sizes = [each.num_features for each in found]
        for each, m, v in zip(found, mean.split(sizes), (squares - mean**2).split(sizes), strict=True):
            each.running_mean.copy_(m)
            each.running_var.copy_(v)


@wrong("12.3", hint="Think of the samples of all ranks together, equally many from each.")
def written_for_two_ranks(model):
    found = norms(model)
    means = torch.cat([each.running_mean for each in found])
    variances = torch.cat([each.running_var for each in found])
    both = torch.stack([means, variances + means**2])
    dist.all_reduce(both)
    mean, squares = both / 2
    sizes = [each.num_features for each in found]
    for each, m, v in zip(found, mean.split(sizes), (squares - mean**2).split(sizes), strict=True):
        each.running_mean.copy_(m)
        each.running_var.copy_(v)


@wrong("12.3", MEAN, VARIANCE, hint="Only the running statistics of batch norms may change.")
def leaves_it_in_eval(model):
    pool(model.eval(), norms(model), lambda variances, squares, mean: variances + squares - mean**2)


# --- right, in another style ---


@wrong("12.3", MEAN, VARIANCE, hint="Whatever holds the old one, as DDP does, cannot see it.")
def puts_new_buffers_in(model):
    held = [(each, each.running_mean, each.running_var) for each in norms(model)]
    for each, mean, var in held:
        each.running_mean, each.running_var = mean.clone(), var.clone()
    pool(model, norms(model), lambda variances, squares, mean: variances + squares - mean**2)


@wrong("12.3", hint="ne of rank")
def all_but_the_model_itself(model):
    inner = [each for child in model.children() for each in norms(child)]
    if inner:
        pool(model, inner, lambda variances, squares, mean: variances + squares - mean**2)


@right("12.1")
def asks_autograd(model, loss):
    parameters = [each for _, each in trainable(model)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    unused = torch.tensor([grad is None for grad in gradients], dtype=torch.int32)
    dist.all_reduce(unused, op=dist.ReduceOp.MIN)
    pairs = list(zip(trainable(model), unused.tolist(), strict=True))
    return tuple(freeze(each for each, free in pairs if free))


@right("12.1")
def gathers_the_names(model, loss):
    found = reached(loss)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [name for name, each in model.named_parameters() if each in found])
    used = {name for names in everyones for name in names}
    return freeze([(name, each) for name, each in trainable(model) if name not in used])


@right("12.2")
def in_two_steps(x, eps):
    n = Summed.apply(x.new_tensor([len(x)]))
    mean = Summed.apply(x.sum(0)) / n
    var = Summed.apply((x - mean).pow(2).sum(0)) / n
    return (x - mean) * torch.rsqrt(var + eps)


@right("12.2")
def gathers_the_statistics(x, eps):
    """As `SyncBatchNorm` does: mean, variance and count of each rank."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    row = torch.cat([x.mean(0), x.var(0, correction=0), x.new_tensor([len(x)])])
    place = torch.zeros(world_size, 1, dtype=x.dtype)
    place[rank] = 1
    table = Summed.apply(place * row)
    means, variances = table[:, :-1].chunk(2, dim=1)
    share = table[:, -1:] / table[:, -1].sum()
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean) ** 2)).sum(0)
    return (x - mean) / (var + eps).sqrt()


@right("12.3")
def all_in_one_tensor(model):
    found = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    found = [each for each in found if each.track_running_stats]
    mine = torch.stack([torch.cat([getattr(n, of) for n in found]) for of in ("running_mean", "running_var")])
    everyones = mine.new_empty(2 * dist.get_world_size(), mine.shape[1])
    dist.all_gather_into_tensor(everyones, mine)
    means, variances = everyones[::2], everyones[1::2]
    var = variances.mean(0) + means.var(0, correction=0)
    at = 0
    for each in found:
        end = at + each.num_features
        each.running_mean.data, each.running_var.data = means.mean(0)[at:end], var[at:end]
        at = end


@right("12.3")
def by_names(model):
    state = model.state_dict()
    found = norms(model)
    names = [f"{name}.running_mean".lstrip(".") for name, each in model.named_modules() if each in found]
    means = torch.cat([state[name] for name in names])
    variances = torch.cat([state[name.replace("_mean", "_var")] for name in names])
    sums = torch.cat([means, variances, means**2]) / dist.get_world_size()
    dist.all_reduce(sums)
    mean, of_variances, of_squares = sums.chunk(3)
    at = 0
    for name in names:
        end = at + len(state[name])
        state[name].copy_(mean[at:end])
        state[name.replace("_mean", "_var")].copy_((of_variances + of_squares - mean**2)[at:end])
        at = end


# --- the result is right, and it was not done as asked ---


TOLD: list[int] = []


def told_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    """By rank, everyone's rows, through the store."""
    store = dist.distributed_c10d._get_default_store()
    TOLD.append(len(tensor))
    store.set(f"{len(TOLD)}/{dist.get_rank()}", tensor.detach().contiguous().numpy().tobytes())
    texts = [bytearray(store.get(f"{len(TOLD)}/{rank}")) for rank in range(dist.get_world_size())]
    return [torch.frombuffer(each, dtype=tensor.dtype).view(-1, tensor.shape[1]) for each in texts]


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        of_ranks = told_all(x)
        ctx.sizes = [len(each) for each in of_ranks]
        return torch.cat(of_ranks)

    @staticmethod
    def backward(ctx, gradient):
        return sum(told_all(gradient)).split(ctx.sizes)[dist.get_rank()]


@wrong("12.2", FORWARD, BACKWARD, hint="Samples travel")
def through_the_store(x, eps):
    whole = Told.apply(x)
    return (x - whole.mean(0)) / torch.sqrt(whole.var(0, correction=0) + eps)


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


def unused(model, loss):
    reached, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                reached.add(node.variable)
            ahead += [before for before, _ in node.next_functions]
    return seen, [each in reached for each in model.parameters() if each.requires_grad]


def frozen_together(model, used):
    uses = torch.tensor(used, dtype=torch.int64)
    dist.all_reduce(uses)
    trainable = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    names = []
    for (name, parameter), count in zip(trainable, uses.tolist(), strict=True):
        if count == 0:
            parameter.requires_grad_(False)
            names.append(name)
    return names


@wrong("12.1", FROZEN, NAMED, hint="in the mode that you left it in")
def in_evaluation_mode(model, loss):
    model.eval()
    return frozen_together(model, unused(model, loss)[1])


@wrong("12.1", FROZEN, NAMED, hint="a hook of yours")
def hooks_on_the_modules(model, loss):
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    return frozen_together(model, unused(model, loss)[1])


@wrong("12.2", hint="on rank")
def by_unbiased_variances(x, eps):  # nan, where a rank has a single row
    n = len(x)
    squares = x.var(0) * (n - 1) + n * x.mean(0) ** 2
    total = Summed.apply(torch.cat([x.sum(0), squares, x.new_tensor([n])]))
    mean, mean_of_squares = (total[:-1] / total[-1]).chunk(2)
    return (x - mean) / torch.sqrt(mean_of_squares - mean**2 + eps)


def pooled(found):
    means = torch.cat([each.running_mean for each in found])
    variances = torch.cat([each.running_var for each in found])
    both = torch.stack([means, variances + means**2]) / dist.get_world_size()
    dist.all_reduce(both)
    sizes = [len(each.running_mean) for each in found]
    for each, mean, squares in zip(found, both[0].split(sizes), both[1].split(sizes), strict=True):
        each.running_mean.copy_(mean)
        each.running_var.copy_(squares - mean**2)


@wrong("12.3", MEAN, VARIANCE, hint="Not only batch norms have such a buffer.")
def every_running_mean(model):
    pooled([each for each in model.modules() if getattr(each, "running_mean", None) is not None])


@wrong("12.3", MEAN, VARIANCE, hint="has changed")
def freezes_then(model):
    pooled(norms(model))
    model.requires_grad_(False)


@wrong("12.3", MEAN, VARIANCE, hint="momentum has changed")
def as_a_plain_mean_from_now_on(model):
    pooled(norms(model))
    for each in norms(model):
        each.momentum = None
