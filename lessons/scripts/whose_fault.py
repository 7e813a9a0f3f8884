"""Whose fault is it? Eight programs that fail, and the reports that `launch` made of them (lesson 13).

    python whose_fault.py  # runs them on three ranks each, and writes ../recorded/13_whose_fault/reports.json

Each function is a program that looks right at first. `ANSWERS` has the rank and the lines at fault.
"""

import hashlib
import html
import inspect
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parents[1]))  # as in a notebook of the folder lessons
from scripts.in_step import join

RECORD = Path(__file__).parents[1] / "recorded" / "13_whose_fault" / "reports.json"
RANKS = 3
FILES = {"shard-0.txt": "512", "shard-1.txt": "512"}  # in the folder in which the programs run


def count_samples():
    device, rank = join()
    file = Path(f"shard-{rank}.txt")
    while not file.exists():
        time.sleep(0.1)
    samples = torch.tensor(int(file.read_text()), device=device)
    dist.all_reduce(samples)
    return samples


def mean_loss():
    device, rank = join()
    losses = [[0.5, 0.3], [], [0.4]][rank]  # of this rank's batches
    if not losses:
        return 0.0
    total = torch.tensor([sum(losses), len(losses)], device=device)
    dist.all_reduce(total)
    return total[0] / total[1]


def one_epoch():
    device, rank = join()
    world_size = dist.get_world_size()
    mine = range(rank, 10, world_size)  # ten batches
    for batch in mine:
        gradient = torch.tensor(float(batch), device=device)
        dist.all_reduce(gradient)
    dist.barrier()


def skip_bad_batches():
    device, rank = join()
    losses = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.9, math.nan, 0.7]][rank]
    for loss in losses:
        if math.isnan(loss):
            continue
        gradient = torch.tensor(loss, device=device)
        dist.all_reduce(gradient)
    dist.barrier()


def add_up_metrics():
    device, rank = join()
    metrics = {"loss": [0.5], "by class": [0.1] * 10}
    done = [["loss", "by class"], ["by class", "loss"], ["loss", "by class"]][rank]  # as they were ready
    for name in done:
        total = torch.tensor(metrics[name], device=device)
        dist.all_reduce(total)


def read_everything():
    device, rank = join()
    images = []
    for step in range(6):
        images.append(read(step, rank))
        count = torch.tensor(len(images), device=device)
        dist.all_reduce(count)


def read(step, rank):
    """Plays the system, which kills a process when no memory is left."""
    if (step, rank) == (4, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate_every_epoch():
    device, rank = join()
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device))
    for epoch in range(3):
        ddp(torch.randn(8, 4, device=device)).sum().backward()
        if rank == 0:
            ddp.eval()
            print(epoch, ddp(torch.ones(8, 4, device=device)).mean().item())
            ddp.train()
    dist.barrier()


def save_a_checkpoint():
    device, rank = join(seconds=2)  # the group's timeout
    total = torch.ones(1, device=device)
    if rank == 0:
        time.sleep(5)  # writes a large file, on a slow disk
    dist.all_reduce(total)


NONE = "no rank"
# the function: the rank, the beginnings of the lines that are right, and why
ANSWERS = {
    count_samples: (2, ["while not", "time.sleep"], "Rank 2 never called: it waits for its file."),
    mean_loss: (
        1,
        ["if not losses", "return 0.0"],
        "Rank 0 or 2 raised the error. Rank 1 had left: its shard is empty, and it returned.",
    ),
    one_epoch: (
        0,
        ["mine ="],
        "Rank 0 makes one call more than the others. Ten batches cannot be cut into three equal shares.",
    ),
    skip_bad_batches: (
        2,
        ["if math", "continue"],
        "Rank 2 makes one call fewer than the others: it skipped a batch. It alone knew of the NaN.",
    ),
    add_up_metrics: (
        1,
        ["done =", "for name"],
        "Number 2 has another shape on rank 1, which goes through the names in another order. Sort them.",
    ),
    read_everything: (
        1,
        ["images.append"],
        "A rank that was killed says nothing. What grows in the loop is the list of images.",
    ),
    evaluate_every_epoch: (
        0,
        ["if rank == 0", "print(epoch"],
        "Rank 0 calls DDP's forward alone, and that broadcasts buffers. It should evaluate ddp.module.",
    ),
    save_a_checkpoint: (
        NONE,
        ["device, rank = join(seconds=2)"],
        "No rank did anything wrong. The group's limit is shorter than an honest pause.",
    ),
}


def source(function):
    """The lines of a function, by their number in this file."""
    lines, first = inspect.getsourcelines(function)
    return {number: line.rstrip() for number, line in enumerate(lines, start=first) if line.strip()}


def of_these_programs():
    """A fingerprint of the programs and of their lines: a record with another one is out of date."""
    return hashlib.sha256(json.dumps([list(source(each).items()) for each in ANSWERS]).encode()).hexdigest()


