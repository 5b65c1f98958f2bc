"""Figures, the tables that people read, and the file that outlives them."""

import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_bench.measuring import Ceilings

GIB = 2**30
TIMED, UNCHECKED = "timed", "timing only"
REFUSED, FAILED, SKIPPED, MISSING = "refused", "failed", "skipped", "missing"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row: times in milliseconds, ratios above one are better than the base, shares are of the floor."""

    case: str
    group: str
    shape: str
    unit: str = ""  # of the rates
    status: str = TIMED
    note: str = ""  # why it was not timed, or not checked
    peer: bool = False
    dtype: str = ""
    checked: str = ""  # the worst output or gradient at the small shape
    error: float | None = None
    allowed: float | None = None
    forward_ms: float | None = None
    forward_low_ms: float | None = None  # quartiles
    forward_high_ms: float | None = None
    forward_host_ms: float | None = None  # until the call returns
    both_ms: float | None = None
    both_low_ms: float | None = None
    both_high_ms: float | None = None
    both_host_ms: float | None = None
    repeats: int | None = None
    forward_rate: float | None = None
    both_rate: float | None = None
    forward_gflop: float | None = None
    both_gflop: float | None = None
    forward_gb: float | None = None
    both_gb: float | None = None
    forward_tflops: float | None = None
    both_tflops: float | None = None
    bound: str = ""  # what the floor is made of: matrix or bytes
    forward_share: float | None = None
    both_share: float | None = None
    peak_gib: float | None = None
    base: str = ""
    base_shape: str = ""
    forward_ratio: float | None = None  # time of the base / time
    both_ratio: float | None = None
    peak_ratio: float | None = None  # peak / peak of the base

    @property
    def timed(self) -> bool:
        return self.status in (TIMED, UNCHECKED)

    @property
    def rate(self) -> float | None:
        """Of forward and backward, or of forward where there is no backward pass."""
        return self.forward_rate if self.both_rate is None else self.both_rate


def base_of(figure: Figure, figures: Iterable[Figure]) -> Figure | None:
    """The timed row that its ratios are against."""
    for other in figures:
        if other.timed and (other.case, other.shape) == (figure.base, figure.base_shape):
            return other
    return None


def with_ratios(figures: Sequence[Figure]) -> list[Figure]:
    """The same rows, held against their bases where these were timed."""
    return [_against(figure, base_of(figure, figures)) for figure in figures]


def _against(figure: Figure, base: Figure | None) -> Figure:
    if base is None or not figure.timed:
        return figure
    return replace(
        figure,
        forward_ratio=_ratio(base.forward_ms, figure.forward_ms),
        both_ratio=_ratio(base.both_ms, figure.both_ms),
        peak_ratio=_ratio(figure.peak_gib, base.peak_gib),
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


@dataclass(frozen=True)
class Machine:
    """What a figure needs beside it to be read later."""

    hardware: str
    torch: str
    triton: str
    fla: str
    commit: str
    command: str
    matrix_tflops: float
    tf32_tflops: float
    bandwidth_gbs: float

    def __str__(self) -> str:
        return (
            f"{self.hardware}, torch {self.torch}, triton {self.triton}, fla-core {self.fla}, "
            f"commit {self.commit}\nmeasured limits: {self.matrix_tflops:.0f} TFLOP/s bf16, "
            f"{self.tf32_tflops:.0f} TFLOP/s TF32, {self.bandwidth_gbs:.0f} GB/s\n{self.command}"
        )


def describe(device: torch.device, limits: Ceilings, commit: str | None) -> Machine:
    return Machine(
        hardware=hardware(device),
        torch=torch.__version__,
        triton=version("triton"),
        fla=version("fla-core"),
        commit=commit or git_commit(),
        command=shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]),
        matrix_tflops=limits.matrix[torch.bfloat16] / 1e12,
        tf32_tflops=limits.matrix[torch.float32] / 1e12,
        bandwidth_gbs=limits.bandwidth / 1e9,
    )


def hardware(device: torch.device) -> str:
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else platform.machine()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def git_commit() -> str:
    try:
        command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return said.stdout.strip() or "unknown"


def save(path: Path, figures: Sequence[Figure], machine: Machine) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for kind in (Figure, Machine) for field in fields(kind)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(asdict(figure) | asdict(machine) for figure in figures)


def load(path: Path) -> tuple[list[Figure], Machine]:
    """The inverse of `save`."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no figures; run the benchmark again")
    return [read_row(Figure, row) for row in rows], read_row(Machine, rows[0])


