"""Draw photograph-sized JPEGs in ImageNet's folder layout, for training that has to read and decode files.

As with the digits, no process ever sees half a data set: the pictures are made in a temporary folder and
moved into place one by one, and the list of their sizes, which every load checks, comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..files import locked
from ..hardware import cores
from ..home import home
from .digits import LOCK_SECONDS, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

TRAIN_EACH, VAL_EACH = 64, 16  # pictures per class
SHAPES = ((900, 660), (660, 900), (780, 780))  # width, height
COARSE = 4  # they are drawn smaller by this factor, then enlarged
QUALITY = 75  # of the JPEGs
MARKER, SIZES = ".made-pictures", "sizes.json"

Field = np.ndarray  # float32, one number per pixel

# Each class is a repeating pattern: a function that says where its shape is, given u and v (the position,
# counted in cells) and a and b (the position within a cell, -0.5 to 0.5).
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


def pictures(root: Path | str | None = None) -> Path:
    """Return the folder of a small JPEG data set in ImageNet's layout, for torchvision's ``ImageFolder``.

    It has ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``: ten classes of patterns, 64 and 16 pictures of each,
    about 800 pixels wide and high, in two random colours, rotated, lit from one side and noisy. The first
    call draws them (some seconds, 50 MB), the same pictures each time. Introduced in lesson 15.

    Parameters
    ----------
    root
        The folder with the pictures, or for them; by default ``home()/data/pictures-v1``.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    DataError
        The folder cannot be written to, or holds files that the course did not make. No half-made file is
        left, and no file of others is deleted.
    CourseHomeError
        ``root`` is not given, and the course's own folder cannot be written to.

    Examples
    --------
    >>> data = torchvision.datasets.ImageFolder(pictures() / "train")
    """
    folder = home() / "data" / "pictures-v1" if root is None else Path(root).expanduser().absolute()
    try:
        if (fault := _fault(folder)) is None:
            return folder
        if root is not None and folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
            raise DataError(f"{folder} {fault}, and the course did not make it: pass another root")
        for part in (*reversed(folder.parents), folder):
            part.mkdir(mode=0o700, exist_ok=True)
        with locked(folder / MARKER, LOCK_SECONDS) as alone:
            if _fault(folder) is None:  # another process made them while this one waited
                return folder
            for leftover in folder.glob(".making-*") if alone else ():
                shutil.rmtree(leftover, ignore_errors=True)  # its maker was killed
            with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as temporary:
                made = Path(temporary)
                sizes = _make(made)
                for name in sizes:
                    (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    os.replace(made / name, folder / name)
                (made / SIZES).write_text(json.dumps(sizes))
                os.replace(made / SIZES, folder / SIZES)
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"the pictures cannot be kept in {folder} ({error}): "
            "pass root= or set COURSE_HOME, with a folder that you can write and that has 60 MB free"
        ) from None
    return folder


def _names() -> list[str]:
    return [
        f"{split}/{kind}/{number:04}.jpg"
        for split, count in (("train", TRAIN_EACH), ("val", VAL_EACH))
        for kind in PATTERNS
        for number in range(count)
    ]


def _fault(folder: Path) -> str | None:
    """Say what is wrong with the pictures in a folder, as the end of a sentence, or None."""
    try:
        sizes = json.loads((folder / SIZES).read_text())
    except (OSError, ValueError):
        return f"has no list {SIZES} of whole pictures"
    if not isinstance(sizes, dict) or sizes.keys() != set(_names()):
        return "holds the pictures of another version"
    for name, size in sizes.items():
        try:
            size_there = os.stat(folder / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"has no file {name}"
        if size_there != size:
            return f"holds a broken {name}: {size_there:,} bytes, where {size:,} were written"
    return None


def _make(folder: Path) -> dict[str, int]:
    """Draw all pictures and return their sizes in bytes, by name. NumPy and Pillow release the GIL."""

    def make(numbered: tuple[int, str]) -> tuple[str, int]:
        seed, name = numbered
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(path.parent.name, np.random.RandomState(seed)).save(path, "JPEG", quality=QUALITY)
        return name, path.stat().st_size

    with ThreadPoolExecutor(max(1, min(8, int(cores())))) as pool:
        return dict(pool.map(make, enumerate(_names())))


def _draw(kind: str, rng: np.random.RandomState) -> Image:
    """Draw one picture: the pattern's shapes in one colour on another, in uneven light, with noise."""
    from PIL import Image

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
