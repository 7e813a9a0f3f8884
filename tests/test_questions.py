"""The checks judge right: solutions, blanks, and the wrong answers that people really give."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.check import QUESTIONS, Feedback, check
from course_lib.exercises import blank

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's; no rank imports this file
SOLUTIONS = sorted((Path(__file__).parents[1] / "solutions").glob("*.ipynb"))


def answers(notebook: Any) -> dict[str, Any]:
    """What a notebook answers to each of its questions: its cells are run, all but those that launch."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and "launch(" not in cell.source:
            if asked := re.fullmatch(r'check\("(.+)", (\w+)\)', cell.source):
                found[asked[1]] = names[asked[2]]
            else:
                exec(cell.source, names)
    return found


SOLVED: dict[str, Any] = {}
BLANK: dict[str, Any] = {}
for source in SOLUTIONS:
    SOLVED |= answers(nbformat.read(source, as_version=4))
    BLANK |= answers(nbformat.reads(blank(source), as_version=4))


def test_every_question_is_asked_in_a_notebook_for_its_points() -> None:
    asked = {}
    for path in SOLUTIONS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.metadata.get("nbgrader", {}).get("grade"):
                asked[cell.source.split('"')[1]] = cell.metadata.nbgrader.points

    check("", None)  # registers the questions
    assert asked == {number: sum(each.properties.values()) for number, each in QUESTIONS.items()}


@pytest.mark.parametrize("number", SOLVED)
def test_the_solution_has_full_points_ten_times_out_of_ten(number: str) -> None:
    for _ in range(10):
        feedback = check(number, SOLVED[number])
        assert feedback.points == feedback.most, str(feedback)


@pytest.mark.parametrize("number", BLANK)
def test_the_blank_has_none(number: str) -> None:
    feedback = check(number, BLANK[number])
    assert repr(feedback) == "0", str(feedback)
    assert "failed" not in feedback.trouble, "it runs"


# --- wrong answers: what they are called, the properties that still hold, and words of a hint ---

WRONG: dict[str, list[tuple[Callable[..., Any], set[str], str]]] = {}


def wrong(number: str, *hold: str, hint: str) -> Callable[[Any], Any]:
    def register(answer: Any) -> Any:
        WRONG.setdefault(number, []).append((answer, set(hold), hint))
        return answer

    return register


def cases() -> Iterator[Any]:
    for number, entries in WRONG.items():
        for answer, hold, hint in entries:
            yield pytest.param(number, answer, hold, hint, id=f"{number} {answer.__name__}")


EQUAL = "right where all batches have the same size"


@wrong("02.1", hint="too small by about the batch size")
def means_over_samples(losses, sizes):
    return sum(losses) / sum(sizes)


@wrong("02.1", EQUAL, hint="Should a batch of")
def mean_of_means(losses, sizes):
    return sum(losses) / len(losses)


@wrong("02.1", hint="By what should it be divided?")
def the_sum(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True))


@wrong("02.1", hint="By what should it be divided?")
def over_the_batches(losses, sizes):
    return the_sum(losses, sizes) / len(sizes)


@wrong("02.1", EQUAL, hint="By what should it be divided?")
def as_if_all_were_full(losses, sizes):
    return the_sum(losses, sizes) / (len(sizes) * sizes[0])


@wrong("02.1", hint="it returned nothing (None)")
def prints_it(losses, sizes):
    print(the_sum(losses, sizes) / sum(sizes))


@wrong("02.1", hint="ended its process")
def exits(losses, sizes):
    raise SystemExit


@wrong("02.1", hint="A batch's mean times its size")
def remembered(losses, sizes):
    return 0.8


@wrong("02.1", hint="raised ZeroDivisionError")
def divides_by_zero(losses, sizes):
    return losses[0] / 0


RIGHT, QUIET = "counts right, whatever the sizes of the batches", "the model is in evaluation mode meanwhile"
GRAPHLESS, BACK = "no graph is kept", "the model is in training mode again afterwards"


@wrong("02.2", RIGHT, GRAPHLESS, hint="nothing to go back from")
@torch.no_grad()
def never_in_eval(model, loader):
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", RIGHT, QUIET, BACK, hint="Which context builds no graph?")
def with_graphs(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="The training goes on after it")
@torch.no_grad()
def left_in_eval(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="the mean of the batches' accuracies")
@torch.no_grad()
def mean_of_accuracies(model, loader):
    model.eval()
    each = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    model.train()
    return sum(each) / len(each)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="Of how many?")
@torch.no_grad()
def how_many(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right


@wrong("02.2", hint="it returned tensor(")
@torch.no_grad()
def each_on_its_own(model, loader):
    model.eval()
    right = torch.cat([model(x).argmax(1) == y for x, y in loader])
    model.train()
    return right


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="in percent")
def in_percent(model, loader):
    return 100 * whole_set(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="For how long are graphs switched off?")
def never_switched_on_again(model, loader):
    torch.set_grad_enabled(False)
    return whole_set(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="For how long are graphs switched off?")
def frozen_for_good(model, loader):
    model.requires_grad_(False)
    return whole_set(model, loader)