def read_row(kind: Any, row: dict[str, str]) -> Any:
    made: dict[str, Any] = {}
    for field in fields(kind):
        text = row[field.name]
        if field.type is bool:
            made[field.name] = text == "True"
        elif field.type is str:
            made[field.name] = text
        else:
            number = int if field.type in (int, int | None) else float
            made[field.name] = number(text) if text else None
    return kind(**made)


Column = tuple[str, int]
COLUMNS: tuple[Column, ...] = (
    ("case", -35),
    ("shape", -15),
    ("fwd {unit}", 11),
    ("fwd+bwd {unit}", 15),
    ("quartiles", 15),
    ("ms", 9),
    ("TFLOP/s", 8),
    ("fwd x base", 11),
    ("f+b x base", 11),
    ("fwd roof", 9),
    ("f+b roof", 9),
    ("bound", 7),
    ("GiB", 7),
    ("x base", 7),
    ("check", 9),
)


def table(figures: Iterable[Figure]) -> str:
    """All rows, a head for every unit; under it what was not timed, and notes."""
    figures = list(figures)
    lines: list[str] = []
    for unit in dict.fromkeys(f.unit for f in figures if f.timed):
        lines += ["", line([title.format(unit=unit) for title, _ in COLUMNS])]
        lines += [line(_cells(f)) for f in figures if f.timed and f.unit == unit]
    notes = dict.fromkeys(_note(f) for f in figures if f.note)
    lines += ["", *notes] if notes else []
    bases = dict.fromkeys(f.base for f in figures if f.timed and f.base and f.peak_ratio)
    lines += ["", f"base: {', '.join(bases)}"] if bases else []
    return "\n".join([*lines, FOOT])


FOOT = (
    "x base: time of the base / time at the same shape (memory: peak / peak of the base). roof: share of\n"
    "the floor max(FLOPs / matrix rate, bytes / bandwidth), limits measured in this run. ms and TFLOP/s:\n"
    "forward and backward, or forward where there is no backward. check: worst error / the error allowed."
)


def _note(figure: Figure) -> str:
    where = f" {figure.shape}" if figure.shape else ""
    return f"{figure.status}: {figure.case}{where}: {figure.note}"


def _cells(f: Figure) -> list[str]:
    return [
        f.case,
        f.shape,
        _number(f.forward_rate),
        _number(f.both_rate),
        _spread(f),
        _number(f.both_ms or f.forward_ms, 3),
        _number(f.both_tflops or f.forward_tflops, 1),
        _number(f.forward_ratio),
        _number(f.both_ratio),
        _percent(f.forward_share),
        _percent(f.both_share),
        f.bound,
        _number(f.peak_gib),
        _number(f.peak_ratio),
        "no" if f.error is None or not f.allowed else f"{f.error / f.allowed:.2f}",
    ]


def _spread(f: Figure) -> str:
    """Quartiles of the rate."""
    both = f.both_ms is not None
    median, low, high = (
        (f.both_ms, f.both_low_ms, f.both_high_ms)
        if both
        else (f.forward_ms, f.forward_low_ms, f.forward_high_ms)
    )
    if f.rate is None or not (median and low and high):
        return "-"
    return f"{f.rate * median / high:.2f}..{f.rate * median / low:.2f}"


def line(cells: Sequence[str], columns: Sequence[Column] = COLUMNS) -> str:
    """Negative widths stand left."""
    widths = [width for _, width in columns]
    return " ".join(
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
