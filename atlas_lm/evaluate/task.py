"""What a task is: samples, a way to examine a model on them, and a summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atlas_lm.evaluate.intervals import wilson
from atlas_lm.evaluate.reader import Reader, Tell
from atlas_lm.runs.journal import Record

# what a line of the table is about, e.g. {"question": "qa1", "length": "4k"}
Cell = Mapping[str, str]
AVERAGE = "average"  # stands in a cell for all that it was taken over


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One thing to examine, by name; what it holds is made when it is needed."""

    id: str  # unique in a run, e.g. babilong/qa1/4k/17
    cell: Cell
    index: int
    tokens: int  # about so many will be read


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a table."""

    task: str
    cell: Cell
    metric: str
    value: float
    count: int  # samples
    low: float | None = None  # of its range
    high: float | None = None
    range: str = "95 % intervals"
    notes: tuple[str, ...] = field(default=())

    @property
    def is_share(self) -> bool:
        return self.low is not None


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def axis(self) -> str | None:
        """The entry of a cell that a picture has on its horizontal axis; None: no picture."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """All that determines the samples, for the record."""
        ...

    def samples(self) -> Sequence[Sample]: ...

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        """One record for each sample, in order. Samples are of one cell.

        TooLong: the model cannot take them.
        """
        ...

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """The summary of all records of this task."""
        ...


def share_rows(task: str, records: Sequence[Record], weight: str | None = None) -> list[Row]:
    """Of every cell the mean score with its interval.

    weight: the entry of a record that says how much it counts; None: all the same.
    """
    cells: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in records:
        cells.setdefault(tuple(record["cell"].items()), []).append(record)
    rows = []
    for cell, found in cells.items():
        weights = [1.0 if weight is None else float(record[weight]) for record in found]
        scores = [float(record["score"]) for record in found]
        value = sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)
        rows.append(_share(task, dict(cell), value, len(found), truncation(found)))
    return rows


def averages(rows: Sequence[Row], over: str) -> list[Row]:
    """The mean of rows that differ in one entry of their cells alone, wherever none of them is missing.

    >>> one, two = (Row(task="t", cell={"q": q, "l": "1k"}, metric="accuracy", value=v, count=5)
    ...             for q, v in (("a", 0.2), ("b", 0.6)))
    >>> [mean] = averages([one, two], over="q")
    >>> mean.cell, mean.value, mean.count
    ({'q': 'average', 'l': '1k'}, 0.4, 10)
    """
    kinds = {row.cell[over] for row in rows}
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(({**row.cell, over: AVERAGE}).items()), []).append(row)
    return [
        _share(
            rows[0].task,
            dict(cell),
            sum(row.value for row in found) / len(found),
            sum(row.count for row in found),
            ("some of what it is made of is marked",) if any(row.notes for row in found) else (),
        )
        for cell, found in groups.items()
        if len(found) == len(kinds) > 1
    ]


def _share(task: str, cell: Cell, value: float, count: int, notes: tuple[str, ...]) -> Row:
    low, high = wilson(value, count)
    return Row(
        task=task,
        cell=cell,
        metric="accuracy",
        value=value,
        count=count,
        low=low,
        high=high,
        notes=notes,
    )


def truncation(records: Sequence[Record]) -> tuple[str, ...]:
    """The note that marks a number if texts behind it were cut."""
    cut = sum(bool(record.get("truncated")) for record in records)
    return (f"{cut} of {len(records)} truncated",) if cut else ()


def windowing(records: Sequence[Record]) -> tuple[str, ...]:
    """The note that marks a number of a model which could not take its texts as a whole."""
    cut = [record["window"] for record in records if record.get("window") is not None]
    return (f"{len(cut)} of {len(records)} read in windows of {cut[0]:,} tokens",) if cut else ()
