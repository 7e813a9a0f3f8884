"""What `make gpu ARGS="--keep gpu.zip"` takes from another machine, and what it refuses.

Whoever sent the archive is not known: nothing is unpickled or unpacked, sizes have limits, and all but each
figure's JSON file and picture is ignored. Standard library only, as `.ci/gpu.py`, which asks.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MIB = 2**20
MOST_BYTES = {"json": MIB, "png": 4 * MIB, "zip": 64 * MIB}
MOST_FILES = 5000
ENTRY = b"PK\1\2"  # begins each entry of a zip file's directory
MOST_VALUES = 20_000  # in a record's numbers
MOST_CHARACTERS = 2000
VERSION = r"\d+(\.\d+){1,2}\w*"
KINDS = {  # what stands in a record, and what it looks like
    "figure": r"\w+",
    "alt": r"[^<>]+",
    "device": r"(NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)[\w ./()-]{0,80}",  # as CUDA names them
    "driver": r"\d{3,}(\.\d+){1,2}",
    "cuda": VERSION,
    "torch": VERSION,
    "python": VERSION,
    "course": VERSION,
    "date": r"\d{4}-\d\d-\d\d",
    "picture_sha256": r"[0-9a-f]{64}",
    "gpus": int,
    "numbers": dict,
}
# What a GPU's link to main memory can (GB/s, by its specification), and its memory (GiB): the first that fits
GPUS = {
    r"\bG[HB]\d": (450.0, 300),  # NVLink-C2C
    r"\bT4\b": (15.75, 16),  # PCIe 3, 16 lanes
    r"\bL4\b": (31.5, 24),  # PCIe 4
    r"\bA100\b": (31.5, 80),
    r"\bH100\b": (63.0, 96),  # PCIe 5
    r"\bH200\b": (63.0, 144),
    "": (126.0, 300),  # PCIe 6
}
NVLINK_5 = 900.0  # GB/s from one GPU to others
STATES = {"not here", "crashes", "refuses", "wrong", "works"}  # of a call, in lesson 09's table


class Refused(ValueError):
    """Why an archive, or one record in it, is not kept, with the value that was found."""


def files_in(archive: Path) -> dict[str, dict[str, bytes | Refused]]:
    """Return by figure what the archive has of it: "json" and "png", each its content, or why it is not read.

    Raises Refused for the archive as a whole.
    """
    try:
        if (size := archive.stat().st_size) > MOST_BYTES["zip"]:
            raise Refused(f"it has {size:,} bytes; {MOST_BYTES['zip']:,} are the limit")
        # ahead of zipfile, which keeps an object of its own for each entry
        if (files := archive.read_bytes().count(ENTRY)) > MOST_FILES:
            raise Refused(f"it has {files:,} files; {MOST_FILES:,} are the limit")
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            for name, times in Counter(entry.orig_filename for entry in entries).items():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or re.search(r"[\\\0]|^\w:", name):
                    raise Refused(f"the name {name!r} leads out of the folder")
                if times > 1:
                    raise Refused(f"{name!r} is in it {times} times")
            found: dict[str, dict[str, bytes | Refused]] = {}
            for entry in entries:
                if match := re.fullmatch(r"parts/figure/(\w+)/\1\.(json|png)", entry.filename, re.ASCII):
                    found.setdefault(match[1], {})[match[2]] = _content(opened, entry, MOST_BYTES[match[2]])
            return found
    except Refused:
        raise
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise Refused(f"it cannot be read, cut off perhaps: {error}") from None


def _content(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes | Refused:
    name = PurePosixPath(entry.filename).name
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return Refused(f"{name} is packed in a way whose size cannot be limited")
    if entry.file_size > most:
        return Refused(f"{name} has {entry.file_size:,} bytes; {most:,} are the limit")
    try:
        with opened.open(entry) as file:
            return file.read(most)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        return Refused(f"{name} cannot be read: {error}")  # cut off, encrypted, packed in another way


def checked(name: str, files: dict[str, bytes | Refused]) -> dict[str, Any]:
    """Return a figure's record, if it is one that the course can show; raise Refused with the reason."""
    if name not in PLAUSIBLE:
        raise Refused(f"no lesson has a figure {name!r}")
    for kind in ("json", "png"):
        if kind not in files:
            raise Refused(f"there is no {name}.{kind}")
        if isinstance(content := files[kind], Refused):
            raise content
    record = _record(files["json"], name)
    _versions(record)
    _picture(files["png"], record)
    _plain(record["numbers"])
    count = 0
    try:
        for what, value, least, most in PLAUSIBLE[name](record["numbers"], record):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Refused(f"{what}: {str(value)[:100]!r} is no number")
            if not least <= value <= most:
                raise Refused(f"{what}: {value:g} is not plausible ({least:g} to {most:g} is)")
            count += 1
        if count == 0:
            raise Refused("it has no numbers")
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            f"its numbers do not have the form of {name}: {type(error).__name__}: {error}"
        ) from None
    return record


