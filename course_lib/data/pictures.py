"""Draw JPEGs as large as photographs in ImageNet's folder layout, for training that reads and decodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from ..files import whole_file
from ..host.hardware import cores
from .once import made_once

TRAIN_EACH, VAL_EACH = 64, 16  # pictures per class
SHAPES = ((900, 660), (660, 900), (780, 780))  # width, height
COARSE = 4  # pictures are drawn smaller by this factor, then enlarged
QUALITY = 75  # of the JPEGs

Field = np.ndarray  # float32, one number per pixel

# Each class is a repeating pattern: a function that says where the shape is, given the position in cells (u
# and v) and the position within a cell (a and b, -0.5 to 0.5).
PATTERNS: dict[str, Callable[[Field, Field, Field, Field], Field]] = {
    "bricks": lambda u, v, a, b: (np.abs(b) > 0.4) | (np.abs((u + 0.5 * (np.floor(v) % 2)) % 1 - 0.5) > 0.42),
    "checks": lambda u, v, a, b: (a < 0) ^ (b < 0),
    "crosses": lambda u, v, a, b: (np.minimum(abs(a), abs(b)) < 0.1) & (np.maximum(abs(a), abs(b)) < 0.38),
    "diamonds": lambda u, v, a, b: np.abs(a) + np.abs(b) < 0.38,
    "dots": lambda u, v, a, b: a * a + b * b < 0.09,
    "rings": lambda u, v, a, b: np.abs(np.hypot(a, b) - 0.32) < 0.09,
    "stripes": lambda u, v, a, b: a < 0,
    "triangles": lambda u, v, a, b: (np.abs(b) < 0.38) & (np.abs(a) < (b + 0.38) * 0.6),
    "waves": lambda u, v, a, b: np.sin(2 * np.pi * (v + 0.3 * np.sin(2 * np.pi * u))) > 0,
    "zigzag": lambda u, v, a, b: (v + 1.6 * np.abs(a)) % 1 < 0.5,
}


def pictures() -> Path:
    """Return the folder of a small JPEG data set in ImageNet's layout (lesson 15).

    It has ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``: ten classes of patterns, 64 and 16 pictures of each,
    about 800 pixels wide and high, in two random colours, rotated, lit from one side and noisy. The first
    call draws them in the course's own folder (some seconds, 50 MB), the same pictures each time.
    `CourseHomeError` is raised if that cannot be written to, or the disk is full.
    """
    return made_once("pictures-v1", _make)


def _make(folder: Path) -> None:
    """Draw all pictures, in threads: NumPy and Pillow release the GIL."""
    each = {"train": TRAIN_EACH, "val": VAL_EACH}
    names = [f"{split}/{kind}/{i:04}.jpg" for split in each for kind in PATTERNS for i in range(each[split])]

    def make(seed: int) -> None:
        path = folder / names[seed]
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            _draw(path.parent.name, np.random.RandomState(seed)).save(file, "JPEG", quality=QUALITY)

    with ThreadPoolExecutor(min(8, cores())) as pool:
        list(pool.map(make, range(len(names))))


def _draw(kind: str, rng: np.random.RandomState) -> Image.Image:
    """Draw one picture: the pattern's shapes in one colour on another, in uneven light, with noise."""
    width, height = SHAPES[rng.randint(len(SHAPES))]
    y, x = np.mgrid[0 : height // COARSE, 0 : width // COARSE].astype(np.float32)
    turn, cell = rng.uniform(-0.4, 0.4), rng.uniform(130, 210) / COARSE
    u = np.float32(np.cos(turn) / cell) * x + np.float32(np.sin(turn) / cell) * y + np.float32(rng.uniform())
    v = np.float32(np.cos(turn) / cell) * y - np.float32(np.sin(turn) / cell) * x + np.float32(rng.uniform())
    where = PATTERNS[kind](u, v, u - np.floor(u) - 0.5, v - np.floor(v) - 0.5)

    colors = np.stack([rng.randint(0, 110, 3), rng.randint(150, 256, 3)])[:: rng.choice((-1, 1))]
    light = 1 - x * np.float32(rng.uniform(0, 0.4) / x.max()) - y * np.float32(rng.uniform(0, 0.4) / y.max())
    lit = colors.astype(np.float32)[where.astype(np.uint8)] * light[..., None]
    lit += rng.randint(-3, 4, (*lit.shape[:2], 1))
    small = Image.fromarray(lit.clip(0, 255).astype(np.uint8))
    return small.resize((width, height), Image.Resampling.BILINEAR)
