"""Start ranks with mp.spawn, let them meet, and say what took how long (lesson 04).

    python lessons/scripts/hello_spawn.py
    python lessons/scripts/hello_spawn.py --nprocs 4 --work 2

Two ways to make it hang, so that you know them when you see them (Ctrl-C ends it; with --port, kill):

    python lessons/scripts/hello_spawn.py --nprocs 2 --world-size 3    # the third rank never comes
    python lessons/scripts/hello_spawn.py --nprocs 2 --absent 1        # rank 1 never calls the barrier
"""

import time

BEGAN = time.time()  # first of all, in every process: mp.spawn runs this file anew in each of them

import argparse
import math
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Not needed to start ranks: place() picks a device and a backend, and log() notes the times for the lesson's
# picture and does nothing where nobody watches.
from course_lib import log, place

IMPORTED = time.time()


def hello(rank, world_size, port, program, args):
    """One process. mp.spawn passes the rank, as the first argument; the rest comes from its `args`."""
    tell_environment(rank, world_size, port, args)
    device, backend = place()
    number, threads = torch.rand(()).item(), torch.get_num_threads()  # as they are, if a program sets neither
    ready = time.time()
    # Reads what was set above. With gloo it returns when all of world_size are there.
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    # The newline is part of the text: print() may write it separately, and the ranks share this output.
    print(f"process {os.getpid()}: I am rank {rank} of {world_size}\n", end="", flush=True)
    if rank != args.absent:
        # Returns when all ranks have called it.
        dist.barrier()
    else:
        wait_for_a_file_that_never_comes()
    met = time.time()

    total = torch.tensor(rank + 1.0, device=device)
    dist.all_reduce(total)  # the sum over all ranks, on all ranks
    time.sleep(args.work)  # stands for the training loop
    done = time.time()
    log(**program, began=BEGAN, imported=IMPORTED, ready=ready, met=met, done=done)
    log(total=total, number=number, threads=threads)
    dist.destroy_process_group()
    if rank == 0:
        print(f"the numbers of the ranks, 1 to {world_size}, add up to {total.item():g}")
        start, imports = BEGAN - program["spawned"], IMPORTED - BEGAN
        before = f"start {start:.2f} s, import {imports:.2f} s"
        print(f"{before}, rendezvous {met - ready:.2f} s, work {done - met:.2f} s", flush=True)


def tell_environment(rank, world_size, port, args):
    """What init_process_group reads. torchrun would have set it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),  # one machine: the rank on this machine is the rank
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if args.port is None:
        # The store is there already, in the parent, as torchrun's is: rank 0 must not open one of its own.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if sys.platform in ("linux", "darwin"):  # the ranks talk over this machine's loopback, not its network
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def wait_for_a_file_that_never_comes():
    while not os.path.exists("/no/such/file"):
        time.sleep(0.1)


def open_store():
    """The key-value store where the ranks find each other, on a port that the system chooses, and the port.

    Only on 127.0.0.1: a store that rank 0 opens by itself listens to the whole network.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # 0: any port that is free
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def main():
    args = parse_arguments()
    store, port = open_store() if args.port is None else (None, args.port)
    program = {"program_began": BEGAN, "program_imported": IMPORTED, "spawned": time.time()}
    try:
        mp.spawn(hello, args=(args.world_size, port, program, args), nprocs=args.nprocs)
    except KeyboardInterrupt:
        sys.exit("stopped")
    del store  # it had to live as long as the ranks


# --- arguments ----------------------------------------------------------------------------------------------


def whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is a whole number from 1 on, not {text!r}")
    return int(text)


def port_number(text):
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"it is a port from 1 to 65535, not {text!r}")
    return int(text)


def seconds(text):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"it is a number of seconds from 0 on, not {text!r}")
    return number


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Start ranks with mp.spawn, let them meet, and say what took how long."
    )
    ranks = torch.cuda.device_count() or 2
    parser.add_argument("--nprocs", type=whole_number, default=ranks, help=f"processes to start ({ranks})")
    parser.add_argument("--world-size", type=whole_number, help="ranks in the group (as many as --nprocs)")
    parser.add_argument("--work", type=seconds, default=0.5, help="seconds of work after the barrier (0.5)")
    parser.add_argument("--absent", metavar="RANK", help="a rank that never calls the barrier (none)")
    parser.add_argument("--port", type=port_number, help="MASTER_PORT (the system chooses one that is free)")
    args = parser.parse_args()
    if args.world_size is None:
        args.world_size = args.nprocs
    if args.absent is not None:
        if not args.absent.isdecimal() or int(args.absent) >= args.nprocs:
            parser.error(f"argument --absent: it is a rank, 0 to {args.nprocs - 1}, not {args.absent!r}")
        args.absent = int(args.absent)
    return args


if __name__ == "__main__":
    main()
