"""The questions of lesson 12: three models that DDP alone does not get right."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...frames import is_learners
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, refuse_unless
from ..inputs import seeds, settings, tensor
from ..judging import (
    Faults,
    by_call,
    far,
    first_fault,
    first_wrong,
    furthest,
    nearest,
    place_of_furthest,
    with_two_world_sizes,
)
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, TENSOR, of_size, reports
from ..wording import reason, told

CLOSE = 1e-9  # the tensors are float64


# --- 12.1 -------------------------------------------------------------------------------------------------

FROZEN = "what no rank's loss uses is frozen, and nothing else"
NAMED = "every rank returns the names of what it froze, in the model's order"
NO_TRACE = "no gradient is made or changed, and the loss can still go backward"
MEETINGS = 40  # of paths in the graph: each doubles a walk that revisits nodes


class _Heads(nn.Module):
    """A model with a body and nested heads; each loss uses some of the heads."""

    def __init__(self, heads: list[str]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        deep = {name: nn.Sequential(nn.Linear(3, 2), nn.ModuleList([nn.Linear(2, 2)])) for name in heads}
        self.tasks = nn.ModuleDict({"heads": nn.ModuleDict(deep)})
        self.scale = nn.Parameter(torch.ones(()))  # used by ranks that use the first head

    def loss(self, x: Tensor, used: list[str], closed: str) -> Tensor:
        """Compute a loss from the used heads; the closed one is among them, with a gradient of 0."""
        layer: Any = self.body[0]
        heads: Any = self.tasks["heads"]
        bias = layer.bias if len(used) == len(heads) else None  # used by ranks that use all heads
        features = nn.functional.linear(x, layer.weight, bias).tanh()
        for _ in range(MEETINGS):
            features = (features + features.tanh()) / 2
        total = features.pow(2).mean()
        for place, (name, head) in enumerate(heads.items()):
            if name in used:
                first, (second,) = head
                score = second(first(features)) - 1e3 * (name == closed)
                total = total + (1 if place else self.scale) * score.relu().sum()
        return total


@question("12.1", "freeze_unused(model, loss)", {FROZEN: 1, NAMED: 1, NO_TRACE: 1}, rests={NO_TRACE: FROZEN})
@with_two_world_sizes()
def freeze_unused(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    kinds = ["depth", "edge", "mask", "pose", "sound", "text", "voice"]
    heads = [f"{kind}{rng.randrange(100)}" for kind in rng.sample(kinds, len(kinds))]
    roles = rng.sample(heads, len(heads))
    plans = [_plan(rng, heads, roles[turn:] + roles[:turn], count) for turn in (0, 3, 5)]
    plans[-1]["used"][rng.randrange(count)] = heads  # one rank uses all heads
    for plan, results in zip(plans, by_call(ask(_after_freezing, plans, nprocs=count)), strict=True):
        names = [name for name, _ in _Heads(plan["heads"]).named_parameters()]
        by_rank = [[name for name in names if not _is_used(name, plan, used)] for used in plan["used"]]
        before = [name for name in names if _of(plan["frozen"], name)]
        right = [name for name in names if all(name in unused for unused in by_rank) and name not in before]
        yield _of_frozen(results, right, before, by_rank)
        names_are_right = [result["names"] == right for result in results]
        rank = first_wrong(names_are_right)
        returned = results[rank]["names"]
        seen = f"rank {rank} returned {returned if isinstance(returned, str) else _some(returned)}"
        hint = (
            "Return the names of what this call froze, as the model lists them: the same list on every rank."
        )
        yield Finding(NAMED, all(names_are_right), seen, hint)
        yield first_fault(NO_TRACE, _traces(results))


def _plan(rng: random.Random, heads: list[str], roles: list[str], count: int) -> dict[str, Any]:
    """Draw which heads each rank uses, and which one is frozen from the start."""
    _, nobodys, first, last, of_two, frozen, everyones = roles
    used = [[everyones, frozen] for _ in range(count)]
    used[0] += [first, of_two]
    used[-1] += [last, of_two]
    return {
        "heads": heads,
        "used": used,
        "frozen": rng.choice([frozen, nobodys]),
        "closed": rng.choice([first, last]),
        "seed": rng.randrange(2**31),
    }


def _of(head: str, name: str) -> bool:
    return f".{head}." in name


def _is_used(name: str, plan: dict[str, Any], used: list[str]) -> bool:
    if name == "scale":
        return plan["heads"][0] in used
    if name == "body.0.bias":
        return len(used) == len(plan["heads"])
    return name.startswith("body") or any(_of(head, name) for head in used)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "an empty list"


def _of_frozen(
    results: list[Result], right: list[str], before: list[str], by_rank: list[list[str]]
) -> Finding:
    wanted = {*right, *before}
    frozen = [set(result["frozen"]) for result in results]
    rank = first_wrong(names == wanted for names in frozen)
    now = frozen[rank]
    seen = f"on rank {rank}: should be frozen and is not: {_some(sorted(wanted - now))}; "
    seen += f"is frozen and should not be: {_some(sorted(now - wanted))}"
    seen = seen.replace("an empty list", "none")
    hint = "Which parameters are at the ends of the loss's graph? On every rank, and then over all ranks."
    if now == set(before):
        hint = "Nothing was frozen. What stops a parameter from asking for a gradient?"
    elif before and not now.issuperset(before):
        hint = "What was frozen before no longer is. It is not yours to change."
    elif now == {*by_rank[rank], *before}:
        hint = "That is what this rank does not use. Another rank may: how do they agree?"
    elif now >= {*by_rank[rank], *before}:
        hint = "More is frozen than this rank leaves unused. Which ranks must keep what one rank uses?"
    return Finding(FROZEN, now == wanted, seen, hint)


def _traces(results: list[Result]) -> Faults:
    """Yield what a call has left behind, with a hint."""
    for rank, result in enumerate(results):
        if not result["kept"]:
            seen = f"on rank {rank} a gradient is not what it was"
            yield seen, "A graph can be examined without writing any gradient."
        if not result["as_it_was"]:
            seen = f"on rank {rank} a module of the model is in another mode after your call"
            yield seen, "The training goes on in the mode that you left it in."
        if result["hooks"]:
            seen = f"on rank {rank} a hook of yours is still there, on the model or in the loss's graph"
            yield seen, "It will be called in every backward pass from now on."
        if result["error"]:
            seen = f"on rank {rank}, loss.backward() after your call: {result['error']}"
            yield seen, "What does a backward pass do with the graph? It is still needed."


@reports(
    lambda plans: (
        [
            {
                "names": ([str, ...], str),
                "frozen": [str, ...],
                "kept": bool,
                "hooks": bool,
                "error": str,
                "as_it_was": bool,
            }
        ]
        * len(plans)
    )
)
@in_group
def _after_freezing(answer: Any, plans: list[dict[str, Any]]) -> list[Result]:
    rank, results = dist.get_rank(), []
    for plan in plans:
        torch.manual_seed(plan["seed"] + rank)
        model = _Heads(plan["heads"]).double()
        for name, parameter in model.named_parameters():
            if _of(plan["frozen"], name):
                parameter.requires_grad_(False)
            elif "weight" in name:  # left by an earlier step
                parameter.grad = torch.randn_like(parameter)
        had = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        loss = model.loss(tensor(plan["seed"] + rank, (5, 4)), plan["used"][rank], plan["closed"])
        before = settings(model)
        names = answer(model, loss)
        now = settings(model)
        listed = isinstance(names, list | tuple | set | dict)
        names = list(map(str, names)) if listed else told(names)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        kept = all(_same(had[name], parameter.grad) for name, parameter in model.named_parameters())
        as_it_was = all(now[name] == before[name] for name in before if name.endswith(".training"))
        parts: list[nn.Module | nn.Parameter] = [*model.modules(), *model.parameters()]
        error, hooks = "", [part for part in parts if _has_hooks(part)]
        try:
            with _calls_of_others(hooks):
                loss.backward()
        except Exception as raised:
            error = reason(raised)
        results.append({"names": names, "frozen": frozen, "kept": kept, "hooks": bool(hooks), "error": error})
        results[-1]["as_it_was"] = as_it_was
    return results


def _has_hooks(part: nn.Module | nn.Parameter) -> bool:
    if isinstance(part, nn.Parameter):
        return bool(part._backward_hooks or part._post_accumulate_grad_hooks)
    return any(vars(part)[name] for name in vars(part) if name.endswith("_hooks"))


@contextlib.contextmanager
def _calls_of_others(called: list[Any]) -> Iterator[None]:
    """Add to ``called`` each of the learner's functions that is called inside: a hook, whatever it is on."""

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and is_learners(frame.f_code.co_filename):
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


