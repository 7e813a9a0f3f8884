"""Compare several runs side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ..figures.charts import draw_bars, spread
from ..figures.style import Picture, new_figure, styled
from .run import Run


def compare(runs: Mapping[str, Run | Sequence[Run]], title: str | None = None) -> Picture:
    """Draw several runs side by side: total throughput, and the peak memory of the rank with the most.

    One run may be fast or slow by chance. Of several, made in turns, the median is drawn, with a line from
    the least to the most.

    Parameters
    ----------
    runs
        The runs, or equally long lists of them, by name. The default title compares the last ones with the
        first, round by round, and claims no difference that is not in every round.

    Raises
    ------
    ValueError
        There is no run, or one without a `track` loop to compare.
    """
    if not runs:
        raise ValueError("compare needs at least one run: compare({'one rank': a, 'two ranks': b})")
    repeated = {name: [value] if isinstance(value, Run) else list(value) for name, value in runs.items()}
    rates = {name: [run.samples_per_second() for run in of_name] for name, of_name in repeated.items()}
    for name, of_name in rates.items():
        if not of_name or not all(of_name):
            raise ValueError(
                f"the run {name!r} has no throughput to compare: it did not loop over track(loader)"
            )
    peaks = {name: [_peak_mib(run) for run in of_name] for name, of_name in repeated.items()}
    rate_title = title or _verdict(rates)
    figure, (left, right) = new_figure(2, height=1.4 + 0.45 * len(runs))
    with styled():
        draw_bars(left, rates, rate_title, "samples/s, all ranks together")
        draw_bars(right, peaks, "Peak memory of a rank", "MiB, the rank with the most")
    words = (f"{name}: {spread(rates[name])} samples/s, {spread(peaks[name])} MiB" for name in runs)
    return Picture(figure, f"{rate_title}. {'; '.join(words)}.")


def _peak_mib(run: Run) -> float:
    return max(map(run.peak_memory_bytes, range(run.world_size))) / 2**20


def _verdict(rates: Mapping[str, Sequence[float]]) -> str:
    """Compare the last with the first, round by round."""
    if len(rates) < 2:
        return "Throughput"
    first, *_, last = rates
    if len(rates[first]) != len(rates[last]):
        raise ValueError(f"{len(rates[first])} runs of {first!r} cannot be compared with {len(rates[last])}")
    ratios = [b / a for a, b in zip(rates[first], rates[last], strict=True)]
    if min(ratios) < 1 < max(ratios):
        return f"{last} and {first}: now one is faster, now the other"
    return f"{last}: {statistics.median(ratios):.2f} × {first}"
