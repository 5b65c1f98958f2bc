"""Bars of all rates, a panel for every shape, the base marked on each bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_bench.report import TIMED, Figure, Machine, base_of

OURS, PEER, MARK = "#2f6f8f", "#b9b9b9", "#c0392b"


def panels(figures: Sequence[Figure]) -> dict[tuple[str, str], list[Figure]]:
    """Timed rows by unit and shape; rows at different positions of a stream share a panel."""
    made: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        if figure.timed and figure.rate is not None:
            shape = "decode" if figure.group == "decode" else figure.shape
            made.setdefault((figure.unit, shape), []).append(figure)
    return made


def plot(figures: Sequence[Figure], machine: Machine, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = panels(figures)
    if not shown:
        return
    heights = [len(rows) + 1.5 for rows in shown.values()]
    canvas = Canvas(
        figsize=(11, 0.34 * sum(heights) + 0.8), layout=ConstrainedLayoutEngine(h_pad=0.08)
    )
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, ((unit, shape), rows) in zip(axes, shown.items(), strict=True):
        _panel(axis, unit, shape, rows, figures)
    canvas.suptitle(
        f"{machine.hardware}, torch {machine.torch}, triton {machine.triton}, commit {machine.commit}; "
        "red: the base",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=150)


def _panel(axis: Any, unit: str, shape: str, rows: list[Figure], figures: Sequence[Figure]) -> None:
    """Horizontal bars from top to bottom, their numbers in a column at the right."""
    rates = [row.rate or 0.0 for row in rows]
    places = range(len(rows), 0, -1)
    axis.barh(places, rates, 0.7, color=[PEER if row.peer else OURS for row in rows])
    for place, row, rate in zip(places, rows, rates, strict=True):
        base = base_of(row, figures)
        if base is not None and base.rate is not None:
            axis.vlines(
                base.rate, place - 0.5, place + 0.5, color=MARK, linestyle="--", linewidth=1
            )
        doubt = "" if row.status == TIMED else ", timing only"
        axis.annotate(
            f"{rate:.3g}{doubt}",
            (1.01, place),
            xycoords=axis.get_yaxis_transform(),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    names = [row.case if shape != "decode" else f"{row.case}, {row.shape}" for row in rows]
    axis.set_yticks(list(places), names, fontsize=8)
    axis.set_ylim(0.3, len(rows) + 0.7)
    axis.set_xlim(0, 1.03 * max(rates))
    axis.tick_params(axis="x", labelsize=8)
    passes = "forward" if rows[0].both_rate is None else "forward and backward"
    axis.set_title(f"{shape}, {passes}, {unit}", fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
