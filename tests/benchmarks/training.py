"""Measure what the course costs a training run: lesson 06's loop under `launch` and under plain torchrun."""

from __future__ import annotations

from pathlib import Path

from kernel import HERE, RANKS, TORCHRUN, Kernel, output_of
from rounds import interleaved, ratio
from table import Section

IMPORTS = """
from course_lib import launch, log, track
from lesson import samples_per_second
"""
TRAIN = "print(launch(samples_per_second, {}, track, log, nprocs={}, dashboard={}).results[0])"


def throughput(rounds: int, folder: Path, epochs: int) -> Section:
    """Compare samples per second on rank 0: with the dashboard, without it, and without the course."""
    with Kernel(folder) as kernel:
        kernel.run(IMPORTS)

        def launched(epochs: int, dashboard: bool) -> float:
            return kernel.value(TRAIN.format(epochs, RANKS, dashboard))

        def plain() -> float:
            told = output_of([*TORCHRUN, str(HERE / "lesson.py"), str(epochs)], folder)
            return float(told.splitlines()[-1])

        launched(1, True)  # makes the digits and loads what the dashboard draws with
        takes = {
            "launch, dashboard on": lambda: launched(epochs, True),
            "launch, dashboard off": lambda: launched(epochs, False),
            "plain torchrun script": plain,
        }
        taken = interleaved(takes, rounds)
    shown, hidden, alone = taken.values()
    section = Section(f"Lesson 06's loop on two ranks, {epochs} epochs (ratio: to the plain script)")
    for name, rates in taken.items():
        section.add(name, rates, "{:,.0f}/s", f"{ratio(rates, alone):.3f}")
    section.judge("dashboard on / off", ratio(shown, hidden), least=0.98)
    section.judge("launch, dashboard on / plain script", ratio(shown, alone), least=0.99)
    return section
