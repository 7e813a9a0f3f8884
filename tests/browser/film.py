"""python -m tests.browser.film: two ranks train in a real JupyterLab, one is killed, and a report names it.

The moving picture of the README, `lessons/images/killed_rank.gif`.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from tests.browser.look import PANEL, opened
from tests.notebooks.execute import ROOT

PICTURE = ROOT / "lessons" / "images" / "killed_rank.gif"
CELL = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course_lib import digits, launch, log, place, track


def train(epochs):
    device, backend = place()
    dist.init_process_group(backend)
    data, model = digits(), nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DDP(model.to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(epochs):
        for images, labels in track(DataLoader(data, 20, sampler=DistributedSampler(data))):
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss)
        if epoch == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)  # as the system does when memory runs out


launch(train, 9, nprocs=2)"""
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
STAYS = 5.0  # seconds that the report is shown
BETWEEN = 0.35  # seconds between two frames


def film() -> list[tuple[bytes, float]]:
    """Return screenshots of the notebook's cell, each with the seconds that it is to be shown."""
    frames: list[tuple[bytes, float]] = []
    with tempfile.TemporaryDirectory() as made:
        course = Path(made, "course")
        course.mkdir()
        written = new_notebook(cells=[new_code_cell(CELL)], metadata={"kernelspec": KERNEL})
        nbformat.write(written, course / "train.ipynb")
        with opened(course, "train.ipynb", 850) as notebook:
            page = notebook.page
            notebook.run_all()
            page.wait_for_selector(".jp-OutputArea-output img, .jp-OutputArea-output .widget-html")
            panel = page.locator(PANEL)
            panel.evaluate("panel => { panel.scrollTop = 330 }")  # the end of the cell, and its outputs
            while not page.locator("text=was killed").count():
                frames.append((panel.screenshot(), BETWEEN))
                page.wait_for_timeout(1000 * BETWEEN)
            frames.append((panel.screenshot(), STAYS))
    return frames


def main() -> None:
    frames = film()
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in frames]
    first, *others = [each.quantize(64) for each in pictures]
    milliseconds = [round(1000 * seconds) for _, seconds in frames]
    first.save(PICTURE, save_all=True, append_images=others, duration=milliseconds, loop=0, optimize=True)
    print(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
