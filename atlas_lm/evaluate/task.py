"""What a task is: samples, a way to examine a model on them, and a summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atlas_lm.evaluate.intervals import wilson
from atlas_lm.evaluate.reader import Reader, Tell

# what a line of the table is about, e.g. {"question": "qa1", "length": "4k"}
Cell = Mapping[str, str]
Record = dict[str, Any]


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


def share_rows(
    task: str, records: Sequence[Record], metric: str = "accuracy", score: str = "score"
) -> list[Row]:
    """Of every cell the mean score with its interval."""
    cells: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in records:
        cells.setdefault(tuple(record["cell"].items()), []).append(record)
    rows = []
    for cell, found in cells.items():
        value = sum(float(record[score]) for record in found) / len(found)
        low, high = wilson(value, len(found))
        rows.append(
            Row(
                task=task,
                cell=dict(cell),
                metric=metric,
                value=value,
                count=len(found),
                low=low,
                high=high,
                notes=truncation(found),
            )
        )
    return rows


def truncation(records: Sequence[Record]) -> tuple[str, ...]:
    """The note that marks a number if texts behind it were cut."""
    cut = sum(bool(record.get("truncated")) for record in records)
    return (f"{cut} of {len(records)} truncated",) if cut else ()
