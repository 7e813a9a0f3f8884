"""What the lessons' texts say about GPUs from the documentation, tried: `make gpu` starts it.

    python -m tests.gpu.claims --out FOLDER

Each claim quotes its lesson, and `tests/test_gpu.py` finds the quote there: a text that changes takes its
claim along. The folder has `differs.json` after each of them.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SKIPPED = 77  # the exit code of what could not be tried here
LONG = 500_000_000  # GPU clock cycles: a quarter of a second or more
CLAIMS: list[Claim] = []


@dataclass(frozen=True)
class Claim:
    lesson: str
    quote: str
    trial: Callable[[], tuple[bool, str]]  # whether it is so, and what was seen


def claim(lesson: str, quote: str) -> Callable[[Any], Any]:
    """For a function that tries it, and returns whether it is so and what was seen."""

    def kept(trial: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
        CLAIMS.append(Claim(lesson, quote, trial))
        return trial

    return kept


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of some runs, until the GPU is done; the first one does not count."""
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def in_one_rank(work: Callable[[], Any]) -> Any:
    from course_lib import launch

    return launch(work, nprocs=1, dashboard=False, timeout=60).results[0]


@claim("01", "On a GPU, the first two copy, and `d.numpy()` is refused.")
def both_copy() -> tuple[bool, str]:
    import torch

    t = torch.zeros(3)
    d = t.to("cuda")
    back = d.cpu()
    d += 1
    try:
        d.numpy()
        refused = "d.numpy() works"
    except TypeError as error:
        refused = f"TypeError: {error}"
    return (t.sum() == 0 and back.sum() == 0 and refused.startswith("TypeError")), (
        f"after d += 1: t {t.tolist()}, d.cpu() {back.tolist()}; {refused}"
    )


@claim("01", 'so there `t.device == torch.device("cuda")` is `False`')
def full_name() -> tuple[bool, str]:
    import torch

    device = torch.ones(1).to("cuda").device
    return device != torch.device(
        "cuda"
    ), f"{device!r} == torch.device('cuda'): {device == torch.device('cuda')}"


@claim("01", "On a CUDA GPU you will see `Expected all tensors to be on the same device, but`")
def two_devices() -> tuple[bool, str]:
    import torch

    said = []
    layer = torch.nn.Linear(3, 2).to("cuda")
    for work in (lambda: layer(torch.ones(1, 3)), lambda: torch.ones(3) - torch.ones(3, device="cuda")):
        try:
            work()
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    endings = ("found at least two devices, c", "got mat1 is on cpu, different from other tensors on cuda:0")
    return (
        all("Expected all tensors to be on the same device, but" in each for each in said)
        and all(any(end in each for end in endings) for each in said)
    ), " | ".join(said)


@claim("01", "On a GPU the second one measures how fast you can *queue work*.")
def orders() -> tuple[bool, str]:
    import torch

    a = torch.rand(4096, 4096, device="cuda")

    def products() -> float:
        begin = time.perf_counter()
        for _ in range(5):
            a @ a
        return time.perf_counter() - begin

    waited = seconds_of(products)
    given = min(products() for _ in range(3) if torch.cuda.synchronize() is None)
    return given < waited / 2, f"waited for: {1e3 * waited:.2f} ms; not waited for: {1e3 * given:.2f} ms"


