"""A training program as many were written in 2021, for two GPUs. In lesson 08 you migrate it.

python -m torch.distributed.launch --nproc_per_node=2 lessons/scripts/train_2021.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course_lib import digits

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl")

model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank)
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
data = digits()
for images, labels in DataLoader(data, batch_size=250, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} is done: loss {loss.item():.3f}")
