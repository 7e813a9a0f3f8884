"""Compare several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping

from ..figures.charts import draw_bars
from ..figures.style import Picture, new_figure, styled
from .run import Run


def compare(runs: Mapping[str, Run], title: str | None = None) -> Picture:
    """Draw several runs side by side: total throughput, and the peak memory of the rank with the most.

    Parameters
    ----------
    runs
        The runs by name; the default title compares the last one with the first.

    Raises
    ------
    ValueError
        There is no run, or one without a `track` loop to compare.
    """
    if not runs:
        raise ValueError("compare needs at least one run: compare({'one rank': a, 'two ranks': b})")
    rates = [run.samples_per_second() for run in runs.values()]
    for name, rate in zip(runs, rates, strict=True):
        if not rate:
            raise ValueError(
                f"the run {name!r} has no throughput to compare: it did not loop over track(loader)"
            )
    peaks = [max(map(run.peak_memory_bytes, range(run.world_size))) / 2**20 for run in runs.values()]
    names = list(runs)
    ratio = rates[-1] / rates[0]
    rate_title = title or (f"{names[-1]}: {ratio:.2f} × {names[0]}" if len(names) > 1 else "Throughput")
    figure, (left, right) = new_figure(2, height=1.4 + 0.45 * len(names))
    with styled():
        draw_bars(left, dict(zip(names, rates, strict=True)), rate_title, "samples/s, all ranks together")
        draw_bars(
            right,
            dict(zip(names, peaks, strict=True)),
            "Peak memory of a rank",
            "MiB, the rank with the most",
        )
    words = "; ".join(
        f"{name}: {rate:,.0f} samples/s, {peak:,.0f} MiB"
        for name, rate, peak in zip(names, rates, peaks, strict=True)
    )
    return Picture(figure, f"{rate_title}. {words}.")
