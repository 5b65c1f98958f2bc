"""Time and peak memory of the two forms on CPU: `python benchmarks/forms.py --help`.

Each figure comes from a fresh process. Before anything is timed, both forms must agree in fp64.
"""

import argparse
import csv
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from atlas_lm.memory import MemorySpec, memorize, presets
from atlas_lm.memory.architectures import Matrix

SIZES = dict(heads=4, key_dim=32, value_dim=32)
CHUNK, BATCH = 64, 1
# name -> what is built: matrix memories first, then deep ones
CASES: dict[str, dict] = {
    "swla": dict(preset="swla"),
    "deltanet": dict(preset="deltanet"),
    "matrix_momentum": dict(preset="titans", architecture=Matrix(), chunk=CHUNK),
    "titans": dict(preset="titans", chunk=CHUNK),
    "omeganet": dict(preset="omeganet", chunk=CHUNK),
    "atlas": dict(preset="atlas", chunk=CHUNK, period=CHUNK),
}
NOTES = {
    "swla": "matrix, dot, window 16, 153 features",
    "deltanet": "matrix, l2, exact online rule",
    "matrix_momentum": "matrix, l2, momentum, chunk 64",
    "titans": "MLP, l2, momentum, chunk 64",
    "omeganet": "MLP, l2, window 16, 153 features, chunk 64",
    "atlas": "omeganet with Newton-Schulz once per chunk",
}
RANGES = dict(eta=(0.0, 1 / CHUNK), log_alpha=(-0.02, 0.0), theta=(0.0, 0.9), gamma=(0.0, 1 / 16))
LONG, VERY_LONG = 8.0, 20.0  # seconds spent on one figure after which two runs, or one, will do
Inputs = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Job:
    """One figure to be measured."""

    case: str
    form: str
    mode: str  # "forward" (no_grad) or "backward" (forward and backward)
    tokens: int
    runs: int
    threads: int


@dataclass(frozen=True)
class Figure:
    case: str
    form: str
    mode: str
    tokens: int
    median_s: float
    fastest_s: float
    slowest_s: float
    runs: int
    peak_mib: float


def build(case: str) -> MemorySpec:
    changes = dict(CASES[case])
    return presets.build(changes.pop("preset"), **SIZES, **changes)


