"""`scripts/hang.py`: a hang under torchrun alone, in files that PyTorch's own analyzer can read."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from course_lib.compat import torch_before
from tests.support.processes import alive, wait_for

SCRIPT = Path(__file__).parents[2] / "lessons" / "scripts" / "hang.py"


def test_the_files_of_a_hang_name_the_rank_that_never_came(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.flight_recorder.fr_trace import main as compare

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_", "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCH_FR_BUFFER_SIZE"] = "2000"  # the default of torch 2.14; 0 in 2.10
    job = subprocess.Popen([*torchrun, str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        told = sorted(islice((line for line in job.stdout if line.startswith("rank ")), 2))
        assert [line.split(":")[0] for line in told] == ["rank 0", "rank 1"]
        ranks = [psutil.Process(int(line.split()[3].rstrip(","))) for line in told]
        wait_for(lambda: sorted(os.listdir(tmp_path)) == ["rank_0", "rank_1"], what="both files")
    finally:
        job.terminate()
        job.wait(60)
    assert not any(alive(rank) for rank in ranks)
    with caplog.at_level("INFO", "Flight Recorder"):
        compare([str(tmp_path)])
    assert "Not all ranks joining collective, sequence number: 2" in caplog.text
    assert f"collective: {'nccl' if torch_before(2, 14) else 'gloo'}:all_reduce" in caplog.text
    assert "missing ranks: {1}" in caplog.text
    assert "hang.py" in caplog.text, "the line of the call"
