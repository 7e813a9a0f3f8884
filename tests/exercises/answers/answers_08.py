"""What people answer in exercise 08, wrong and right (see `answers`)."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.exercises.answers import right, wrong

TOLD = "under torchrun it knows who it is"
OLD = "an old launcher, which passes --local-rank, does not stop it"
ALONE = "started alone, it is rank 0 of 1"


def parser(*more: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    if more == ("--local-rank",):  # as new launchers write it, and as old ones did
        more = ("--local-rank", "--local_rank")
    if more:
        parser.add_argument(*more, type=int, default=0)
    return parser


def number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@wrong("08.1", hint="Return what parse_args gives, with three more attributes.")
def returns_nothing(argv):
    parser("--local-rank").parse_args(argv)


@wrong("08.1", hint="It is not among the attributes")
def as_it_was(argv):
    return parser("--local_rank", "--local-rank").parse_args(argv)


@wrong("08.1", TOLD, ALONE, hint="Hyphen or underscore?")
def underscore(argv):
    args = parser("--local_rank").parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@wrong("08.1", TOLD, ALONE, hint="given an argument it does not know")
def without_the_argument(argv):
    args = parser().parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@wrong("08.1", OLD, ALONE, hint="Which of torchrun's environment variables says this?")
def believes_the_argument(argv):
    args = parser("--local-rank").parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    return args


@wrong("08.1", ALONE, hint="not among those of its own")
def rank_as_local_rank(argv):
    args = parser("--local-rank").parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    args.local_rank = args.rank
    return args


@wrong("08.1", TOLD, OLD, hint="Which value is right then?")
def only_launched(argv):
    args = parser("--local-rank").parse_args(argv)
    for name in ("rank", "local_rank", "world_size"):
        setattr(args, name, int(os.environ[name.upper()]))
    return args


@wrong("08.1", hint="The environment holds text")
def as_text(argv):
    args = parser("--local-rank").parse_args(argv)
    for name, default in (("rank", "0"), ("local_rank", "0"), ("world_size", "1")):
        setattr(args, name, os.environ.get(name.upper(), default))
    return args


@wrong("08.1", TOLD, OLD, hint="What is true of a process that is alone?")
def a_world_of_none(argv):
    args = parser("--local-rank").parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 0)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@wrong("08.1", ALONE, hint="Which of torchrun's environment variables says this?")
def the_node_alone(argv):
    args = parser("--local-rank").parse_args(argv)
    args.rank, args.world_size = number("RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@wrong("08.1", hint="The script's own argument has to be kept.")
def drops_all_arguments(argv):
    args = parser().parse_args([])
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@wrong("08.1", hint="It has to return with any launcher, and without one.")
def asks_the_group(argv):
    args = parser("--local-rank").parse_args(argv)
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    return args


def with_ranks(args, local_rank=None):
    args.rank, args.world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    args.local_rank = number("LOCAL_RANK", 0) if local_rank is None else local_rank
    return args


@wrong("08.1", ALONE, hint="(Nodes may have different numbers of ranks.)")
def counts_gpus(argv):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
    return with_ranks(parser("--local-rank").parse_args(argv), number("RANK", 0) % gpus)


@wrong("08.1", ALONE, hint="args.world_size is")
def nodes_times_ranks(argv):
    args = with_ranks(parser("--local-rank").parse_args(argv))
    args.world_size = number("GROUP_WORLD_SIZE", 1) * number("LOCAL_WORLD_SIZE", 1)
    return args


@wrong("08.1", OLD, ALONE, hint="args.world_size is 1")
def rank_0_is_alone(argv):
    args = with_ranks(parser("--local-rank").parse_args(argv))
    args.world_size = args.world_size if args.rank else 1
    return args


@wrong("08.1", TOLD, OLD, hint="argparse ends a program that lacks a required argument.")
def asks_for_epochs(argv):
    known = argparse.ArgumentParser()
    known.add_argument("--epochs", type=int, required=True)
    known.add_argument("--local-rank", "--local_rank", type=int)
    return with_ranks(known.parse_args(argv))


@wrong("08.1", TOLD, ALONE, hint="argparse ends a program")
def the_first_argument_goes(argv):
    if argv and argv[0].startswith("--local"):
        argv = argv[1:]
    return with_ranks(parser().parse_args(argv))


TAKES = "on the CPU it gives a DistributedDataParallel"
MEAN = "whose gradients are the mean over all ranks"
ON_GPU = "on a GPU, device_ids names that GPU"


@wrong("08.2", ON_GPU, hint="what must device_ids be?")
def gpus_alone(model, device):
    return DDP(model, device_ids=[device.index], output_device=device.index)


@wrong("08.2", TAKES, MEAN, hint="None is for the CPU")
def never_names_one(model, device):
    return DDP(model)


@wrong("08.2", TAKES, MEAN, hint="All ranks of the node would use the same GPU.")
def always_the_first(model, device):
    return DDP(model, device_ids=[0] if device.type == "cuda" else None)


@wrong("08.2", TAKES, MEAN, hint="One process, one GPU")
def the_rank_of_all(model, device):
    return DDP(model, device_ids=[int(os.environ["RANK"])] if device.type == "cuda" else None)


@wrong("08.2", hint="The training loop calls what you return, and that has to average the gradients.")
def forgets_to_return(model, device):
    DDP(model)


@wrong("08.2", ON_GPU, hint="The training loop calls what you return, and that has to average the gradients.")
def the_bare_model_on_a_cpu(model, device):
    return DDP(model, device_ids=[device.index]) if device.type == "cuda" else model


@wrong("08.2", TAKES, ON_GPU, hint="Is it the given model that you wrap, unchanged?")
def a_model_of_its_own(model, device):
    return DDP(nn.Linear(4, 3).double(), device_ids=[device.index] if device.type == "cuda" else None)


@wrong("08.2", TAKES, MEAN, hint="DDP must be called all the same.")
def by_its_name(model, device):
    return DDP(model, device_ids=None if device == torch.device("cpu") else [device.number])


@wrong("08.2", TAKES, MEAN, hint="the one in `device`.")
def by_local_rank(model, device):
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    return DDP(model, [local_rank] if device.type == "cuda" else None)


@wrong("08.2", TAKES, MEAN, hint="0 is one, too")
def no_ids_for_gpu_0(model, device):
    return DDP(model, device_ids=[device.index] if device.index else None)


GOES_ON = "a second start resumes after the last completed epoch"
SAME = "and ends with the weights of an uninterrupted run"
ONE = "rank 0 alone writes"
WHOLE = "a kill in the middle of a write leaves a checkpoint to resume from"


def restore(model, optimizer, path) -> int:
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def whole(model, optimizer, epoch) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def keep(state, path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)


@wrong("08.3", hint="never called run_epoch")
def trains_nothing(model, optimizer, run_epoch, epochs, path):
    keep(whole(model, optimizer, epochs - 1), path)


@wrong("08.3", hint="What should a start look for before its first epoch?")
def as_it_was_in_2021(model, optimizer, run_epoch, epochs, path):
    for epoch in range(epochs):
        run_epoch(epoch)
        torch.save(model.state_dict(), path + f".{dist.get_rank()}")


@wrong("08.3", ONE, hint="What should a start look for before its first epoch?")
def weights_alone_from_the_start(model, optimizer, run_epoch, epochs, path):
    if os.path.exists(path):
        model.load_state_dict(torch.load(path))
    for epoch in range(epochs):
        run_epoch(epoch)
        keep(model.state_dict(), path)


@wrong("08.3", GOES_ON, ONE, WHOLE, hint="(Think of momentum.)")
def without_the_optimizer(model, optimizer, run_epoch, epochs, path):
    begin = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        begin = state["epoch"] + 1
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep({"model": model.state_dict(), "epoch": epoch}, path)


@wrong("08.3", ONE, hint="The last completed epoch is run again.")
def one_epoch_twice(model, optimizer, run_epoch, epochs, path):
    begin = max(0, restore(model, optimizer, path) - 1)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.3", ONE, hint="The epoch in which it was killed was never completed, and now it is skipped.")
def one_epoch_left_out(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch + 1), path)


@wrong("08.3", GOES_ON, SAME, WHOLE, hint="How many of them need to write the file?")
def every_rank_writes(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path)
    dist.barrier()
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        part = f"{path}.{dist.get_rank()}"
        torch.save(whole(model, optimizer, epoch), part)
        os.replace(part, path)


@wrong("08.3", GOES_ON, SAME, ONE, hint="When may a file get that name?")
def straight_to_its_name(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            torch.save(whole(model, optimizer, epoch), path)
        dist.barrier()


@wrong("08.3", GOES_ON, ONE, WHOLE, hint="began with other weights")
def the_epoch_alone(model, optimizer, run_epoch, epochs, path):
    begin = torch.load(path)["epoch"] + 1 if os.path.exists(path) else 0
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.3", hint="FileNotFoundError")
def expects_a_checkpoint(model, optimizer, run_epoch, epochs, path):
    state = torch.load(path)
    for epoch in range(state["epoch"] + 1, epochs):
        run_epoch(epoch)


@wrong("08.3", ONE, hint="How often must it be written, and when?")
def every_second_epoch(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if epoch % 2 or epoch == epochs - 1:
            keep(whole(model, optimizer, epoch), path)


@wrong("08.3", GOES_ON, ONE, WHOLE, hint="other weights or buffers")
def parameters_alone(model, optimizer, run_epoch, epochs, path):
    """Batch norm has numbers that are no parameters."""
    begin = 0
    if os.path.exists(path):
        state = torch.load(path)
        nn.utils.vector_to_parameters(state["model"], model.parameters())
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        keep(whole(model, optimizer, epoch) | {"model": vector}, path)


@wrong("08.3", GOES_ON, ONE, WHOLE, hint="What else remembers the earlier steps?")
def the_momentum_alone(model, optimizer, run_epoch, epochs, path):
    """The learning rate had changed, too."""
    begin = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        begin = state["epoch"] + 1
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.3", ONE, hint="nothing left to do")
def once_more_when_complete(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path) % epochs
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.3", GOES_ON, SAME, ONE, hint="When may a file get that name?")
def copied_from_elsewhere(model, optimizer, run_epoch, epochs, path):
    """The copy is no single step."""
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(whole(model, optimizer, epoch), f"{folder}/new.pt")
                shutil.copy(f"{folder}/new.pt", path)


@wrong("08.3", GOES_ON, SAME, ONE, hint="It was not yours")
def tidies_the_folder(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)
        if dist.get_rank() == 0:
            for each in Path(path).parent.glob("*.[!p]*"):
                each.unlink()


@wrong("08.3", hint="cross-device")
def renamed_from_elsewhere(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            with tempfile.NamedTemporaryFile(delete=False) as file:
                torch.save(whole(model, optimizer, epoch), file)
            try:
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
        dist.barrier()


@wrong("08.3", GOES_ON, SAME, ONE, hint="What must change in a single step, with what in it?")
def the_epoch_in_a_file_of_its_own(model, optimizer, run_epoch, epochs, path):
    """Each of the two is whole; they do not change together."""
    note = Path(f"{path}.epoch")
    begin = 0
    if note.exists():
        begin = int(note.read_text()) + 1
        restore(model, optimizer, path)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, 0), path)
        if dist.get_rank() == 0:
            Path(f"{note}.new").write_text(str(epoch))
            os.replace(f"{note}.new", note)


@wrong("08.3", GOES_ON, SAME, ONE, hint="May the next start overwrite it?")
def into_a_new_file_alone(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            with open(f"{path}.new", "xb") as file:
                torch.save(whole(model, optimizer, epoch), file)
            os.replace(f"{path}.new", path)


# --- right, in another style ---


@right("08.1")
def lets_argparse_pass(argv):
    args, _ = parser().parse_known_args(argv)
    environment = os.environ
    args.rank, args.local_rank, args.world_size = (
        (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        if "RANK" in environment
        else (0, 0, 1)
    )
    return args


@right("08.1")
def by_defaults(argv):
    known = parser("--local-rank")
    known.add_argument("--rank", type=int, default=number("RANK", 0))
    known.add_argument("--world-size", type=int, default=number("WORLD_SIZE", 1))
    args = known.parse_args(argv)
    args.local_rank = number("LOCAL_RANK", 0)
    return args


@functools.cache
def variable(name: str, default: int) -> int:
    return int(os.getenv(name) or default)


class Wrapped(DDP):
    """As people do it to reach the model's own methods."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@right("08.2")
