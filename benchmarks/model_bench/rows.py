"""A row for every measurement, the file that rows are added to as they come, and the table of them."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.kernel_bench.report import GIB, TIMED, UNCHECKED, Column, line, read_row
from benchmarks.model_bench.clock import quartiles
from benchmarks.model_bench.jobs import Done, Job


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured, or why not. Rates are of all rows of the batch together."""

    name: str
    what: str
    batch: int
    tokens: int  # of each row of the batch; decode: those that were read before
    status: str
    tokens_per_s: float | None = None
    low_tokens_per_s: float | None = None  # quartiles
    high_tokens_per_s: float | None = None
    ms: float | None = None  # of a run: a step, a prompt, a stride, some tokens decoded
    host_ms: float | None = None  # until it has returned
    repeats: int | None = None
    peak_gib: float | None = (
        None  # with weights, and in training gradients and the optimizer's state
    )
    checkpointing: str = ""  # of a training step: yes or no
    params: int | None = None
    note: str = ""
    peer: bool = False
    command: str = ""
    commit: str = ""
    device: str = ""

    @property
    def timed(self) -> bool:
        return self.status in (TIMED, UNCHECKED)

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.name, self.what, self.batch, self.tokens


def measured(done: Done) -> dict[str, object]:
    """The fields of a row that say what was found."""
    clocked = done.clocked
    low, median, high = quartiles(clocked.seconds)
    mean = sum(clocked.seconds) / len(clocked.seconds)
    return dict(
        status=UNCHECKED if done.caution else TIMED,
        tokens_per_s=done.tokens / (mean if done.whole else median),
        low_tokens_per_s=done.tokens / high,
        high_tokens_per_s=done.tokens / low,
        ms=1e3 * median,
        host_ms=None if clocked.host is None else 1e3 * clocked.host,
        repeats=len(clocked.seconds),
        peak_gib=None if clocked.peak is None else clocked.peak / GIB,
        checkpointing={None: "", False: "no", True: "yes"}[done.checkpointing],
        note="; ".join(filter(None, [done.note, done.caution])),
    )


NAMES = [field.name for field in fields(Row)]


def add(path: Path, row: Row) -> None:
    """Write it behind those that are there; a run that is cut off loses nothing."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not new:
        _check_columns(path)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def load(path: Path) -> list[Row]:
    """All rows of a file, oldest first."""
    _check_columns(path)
    with path.open(newline="") as file:
        return [read_row(Row, row) for row in csv.DictReader(file)]


def _check_columns(path: Path) -> None:
    with path.open(newline="") as file:
        found = next(csv.reader(file), [])
    if found != NAMES:
        raise ValueError(
            f"{path} has columns {', '.join(found) or 'none'}, wanted {', '.join(NAMES)}; move it away"
        )


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows that measure the same the last that was timed, else the last."""
    kept: dict[tuple[str, str, int, int], Row] = {}
    for row in rows:
        if row.timed or row.key not in kept or not kept[row.key].timed:
            kept[row.key] = row
    return list(kept.values())


COLUMNS: tuple[Column, ...] = (
    ("model", -20),
    ("what", -8),
    ("shape", -12),
    ("tokens/s", 11),
    ("quartiles", 23),
    ("ms", 10),
    ("host ms", 9),
    ("runs", 5),
    ("GiB", 7),
    ("checkpoints", 12),
    ("M params", 9),
    ("note", -4),
)


def table(rows: Sequence[Row]) -> str:
    """Jobs of one shape stand together; below them what has no figure."""
    lines = []
    for job in dict.fromkeys(Job(row.what, row.batch, row.tokens) for row in rows if row.timed):
        lines += ["", line([title for title, _ in COLUMNS], COLUMNS)]
        same = [row for row in rows if row.timed and Job(row.what, row.batch, row.tokens) == job]
        lines += [line(_cells(row), COLUMNS) for row in same]
    missed = [say(row) for row in rows if not row.timed]
    return "\n".join([*lines, "", *missed] if missed else lines)


def say(row: Row) -> str:
    """In one line: the rate, or why there is none."""
    where = f"{row.name} {row.what} {row.batch}x{row.tokens}" if row.what else row.name
    found = []
    if row.timed:
        found.append(f"{row.tokens_per_s:,.0f} tokens/s")
    if row.peak_gib is not None:
        found.append(f"{row.peak_gib:.1f} GiB")
    if row.checkpointing == "yes":
        found.append("checkpointing")
    return f"{row.status}: {where}: {'; '.join([*found, row.note] if row.note else found)}"


def _cells(row: Row) -> list[str]:
    low, high = row.low_tokens_per_s, row.high_tokens_per_s
    return [
        row.name,
        row.what,
        f"{row.batch}x{row.tokens}",
        _number(row.tokens_per_s),
        f"{_number(low)}..{_number(high)}",
        _number(row.ms, 2),
        _number(row.host_ms, 2),
        _number(row.repeats),
        _number(row.peak_gib, 2),
        row.checkpointing or "-",
        _number(None if row.params is None else row.params / 1e6, 1),
        row.note if row.status == TIMED else f"{row.status}: {row.note}",
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