@claim("01", "and pinned memory lies above pageable")
def pinned() -> tuple[bool, str]:
    import torch

    host = torch.ones(64 * MIB // 4)
    there, kept = torch.empty_like(host, device="cuda"), host.pin_memory()
    pageable = seconds_of(lambda: there.copy_(host))
    fast = seconds_of(lambda: there.copy_(kept, non_blocking=True))
    rates = [64 * MIB / each / 1e9 for each in (pageable, fast)]
    return fast < pageable, f"64 MiB to the device: pageable {rates[0]:.1f} GB/s, pinned {rates[1]:.1f} GB/s"


@claim("01", "PyTorch's own guide measures this as slower than a plain `.to(device)`")
def pinned_on_the_way() -> tuple[bool, str]:
    import torch

    torch.set_num_threads(1)  # as in the lesson: `pin_memory` copies with all that there are
    host = torch.ones(64 * MIB // 4)
    plain = seconds_of(lambda: host.to("cuda"))
    way = seconds_of(lambda: host.pin_memory().to("cuda", non_blocking=True))
    return way > plain, f"64 MiB: .to(device) {1e3 * plain:.2f} ms, pinned on the way {1e3 * way:.2f} ms"


@claim("01", "`.item()`, `.tolist()` and a plain `.cpu()` wait for you")
def they_wait() -> tuple[bool, str]:
    import torch

    seen = {}
    for name in ("item", "tolist", "cpu"):
        x = torch.zeros((), device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        x.fill_(7)
        seen[name] = float(getattr(x, name)())
    return set(seen.values()) == {7.0}, f"read after a long sleep of the GPU and fill_(7): {seen}"


@claim("02", "On a GPU the count begins at zero, because it counts only what torch's allocator hands out")
def begins_at_zero() -> tuple[bool, str]:
    def work() -> int:
        import torch

        from course_lib import place

        device, _ = place()
        return torch.accelerator.memory_allocated(device)

    allocated = in_one_rank(work)
    return allocated == 0, f"{allocated} bytes in a fresh rank"


@claim("02", "`reserved_bytes` has tensors and cache")
def cache() -> tuple[bool, str]:
    import torch

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    x = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    del x
    freed = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    grown = freed[1] - before[1]
    return (freed[0] == before[0] and grown >= 256 * MIB and after < freed[1]), (
        f"after 256 MiB were freed: allocated {freed[0] - before[0]}, reserved {grown / MIB:.0f} MiB more, "
        f"after empty_cache {(after - before[1]) / MIB:.0f} MiB more"
    )


@claim("03", "(On GPUs autograd has a thread for each device.)")
def a_thread_for_each_device() -> tuple[bool, str]:
    import torch

    threads = []
    layer = torch.nn.Linear(3, 2).to("cuda")
    layer.weight.register_hook(lambda _: threads.append(threading.get_ident()))
    layer(torch.ones(1, 3, device="cuda")).sum().backward()
    return threads != [threading.get_ident()], (
        f"the hook ran in {'this' if threads == [threading.get_ident()] else 'another'} thread"
    )


@claim("03", "DP under bfloat16 autocast computes in float16")
def autocast_in_replicas() -> tuple[bool, str]:
    import torch

    layer, x = torch.nn.Linear(3, 2).to("cuda"), torch.ones(1, 3, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        alone = layer(x).dtype
    with torch.autocast("cuda", dtype=torch.bfloat16):  # a new one: the last keeps the cast weight
        first, _ = torch.nn.parallel.parallel_apply([layer, layer], [(x,), (x,)], devices=[0, 0])
    seen = alone, first.dtype
    return seen == (torch.bfloat16, torch.float16), f"alone, and in a replica: {seen}"


@claim("05", "with NCCL even a call without `async_op` returns early")
@claim("13", "a collective of NCCL is only *queued* by the call")
def queued() -> tuple[bool, str]:
    def work() -> tuple[float, float]:
        import torch
        import torch.distributed as dist

        from course_lib import place

        device, _ = place()
        dist.init_process_group("nccl", device_id=device)
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        begin = time.perf_counter()
        dist.all_reduce(x)
        called = time.perf_counter() - begin
        x.item()
        return called, time.perf_counter() - begin

    called, done = in_one_rank(work)
    return (
        called < done / 4,
        f"the call took {1e3 * called:.1f} ms, its result was there after {1e3 * done:.1f} ms",
    )


@claim("09", "On a GPU machine it is `nccl` for CUDA tensors, and then a CPU tensor has no backend.")
def no_name() -> tuple[bool, str]:
    def work() -> tuple[str, str]:
        import torch
        import torch.distributed as dist

        from course_lib import place

        place()
        dist.init_process_group()
        try:
            dist.all_reduce(torch.ones(1))
            said = "a CPU tensor is summed up"
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return str(dist.get_backend_config()), said

    config, said = in_one_rank(work)
    return config == "cuda:nccl" and "Error" in said, f"{config}; {said}"


@claim("13", 'A group of `"nccl"` refuses CPU tensors in the same words')
def same_words() -> tuple[bool, str]:
    def work() -> list[str]:
        import torch
        import torch.distributed as dist

        from course_lib import place

        device, _ = place()
        said = []
        dist.init_process_group("nccl", device_id=device)
        for backend in ("nccl", "cuda:gloo"):
            group = dist.new_group(backend=backend)
            try:
                dist.all_reduce(torch.ones(1), group=group)
                said.append("no error")
            except Exception as error:
                said.append(str(error).splitlines()[0])
        return said

    nccl, gloo = in_one_rank(work)
    return nccl == gloo != "no error", f"nccl: {nccl} | cuda:gloo: {gloo}"


@claim("15", "GPUs before Ampere (a T4, a V100) have Tensor Cores for float16, but not for bfloat16.")
def bfloat16() -> tuple[bool, str]:
    import torch

    a = torch.rand(4096, 4096, device="cuda")
    b = a.bfloat16()
    single, half = seconds_of(lambda: a @ a), seconds_of(lambda: b @ b)
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return True, f"not asked: this GPU has compute capability {major}.{minor}"
    return half < single / 2, (
        f"a product of 4096² takes {1e3 * single:.2f} ms in float32, {1e3 * half:.2f} ms in bfloat16 "
        "(of a whole network: the figure 15_mixed_precision)"
    )


@claim("04", "It breaks as soon as the notebook has used a GPU")
def fork() -> tuple[bool, str]:
    import multiprocessing

    import torch

    torch.ones(1, device="cuda")
    context = multiprocessing.get_context("fork")
    words = context.Queue()

    def child() -> None:
        try:
            words.put(f"works: {torch.ones(1, device='cuda').item()}")
        except RuntimeError as error:
            words.put(f"RuntimeError: {str(error).splitlines()[0]}")

    process = context.Process(target=child, daemon=True)
    process.start()
    try:
        said = words.get(timeout=30)
    except Exception:
        said = "the child said nothing for 30 s"
    process.kill()
    process.join()
    return not said.startswith("works"), said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(f"skipped: its {len(CLAIMS)} claims are about GPUs, and torch sees none here")
        return SKIPPED
    from tests.gpu.lesson import write

    arguments.out.mkdir(parents=True, exist_ok=True)
    tried: list[dict[str, Any]] = []
    for each in CLAIMS:
        print(f"{each.lesson}: {each.quote}", flush=True)
        try:
            so, seen = each.trial()
        except Exception as error:
            so, seen = False, f"could not be tried: {type(error).__name__}: {error}"[:1000]
        print(f"    {'yes' if so else 'NO'}: {seen}", flush=True)
        tried.append({"lesson": each.lesson, "quote": each.quote, "so": bool(so), "seen": seen})
        write(arguments.out / "differs.json", {"claims": tried})
    print(f"{sum(each['so'] for each in tried)} of {len(tried)} claims are so")
    return 0


if __name__ == "__main__":
    sys.exit(main())