# --- 12.2 -------------------------------------------------------------------------------------------------

FORWARD = "the output is that of one device with the whole batch"
BACKWARD = "so is the gradient"
LESS = "what the ranks send does not grow with the batch"
ROWS = 200  # times as many samples in the second call
THREE_THINGS = "Three things, added up over the ranks, give the mean and the variance of the whole batch."
ROUNDING = 1e-4
ROUNDED = "It is right to about six digits, but the samples have more. In which dtype do you compute?"
SIZES = (
    "The ranks have the same weight here, but different numbers of samples. What may be added up over ranks?"
)
CONSTANTS = "For autograd the mean and the variance were constants here. They depend on x."


@question(
    "12.2", "whole_norm(x, eps)", {FORWARD: 1, BACKWARD: 2, LESS: 1}, rests={BACKWARD: FORWARD, LESS: FORWARD}
)
@with_two_world_sizes()
def whole_norm(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    channels = rng.randint(3, 6)
    few = [rank + 1 for rank in range(count)]
    rng.shuffle(few)  # a different number of samples on each rank
    calls: list[dict[str, Any]] = [
        {"sizes": [size * times for size in few], "channels": channels, "eps": rng.uniform(0.01, 0.5)}
        | {"seeds": seeds(rng, count), "shift": rng.uniform(2.0, 4.0)}
        for times in (1, ROWS)
    ]
    calls.append(calls[-1] | {"seeds": seeds(rng, count), "again": True})
    results = by_call(ask(_normed, calls, nprocs=count))
    for given, of_call in zip(calls, results, strict=True):
        inputs, weights = zip(*(_share(given, rank) for rank in range(count)), strict=True)
        whole = torch.cat(inputs).requires_grad_()
        mean, var = whole.mean(0), whole.var(0, correction=0)
        output = _by(whole, mean, var, given["eps"])
        (gradient,) = torch.autograd.grad((output * torch.cat(weights)).sum(), whole)
        right = output.detach().split(given["sizes"])
        yield _of_output(of_call, right, inputs, given)
        yield _of_gradient(of_call, gradient.split(given["sizes"]), inputs, weights, given)
    few_sent, many_sent = ([result["numbers"] for result in of_call] for of_call in results[:2])
    rank, _ = furthest(many - few for many, few in zip(many_sent, few_sent, strict=True))
    seen = f"rank {rank} sent {few_sent[rank]:,} numbers for {calls[0]['sizes'][rank]} samples, "
    seen += f"and {many_sent[rank]:,} for {calls[1]['sizes'][rank]}"
    hint = (
        "Samples travel, or something of their size. Which few numbers are enough for a mean and a variance?"
    )
    yield Finding(LESS, many_sent == few_sent, seen, hint)
    rank, size = furthest(calls[1]["sizes"])
    numbers = size * channels
    seen = f"rank {rank} had {numbers:,} numbers in its samples, and sent {many_sent[rank]:,}"
    yield Finding(LESS, many_sent[rank] < numbers, seen, hint)


def _share(call: dict[str, Any], rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's samples, with their own mean and spread, and the weights of its outputs in the loss."""
    both = tensor(call["seeds"][rank], (2, call["sizes"][rank], call["channels"]))
    return both[0] * (1 + rank) + call["shift"] * rank, both[1]


def _by(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (x - mean) / (var + eps).sqrt()


def _of_output(
    results: list[Result], right: tuple[Tensor, ...], inputs: Any, call: dict[str, Any]
) -> Finding:
    rank, gap = furthest(far(result["output"], wanted) for result, wanted in zip(results, right, strict=True))
    output, wanted, eps = results[rank]["output"], right[rank], call["eps"]
    if changed := [rank for rank, result in enumerate(results) if result["changed"]]:
        seen = f"on rank {changed[0]} x holds other numbers after your call"
        return Finding(FORWARD, False, seen, "The layer before still needs its output as it was.")
    shape = list(torch.as_tensor(output).shape)
    if shape != list(wanted.shape):
        seen = f"rank {rank} passed in {list(wanted.shape)}, and got {shape} back"
        return Finding(FORWARD, False, seen, "Every number is normalised; none is lost.")
    seen = f"on rank {rank} the first number became {output[0][0]:.6f}, and should be {wanted[0, 0]:.6f}"
    means, variances = zip(*((x.mean(0), x.var(0, correction=0)) for x in inputs), strict=True)
    of_means, of_variances = torch.stack(means), torch.stack(variances).mean(0)
    own = _by(inputs[rank], means[rank], variances[rank], eps)
    mixed = _by(inputs[rank], of_means.mean(0), of_variances + of_means.var(0, correction=0), eps)
    hint = nearest(
        output,
        (own, "That normalises by this rank's own samples. What must the others contribute?"),
        (mixed, SIZES),
        otherwise=ROUNDED if gap < ROUNDING else THREE_THINGS,
        within=CLOSE,
    )
    return Finding(FORWARD, gap < CLOSE, seen, hint)


def _of_gradient(
    results: list[Result], right: Any, inputs: Any, weights: Any, call: dict[str, Any]
) -> Finding:
    rank, gap = furthest(far(result["gradient"], own) for result, own in zip(results, right, strict=True))
    gradient = results[rank]["gradient"]
    if gradient is None or results[rank]["error"]:
        seen = f"on rank {rank}: {results[rank]['error'] or 'the input has no gradient'}"
        hint = "The output must still be connected with the input in the autograd graph."
        if "written into" in seen:
            hint = "Others may still need it as it is. Add up in a tensor of your own."
        return Finding(BACKWARD, False, seen, hint)
    wanted = right[rank][0, 0]
    seen = f"on rank {rank} the first gradient is {gradient[0][0]:.6f}, and should be {wanted:.6f}"
    whole = torch.cat(inputs)
    scale = (whole.var(0, correction=0) + call["eps"]).rsqrt()
    own = [x.clone().requires_grad_() for x in inputs]
    before = sum(map(len, inputs[:rank]))
    mean, var = torch.cat(own).mean(0), torch.cat(own).var(0, correction=0)
    normed = _by(torch.cat(own), mean, var, call["eps"])[before : before + len(own[rank])]
    (normed * weights[rank]).sum().backward()
    hint = nearest(
        gradient,
        (scale * weights[rank], CONSTANTS),
        (
            own[rank].grad,
            "The other ranks' outputs depend on this rank's samples, too. Does your backward say so?",
        ),
        otherwise="The forward pass adds up over the ranks. What does the backward pass of such a sum do?",
        within=CLOSE,
    )
    return Finding(BACKWARD, gap < CLOSE, seen, hint)


def _normed_on(call: dict[str, Any], rank: int) -> Result:
    gradient = of_size(NUMBER, call["sizes"][rank], call["channels"])
    return {"output": TENSOR, "gradient": (gradient, None), "error": str, "numbers": int, "changed": bool}


@reports(lambda calls: lambda rank: [_normed_on(call, rank) for call in calls])
@in_group
def _normed(answer: Any, calls: list[dict[str, Any]]) -> list[Result]:
    rank, results, x, eps = dist.get_rank(), [], torch.empty(0), 0.0
    for call in calls:
        numbers, weights = _share(call, rank)
        if "again" in call:  # the same objects; the tensor has new numbers
            x.grad = None
            x.data.copy_(numbers)
        else:
            x, eps = numbers.requires_grad_(), call["eps"]
        with record_traffic() as seen:
            output = answer(x, eps)
            changed = not torch.equal(x, _share(call, rank)[0])
            refuse_unless(isinstance(output, Tensor), "whole_norm(x, eps) returns a tensor", output)
            error = ""
            if output.shape == weights.shape:
                given = weights.clone()
                passed = _passed_to_functions(output.grad_fn)
                passed.append((given, weights))
                try:
                    output.backward(given)
                except RuntimeError as raised:
                    error = reason(raised)
                if not all(torch.equal(*pair) for pair in passed):
                    error = "your backward pass has written into the gradient that it was given"
        sent = sum(count for _, count in seen.calls) + seen.put
        results.append({"output": output, "gradient": x.grad, "error": error, "numbers": sent})
        results[-1]["changed"] = changed
    return results


def _passed_to_functions(node: Any) -> list[tuple[Tensor, Tensor]]:
    """Return a list that a backward pass fills with each gradient given to a Python Function, and a copy."""
    passed: list[tuple[Tensor, Tensor]] = []

    def note(gradients: tuple[Tensor | None, ...]) -> None:
        passed.extend((gradient, gradient.clone()) for gradient in gradients if gradient is not None)

    seen, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                node.register_prehook(note)
            ahead += [before for before, _ in node.next_functions]
    return passed


# --- 12.3 -------------------------------------------------------------------------------------------------

MEAN = "every norm has the mean of all that the ranks have seen"
VARIANCE = "and its variance"
ONCE = "the ranks meet once for the whole model, and nothing else in it changes"
ONE_HEAP = "Think of the samples of all ranks together, equally many from each."
HELD = "a buffer that somebody held before"


class _Own(nn.BatchNorm2d):
    """A subclass such as lesson 12 makes."""


KINDS: dict[str, type] = {norm.__name__: norm for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}
KINDS |= {"SyncBatchNorm": nn.SyncBatchNorm, "a class made from BatchNorm2d": _Own}
NEIGHBOURS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # no batch norms
SETTINGS = ("momentum", "eps", "track_running_stats")


class _Block(nn.Module):
    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        self.shift = nn.ParameterDict({"by": nn.Parameter(torch.zeros(channels))})
        self.inner = nn.Sequential(nn.LayerNorm(channels), KINDS[kind](channels))
        self.neighbour = NEIGHBOURS[channels % 3](channels, track_running_stats=True)
        self.forgetful = nn.BatchNorm1d(channels, track_running_stats=False)  # it has no running statistics
        self.register_buffer("table", torch.zeros(channels))


@question("12.3", "pool_statistics(model)", {MEAN: 1, VARIANCE: 1, ONCE: 1}, rests={ONCE: MEAN})
@with_two_world_sizes()
def pool_statistics(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    calls: list[dict[str, Any]] = []
    for _ in range(2):
        kinds = [*rng.sample(list(KINDS), len(KINDS)), *rng.sample(list(KINDS), rng.randint(0, 2))]
        channels = rng.sample(range(2, 9), len(kinds))
        calls.append({"kinds": kinds, "channels": channels, "seeds": seeds(rng, count)})
    calls.append(calls[-1] | {"seeds": seeds(rng, count), "again": True})
    alone = {"kinds": rng.sample(list(KINDS), 1), "channels": [rng.randint(2, 8)], "alone": True}
    calls.append(alone | {"seeds": seeds(rng, count)})  # a model that is a norm itself
    for given, results in zip(calls, by_call(ask(_pooled, calls, nprocs=count)), strict=True):
        both = zip(*(_seen_by(given, rank) for rank in range(count)), strict=True)
        means, variances = map(torch.stack, both)
        mean = means.mean(0)
        of_variances = variances.mean(0)
        var = of_variances + means.var(0, correction=0)
        yield _of_pooled(MEAN, results, "means", mean, means, [], given)
        known = [(of_variances, "That is the mean of the variances. The ranks' means differ, too.")]
        yield _of_pooled(VARIANCE, results, "variances", var, variances, known, given)
        meetings = max(result["meetings"] for result in results)
        changed = [result["changed"] for result in results if result["changed"]]
        seen = f"a rank called {meetings} collectives for {len(given['kinds'])} norms"
        hint = "What can be concatenated can travel together: the numbers of several norms, of both kinds."
        if changed:
            seen = f"{changed[0][0]} has changed"
            hint = "Only the running statistics of batch norms may change."
            if changed[0] == [HELD]:
                seen = f"{HELD} no longer has the model's numbers"
                hint = "The norm has a new tensor now. "
                hint += "Whatever holds the old one, as DDP does, cannot see it."
            elif changed[0][0].endswith(("neighbour.running_mean", "neighbour.running_var")):
                seen += "; it belongs to an InstanceNorm"
                hint = "Not only batch norms have such a buffer. Which classes are asked for?"
        yield Finding(ONCE, meetings <= 1 and not changed, seen, hint)


def _of_pooled(
    what: str, results: Any, key: str, right: Tensor, had: Tensor, known: Any, call: dict[str, Any]
) -> Finding:
    gaps = [far(result[key], right) for result in results]
    rank, gap = furthest(gaps)
    now = torch.as_tensor(results[rank][key], dtype=torch.float64)
    place = place_of_furthest(now, right)
    seen = f"one of rank {rank}'s {key} is {now[place]:.5f}, and should be {right[place]:.5f}"
    by_norm = zip(now.split(call["channels"]), right.split(call["channels"]), strict=True)
    done = [far(got, wanted) < CLOSE for got, wanted in by_norm]
    if any(done) and not all(done):
        kinds = [kind for kind, ok in zip(call["kinds"], done, strict=True) if ok]
        others = [kind for kind, ok in zip(call["kinds"], done, strict=True) if not ok]
        hint = "Some norms are done and others are not. Which kinds are there, and how deep are they?"
        seen += f"; right: {', '.join(kinds)}; not right: {', '.join(others)}"
    elif min(gaps) < CLOSE:
        hint = "Some ranks have it, and others do not. Does each of them get the result?"
    else:
        hint = nearest(
            now,
            (had[rank], "Nothing has changed. The new values must get into the model's own buffers."),
            *known,
            otherwise=ROUNDED if gap < ROUNDING else ONE_HEAP,
            within=CLOSE,
        )
    return Finding(what, gap < CLOSE, seen, hint)


def _seen_by(call: dict[str, Any], rank: int) -> tuple[Tensor, Tensor]:
    """Draw the running means and variances of all norms of a rank, each in one flat tensor."""
    both = tensor(call["seeds"][rank], (2, sum(call["channels"])))
    return both[0] * 3 + rank, both[1].abs() + 0.1


def _model(call: dict[str, Any]) -> nn.Module:
    if "alone" in call:
        return KINDS[call["kinds"][0]](call["channels"][0]).double()
    blocks = [_Block(*block) for block in zip(call["channels"], call["kinds"], strict=True)]
    return nn.Sequential(nn.ModuleDict({f"stage{i}": block for i, block in enumerate(blocks)})).double()


def _held(model: nn.Module) -> Result:
    """Return, by name, what else is not to change: settings of modules and parameters, and gradients."""
    norms = [(name, each) for name, each in model.named_modules() if isinstance(each, tuple(KINDS.values()))]
    of_norms = {f"{name}.{what}": getattr(norm, what) for name, norm in norms for what in SETTINGS}
    gradients = {f"{name}.grad": _numbers(each.grad) for name, each in model.named_parameters()}
    return settings(model) | of_norms | gradients


def _numbers(gradient: Tensor | None) -> Any:
    return None if gradient is None else gradient.tolist()


def _norms(model: nn.Module) -> list[Any]:
    norms = (module for module in model.modules() if isinstance(module, tuple(KINDS.values())))
    return [norm for norm in norms if norm.running_mean is not None]


@reports(
    lambda calls: [
        dict.fromkeys(("means", "variances"), [NUMBER] * sum(call["channels"]))
        | {"meetings": int, "changed": [str, ...]}
        for call in calls
    ]
)
@in_group
def _pooled(answer: Any, calls: list[dict[str, Any]]) -> list[Result]:
    rank, results = dist.get_rank(), []
    for call in calls:
        if "again" not in call:  # else the same model, after more batches
            model = _model(call)
        torch.manual_seed(call["seeds"][rank] % 2**31)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        for norm, mean, var in zip(
            _norms(model),
            *(statistics.split(call["channels"]) for statistics in _seen_by(call, rank)),
            strict=True,
        ):
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            norm.num_batches_tracked += 7 + rank
            norm.weight.grad = torch.ones_like(norm.weight)  # of the last step
        for name, buffer in model.named_buffers():
            if name.endswith(("table", "neighbour.running_mean", "neighbour.running_var")):
                buffer.normal_()
        if "alone" not in call:
            model.get_submodule("0.stage0").eval()  # as in fine-tuning with frozen norms
        had, parameters = _held(model), dict(model.named_parameters())
        buffers = dict(model.named_buffers())  # as DDP holds them
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with record_traffic() as seen:
            answer(model)
        meetings = len(seen.calls) + seen.stored
        changed = [
            name
            for name, value in model.state_dict().items()
            if (not name.endswith(("running_mean", "running_var")) or "neighbour" in name)
            and (name not in before or not torch.equal(value, before[name]))
        ]
        changed += [name for name, value in _held(model).items() if value != had.get(name)]
        changed += [name for name, value in model.named_parameters() if value is not parameters.get(name)]
        now = dict(model.named_buffers())
        if any(not torch.equal(now[name], buffer) for name, buffer in buffers.items() if name in now):
            changed.append(HELD)
        means, variances = (
            torch.cat([getattr(norm, of).detach().flatten() for norm in _norms(model)])
            for of in ("running_mean", "running_var")
        )
        if len(means) != sum(call["channels"]) or len(variances) != len(means):
            raise Refused("the running statistics of a norm have another shape now")
        results.append({"means": means, "variances": variances, "meetings": meetings, "changed": changed})
    return results
