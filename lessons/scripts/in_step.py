"""Lesson 13: ranks that talk over gloo, and a picture of how they fell out of step.

from scripts.in_step import join, tiles  # in a notebook of the folder lessons
"""

from datetime import timedelta

import torch.distributed as dist
from scripts.helpers import show

from course_lib import place

MATCHES, DIFFERS, LATER = ("#e8f1f8", "#0072b2"), ("#fbe3e0", "#c0392b"), ("#f2f2f2", "#888888")


def join(seconds=None):
    """Join the group, and return this rank's device and number.

    The group's backend is gloo, on GPUs too: a rank then waits in the line of its call. The functions of the
    lesson leave out `destroy_process_group`: each is the last thing that its process does.
    """
    device, _ = place()
    limit = None if seconds is None else timedelta(seconds=seconds)  # None: PyTorch's own limit
    dist.init_process_group("gloo", timeout=limit)
    dist.barrier()
    return device, dist.get_rank()


def called(run, rank):
    """The last collectives of a rank in the group of all: by number, the name and the tensor's shape."""
    recent = [call for call in run.trace(rank).standstill.get("recent", []) if call["group"] == "0"]
    return {call["number"]: (call["name"], *map(str, call["sizes"])) for call in recent}


def tiles(run, title, last=5):
    """A tile for each of the last collectives, a row for each rank; in red the first number that differs."""
    import matplotlib.pyplot as plt

    rows = [called(run, rank) for rank in range(run.world_size)]
    numbers = sorted(set().union(*rows))[-last:]
    differs = next((number for number in numbers if len({row.get(number) for row in rows}) > 1), None)
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.62 * len(rows)), dpi=144)
    axes.set_title(title, weight="bold", loc="left", size=11)
    axes.set(xlim=(-1, len(numbers)), ylim=(len(rows) - 0.4, -1.1))
    axes.axis("off")
    axes.text(-0.95, -0.75, "call number", va="center", size=9)
    for rank, row in enumerate(rows):
        axes.text(-0.95, rank, f"rank {rank}", va="center", weight="bold", size=10)
        for at, number in enumerate(numbers):
            fill, ink = MATCHES if differs is None or number < differs else LATER
            if number == differs:
                fill, ink = DIFFERS
            words = row.get(number, ("not called",))
            style = {"ls": "-", "lw": 1.5} if number in row else {"ls": "--", "lw": 1.0}
            box = plt.Rectangle((at + 0.04, rank - 0.4), 0.92, 0.8, facecolor=fill, edgecolor=ink, **style)
            axes.add_patch(box)
            words = [word for word in words if word != "[]"]  # the shape of one number
            axes.text(at + 0.5, rank, "\n".join(words), ha="center", va="center", size=8)
            if not rank:
                bold = "bold" if number == differs else "normal"
                axes.text(at + 0.5, -0.75, number, ha="center", va="center", size=10, color=ink, weight=bold)
    told = [
        f"rank {rank}: " + ", ".join(f"{n} {' '.join(row.get(n, ['not called']))}" for n in numbers)
        for rank, row in enumerate(rows)
    ]
    show(figure, f"{title}. {'; '.join(told)}. In red: number {differs}.")
