"""Hooks of lesson 19 and of its solution: a lost rank is an error in that step, not a made-up gradient."""

from __future__ import annotations

import ast
import json

import pytest

from course_lib import RankError
from tests.notebooks.execute import ROOT
from tests.support.cells import cell, quiet_launch

TRAINS = """
def work(steps=8):
    dist.init_process_group("gloo")
    ddp = DDP(nn.Linear(64, 64))
    register(ddp)
    for step in range(steps):
        if dist.get_rank() == 1 and step == 4:
            return  # and its process ends
        ddp(torch.ones(2, 64)).sum().backward()
"""
HOOKS = {
    "lessons": "def register(ddp):\n    ddp.register_comm_hook(TopK(0.1), top_k_hook)\n",
    "solutions": "register = send_signs\n",
}


@pytest.mark.parametrize("folder", HOOKS)
def test_a_lost_rank_is_an_error(folder: str) -> None:
    if folder == "lessons":
        text = (ROOT / "lessons" / "scripts" / "ways.py").read_text()
        named = {getattr(each, "name", ""): each for each in ast.parse(text).body}
        hook = "\n".join(ast.get_source_segment(text, named[name]) or "" for name in ("TopK", "top_k_hook"))
    else:
        notebook = json.loads((ROOT / folder / "19_sending_less.ipynb").read_text())
        code = ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]
        hook = "\n".join(each for each in code if "def pack" in each or "def send_signs" in each)
    source = "import math, torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
    source += "from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    with pytest.raises(RankError, match="onnection") as caught:
        quiet_launch(cell(source + hook + "\n\n" + HOOKS[folder] + TRAINS).work, nprocs=2, device="cpu")
    assert caught.value.rank == 0
