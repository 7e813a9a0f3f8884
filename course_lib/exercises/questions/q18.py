"""The questions of lesson 18: FSDP block by block, and one file for a model in shards."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, refuse_unless
from ..inputs import flat, tensor
from ..judging import Faults, far, first_fault, furthest
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, TENSOR, reports
from ..wording import reason, told

CLOSE = 1e-9  # the tensors are float64


class Net(nn.Module):
    """A row of equal blocks between a first and a last layer, like the lesson's model, with a buffer."""

    def __init__(self, width: int, blocks: int, seed: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(up=nn.Linear(width, 9), act=nn.Tanh(), down=nn.Linear(9, width)))
            for _ in range(blocks)
        )
        self.register_buffer("scale", torch.ones(2))
        self.double()
        for place, value in enumerate(self.state_dict().values()):
            value.copy_(tensor(seed + place, tuple(value.shape)) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.get_buffer("scale")


def _drawn(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(5, 8), rng.randint(3, 5), rng.randrange(2**31)


# --- 18.1 -------------------------------------------------------------------------------------------------

BLOCKS = "each block is gathered by itself, and what the blocks have left by the model"
STEPS = "after each step the ranks have the weights of one device"
HINTS_1 = {
    BLOCKS: {
        "all at once": "More than one block is there at once. What must be wrapped, besides the model?",
        "in pieces": "A block is one unit here: a gather for each of its layers is one message too many.",
        "not sharded": "Something is never gathered, so every rank holds all of it. What is not wrapped?",
    },
    STEPS: {"other parameters": "Which parameters does the optimizer have: the earlier or the present ones?"},
}


@question(
    "18.1", "with_fsdp(model, device)", {BLOCKS: 3, STEPS: 1}, depends_on={STEPS: BLOCKS}, hints=HINTS_1
)
def with_fsdp(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    net, seed, ranks = _drawn(rng), rng.randrange(2**31), rng.choice((2, 3, 4))
    results = ask(_trained, net, seed, nprocs=ranks)
    alone = Net(*net)
    units = [*alone.blocks, nn.ModuleList([alone.first, alone.last])]
    right = [sum(math.ceil(len(w) / ranks) * w[0].numel() for w in unit.parameters()) for unit in units]
    for each in results:
        yield first_fault(BLOCKS, _of_gathers(sorted(each["gathers"]), sorted(right), net[1]))
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-3)
    for step in range(2):
        _step(alone, optimizer, torch.cat([_inputs(seed, step, rank) for rank in range(ranks)]))
        rank, gap = furthest(far(each["weights"][step], flat(alone.parameters())) for each in results)
        seen = f"{ranks} ranks, step {step + 1}: rank {rank}'s weights are off by up to {gap:.2g}"
        yield Finding(STEPS, gap < CLOSE, seen, "other parameters")


def _of_gathers(gathers: list[int], right: list[int], blocks: int) -> Faults:
    """Yield what is wrong with the numbers that a rank gave to the gathers of a forward pass."""
    if gathers != right:
        seen = f"the model has {blocks} blocks; in a forward pass a rank gave its shards to {len(gathers)} "
        seen += f"gathers, {sum(gathers)} numbers in all, and should give {sum(right)} to {len(right)}"
        too_much = bool(gathers) and max(gathers) > max(right)
        yield seen, "all at once" if too_much else "in pieces" if len(gathers) > len(right) else "not sharded"


def _inputs(seed: int, step: int, rank: int) -> Tensor:
    return tensor(seed + 10 * step + rank, (3, 4))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@reports(
    lambda net, seed: {
        "gathers": [int, ...],
        "weights": [[NUMBER] * sum(each.numel() for each in Net(*net).parameters())] * 2,
    }
)
@in_group
def _trained(answer: Any, net: list[int], seed: int) -> Result:
    model = Net(*net)
    returned = answer(model, torch.device("cpu"))
    is_pair = isinstance(returned, tuple) and [*map(callable, returned)] == [True, False]
    refuse_unless(is_pair, "with_fsdp(model, device) returns the model and its optimizer", returned)
    model, optimizer = returned
    with record_traffic() as seen:
        model(_inputs(seed, 0, dist.get_rank()))
    gathers = [count for name, count in seen.calls if "gather" in name]
    weights = []
    for step in range(2):
        _step(model, optimizer, _inputs(seed, step, dist.get_rank()))
        weights.append(flat(getattr(each, "full_tensor", each.clone)() for each in model.parameters()))
    return {"gathers": gathers, "weights": weights}


# --- 18.2 -------------------------------------------------------------------------------------------------

FILE = "rank 0 saves the whole model: plain tensors under their names"
DEALT = "after load every rank has its shards of the file, in the same parameters"
ALONE = "no other rank writes"
HINTS_2 = {
    FILE: {
        "no file": "When save is over, the file must be there.",
        "shards": "That is not the whole as a plain tensor. What gathers the shards, and who takes part?",
        "names": "What else does a model hold, besides its parameters?",
    },
    DEALT: {
        "other numbers": "Which rank has read the file, and how does each other rank get its part, for "
        "everything in it?",
        "new parameters": "An optimizer that was made before still has the old parameters.",
    },
    ALONE: {"others write": "All ranks take part in the gathering. Which one has the result, and writes?"},
}


@question("18.2", "WholeFile(path)", {FILE: 3, DEALT: 2, ALONE: 1}, depends_on={ALONE: FILE}, hints=HINTS_2)
def whole_file(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    saving, loading = rng.sample((2, 3, 4), 2)
    net, other = _drawn(rng), rng.randrange(2**31)
    with ask.folder() as folder:
        files = ask(_saved, net, str(folder), nprocs=saving)
        (found,) = ask(_read, net, str(folder))
    yield first_fault(FILE, _of_file(found, Net(*net).state_dict()))
    seen = f"{saving} ranks saved, and left {', '.join(map(str, files))} files in their folders"
    yield Finding(ALONE, files[0] > 0 and not any(files[1:]), seen, "others write")
    with ask.folder() as folder:
        results = ask(_loaded, net, other, str(folder), nprocs=loading)
    right = [_local(Net(*net), rank, loading) for rank in range(loading)]
    rank, gap = furthest(far(each["local"], own) for each, own in zip(results, right, strict=True))
    seen = f"{loading} ranks, after load: rank {rank}'s numbers are not the file's part, or not all of them"
    yield Finding(DEALT, gap < CLOSE, seen, "other numbers")
    kept = all(each["kept"] for each in results)
    yield Finding(DEALT, kept, "the model has new parameters now", "new parameters")


def _of_file(found: dict[str, Any], right: dict[str, Tensor]) -> Faults:
    if "" in found:
        yield f"rank 0's file: {found['']}", "no file" if "FileNotFound" in found[""] else "shards"
    for name, value in right.items():
        if name not in found:
            yield f"the file lacks {name}", "names"
        elif far(found[name], value) >= CLOSE:
            seen = f"{name} has shape {list(value.shape)}, and the file has "
            seen += found[name] if isinstance(found[name], str) else "other numbers, or another shape"
            yield seen, "shards"
    if more := found.keys() - right.keys():
        yield f"the file has {min(more)!r}, which a plain model does not", "shards"


def _local(net: nn.Module, rank: int, ranks: int) -> Tensor:
    """Return a rank's rows of all parameters, and all buffers, in a flat tensor."""
    rows = [[*each.detach().chunk(ranks), *[each[:0]] * ranks][rank] for each in net.parameters()]
    return flat([*rows, *net.buffers()])


def _in_shards(net: list[int]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(*net)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _path(folder: str, rank: int) -> Path:
    """Return a path of the rank's own, as on nodes that share no disk."""
    path = Path(folder) / f"node-{rank}" / "whole.pt"
    path.parent.mkdir(exist_ok=True)
    return path


@reports(lambda net, folder: int)
@in_group
def _saved(answer: Any, net: list[int], folder: str) -> int:
    path = _path(folder, dist.get_rank())
    answer(path).save(_in_shards(net))
    return len([*path.parent.iterdir()])


@reports(lambda net, folder: {str: (TENSOR, str)})
def _read(answer: Any, net: list[int], folder: str) -> dict[str, Any]:
    try:
        found = torch.load(_path(folder, 0), weights_only=True)
        return {name: each.tolist() if type(each) is Tensor else told(each) for name, each in found.items()}
    except Exception as error:
        return {"": reason(error)}


@reports(lambda net, other, folder: {"local": TENSOR, "kept": bool})
@in_group
def _loaded(answer: Any, net: list[int], other: int, folder: str) -> Result:
    path = _path(folder, dist.get_rank())
    if dist.get_rank() == 0:
        torch.save(Net(*net).state_dict(), path)
    model = _in_shards([*net[:2], other])
    before = [*model.parameters()]
    answer(path).load(model)
    after = [*model.parameters()]
    local = [getattr(each, "to_local", each.detach)() for each in after]
    kept = [*map(id, before)] == [*map(id, after)]
    return {"local": flat([*local, *model.buffers()]), "kept": kept}