def draw(spec: MemorySpec, tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """q, k, v; gates; weights: everything that collects gradients."""
    generator = torch.Generator().manual_seed(0)

    def rand(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype)

    widths = dict(q=spec.key_dim, k=spec.key_dim, v=spec.value_dim)
    inputs = {n: 2 * rand((BATCH, tokens, spec.heads, width)) - 1 for n, width in widths.items()}
    gates = {
        n: RANGES[n][0]
        + (RANGES[n][1] - RANGES[n][0]) * rand(gate.shape(BATCH, tokens, spec.heads))
        for n, gate in spec.gates.items()
    }
    weights = {n: weight.to(dtype) for n, weight in spec.init_weights().items()}
    return inputs, gates, weights


def forward(spec: MemorySpec, drawn: Inputs, form: str) -> Tensor:
    inputs, gates, weights = drawn
    y, _ = memorize(spec, weights, None, *inputs.values(), gates, form=form, check=False)  # type: ignore[call-overload]
    return y


def run(spec: MemorySpec, drawn: Inputs, form: str, mode: str) -> list[Tensor]:
    """Outputs, and in the backward mode all gradients."""
    if mode == "forward":
        with torch.no_grad():
            return [forward(spec, drawn, form)]
    tensors = [x.requires_grad_() for group in drawn for x in group.values()]
    y = forward(spec, drawn, form)
    return [y, *torch.autograd.grad(y.square().sum(), tensors)]


def disagreement(spec: MemorySpec) -> float:
    """Largest difference of the forms in fp64, outputs and gradients, relative to the largest entry."""
    drawn = draw(spec, 2 * CHUNK + 5, torch.float64)
    pairs = zip(
        *(run(spec, drawn, form, "backward") for form in ("reference", "parallel")), strict=True
    )
    return max(((a - b).abs().max() / a.abs().max().clamp_min(1e-12)).item() for a, b in pairs)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(job: Job) -> Figure:
    """In a fresh process: warm up small, take the baseline, run once for the peak, then for the time."""
    torch.set_num_threads(job.threads)
    spec = build(job.case)
    for _ in range(2):
        run(spec, draw(spec, CHUNK + 1), job.form, job.mode)
    drawn, baseline = draw(spec, job.tokens), peak_mib()
    times: list[float] = []
    while len(times) < job.runs and sum(times) < (LONG if len(times) > 1 else VERY_LONG):
        begin = time.perf_counter()
        run(spec, drawn, job.form, job.mode)
        times.append(time.perf_counter() - begin)
        if len(times) == 1:
            peak = peak_mib() - baseline
    return Figure(
        job.case,
        job.form,
        job.mode,
        job.tokens,
        statistics.median(times),
        min(times),
        max(times),
        len(times),
        peak,
    )


def in_fresh_process(job: Job) -> Figure:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(measure, job).result()


def why_not(job: Job, known: list[Figure], limits: argparse.Namespace) -> str | None:
    """A reason to leave a figure out; None: measure it."""
    if job.form == "parallel":
        return None
    if job.tokens > limits.reference_limit:
        return f"above --reference-limit {limits.reference_limit}"
    smaller = [f for f in known if (f.case, f.form, f.mode) == (job.case, job.form, job.mode)]
    if smaller:
        need = smaller[-1].peak_mib * job.tokens / smaller[-1].tokens
        if need > limits.memory_limit:
            return f"would need about {need / 1024:.0f} GiB, above --memory-limit {limits.memory_limit} MiB"
    return None


def saved_for_backward(spec: MemorySpec, tokens: int) -> tuple[float, int]:
    """Bytes kept for the backward pass per token, and the entries of the largest tensor among them.

    Views of one storage count once, expanded axes not at all.
    """
    storages: dict[int, int] = {}
    kept, largest = [], 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()
        kept.append(storage)  # alive, so that no address is used twice
        storages[storage.data_ptr()] = storage.nbytes()
        largest = max(largest, min(tensor.numel(), storage.nbytes() // tensor.element_size()))
        return tensor

    drawn = draw(spec, tokens)
    for group in drawn:
        for tensor in group.values():
            tensor.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward(spec, drawn, "parallel")
    assert y.requires_grad
    return sum(storages.values()) / tokens, largest


def report_saved(cases: list[str], tokens: int = 4 * CHUNK) -> None:
    print(f"\nsaved for backward by the parallel form, T = {tokens}, fp32")
    print(f"{'':16} {'per token':>12} {'largest tensor':>16} {'chunk x weights':>16} {'share':>7}")
    for case in cases:
        spec = build(case)
        per_token, largest = saved_for_backward(spec, tokens)
        largest_weight = max(o * i for o, i in spec.fast_shapes.values())
        bound = BATCH * spec.heads * CHUNK * largest_weight
        share = f"{largest / bound:7.3f} {'below' if largest < bound else 'REACHED'}"
        print(f"{case:16} {per_token / 1024:8.1f} KiB {largest:16,} {bound:16,} {share}")


def exponent(figures: list[Figure]) -> float:
    """Slope of log time over log tokens."""
    if len(figures) < 2:
        return math.nan
    x, y = [math.log(f.tokens) for f in figures], [math.log(f.median_s) for f in figures]
    return statistics.linear_regression(x, y).slope


def report_times(figures: list[Figure]) -> None:
    print(
        f"\n{'':16} {'mode':9} {'T':>6} {'reference':>25} {'parallel':>25} {'faster':>8} "
        f"{'ref. peak':>11} {'par. peak':>11}"
    )
    by_key = {(f.case, f.form, f.mode, f.tokens): f for f in figures}
    for case, form, mode, tokens in by_key:
        if form == "parallel":
            mine, other = (
                by_key[case, form, mode, tokens],
                by_key.get((case, "reference", mode, tokens)),
            )
            ratio = f"{other.median_s / mine.median_s:7.1f}x" if other else "-"
            print(
                f"{case:16} {mode:9} {tokens:6} {seconds(other):>25} {seconds(mine):>25} {ratio:>8} "
                f"{mebibytes(other):>11} {mebibytes(mine):>11}"
            )


def report_scaling(figures: list[Figure]) -> None:
    print("\nparallel time grows as T^p: forward, backward")
    for case in dict.fromkeys(figure.case for figure in figures):
        exponents = (
            exponent([f for f in figures if (f.case, f.form, f.mode) == (case, "parallel", mode)])
            for mode in ("forward", "backward")
        )
        print(f"{case:16} " + "  ".join(f"{p:5.2f}" for p in exponents) + f"   {NOTES[case]}")


def seconds(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    spread = (figure.slowest_s - figure.fastest_s) / figure.median_s
    return f"{figure.median_s:8.3f} s ±{50 * spread:3.0f}% n={figure.runs}"


def mebibytes(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.peak_mib:7.0f} MiB"


def describe_machine(threads: int) -> str:
    """What a figure needs beside it to be read later."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next(
        (line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine()
    )
    load = os.getloadavg()[0]
    return f"{cpu}, {threads} threads, torch {torch.__version__}, commit {commit}, load {load:.1f}"


def save(path: Path, figures: list[Figure], machine: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*asdict(figures[0]), "machine"])
        writer.writeheader()
        writer.writerows(asdict(figure) | {"machine": machine} for figure in figures)
    print(f"\nwritten to {path}")


def refuse_what_disagrees(cases: list[str]) -> None:
    for case in cases:
        error = disagreement(build(case))
        if not error < 1e-9:
            raise SystemExit(f"{case}: the forms differ by {error:.1e} in fp64; nothing is timed")
        print(f"{case:16} forms agree to {error:.0e} in fp64, outputs and gradients")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=int, default=5, help="runs per figure; long ones get fewer")
    parser.add_argument(
        "--reference-limit", type=int, default=8192, help="longest T of the reference"
    )
    parser.add_argument(
        "--memory-limit", type=int, default=12288, help="MiB that the reference may need"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "forms.csv")
    return parser.parse_args()


def main() -> None:
    limits = arguments()
    multiprocessing.set_forkserver_preload(["torch", "atlas_lm.memory"])
    torch.set_num_threads(1)
    machine = describe_machine(limits.threads)
    print(machine)
    refuse_what_disagrees(limits.cases)
    figures: list[Figure] = []
    for case in limits.cases:
        for mode in ("forward", "backward"):
            for tokens in sorted(limits.lengths):
                for form in ("reference", "parallel"):
                    job = Job(case, form, mode, tokens, limits.runs, limits.threads)
                    reason = why_not(job, figures, limits)
                    if reason:
                        print(f"left out: {case} {form} {mode} T = {tokens}, {reason}")
                    else:
                        figures.append(in_fresh_process(job))
    report_times(figures)
    report_scaling(figures)
    report_saved(limits.cases)
    save(limits.out, figures, machine)


if __name__ == "__main__":
    main()
