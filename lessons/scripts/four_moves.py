"""The pictures of lesson 03: what DataParallel moves in the forward pass, and what comes back.

from scripts.four_moves import forward_picture  # in a notebook of the folder lessons
"""

import matplotlib.pyplot as plt
from scripts.helpers import show

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]  # of the devices
WIDTH, HEIGHT = 1.7, 0.7  # of a box


def forward_picture(replicas):
    """Draw the forward pass: scatter, replicate, parallel_apply, gather."""
    middle, top = replicas / 2, replicas + 0.6
    axes = empty("Four moves: the batch is split, the outputs meet on device 0", replicas)
    box(axes, 0, middle, "batch", "#555555")
    box(axes, 6.2, top, "model\non device 0", COLORS[0])
    box(axes, 9, middle, "outputs, loss\non device 0", COLORS[0])
    for i, row in rows(replicas):
        box(axes, 2.7, row, f"chunk {i}\non device {i}", COLORS[i % 4])
        box(axes, 6.2, row, f"replica {i}\non device {i}", COLORS[i % 4])
        arrow(axes, (1.7, middle), (2.7, row))
        arrow(axes, (4.4, row - 0.15), (6.2, row - 0.15))  # below the arrow of the weights
        arrow(axes, (7.9, row), (9, middle))
        around = "arc,angleA=180,angleB=180,armA=16,armB=16"  # the weights, past the replicas above
        arrow(axes, (6.2, top), (6.2, row + 0.2), ls="--", connectionstyle=around)
    for x, y, name in [
        (2.2, -0.2, "1 scatter"),
        (5, top, "2 replicate"),
        (5.3, -0.2, "3 parallel_apply"),
        (8.4, -0.2, "4 gather"),
    ]:
        axes.text(x, y, name, weight="bold", ha="center", va="center")
    alt = "Each device gets a chunk of the batch and a replica of the model; device 0 gathers the outputs."
    show(axes.figure, alt)


def backward_picture(replicas):
    """Draw the backward pass: the same moves from right to left, up to the model's gradients."""
    middle = replicas / 2
    axes = empty("The backward pass: gradients are added up on device 0", replicas, above=0.6)
    box(axes, 0, middle, "gradients\non device 0", COLORS[0])
    box(axes, 9, middle, "loss\non device 0", COLORS[0])
    for i, row in rows(replicas):
        box(axes, 4.5, row, f"replica {i}\non device {i}", COLORS[i % 4])
        arrow(axes, (9, middle), (6.2, row))
        arrow(axes, (4.5, row), (1.7, middle))
    for x, y, name in [
        (7.6, -0.2, "4 gather: split"),
        (5.35, replicas + 0.3, "3 parallel_apply: each replica's own gradients"),
        (3.1, -0.2, "2 replicate: sum"),
    ]:
        axes.text(x, y, name, weight="bold", ha="center", va="center")
    alt = "Each replica gets the gradient of its outputs; its own gradients are summed on device 0."
    show(axes.figure, alt)


def empty(title, replicas, above=1.1):
    """Axes with a title, a row of boxes for each replica, and so much space above them."""
    _, axes = plt.subplots(figsize=(7.2, 1.2 + 0.8 * (replicas + above)), dpi=144)
    axes.set_title(title, weight="bold", loc="left")
    axes.set(xlim=(-0.1, 10.8), ylim=(-0.4, replicas + above))
    axes.axis("off")
    return axes


def rows(replicas):
    """The number of each replica and the height of its row, from the top."""
    return [(i, replicas - i - 0.5) for i in range(replicas)]


def box(axes, left, y, name, color):
    place = (left, y - HEIGHT / 2)
    axes.add_patch(plt.Rectangle(place, WIDTH, HEIGHT, facecolor="white", edgecolor=color, lw=2))
    axes.text(left + WIDTH / 2, y, name, ha="center", va="center", size=9)


def arrow(axes, start, end, **style):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", **style})