def is_up_to_date():
    """Whether the recorded reports are of these programs, and name only lines of theirs."""
    kept = json.loads(RECORD.read_text())
    return kept["programs"] == of_these_programs() and list(kept["reports"]) == [
        each.__name__ for each in ANSWERS
    ]


def record():
    """Run the eight programs here, and write down what `launch` reported."""
    from course_lib import RankError, launch

    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        for function in ANSWERS:
            try:
                launch(function, nprocs=RANKS, device="cpu", timeout=6, dashboard=False)
            except RankError as error:
                reports[function.__name__] = str(error)
                print(error, end="\n\n")
            else:
                raise RuntimeError(f"{function.__name__} ran to its end")
    machine = f"{os.cpu_count()} CPU cores, Linux {platform.release().split('-')[0]}, "
    machine += f"torch {torch.__version__.split('+')[0]}, gloo"
    kept = {"date": date.today().isoformat(), "machine": machine, "programs": of_these_programs()}
    RECORD.write_text(json.dumps(kept | {"reports": reports}, indent=1, ensure_ascii=False) + "\n")


class Case:
    """One of the eight: its program, what was reported, and the answer that the reader has given."""

    def __init__(self, number, function, report):
        self.number, self.report, self.lines = number, report, source(function)
        self.rank, self.begins, self.why = ANSWERS[function]
        self.choices = [*range(RANKS), NONE]

    def is_at_fault(self, line):
        return self.lines[line].strip().startswith(tuple(self.begins))

    def verdict(self, rank, line):
        rank_is_right, line_is_right = rank == self.rank, self.is_at_fault(line)
        marks = f"{'✓' if rank_is_right else '✗'} rank   {'✓' if line_is_right else '✗'} line"
        fault = next(number for number in self.lines if self.is_at_fault(number))
        who = f"{self.rank}" if self.rank == NONE else f"rank {self.rank}"
        return rank_is_right + line_is_right, f"{marks}   It was {who}, line {fault}. {self.why}"

    def __str__(self):
        program = "\n".join(f"{number:4}  {line}" for number, line in self.lines.items())
        ranks = "  |  ".join(map(str, self.choices))
        return f"{self.report}\n\n{program}\n\nYour choice, rank:  {ranks}      line:  one of the above"


def cases():
    reports = json.loads(RECORD.read_text())["reports"]
    return [Case(at, each, reports[each.__name__]) for at, each in enumerate(ANSWERS, start=1)]


def whose_fault():
    """Show report after report, with a choice of rank and line. Without buttons: the first, as text."""
    kept, every = json.loads(RECORD.read_text()), cases()
    heading = f"Recorded on {kept['date']}, on {kept['machine']}:"
    text = f"{heading} report 1 of {len(every)}\n\n{every[0]}"
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        print(text)
        return
    from IPython.display import display

    box = _chooser(every, heading)
    display(box._repr_mimebundle_() | {"text/plain": text}, raw=True)  # the text is what a notebook keeps


def _chooser(every, heading):
    import ipywidgets as widgets

    head, report, verdict = widgets.HTML(), widgets.HTML(), widgets.HTML()
    mono = widgets.HTML("<style>.whose-fault select {font-family: monospace; font-size: 12px}</style>")
    line = widgets.Select(layout={"width": "46em"})
    rank = widgets.ToggleButtons(description="rank", style={"button_width": "6em"})
    choose = widgets.Button(description="That is it", button_style="primary")
    onward = widgets.Button(description="Next report")
    points, left = [], list(every)

    def show_next(_=None):
        case = left[0]
        head.value = f"<b>Report {case.number} of {len(every)}.</b> {html.escape(heading)}"
        report.value = f"<pre style='line-height: 1.3'>{html.escape(case.report)}</pre>"
        numbered = [(f"{at:4}  {text}".replace(" ", "\u00a0"), at) for at, text in case.lines.items()]
        line.options, line.rows, line.value = numbered, len(numbered), None
        rank.options = [(str(each), each) for each in case.choices]
        rank.value, verdict.value = None, "Click the line at fault, and the rank."
        choose.disabled, onward.disabled = False, True

    def answer(_):
        if line.value is None or rank.value is None:
            verdict.value = "Choose a line and a rank first."
            return
        case = left.pop(0)
        found, words = case.verdict(rank.value, line.value)
        points.append(found)
        total = f"<br>So far {sum(points)} of {2 * len(points)} are right."
        verdict.value = html.escape(words) + total
        choose.disabled, onward.disabled = True, not left

    choose.on_click(answer)
    onward.on_click(show_next)
    show_next()
    parts = [mono, head, report, line, rank, widgets.HBox([choose, onward]), verdict]
    box = widgets.VBox(parts)
    box.add_class("whose-fault")
    return box


if __name__ == "__main__":
    record()
