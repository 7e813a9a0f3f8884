"""The program hello_spawn.py with a clock: what took how long until the ranks had met (lesson 04, deeper).

python lessons/scripts/timed_spawn.py --nprocs 4
"""

import time

BEGAN = time.time()  # first of all, in every process: mp.spawn runs this file anew in each of them

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Not needed to start ranks: place() picks a device and a backend, and log() notes the times for the lesson's
# picture and does nothing where nobody watches.
from course_lib import log, place

IMPORTED = time.time()


def hello(rank, world_size, port, program):
    """One process. It finds the group by variables, as under torchrun."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),  # one machine: the rank on this machine is the rank
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The store is there already, in the parent, as torchrun's is: rank 0 must not open one of its own.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    device, backend = place()
    number, threads = torch.rand(()).item(), torch.get_num_threads()  # as they are, if a program sets neither
    ready = time.time()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    dist.barrier()
    met = time.time()
    time.sleep(0.5)  # stands for the training loop
    log(**program, began=BEGAN, imported=IMPORTED, ready=ready, met=met, done=time.time())
    log(number=number, threads=threads)
    dist.destroy_process_group()


def open_store():
    """The store and its port, which the system chooses.

    Only on 127.0.0.1: a store that is given a port number listens to the whole network.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # 0: any port that is free
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Start ranks with mp.spawn, and note what took how long.")
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2, help="how many ranks")
    nprocs = parser.parse_args().nprocs
    store, port = open_store()  # it has to live as long as the ranks
    program = {"program_began": BEGAN, "program_imported": IMPORTED, "spawned": time.time()}
    mp.spawn(hello, args=(nprocs, port, program), nprocs=nprocs)
