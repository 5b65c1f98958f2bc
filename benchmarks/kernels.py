"""Our kernels and their peers in one run on one GPU: `python -m benchmarks.kernels --help`.

A case is checked before it is timed: outputs and every gradient against fp64 at a small odd shape, with at
most twice the error of plain PyTorch in the same dtype. What fails is refused. Limits of the machine are
measured in the same run, and every time is held against them.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_bench import report
from benchmarks.kernel_bench.cases import Case, Shape, pick, reshape
from benchmarks.kernel_bench.checking import Verdict, check
from benchmarks.kernel_bench.decode import DECODE
from benchmarks.kernel_bench.deep import DEEP, PLAIN
from benchmarks.kernel_bench.lact import LACT
from benchmarks.kernel_bench.measuring import (
    Ceilings,
    Limits,
    Measured,
    Times,
    allocated,
    ceilings,
    measure,
)
from benchmarks.kernel_bench.ours import COMPILED, OURS
from benchmarks.kernel_bench.peers import PEERS
from benchmarks.kernel_bench.plot import plot
from benchmarks.kernel_bench.report import Figure
from benchmarks.kernel_bench.titans import TITANS

# in the order in which a budget should be spent: the base, ours, then the peers that take long to compile
CASES: tuple[Case, ...] = (
    *PEERS[:2],
    *OURS,
    *DEEP,
    *DECODE,
    *PEERS[2:],
    TITANS,
    *COMPILED,
    *LACT,
    *PLAIN,
)
RESULTS = Path(__file__).parent / "results"


class DeviceLost(Exception):
    """The device no longer answers: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Bench:
    """Where cases are measured, against what, and until when (seconds of `time.monotonic`)."""

    device: torch.device
    ceilings: Ceilings
    limits: Limits = field(default_factory=Limits)
    deadline: float = float("inf")

    def run(self, cases: Sequence[Case]) -> Iterator[Figure]:
        """A figure for each case and shape, whatever happens."""
        lost = ""
        for case in cases:
            try:
                yield from [empty(case, "", report.SKIPPED, lost)] if lost else self.case(case)
            except DeviceLost as trouble:
                lost = f"the device was lost: {trouble}"
                yield empty(case, "", report.FAILED, lost)

    def case(self, case: Case) -> Iterator[Figure]:
        if self.late:
            yield empty(case, "", report.SKIPPED, "the budget is spent")
            return
        before = allocated(self.device)
        try:
            caution = case.caution()
            verdict = None if caution else self.check(case)
            if isinstance(verdict, Figure):
                yield verdict
                return
            if verdict is not None and not verdict.passed:
                caution = str(verdict)
            if caution and not case.peer:
                yield empty(case, "", report.REFUSED, caution)
                return
            for shape in case.shapes:
                yield self.measure(case, shape, before, verdict, caution or "")
        finally:
            case.release()

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def check(self, case: Case) -> Verdict | Figure:
        """How the check went, or the figure of a case that could not be checked."""
        try:
            return check(case, self.device)
        except Exception as trouble:
            return self.trouble(case, "", trouble)

    def measure(
        self, case: Case, shape: Shape, before: int, verdict: Verdict | None, caution: str
    ) -> Figure:
        if self.late:
            return empty(case, shape.label, report.SKIPPED, "the budget is spent")
        try:
            measured = measure(case, shape, self.device, self.limits, before)
            for kernel, ms in measured.kernels.items():
                print(f"  {ms:8.3f} ms  {kernel[:100]}", flush=True)
        except Exception as trouble:
            return self.trouble(case, shape.label, trouble)
        return figure(case, shape, measured, self.ceilings, verdict, caution)

    def trouble(self, case: Case, where: str, trouble: Exception) -> Figure:
        """The failure as a row; the run goes on unless the device is gone."""
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        said = f"{type(trouble).__name__}: {lines[0] if lines else ''}"[:160]
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except Exception:
                raise DeviceLost(said) from trouble
        missing = isinstance(trouble, ImportError)
        return empty(case, where, report.MISSING if missing else report.FAILED, said)


def empty(case: Case, where: str, status: str, note: str) -> Figure:
    return Figure(
        case=case.name,
        group=case.group,
        shape=where,
        unit=case.shapes[0].unit,
        status=status,
        note=note,
        peer=case.peer,
        dtype=str(case.dtype).removeprefix("torch."),
    )


