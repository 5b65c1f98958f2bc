"""Time, memory, and the machine's own limits."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_bench.cases import Case, Shape

WARM = 3  # runs before the clock is looked at
LEAST_REPEATS = 5
FILL = 256 * 2**20  # bytes overwritten before each repeat: more than any cache holds


@dataclass(frozen=True)
class Limits:
    """How long one figure may take."""

    repeats: int = 30
    seconds: float = 0.25
    profile: bool = False  # also the time of each kernel


@dataclass(frozen=True)
class Times:
    """Seconds of one run."""

    median: float
    low: float  # quartiles
    high: float
    repeats: int
    host: float  # until the call has returned: above the median, launching is the limit


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches, in FLOP/s by dtype and byte/s."""

    matrix: dict[torch.dtype, float]
    bandwidth: float

    def floor(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """Seconds below which nothing can do this work."""
        return max(flops / self.matrix[dtype], moved / self.bandwidth)

    def bound(self, flops: float, moved: float, dtype: torch.dtype) -> str:
        return "matrix" if flops / self.matrix[dtype] > moved / self.bandwidth else "bytes"


@dataclass(frozen=True)
class Measured:
    forward: Times
    both: Times | None
    peak: int  # bytes, inputs included
    kernels: dict[str, float]  # milliseconds of a whole pass by kernel, if asked for


def measure(
    case: Case, shape: Shape, device: torch.device, limits: Limits, before: int
) -> Measured:
    """Forward alone (no gradients kept), forward and backward, and the peak of a whole pass.

    before: bytes that were allocated before the case began
    """
    inputs = case.draw(shape, device)

    def forward() -> Tensor:
        with torch.no_grad():
            return next(iter(case.call(inputs).values()))

    slope = torch.randn_like(forward())

    def both() -> None:
        y = next(iter(case.call(inputs).values()))
        torch.autograd.grad(y, list(inputs.values()), slope, allow_unused=True)

    whole = both if case.backward else forward
    peak = _peak(whole, device) - before
    return Measured(
        clock(forward, device, limits),
        clock(both, device, limits) if case.backward else None,
        peak,
        by_kernel(whole) if limits.profile else {},
    )


def by_kernel(run: Callable[[], object], times: int = 3) -> dict[str, float]:
    """Milliseconds of a run by kernel, those above 5 us, longest first."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total / times / 1e3 for e in seen.key_averages()}
    return {name: ms for name, ms in sorted(spent.items(), key=lambda x: -x[1]) if ms > 5e-3}


def clock(run: Callable[[], object], device: torch.device, limits: Limits) -> Times:
    """Time on the device. Before each repeat a buffer is filled for as long as the host needs to launch
    the run, so that gaps between kernels are the device's own; it also empties the caches."""
    for _ in range(WARM):
        run()
    host, whole = once(run, device)
    repeats = max(LEAST_REPEATS, min(limits.repeats, int(limits.seconds / max(whole, 1e-9))))
    if device.type == "cuda":
        times = _events(run, repeats, host)
    else:
        times = [once(run, device)[1] for _ in range(repeats)]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Times(median, low, high, repeats, host)


def once(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds until the call returns, and until the work is done."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    returned = time.perf_counter()
    synchronize(device)
    return returned - begin, time.perf_counter() - begin


def _events(run: Callable[[], object], repeats: int, host: float) -> list[float]:
    buffer = torch.empty(FILL, dtype=torch.int8, device="cuda")
    fills = min(2 + math.ceil(1.25 * host / (FILL / 4e12)), 64)  # at 4 TB/s
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in marks:
        for _ in range(fills):
            buffer.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def ceilings(device: torch.device) -> Ceilings:
    """Matrix rates by a large product of random numbers, bandwidth by a large copy.

    The limit of fp32 rows is the TF32 rate; products of three TF32 passes reach a third of it.
    """
    cuda = device.type == "cuda"
    limits = Limits(repeats=20, seconds=0.1)
    size, long = (8192, 2**30) if cuda else (256, 2**22)
    matrix = {dtype: _matrix_rate(dtype, size, device, limits) for dtype in RATED}
    source = torch.empty(long, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = clock(lambda: target.copy_(source), device, limits)
    return Ceilings(matrix, 2 * long / copy.median)


RATED = (torch.bfloat16, torch.float32)


def _matrix_rate(dtype: torch.dtype, size: int, device: torch.device, limits: Limits) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return 2 * size**3 / clock(lambda: a @ b, device, limits).median
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes allocated at the worst moment of a run; 0 where nobody counts them."""
    if device.type != "cuda":
        run()
        return 0
    run()  # what compiling and tuning allocate is not the kernel's
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)