def _record(content: Any, name: str) -> dict[str, Any]:
    try:
        record = json.loads(content.decode(), parse_constant=_no_constant)
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name}.json is no JSON, or is damaged: {str(error)[:100]}") from None
    if not isinstance(record, dict):
        raise Refused(f"{name}.json has a {type(record).__name__} where a record is a dict")
    if unknown := sorted(record.keys() - KINDS.keys()):
        raise Refused(f"it has {unknown[0][:100]!r}, which is in no record")
    if record.get("gpus") == 0:
        raise Refused("a rehearsal made it, without a GPU")
    for key, kind in KINDS.items():
        if key not in record:
            raise Refused(f"it has no {key!r}")
        value = record[key]
        if isinstance(kind, type):
            fits = type(value) is kind
        else:
            fits = isinstance(value, str) and len(value) <= MOST_CHARACTERS and value.isprintable()
            fits = fits and re.fullmatch(kind, value, re.ASCII) is not None
        if not fits:
            raise Refused(f"its {key!r} is {str(value)[:100]!r}, which is not possible")
    if record["figure"] != name:
        raise Refused(f"it is of the figure {record['figure']!r}, in the place of {name}")
    if not 1 <= record["gpus"] <= 16:
        raise Refused(f"it is of {record['gpus']} GPUs in one machine")
    return record


def _no_constant(name: str) -> None:
    raise Refused(f"it has {name} where a number should be")


def _versions(record: dict[str, Any]) -> None:
    (torch,) = (each for each in PROJECT["dependencies"] if re.match(r"torch\b(?!vision)", each))
    for key, allowed in {"torch": torch, "python": PROJECT["requires-python"]}.items():
        least = allowed.partition(">=")[2]
        if _numbers_of(record[key]) < _numbers_of(least):
            raise Refused(f"it was made with {key} {record[key]}; the course allows {least} or newer")
    if record["course"] != PROJECT["version"]:
        raise Refused(
            f"it was made with version {record['course']} of the course; this is {PROJECT['version']}"
        )
    try:
        day = datetime.date.fromisoformat(record["date"])
    except ValueError:
        raise Refused(f"there is no date {record['date']}") from None
    if day > datetime.date.today() + datetime.timedelta(days=1):  # it is tomorrow already in the east
        raise Refused(f"its date, {day}, is in the future")


def _numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def _picture(content: Any, record: dict[str, Any]) -> None:
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR" or content[-8:-4] != b"IEND":
        raise Refused(f"its picture is no PNG, or is cut off: it begins with {content[:8]!r}")
    if not _whole(content):
        raise Refused("its picture is damaged, or has more in it than a picture")
    size = tuple(int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    if not all(100 <= each <= 4000 for each in size):
        raise Refused(f"its picture has {size[0]:,} × {size[1]:,} pixels; from 100 to 4,000 are allowed")
    if (found := hashlib.sha256(content).hexdigest()) != record["picture_sha256"]:
        raise Refused(f"its picture is another one: {found[:12]}…, not {record['picture_sha256'][:12]}…")


def _whole(png: bytes) -> bool:
    """Return whether a PNG is chunks of the usual kinds, each with its checksum, and nothing after them."""
    at, kind = 8, b""
    while kind != b"IEND" and at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4], "big")
        kind = png[at + 4 : at + 8]
        if kind not in (b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"pHYs", b"tEXt", b"IEND"):
            return False
        if png[end : end + 4] != zlib.crc32(png[at + 4 : end]).to_bytes(4, "big"):
            return False
        at = end + 4
    return kind == b"IEND" and at == len(png)