def figure(
    case: Case,
    shape: Shape,
    measured: Measured,
    limits: Ceilings,
    verdict: Verdict | None,
    caution: str,
) -> Figure:
    flops, moved = case.flops(shape), case.bytes(shape)
    work = (flops.both, moved.both) if measured.both else (flops.forward, moved.forward)
    made: dict[str, Any] = dict(
        unit=shape.unit,
        status=report.UNCHECKED if caution else report.TIMED,
        note=caution,
        checked=verdict.worst if verdict else "",
        error=verdict.error if verdict else None,
        allowed=verdict.allowed if verdict else None,
        repeats=(measured.both or measured.forward).repeats,
        bound=limits.bound(*work, case.dtype),
        peak_gib=measured.peak / report.GIB,
        base=case.base or "",
        base_shape=(case.base_shape or shape).label,
        **times("forward", case, shape, measured.forward, limits),
        **(times("both", case, shape, measured.both, limits) if measured.both else {}),
    )
    row = empty(case, shape.label, report.TIMED, "")
    return replace(row, **made)


def times(name: str, case: Case, shape: Shape, took: Times, limits: Ceilings) -> dict[str, float]:
    """The fields of one pass, `forward` or `both`."""
    flops, moved = (getattr(count(shape), name) for count in (case.flops, case.bytes))
    rate = shape.count / shape.scale
    made = {
        "ms": 1e3 * took.median,
        "low_ms": 1e3 * took.low,
        "high_ms": 1e3 * took.high,
        "host_ms": 1e3 * took.host,
        "rate": rate / took.median,
        "gflop": flops / 1e9,
        "gb": moved / 1e9,
        "tflops": flops / took.median / 1e12,
        "share": limits.floor(flops, moved, case.dtype) / took.median,
    }
    return {f"{name}_{field}": value for field, value in made.items()}


def say(row: Figure) -> None:
    """One line as soon as a row is known."""
    if row.timed:
        rates = [x for x in (row.forward_rate, row.both_rate) if x is not None]
        found = ", ".join(f"{x:.2f}" for x in rates) + f" {row.unit}"
    else:
        found = row.note
    print(f"{row.status}: {row.case} {row.shape}: {found}", flush=True)


def draw_plot(figures: Sequence[Figure], machine: report.Machine, path: Path) -> None:
    try:
        plot(figures, machine, path)
    except ImportError:
        print(
            f"no plot, matplotlib is missing: --plot {path.with_suffix('.csv')} makes it elsewhere"
        )
    else:
        print(f"written to {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = ", ".join(dict.fromkeys(case.group for case in CASES))
    parser.add_argument("--only", nargs="+", metavar="NAMES", help=f"names, or groups: {groups}")
    parser.add_argument("--shapes", help="batch x tokens of sequences, e.g. 16x4096,1x65536")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=Limits.repeats, help="at most, per figure")
    parser.add_argument("--seconds", type=float, default=Limits.seconds, help="at most, per figure")
    parser.add_argument(
        "--budget", type=float, default=150, metavar="SECONDS", help="after which no case is begun"
    )
    parser.add_argument("--profile", action="store_true", help="also print the time of each kernel")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw the plot of a file")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    return parser.parse_args()


def wanted(names: list[str] | None, shapes: str | None) -> list[Case]:
    split = names and [part.strip() for name in names for part in name.split(",") if part.strip()]
    sizes = [pair(size) for size in shapes.split(",")] if shapes else None
    return [reshape(case, sizes) for case in pick(CASES, split or None)]


def pair(size: str) -> tuple[int, int]:
    batch, _, tokens = size.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal()):
        raise ValueError(f"a shape is {size!r}, wanted batch x tokens, e.g. 16x4096")
    return int(batch), int(tokens)


def main() -> None:
    began, options = time.monotonic(), arguments()
    if options.plot:
        draw_plot(*report.load(options.plot), options.plot.with_suffix(".png"))
        return
    cases = wanted(options.only, options.shapes)
    if options.list:
        print("\n".join(f"{case.group:14} {case.name}" for case in cases))
        return
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on a CUDA GPU, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    limits = ceilings(device)
    machine = report.describe(device, limits, options.commit)
    print(machine, flush=True)
    each = Limits(options.repeats, options.seconds, options.profile)
    bench = Bench(device, limits, each, began + options.budget)
    figures: list[Figure] = []
    for row in bench.run(cases):
        say(row)
        figures = report.with_ratios([*figures, row])
        report.save(options.out / "kernels.csv", figures, machine)
    print(f"{report.table(figures)}\n{machine}\n{time.monotonic() - began:.0f} s")
    print(f"written to {options.out / 'kernels.csv'}")
    draw_plot(figures, machine, options.out / "kernels.png")


if __name__ == "__main__":
    main()
