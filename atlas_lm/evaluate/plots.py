"""Pictures of what a run found: a number against length, strength or position, one line for each kind."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from atlas_lm.data.babilong import parse_length
from atlas_lm.evaluate.task import AVERAGE, Row
from atlas_lm.runs.look import COLOURS, DASHES, MARKERS, plain


def draw(rows: Sequence[Row], axis: str, title: str, path: Path) -> None:
    """One line for each kind of row, with its intervals, against an entry of the cells."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    ticks = list(dict.fromkeys(row.cell[axis] for row in rows))
    places = {tick: place for place, tick in enumerate(sorted(ticks, key=parse_length))}
    for i, kind in enumerate(dict.fromkeys(_kind(row, axis) for row in rows)):
        chosen = [row for row in rows if _kind(row, axis) == kind]
        chosen.sort(key=lambda row: places[row.cell[axis]])
        _line(axes, chosen, [places[row.cell[axis]] for row in chosen], kind, i)
    axes.set_xticks(list(places.values()), labels=list(places))
    axes.set_xlabel(axis)
    axes.set_ylabel(rows[0].metric)
    if rows[0].is_share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    plain(axes)
    if len({_kind(row, axis) for row in rows}) > 1:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, dpi=150)


def _kind(row: Row, axis: str) -> str:
    return ", ".join(value for key, value in row.cell.items() if key != axis)


def _line(axes: Axes, rows: Sequence[Row], places: list[int], kind: str, i: int) -> None:
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    values = [row.value for row in rows]
    [line] = axes.plot(places, values, color=colour, marker=marker, label=kind or None)
    line.set(
        markersize=5,
        linewidth=2.6 if kind == AVERAGE else 1.5,
        linestyle=DASHES[i // len(COLOURS) % len(DASHES)],
    )
    if all(row.is_share for row in rows):
        low = [row.low or 0.0 for row in rows]
        high = [row.high or 0.0 for row in rows]
        axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
