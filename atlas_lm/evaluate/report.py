"""What a run found, as tables: shares in per cent with their intervals, and what was refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_lm.evaluate.runner import Outcome, Refusal
from atlas_lm.evaluate.task import AVERAGE, Row

MARKED = "†"  # at numbers with a note


@dataclass(frozen=True, kw_only=True)
class Table:
    """Of one task."""

    title: str
    header: list[str]
    lines: list[list[str]]
    below: str  # what the numbers are, and notes


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each task: cells with two entries as a grid, others line by line."""
    made = []
    for task in dict.fromkeys(row.task for row in rows):
        chosen = [row for row in rows if row.task == task]
        keys = list(chosen[0].cell)
        one_metric = len({row.metric for row in chosen}) == 1
        made.append(_grid(chosen, *keys) if len(keys) == 2 and one_metric else _list(chosen))
    return made


def markdown(outcome: Outcome, about: Mapping[str, Any]) -> str:
    """The whole report: tables, what was refused, and what was run."""
    parts = [f"# {about['model']}\n"]
    for table in tables(outcome.rows):
        bar = ["---"] * len(table.header)
        lines = [f"| {' | '.join(line)} |" for line in [table.header, bar, *table.lines]]
        parts += [f"## {table.title}\n", *lines, "", table.below, ""]
    if outcome.refusals:
        parts += ["## Refused\n", *(f"- {refusal_text(one)}" for one in outcome.refusals), ""]
    parts += ["## About this run\n", *(f"- {name}: {value}" for name, value in about.items()), ""]
    return "\n".join(parts)


def value_text(row: Row) -> str:
    """A number as it is read: shares in per cent, with their interval.

    >>> value_text(Row(task="t", cell={}, metric="acc", value=0.5, count=4, low=0.15, high=0.85))
    '50.0 (15–85)'
    """
    if row.low is None or row.high is None:
        return f"{row.value:.4g}"
    return f"{100 * row.value:.1f} ({100 * row.low:.0f}–{100 * row.high:.0f})"


def refusal_text(refusal: Refusal) -> str:
    cell = ", ".join(refusal.cell.values())
    return f"{refusal.task}{f' ({cell})' if cell else ''}: {refusal.reason}"


def _list(rows: Sequence[Row]) -> Table:
    """A line for each number."""
    lines = [
        [*row.cell.values(), row.metric, value_text(row), str(row.count), "; ".join(row.notes)]
        for row in rows
    ]
    header = [*rows[0].cell, "metric", "value", "samples", "notes"]
    if not any(row.notes for row in rows):
        header, lines = header[:-1], [line[:-1] for line in lines]
    shares = [row for row in rows if row.is_share]
    below = f"Shares in %, with {shares[0].range}." if shares else ""
    return Table(title=rows[0].task, header=header, lines=lines, below=below)


def _grid(rows: Sequence[Row], down: str, across: str) -> Table:
    """The first entry of the cells by the second."""
    columns = list(dict.fromkeys(row.cell[across] for row in rows))
    found = {(row.cell[down], row.cell[across]): row for row in rows}
    lines, notes = [], []
    for name in dict.fromkeys(row.cell[down] for row in rows):
        line = [name]
        for column in columns:
            row = found.get((name, column))
            line.append("" if row is None else value_text(row) + (MARKED if row.notes else ""))
            notes += [] if row is None else [f"{MARKED} {name}, {column}: {n}." for n in row.notes]
        lines.append(line)
    counts = sorted({row.count for row in rows if AVERAGE not in row.cell.values()})
    told = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    unit = f"{rows[0].metric} in %, with {rows[0].range}" if rows[0].is_share else rows[0].metric
    each = "sample" if told == "1" else "samples"
    below = " ".join([f"{unit[0].upper()}{unit[1:]}; {told} {each} a cell.", *notes])
    return Table(
        title=rows[0].task, header=[f"{down} \\ {across}", *columns], lines=lines, below=below
    )