def _plain(numbers: dict[str, Any]) -> None:
    """Raise Refused unless these are not too many, not too deep, not too long, and each number is finite."""
    left, count = [(numbers, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        if count > MOST_VALUES or depth > 8:
            raise Refused(f"its numbers are more than {MOST_VALUES:,}, or more than 8 levels deep")
        if isinstance(value, dict):
            left += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            left += [(each, depth + 1) for each in value]
        elif isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise Refused(f"a text in it has {len(value):,} characters; {MOST_CHARACTERS:,} are the limit")
        elif isinstance(value, str) and not value.replace("\n", " ").isprintable():
            raise Refused(f"a text in it cannot be printed: {value[:100]!a}")
        elif isinstance(value, int) and abs(value) > 2**63:
            raise Refused("a number in it is larger than 2**63")
        elif isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"it has {value} where a number should be")


# --- what is plausible, for each figure: what it is, its value, the least and the most it can be ------------

Quantities = Iterator[tuple[str, Any, float, float]]


def _limits(record: dict[str, Any]) -> tuple[float, int]:
    """Return GB/s of the GPU's link to main memory, and bytes of its memory."""
    speed, gib = next(limits for pattern, limits in GPUS.items() if re.search(pattern, record["device"]))
    return speed, gib * 2**30


def _transfers(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    for way, times in numbers["seconds"].items():
        between = way == "device to device"
        if between and record["gpus"] < 2:
            raise Refused(f"it is of {record['gpus']} GPU, and has transfers from device to device")
        most = NVLINK_5 if between else _limits(record)[0]
        for kib, seconds in zip(numbers["KiB"], times, strict=True):
            yield f"{way}, {kib} KiB, seconds", seconds, 1e-9, 60
            yield f"{way}, {kib} KiB, GB/s", kib * 1024 / seconds / 1e9, 0, most


def _throughput(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    yield "width", numbers["width"], 64, 64
    for size, rate in zip(numbers["batch sizes"], numbers["samples per second"], strict=True):
        # a sample takes more than 1e8 operations, and no GPU does 1e15 a second in float32 or TF32
        yield f"batch {size}, samples/s", rate, 0.001, 1e7


def _accounts(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    for size, account in numbers.items():
        for part in ("parts", "held"):
            for kind, count in account[part].items():
                yield f"batch {size}, {part}, {kind}, bytes", count, 0, _limits(record)[1]


def _live_bytes(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    most = numbers["torch.cuda.max_memory_allocated"]
    if len(most) != record["gpus"]:
        raise Refused(f"it is of {record['gpus']} GPUs, and has the memory of {len(most)}")
    for device, counts in (*numbers["live bytes"].items(), ("at most", dict(enumerate(most)))):
        for kind, count in counts.items():
            yield f"{device}, {kind}, bytes", count, 0, _limits(record)[1]


def _states(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    for column, calls in numbers.items():
        for call, (state, _) in calls.items():
            if state not in STATES:
                raise Refused(f"{column}, {call}: {state!r} is none of {', '.join(sorted(STATES))}")
    yield "columns", len(numbers), 1, 10


def _speeds(numbers: dict[str, Any], record: dict[str, Any]) -> Quantities:
    for name, line in numbers.items():
        for size, rate in zip(line["x"], line["y"], strict=True):
            yield f"{name}, batch {size}, samples/s", rate, 0.001, 1e7
    yield "lines", len(numbers), 2, 2


PLAUSIBLE = {
    "01_transfer_bandwidth": _transfers,
    "02_batch_size": _throughput,
    "02_memory_by_kind": _accounts,
    "03_data_parallel_memory": _live_bytes,
    "09_backend_table": _states,
    "15_mixed_precision": _speeds,
}
