"""Records of a GPU's figures as `tests.gpu.figures` writes them: imitated, no GPU has made them."""

from __future__ import annotations

import copy
import hashlib
import re
import zlib
from typing import Any

from tests.gpu import records


def png(width: int = 800, height: int = 600) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        size, check = len(content).to_bytes(4, "big"), zlib.crc32(kind + content).to_bytes(4, "big")
        return size + kind + content + check

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


PICTURE = png()
NUMBERS: dict[str, dict[str, Any]] = {
    "01_transfer_bandwidth": {"KiB": [1, 1024], "seconds": {"to the device, pinned": [1e-5, 1e-4]}},
    "02_batch_size": {"width": 64, "batch sizes": [4, 8], "samples per second": [4000.0, 8000.0]},
    "02_memory_by_kind": {"4": {"parts": {"parameters": 76e6}, "held": {"before": 0, "peak": 3e8}}},
    "03_data_parallel_memory": {
        "live bytes": {"device 0": {"parameters": 1636136}, "device 1": {"parameters": 1636136}},
        "torch.cuda.max_memory_allocated": [30_000_000],
    },
    "09_backend_table": {"gloo GPU tensors": {"broadcast": ["works", ""], "send": ["refuses", "a reason"]}},
    "15_mixed_precision": {
        "float32": {"x": [24, 96], "y": [3000.0, 5000.0]},
        "float16": {"x": [24, 96], "y": [4000.0, 9000.0]},
    },
}


def made(name: str = "01_transfer_bandwidth", picture: bytes = PICTURE) -> dict[str, Any]:
    """A record that is kept."""
    return {
        "figure": name,
        "alt": "Tiny transfers waste the bandwidth. to the device: from 0.1 to 10.5.",
        "device": "Tesla T4",
        "gpus": 1,
        "driver": "580.82.07",
        "cuda": "13.0",
        "torch": re.search(r"torch>=([\d.]+)", str(records.PROJECT["dependencies"]))[1] + ".0",
        "python": "3.12.13",
        "course": records.PROJECT["version"],
        "date": "2026-09-01",
        "numbers": copy.deepcopy(NUMBERS[name]),
        "picture_sha256": hashlib.sha256(picture).hexdigest(),
    }
