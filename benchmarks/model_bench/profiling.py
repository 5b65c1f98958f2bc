"""Where the time of a run goes, kernel by kernel."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_bench.measuring import synchronize

WARM = 2
SHOWN = 40


class Kernel(NamedTuple):
    name: str
    calls: int
    ms: float  # all of them together


def kernels(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Of one run, those that cost most first. On the CPU: operations, each without those it calls."""
    for _ in range(WARM):
        run()
    synchronize(device)
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        run()
        synchronize(device)
    found = []
    for event in seen.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0 and not event.is_user_annotation:  # these span kernels that are listed too
            found.append(Kernel(event.key, event.count, spent / 1e3))
    return sorted(found, key=lambda kernel: -kernel.ms)


def listing(found: list[Kernel]) -> str:
    """The first SHOWN of them, the others in one line, and their sum."""
    total = sum(kernel.ms for kernel in found)
    lines = [f"{'ms':>10} {'share':>6} {'calls':>6}  kernel"]
    lines += [_line(kernel, total) for kernel in found[:SHOWN]]
    rest = found[SHOWN:]
    if rest:
        calls, ms = sum(kernel.calls for kernel in rest), sum(kernel.ms for kernel in rest)
        lines.append(_line(Kernel(f"{len(rest)} others", calls, ms), total))
    calls = sum(kernel.calls for kernel in found)
    return "\n".join([*lines, _line(Kernel("sum", calls, total), total)])


def _line(kernel: Kernel, total: float) -> str:
    share = 100 * kernel.ms / total if total else 0.0
    return f"{kernel.ms:10.3f} {share:5.1f}% {kernel.calls:6}  {kernel.name[:140]}"