def of_a_class_of_its_own(model, device):
    return Wrapped(model, device_ids=[device.index] if device.type == "cuda" else None)


@right("08.2")
def by_where_the_weights_are(model, device):
    there = {each.device for each in model.parameters() if each.is_cuda}
    torch.cuda.set_device(device) if there and torch.cuda.is_available() else None
    return DDP(model, device_ids=[torch.cuda.current_device()] if there else None, bucket_cap_mb=1)


@right("08.3")
def rank_0_reads(model, optimizer, run_epoch, epochs, path):
    found = [None]
    if dist.get_rank() == 0 and os.path.exists(path):
        found = [torch.load(path, weights_only=False)]
    dist.broadcast_object_list(found, src=0)
    begin = 0
    if found[0]:
        begin, weights, momentum = found[0]
        model.load_state_dict(weights)
        optimizer.load_state_dict(momentum)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            part = Path(path).with_suffix(".tmp")
            with open(part, "wb") as file:
                torch.save((epoch + 1, model.state_dict(), optimizer.state_dict()), file)
            part.rename(path)
        dist.barrier()


@right("08.3")
def as_bytes(model, optimizer, run_epoch, epochs, path):
    import io

    begin = 0
    if os.path.exists(path):
        packed = pickle.loads(Path(path).read_bytes())
        state = torch.load(io.BytesIO(packed))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    dist.barrier()
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        if dist.get_rank():
            continue
        buffer = io.BytesIO()
        torch.save(whole(model, optimizer, epoch), buffer)
        Path(path + "~").write_bytes(pickle.dumps(buffer.getvalue()))
        os.replace(path + "~", path)
