"""One rank under DDP (lesson 08): torchrun --standalone --nproc-per-node=2 train_torchrun.py digits.pt"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course_lib import digits  # yours: any data set

path, epochs = sys.argv[1], 4
on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # NCCL: one for each rank
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **alone)
rank = dist.get_rank()
data = digits()
loader = DataLoader(data, batch_size=128, sampler=DistributedSampler(data))  # 128 for each rank
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)  # yours
ddp = DDP(model, device_ids=[device.index] if on_gpu else None)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.001)
state = {"epoch": 0}
if os.path.exists(path):  # go on after the last epoch that was finished
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
print(f"rank {rank} of {dist.get_world_size()}, {device}, epochs done: {state['epoch']}\n", end="")
for epoch in range(state["epoch"] + 1, epochs + 1):
    loader.sampler.set_epoch(epoch)  # a new order for each epoch, and the same one after a restart
    for images, labels in loader:
        loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:  # the weights are the same on all ranks: one writes, and one logs
        print(f"epoch {epoch}: loss {loss.item():.3f} in the last batch of rank 0")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)  # a kill leaves the old file or the new one, never half
del ddp  # before PyTorch 2.14 a DDP that outlives its group may hang
dist.destroy_process_group()
