"""log() of a CUDA tensor: nobody waits for the GPU, and the value is the one it had."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib import Run, log, place
from course_lib.record.layout import RankFiles
from course_lib.record.run_record import RunRecord
from course_lib.record.series import Series
from tests.gpu.gpus import gpu_launch, on_a_gpu

pytestmark = on_a_gpu
LONG = 4_000_000_000  # GPU clock cycles: about 2 s at an H200's 2 GHz, more where it idles slower


def test_log_does_not_wait_for_the_gpu() -> None:
    def work() -> tuple[float, bool, float]:
        device, _ = place()
        loss, done = torch.zeros((), device=device), torch.cuda.Event()
        torch.cuda._sleep(1)
        log(loss=loss.fill_(0))  # the first use of a kernel loads it, which may wait
        torch.cuda.synchronize()
        time.sleep(0.5)  # the recorder's thread has read it

        began = time.perf_counter()
        torch.cuda._sleep(LONG)
        for step in range(1, 101):
            loss.fill_(step)
            log(loss=loss)
            if step == 50:  # the recorder's thread waits for the GPU by now, and holds nobody up
                time.sleep(0.3)
                log(accuracy=loss)
            loss.fill_(-1)  # in place, right after
        done.record()
        logged, at_work = time.perf_counter() - began, not done.query()
        torch.cuda.synchronize()
        return logged, at_work, time.perf_counter() - began

    run = gpu_launch(work, nprocs=1)

    ((logged, at_work, took),) = run.results
    print(f"102 values logged in {logged:.3f} s, of which 0.3 s slept; the GPU took {took:.3f} s")
    assert at_work, "the GPU was done before: nothing is shown"
    assert logged < took / 2
    np.testing.assert_array_equal(run.metrics[0]["loss"], range(101))
    np.testing.assert_array_equal(run.metrics[0]["accuracy"], [50])
    assert (run.metrics[0]["loss.seconds"][1:] - run.metrics[0]["loss.seconds"][1] < took / 2).all()


def test_nothing_in_it_synchronises(tmp_path: Path) -> None:
    """torch's own check. It holds for the whole process, so here no thread reads: only log()'s part runs."""
    loss, own = torch.zeros((), device="cuda"), Series(RankFiles(tmp_path, 0), launched=0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            loss.item()  # the check sees what it should
        for step in range(10):
            loss.fill_(step)
            own.point("loss", loss, 0)
            own.point("vector", loss.reshape(1), 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    own.flush()
    own.close()

    metrics = Run(RunRecord(tmp_path, {"name": "mine", "world_size": 1, "state": "done"})).metrics[0]
    np.testing.assert_array_equal(metrics["loss"], range(10))
    np.testing.assert_array_equal(metrics["vector"], range(10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_kind_of_number_from_any_stream(dtype: torch.dtype) -> None:
    def work() -> None:
        place()
        side = torch.cuda.Stream()
        for step in range(20):
            with torch.cuda.stream(side):  # written and logged on a stream of the learner's own
                torch.cuda._sleep(1_000_000)
                log(value=torch.full((), step, device="cuda").to(dtype))

    run = gpu_launch(work, nprocs=1)
    expected = [float(step > 0) for step in range(20)] if dtype == torch.bool else range(20)
    np.testing.assert_array_equal(run.metrics[0]["value"], expected)