CLEARED, MODE = "each step follows the gradient of its own batch alone", "the model is in training mode"
WEIGHED, RELEASED = "the loss is the mean over all samples", "the graphs of the steps are not kept"


def epoch(clear: bool = True, mode: bool = True, step: bool = True, late: bool = False) -> Callable[..., Any]:
    def train(model, loader, optimizer):
        total = count = 0
        if mode:
            model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if clear and not late:
                optimizer.zero_grad()
            loss.backward()
            if clear and late:
                optimizer.zero_grad()
            if step:
                optimizer.step()
            total, count = total + loss.item() * len(y), count + len(y)
        return total / count

    return train


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="backward() adds to what .grad holds")
def never_clears(model, loader, optimizer):
    return epoch(clear=False)(model, loader, optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="They have not moved at all")
def clears_after_backward(model, loader, optimizer):
    return epoch(late=True)(model, loader, optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="Who changes the weights?")
def never_steps(model, loader, optimizer):
    return epoch(step=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, WEIGHED, RELEASED, hint="Who says that training goes on?")
def stays_in_eval(model, loader, optimizer):
    return epoch(mode=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, MODE, RELEASED, hint="the last batch is smaller")
def means_of_batches(model, loader, optimizer):
    losses = [epoch()(model, [batch], optimizer) for batch in loader]
    return sum(losses) / len(losses)


@wrong("02.3", CLEARED, MODE, WEIGHED, hint="What makes a number of it?")
def keeps_the_graphs(model, loader, optimizer):
    total = count = 0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss * len(y), count + len(y)
    return (total / count).item()


@wrong("02.3", CLEARED, MODE, RELEASED, hint="what is divided by what?")
def over_the_number_of_batches(model, loader, optimizer):
    return epoch()(model, loader, optimizer) * len(loader.dataset) / len(loader)


@wrong("02.3", MODE, RELEASED, hint="Where does the loop end?")
def returns_in_the_loop(model, loader, optimizer):
    for batch in loader:
        return epoch()(model, [batch], optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="One step for each batch")
def steps_along_the_sum(model, loader, optimizer):
    total = 0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader.dataset)


@wrong("02.3", CLEARED, MODE, hint="It shall return the mean loss")
def returns_nothing(model, loader, optimizer):
    epoch()(model, loader, optimizer)


@wrong("02.3", hint="never called the model")
def does_nothing(model, loader, optimizer):
    return 0.5


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


@pytest.mark.parametrize(("number", "answer", "hold", "hint"), list(cases()))
def test_a_wrong_answer_misses_what_it_should(number: str, answer: Any, hold: set[str], hint: str) -> None:
    feedback = check(number, answer)
    print(feedback)
    assert {each.what for each in feedback.findings if each.ok} == hold
    assert hint in str(feedback)
    assert all(each.seen and each.hint for each in feedback.findings if not each.ok) or feedback.trouble
    assert leaks_nothing(feedback)


# --- other right answers, in the styles that people write ---

OTHERS: list[tuple[str, Any]] = []


def right(number: str) -> Callable[[Any], Any]:
    def register(answer: Any) -> Any:
        OTHERS.append((number, answer))
        return answer

    return register


@right("02.1")
def by_numpy(losses, sizes):
    return np.average(np.float32(losses), weights=np.float32(sizes))


@right("02.1")
def by_tensors(losses, sizes):
    losses, sizes = torch.tensor(losses), torch.tensor(sizes)
    return (losses * sizes).sum() / sizes.sum()


@right("02.2")
@torch.inference_mode()
def with_a_tensor(model, loader):
    was = model.training
    model.train(False)
    right = sum((model(x).max(1).indices == y).sum() for x, y in loader)
    model.train(was)
    return right / len(loader.dataset)


@right("02.2")
def whole_set(model, loader):
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(x).argmax(1) for x, _ in loader])
    model.train()
    return (guesses.numpy() == torch.cat([y for _, y in loader]).numpy()).mean()


@right("02.3")
def clears_at_the_end(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for _, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        total += loss.detach() * x.size(0)
    return total / len(loader.dataset)


@right("02.3")
def by_the_model_and_numpy(model, loader, optimizer):
    model.train()
    losses, sizes = [], []
    for x, y in loader:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy())
        sizes.append(len(y))
    return np.average(losses, weights=sizes).astype(np.float32)


@right("02.3")
def by_a_closure(model, loader, optimizer):
    total = 0.0
    model.train()
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        total += optimizer.step(closure).item() * len(y)
    return total / len(loader.dataset)


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


@pytest.mark.parametrize(("number", "answer"), [pytest.param(*each, id=each[1].__name__) for each in OTHERS])
def test_a_right_answer_of_another_style_has_full_points(number: str, answer: Any) -> None:
    feedback = check(number, answer)
    assert feedback.points == feedback.most, str(feedback)


def leaks_nothing(feedback: Feedback) -> bool:
    """No hint has the lines that solve it."""
    hints = " ".join(each.hint for each in feedback.findings)
    return not re.search(r"all_reduce|get_world_size|state_dict|no_grad|\.train\(|\.eval\(|\.item\(", hints)
