"""``python by_spawn.py FOLDER``: the work on ranks that the script starts itself."""

import sys

import torch.multiprocessing as mp

from work import leave, loopback_store, work_as


def worker(rank: int, ranks: int, port: int, folder: str) -> None:
    leave(folder, work_as(rank, ranks, port))


if __name__ == "__main__":
    store = loopback_store()
    mp.spawn(worker, (2, store.port, sys.argv[1]), nprocs=2)
