"""The moves of DataParallel (lesson 03): a picture of each, the moves, and what each device then holds.

from scripts.four_moves import count_memory, moves  # in a notebook of the folder lessons
"""

import copy
import threading

import torch

from course_lib import LiveMemory
from course_lib.figures.style import Picture, new_figure, styled

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]  # of the devices
WIDTH, HEIGHT = 1.8, 0.66  # of a box
MOVES = {
    "scatter": "the batch is cut along its first dimension",
    "replicate": "each device gets the weights",
    "parallel_apply": "each replica works on its chunk, all at the same time",
    "gather": "device 0 gets all outputs, and computes the loss",
    "backward": "the gradients take the same way back",
}


def moves(move=4, replicas=2):
    """Draw the forward pass up to that move of DataParallel; the fifth is the backward pass."""
    name, does = list(MOVES.items())[move - 1]
    middle, top = replicas / 2, replicas + 0.65
    figure, (axes,) = new_figure(width=7.6, height=1.2 + 0.8 * (replicas + 1.1))
    with styled():
        axes.set_title(f"Move {move} of 5, {name}: {does}")
        axes.set(xlim=(-0.1, 10.9), ylim=(-0.5, replicas + 1.1))
        axes.axis("off")
        _box(axes, 0, middle, "batch", "#555555")
        _box(axes, 6, top, "model\non device 0", COLORS[0])
        for i in range(replicas):
            row, color = replicas - i - 0.5, COLORS[i % len(COLORS)]
            arrow = "<-" if move == 5 else "->"
            around = "arc,angleA=180,angleB=180,armA=16,armB=16"  # the weights, past the replicas above
            _box(axes, 2.6, row, f"chunk {i}\non device {i}", color)
            _arrow(axes, (1.8, middle), (2.6, row), move == 1)
            if move >= 2:
                _box(axes, 6, row, f"replica {i}\non device {i}", color)
                way = {"ls": "--", "connectionstyle": around, "arrowstyle": arrow}
                _arrow(axes, (6, top), (6, row + 0.2), move in (2, 5), **way)
            if move >= 3:
                _arrow(axes, (4.4, row - 0.15), (6, row - 0.15), move == 3)
            if move >= 4:
                _arrow(axes, (7.8, row), (9, middle), True, arrowstyle=arrow)
        if move >= 4:
            _box(axes, 9, middle, "outputs, loss\non device 0", COLORS[0])
        places = [(2.2, -0.3), (4.9, top), (5.2, -0.3), (8.4, -0.3), (9.3, top)]
        for at, ((x, y), word) in enumerate(zip(places[:move], MOVES, strict=False), 1):
            style = {"weight": "bold", "color": "black"} if at == move else {"color": "#777777"}
            axes.text(x, y, f"{at} {word}", ha="center", va="center", **style)
    alt = f"Move {move} of 5, {name}: {does}. {replicas} replicas; the model and the loss are on device 0."
    return Picture(figure, alt)


def _box(axes, left, y, words, color):
    from matplotlib.patches import Rectangle

    place = (left, y - HEIGHT / 2)
    axes.add_patch(Rectangle(place, WIDTH, HEIGHT, facecolor="white", edgecolor=color, lw=2))
    axes.text(left + WIDTH / 2, y, words, ha="center", va="center", size=9)


def _arrow(axes, start, end, now, **style):
    look = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0, "lw": 2 if now else 1}
    axes.annotate("", end, start, arrowprops=look | {"color": "black" if now else "#999999"} | style)


def scatter(batch, devices):
    chunks = batch.chunk(len(devices))
    return [chunk.to(device, copy=True) for chunk, device in zip(chunks, devices, strict=False)]


def replicate(model, devices):
    return [replica_of(model, device, first=i == 0) for i, device in enumerate(devices)]


def replica_of(module, device, first):
    replica = copy.copy(module)  # shallow: the same attributes, in an object of its own
    replica._parameters, replica._buffers, replica._modules = {}, {}, {}
    for name, tensor in (module._parameters | module._buffers).items():
        if tensor is not None:  # the first replica uses the model's own memory
            tensor = tensor.view_as(tensor) if first else tensor.to(device, copy=True)
        setattr(replica, name, tensor)
    for name, child in module._modules.items():
        setattr(replica, name, None if child is None else replica_of(child, device, first))
    return replica


def parallel_apply(replicas, chunks):
    """What each replica returns for its tuple of chunks, each in a thread of its own."""
    done, grad_mode = [None] * len(chunks), torch.is_grad_enabled()

    def work(i):
        torch.set_grad_enabled(grad_mode)  # a new thread begins with gradients on, whatever ours says
        try:
            done[i] = replicas[i](*chunks[i])
        except Exception as error:  # it would be lost with its thread
            done[i] = error

    threads = [threading.Thread(target=work, args=[i]) for i in range(len(chunks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in done:
        if isinstance(result, Exception):
            raise result
    return done


def gather(outputs, device):
    if outputs[0].dim() == 0:  # single numbers, one from each replica: they become a vector
        outputs = [output.view(1) for output in outputs]
    return torch.cat([output.to(device) for output in outputs])


def data_parallel(model, devices, *inputs):
    chunks = list(zip(*(scatter(each, devices) for each in inputs), strict=True))
    replicas = replicate(model, devices[: len(chunks)])
    return gather(parallel_apply(replicas, chunks), devices[0])


def count_memory(devices, model, inputs, loss_of, optimizer_class=torch.optim.Adam):
    """The MiB that are alive, by device and kind, at the end of the second step's forward pass."""
    memory, optimizer = LiveMemory(), optimizer_class(model.parameters(), lr=1e-3)
    for _step in range(2):
        chunks = list(zip(*(scatter(each, devices) for each in inputs), strict=True))
        replicas = replicate(model, devices)
        replicas = [_counted(memory, replica, f"device {i}") for i, replica in enumerate(replicas)]
        outputs = parallel_apply(replicas, chunks)
        with memory.saving("device 0", "outputs"):
            output = gather(outputs, devices[0])
            del outputs  # gathered: the parts can go
            memory.note("device 0", "outputs", [output])
            loss = loss_of(output)
        memory.note("device 0", "gradients", [each.grad for each in model.parameters()])
        states = [value for state in optimizer.state.values() for value in state.values()]
        memory.note("device 0", "optimizer state", [each for each in states if torch.is_tensor(each)])
        counts = memory.bytes()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kinds = ["weights", "gradients", "optimizer state", "activations", "outputs"]
    return {name: {kind: held.get(kind, 0) / 2**20 for kind in kinds} for name, held in counts.items()}


def _counted(memory, replica, name):
    def forward(*chunk):
        with memory.saving(name):  # in this replica's thread: hooks belong to a thread
            return replica(*chunk)

    # a replica's weights are not parameters: find them among its attributes
    tensors = [each for part in replica.modules() for each in vars(part).values() if torch.is_tensor(each)]
    memory.note(name, "weights", tensors)
    return forward
