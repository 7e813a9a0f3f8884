"""The smallest hang, on ranks that torchrun starts: rank 1 never comes to an all_reduce (lesson 13).

    TORCH_FR_DUMP_TEMP_FILE=traces/rank_ torchrun --standalone --nproc-per-node=2 hang.py

With a GPU for each rank they talk over NCCL, whose watchdog ends the run after half a minute and writes the
flight recorder's files. Else they talk over gloo, which has no watchdog: each rank writes its own (torch 2.10
wants TORCH_FR_BUFFER_SIZE=2000 for that). `torchfrtrace traces` compares them; make that folder first.
"""

import os
import pickle
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def write_trace():
    """This rank's flight recorder, in the file that NCCL's watchdog would write (torch 2.10 to 2.14)."""
    dump = torch._C._distributed_c10d._dump_fr_trace()  # before 2.14, torchfrtrace knew NCCL alone
    trace = pickle.loads(dump.replace(b"gloo:", b"nccl:") if torch.__version__ < "2.14" else dump)
    name, description = trace["entries"][0]["process_group"]
    ranks = list(range(dist.get_world_size()))  # of the group: NCCL records them, gloo does not
    trace["pg_config"] = {name: {"name": name, "desc": description, "ranks": str(ranks)}}
    path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{dist.get_rank()}"
    with open(f"{path}.part", "wb") as file:
        pickle.dump(trace, file)
    os.replace(f"{path}.part", path)  # nobody reads half a file


def main():
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, device_id=device if has_gpu else None, timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(1, device=device))  # they meet; torchfrtrace knew no barrier before 2.14
    rank = dist.get_rank()
    # The newline is part of the text: print() may write it separately, and the ranks share this output.
    print(f"rank {rank}: process {os.getpid()}, {backend}\n", end="", flush=True)
    if not has_gpu and "TORCH_FR_DUMP_TEMP_FILE" in os.environ:
        threading.Timer(2, write_trace).start()
    total = torch.ones(1, device=device)
    if rank == 1:
        time.sleep(600)  # it waits for a file that nobody writes
    dist.all_reduce(total)
    print("the sum is", total.item())  # over NCCL, Python waits in this line


if __name__ == "__main__":
    main()
