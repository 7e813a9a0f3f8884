"""Print what the launcher told this process: which rank it is, and where (lesson 04).

    torchrun --standalone --nproc-per-node=2 lessons/scripts/who_am_i.py

On two machines, the same line with an address that both can reach, on each of them:

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT who_am_i.py
"""

import os
import sys

import torch.distributed as dist

# Not needed: place() picks a device and a backend that fit.
from course_lib import place

TOLD = ["RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]


def main():
    missing = [name for name in TOLD if name not in os.environ]
    if missing:
        sys.exit(f"{missing[0]} is not set: start this with torchrun, as its first lines say")
    device, backend = place()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    told = "  ".join(f"{name}={os.environ[name]}" for name in TOLD)
    # The newline is part of the text: print() may write it separately, and the ranks share this output.
    print(f"{told}  {device}\n", end="", flush=True)
    # PyTorch counts in the same way: over all nodes.
    assert dist.get_rank() == int(os.environ["RANK"])
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
