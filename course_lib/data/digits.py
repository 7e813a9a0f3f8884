"""Draw the lessons' digits, without a network, as MNIST files that torchvision's MNIST loads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..files import whole_file
from .once import made_once

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torchvision.datasets import MNIST

TRAIN_SIZE, TEST_SIZE = 18_000, 2_000  # digits; 18,000 gives 2, 3, 4, 6 or 8 ranks equal shards
MEAN, STD = 0.1579, 0.2869  # of the training digits, scaled to 0…1 (a test recomputes them)

# The fonts come with matplotlib. The test digits are set in ones that the training digits never use.
TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10", "cmti10"),
)
# matplotlib before 3.11 has no cmti10: another typeface replaces it, and the other pictures stay the same
STAND_INS = {"cmti10": "STIXGeneral"}
TEST_FONTS = ("DejaVuSansMono-BoldOblique", "DejaVuSerif-Italic", "STIXGeneralBolIta", "cmss10", "cmtt10")


def to_tensor(image: Image) -> torch.Tensor:
    """Convert a 28 × 28 grey picture to a float32 tensor (1, 28, 28): 0…255 to 0…1, minus MEAN, over STD."""
    import torch

    return torch.from_numpy((np.asarray(image, dtype=np.float32)[None] / 255 - MEAN) / STD)


def digits(train: bool = True, *, transform: Callable | None = to_tensor) -> MNIST:
    """Load pictures of digits and their labels, as torchvision's own ``MNIST`` data set (lesson 02).

    The first call draws the digits, without a network (about a second): in many fonts, bent, rotated,
    shifted, noisy. The 2,000 test digits use fonts that the 18,000 training digits never use; all classes
    have the same size. One machine draws the same bytes each time; another processor may round a pixel
    differently, and with matplotlib before 3.11 another font replaces one of the training fonts.

    ``transform`` is applied to each 28 × 28 PIL picture; by default it makes a float32 tensor (1, 28, 28),
    normalised with mean 0.1579 and standard deviation 0.2869, those of the training digits.

    Raises
    ------
    CourseHomeError
        The course's own folder cannot be written to, or the disk is full.
    """
    from torchvision.datasets import MNIST

    return MNIST(made_once("digits-v1", _make), train=train, transform=transform)


def _make(root: Path) -> None:
    """Draw both sets and write them as MNIST's files (IDX, described at yann.lecun.com/exdb/mnist)."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "train": _draw(_glyphs(TRAIN_FONTS), TRAIN_SIZE, seed=1),
        "t10k": _draw(_glyphs(TEST_FONTS), TEST_SIZE, seed=2),
    }
    for split, (images, labels) in drawn.items():
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            with whole_file(folder / f"{split}-{what}-ubyte", durable=True) as file:
                file.write(struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape))
                file.write(array.tobytes())


def _glyphs(fonts: Sequence[str]) -> torch.Tensor:
    """Draw each typeface's digits in three stroke widths, as a tensor (fonts, 3, 10, 64, 64) of 0…1."""
    import matplotlib
    import torch
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    sheets = []
    for name in fonts:
        path = folder / f"{name}.ttf"
        if name in STAND_INS and not path.exists():
            path = folder / f"{STAND_INS[name]}.ttf"
        if not path.exists():
            raise RuntimeError(f"matplotlib lacks its font {path.name}, which draws digits: reinstall it")
        font = ImageFont.truetype(path, 100, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font.getbbox("0")
        font = font.font_variant(size=42 * 100 / (bottom - top))  # a zero is 42 pixels high in every font
        for stroke in range(3):
            for digit in "0123456789":
                left, top, right, bottom = font.getbbox(digit, stroke_width=stroke)
                corner = (32 - (left + right) / 2, 32 - (top + bottom) / 2)
                sheet = Image.new("L", (64, 64))
                ImageDraw.Draw(sheet).text(corner, digit, 255, font, stroke_width=stroke)
                sheets.append(np.asarray(sheet.filter(ImageFilter.GaussianBlur(0.8))))
    return torch.from_numpy(np.stack(sheets)).float().div_(255).view(len(fonts), 3, 10, 64, 64)


def _draw(glyphs: torch.Tensor, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``count`` digits, equally many of each: uint8 images (count, 28, 28) and labels (count,)."""
    import torch
    from torch.nn.functional import affine_grid, grid_sample, interpolate

    rng = np.random.RandomState(seed)  # NumPy's only generator with a stream that never changes
    labels = rng.permutation(count) % 10
    fonts, strokes = rng.randint(len(glyphs), size=count), rng.randint(3, size=count)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, (count, *shape)).astype(np.float32))

    angle, shear = between(-0.2, 0.2), between(-0.2, 0.2)  # radians; pixels sideways per pixel down
    width, height = between(0.8, 1.2), between(0.85, 1.2)
    x, y = between(-0.12, 0.12), between(-0.12, 0.12)  # like the bends, in half pictures: 0.1 is 1.4 pixels
    bend = between(-0.1, 0.1, 2, 4, 4)  # a smooth field, given on 4 × 4 points
    ink = between(0.7, 1.0, 1, 1, 1)
    cos, sin = angle.cos(), angle.sin()
    rows = [cos / width, (shear - sin) / width, x, sin / height, (cos + shear * sin) / height, y]
    affine = torch.stack(rows, 1).view(count, 2, 3)

    images = np.empty((count, 28, 28), np.uint8)
    for start in range(0, count, 1000):  # 16 MB of glyphs at a time
        part = slice(start, start + 1000)
        grid = affine_grid(affine[part], [len(affine[part]), 1, 28, 28], align_corners=False)
        grid += interpolate(bend[part], (28, 28), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
        glyph = glyphs[fonts[part], strokes[part], labels[part]][:, None]
        picture = grid_sample(glyph, grid, align_corners=False) * ink[part]
        picture += torch.from_numpy(rng.uniform(-0.075, 0.075, picture.shape).astype(np.float32))
        images[part] = picture[:, 0].clamp_(0, 1).mul_(255).round_().byte().numpy()
    return images, labels.astype(np.uint8)
