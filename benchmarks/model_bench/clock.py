"""Time and memory of runs that follow each other as they do in use: nothing waits between them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernel_bench.measuring import Limits, once, synchronize

LEAST_REPEATS = 3


@dataclass(frozen=True)
class Clocked:
    """Seconds of single runs, and what they held."""

    seconds: Sequence[float]
    host: float | None = None  # until a run has returned: near its seconds, the host is the limit
    peak: int | None = None  # bytes allocated at the worst moment; None where nobody counts them


class Marks:
    """Moments of the device, taken without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.cuda.Event] = []
        self.moments: list[float] = []

    def take(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        synchronize(self.device)
        if self.device.type != "cuda":
            return [end - begin for begin, end in zip(self.moments, self.moments[1:], strict=False)]
        pairs = zip(self.events, self.events[1:], strict=False)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def clock(run: Callable[[], object], device: torch.device, limits: Limits) -> Clocked:
    """Two runs to warm up, then a few that are timed. Of a run longer than `limits.seconds` the second is
    timed too, and only one more."""
    run()
    host, took = once(run, device)
    long = took > limits.seconds
    repeats = 1 if long else max(LEAST_REPEATS, min(limits.repeats, int(limits.seconds / took)))
    forget_peak(device)
    marks = Marks(device)
    marks.take()
    for _ in range(repeats):
        run()
        marks.take()
    seconds = marks.seconds()
    return Clocked([took, *seconds] if long else seconds, host, peak(device))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Low, median, high; of a single value that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
