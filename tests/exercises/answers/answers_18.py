"""What people answer in exercise 18, wrong and right (see `answers`)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.exercises.answers import right, wrong

BLOCKS = "each block is gathered by itself, and what the blocks have left by the model"
STEPS = "after each step the ranks have the weights of one device"


def shard(parts: Any, device: Any) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)


def adam(model: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@wrong("18.1", hint="all at once")
def the_model_alone(model, device):
    shard([model], device)
    return model, adam(model)


@wrong("18.1", hint="in pieces")
def each_layer(model, device):
    shard([*(layer for block in model.blocks for layer in (block.up, block.down)), model], device)
    return model, adam(model)


@wrong("18.1", hint="not sharded")
def the_blocks_alone(model, device):
    shard(model.blocks, device)
    return model, adam(model)


@wrong("18.1", hint="all at once")
def not_the_last_block(model, device):
    shard([*model.blocks[:-1], model], device)
    return model, adam(model)


@wrong("18.1", hint="not sharded")
def nothing_is_wrapped(model, device):
    return model, adam(model)


@wrong("18.1", BLOCKS, hint="other parameters")
def the_optimizer_first(model, device):
    optimizer = adam(model)
    shard([*model.blocks, model], device)
    return model, optimizer


@wrong("18.1", hint="your code failed")
def the_list_of_blocks(model, device):
    shard([model.blocks, model], device)
    return model, adam(model)


@wrong("18.1", hint="returns the model and its optimizer")
def the_model_without_optimizer(model, device):
    shard([*model.blocks, model], device)
    return model


@right("18.1")
def backwards(model, device):
    shard([*reversed(model.blocks), model], device)
    return model, adam(model)


@right("18.1")
def as_a_row_of_parts(model, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in model.modules():
        if part in list(model.blocks):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh), torch.optim.Adam(list(model.parameters()), lr=1e-3)


# --- 18.2 -------------------------------------------------------------------------------------------------

FILE = "rank 0 saves the whole model: plain tensors under their names"
DEALT = "after load every rank has its shards of the file, in the same parameters"
ALONE = "no other rank writes"
GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
DEAL_OUT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class File:
    """A right answer, of which a wrong one replaces a part."""

    def __init__(self, path):
        self.path = path

    def save(self, model):
        state = get_model_state_dict(model, options=GATHER)
        if dist.get_rank() == 0:
            torch.save(state, self.path)

    def load(self, model):
        state = torch.load(self.path) if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=DEAL_OUT)


@wrong("18.2", DEALT, hint="shards")
class TheShardsOfRank0(File):
    def save(self, model):
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), self.path)


@wrong("18.2", DEALT, hint="shards")
class TheRowsOfRank0(File):
    def save(self, model):
        state = {name: getattr(each, "to_local", each.clone)() for name, each in model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(state, self.path)


@wrong("18.2", FILE, DEALT, hint="others write")
class EveryRankWrites(File):
    def save(self, model):
        torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), self.path)


@wrong("18.2", DEALT, hint="names")
class ParametersAlone(File):
    def save(self, model):
        state = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(state, self.path)


@wrong("18.2", DEALT, hint="no file")
class ReturnsTheState(File):
    def save(self, model):
        return get_model_state_dict(model, options=GATHER)


@wrong("18.2", hint="waited in")
class Rank0Alone(File):
    def save(self, model):
        if dist.get_rank() == 0:
            torch.save(get_model_state_dict(model, options=GATHER), self.path)


@wrong("18.2", FILE, ALONE, hint="other numbers")
class LoadsNoBuffers(File):
    def load(self, model):
        state = torch.load(self.path) if dist.get_rank() == 0 else {}
        with torch.no_grad():
            for name, each in model.named_parameters():
                whole = state.get(name, torch.empty(each.shape, dtype=each.dtype))
                each.copy_(distribute_tensor(whole, each.device_mesh, each.placements))


@wrong("18.2", FILE, ALONE, hint="new parameters")
class NewParameters(File):
    def load(self, model):
        super().load(model)
        for part in list(model.modules()):
            for name, each in list(part.named_parameters(recurse=False)):
                setattr(part, name, torch.nn.Parameter(each.detach().clone()))


@wrong("18.2", FILE, ALONE, hint="No such file")
class EveryRankReads(File):
    def load(self, model):
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, torch.load(self.path), options=options)


@right("18.2")
class OneAfterTheOther(File):
    """Without the functions for state dicts, and through a temporary file."""

    def save(self, model):
        state = {
            name: getattr(each, "full_tensor", each.clone)() for name, each in model.state_dict().items()
        }
        if dist.get_rank() == 0:
            torch.save(state, f"{self.path}.part")
            os.replace(f"{self.path}.part", self.path)

    def load(self, model):
        state = torch.load(self.path) if dist.get_rank() == 0 else {}
        with torch.no_grad():
            for name, each in model.state_dict().items():
                whole = state.get(name, torch.empty(each.shape, dtype=each.dtype))
                dist.broadcast(whole, 0)
                placed = hasattr(each, "placements")
                each.copy_(distribute_tensor(whole, each.device_mesh, each.placements) if placed else whole)


@right("18.2")
class SentAsObjects(File):
    def load(self, model):
        sent = [torch.load(self.path, mmap=True) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(sent)
        set_model_state_dict(model, sent[0], options=StateDictOptions(full_state_dict=True))
