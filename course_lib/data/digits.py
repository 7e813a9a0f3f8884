"""Make the lessons' digits once, without a network, as MNIST files that torchvision's MNIST loads.

No process ever sees half a data set: a maker works in a temporary folder and moves each finished file into
place atomically, and every load checks sizes and headers first. So any number of makers may run at the same
time, or be killed; the lock between them only avoids duplicate work.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..files import locked
from ..home import home

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torchvision.datasets import MNIST

TRAIN_SIZE, TEST_SIZE = 18_000, 2_000  # digits; 18,000 gives 2, 3, 4, 6 or 8 ranks equal shards
MEAN, STD = 0.1579, 0.2869  # of the made training digits, scaled to 0…1 (a test recomputes them)
LOCK_SECONDS = 60.0  # then make the files without the lock: a maker that hangs must not block everyone

# The fonts come with matplotlib. The test digits are set in ones that the training digits never use.
TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10", "cmti10"),
)
# matplotlib before 3.11 has no cmti10: another typeface replaces it, and all other pictures stay the same
STAND_INS = {"cmti10": "STIXGeneral"}
TEST_FONTS = ("DejaVuSansMono-BoldOblique", "DejaVuSerif-Italic", "STIXGeneralBolIta", "cmss10", "cmtt10")

_SHAPES = {"images-idx3-ubyte": (28, 28), "labels-idx1-ubyte": ()}  # of one picture, of one label
_FILES = {f"{split}-{what}": shape for split in ("train", "t10k") for what, shape in _SHAPES.items()}


class DataError(OSError):
    """A data set cannot be made, read or downloaded; the message says which file, why, and what to do."""


def to_tensor(image: Image) -> torch.Tensor:
    """Convert a 28 × 28 grey picture to a float32 tensor (1, 28, 28): 0…255 to 0…1, minus MEAN, over STD."""
    import torch

    return torch.from_numpy((np.asarray(image, dtype=np.float32)[None] / 255 - MEAN) / STD)


def digits(
    train: bool = True,
    *,
    root: Path | str | None = None,
    download: bool = False,
    transform: Callable | None = to_tensor,
) -> MNIST:
    """Load pictures of digits and their labels, as torchvision's own ``MNIST`` data set; no network needed.

    The first call makes the digits (about a second): set in many fonts, bent, rotated, shifted, noisy.
    The 2,000 test digits are set in fonts that the 18,000 training digits never use (two are slanted cuts
    of training fonts, and training digits are sheared); all classes have
    the same size. One machine makes the same bytes each time; another processor may round a pixel
    differently, and matplotlib before 3.11 lacks one of the sixteen training typefaces, which another
    replaces. ``torchvision.datasets.MNIST(root)`` loads the files, too. Introduced in lesson 02.

    Parameters
    ----------
    train
        The training digits (True) or the held-out ones (False).
    root
        The folder with the files, or for them, in ``MNIST/raw``; by default ``home()/data/digits-v1``, and
        ``home()/data/mnist`` for the download. Complete MNIST files found there are loaded as they are.
    download
        Fetch the handwritten MNIST (60,000 and 10,000 digits, 11 MB) instead, unless it is already there.
    transform
        A function applied to each 28 × 28 PIL picture. By default `to_tensor`: float32 (1, 28, 28),
        normalised with mean 0.1579 and standard deviation 0.2869, those of the made training digits (also
        for the handwritten ones). None keeps the PIL picture.

    Raises
    ------
    TypeError
        ``train`` is not a bool, or ``transform`` is not callable.
    DataError
        The folder cannot be written to, it holds broken files that the course did not make, or the download
        fails. No half-made file is left, and no file of others is deleted.
    CourseHomeError
        ``root`` is not given, and the course's own folder cannot be written to.
    """
    if not isinstance(train, bool):
        raise TypeError(f"train must be True (training digits) or False (held-out digits), not {train!r}")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform must be a function of one picture, or None, not {transform!r}")
    ours = root is None
    own = home() / "data" / ("mnist" if download else "digits-v1") if root is None else root
    root = Path(own).expanduser().absolute()
    if not download:
        _provide(root / "MNIST", ".made-digits", _make, ours)
    elif (root / "MNIST" / ".made-digits").exists():
        raise DataError(f"{root} holds digits that the course made: give download=True another root")
    else:
        _provide(root / "MNIST", ".downloaded", _download, ours)

    from torchvision.datasets import MNIST

    return MNIST(root, train=train, transform=transform)


def _provide(folder: Path, marker: str, make: Callable[[Path], None], ours: bool) -> None:
    """Make sure that ``folder/raw`` has four whole files; the marker, also the lock, says they are ours."""
    try:
        fault = _fault(folder)
        if fault is None:
            return
        if not ours and folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
            raise DataError(f"{folder / 'raw'} {fault}: repair or remove {folder}, or pass another root")
        for part in (*reversed(folder.parents), folder):
            part.mkdir(mode=0o700, exist_ok=True)
        with locked(folder / marker, LOCK_SECONDS) as alone:
            if _fault(folder) is None:  # another process made them while this one waited
                return
            for leftover in folder.glob(".making-*") if alone else ():
                shutil.rmtree(leftover, ignore_errors=True)  # its maker was killed
            with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as temporary:
                make(Path(temporary))
                made = Path(temporary, "MNIST")
                if fault := _fault(made):
                    raise DataError(f"the new folder {made / 'raw'} {fault}: try again")
                (folder / "raw").mkdir(mode=0o700, exist_ok=True)
                for name in _FILES:
                    os.replace(made / "raw" / name, folder / "raw" / name)
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"the digits cannot be kept in {folder} ({error}): "
            "pass root= or set COURSE_HOME, with a folder that you can write and that has 50 MB free"
        ) from None


def _fault(folder: Path) -> str | None:
    """Say what sizes and headers show to be wrong in ``folder/raw``, as the end of a sentence, or None."""
    images = 0
    for name, shape in _FILES.items():
        length = 8 + 4 * len(shape)  # bytes of the header: 4 each for magic number, count and each dimension
        try:
            with open(folder / "raw" / name, "rb") as file:
                header, size = file.read(length), os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"has no file {name}"
        if size < length:
            return f"holds a broken {name}: {size:,} bytes, where the header alone has {length}"
        magic, count, *rest = struct.unpack(f">{length // 4}I", header)
        if magic != 0x801 + len(shape) or tuple(rest) != shape:
            return f"holds a broken {name}: it begins with {header.hex(' ', 4)}, which is no MNIST header"
        expected = length + count * int(np.prod(shape))
        if size != expected:
            return f"holds a broken {name}: {size:,} bytes, where its header announces {expected:,}"
        if shape:
            images = count
        elif count != images:
            return f"holds a broken {name}: {count:,} labels for {images:,} images"
    return None


def _download(root: Path) -> None:
    """Download the handwritten MNIST with torchvision, which knows the mirrors and verifies checksums."""
    from torchvision.datasets import MNIST

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # seconds without an answer; torchvision sets no timeout
    try:
        MNIST(root, download=True)
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise DataError(
            f"MNIST could not be downloaded ({reason}): try again where there is a network, "
            "or call digits() without download=True, which needs none"
        ) from None
    finally:
        socket.setdefaulttimeout(before)


def _make(root: Path) -> None:
    """Draw both sets and write them as MNIST's files (IDX, described at yann.lecun.com/exdb/mnist)."""
    import torch

    (root / "MNIST" / "raw").mkdir(parents=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes a second on one core; on a busy machine more would wait for each other
    try:
        train = _draw(_glyphs(TRAIN_FONTS), TRAIN_SIZE, seed=1)
        test = _draw(_glyphs(TEST_FONTS), TEST_SIZE, seed=2)
    finally:
        torch.set_num_threads(threads)
    for name, array in zip(_FILES, (*train, *test), strict=True):
        header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
        (root / "MNIST" / "raw" / name).write_bytes(header + array.tobytes())


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
        try:
            font = ImageFont.truetype(path, 100, layout_engine=ImageFont.Layout.BASIC)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error}): reinstall matplotlib, it has the font"
            ) from None
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
