"""Rates and memory against length, a line for every model; rates of decoding as bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_bench.plot import OURS, PEER
from benchmarks.model_bench.rows import Row, latest

# (title, what, name of the field, its axis)
PANELS = (
    ("training step", ("train",), "tokens_per_s", "tokens/s"),
    ("training step", ("train",), "peak_gib", "peak memory, GiB"),
    ("prefill; apart: a stream in strides", ("prefill", "stream"), "tokens_per_s", "tokens/s"),
    ("prefill; apart: a stream in strides", ("prefill", "stream"), "peak_gib", "peak memory, GiB"),
)
COLORS = (OURS, "#c0392b", "#e08e2b", "#3c8d50", "#7a4fa3", "#8c6d46", "#1fa3a3", "#d16ba5")
GREYS = ("#555555", "#999999", "#777777", "#bbbbbb")
MARKERS = "osD^vP*X"


Lines = dict[tuple[str, str], list[Row]]


def lines(rows: Sequence[Row], what: Sequence[str], field: str) -> Lines:
    """By model and what was measured its timed rows that have this field, in the order of their lengths."""
    made: Lines = {}
    for row in sorted(rows, key=lambda row: row.tokens):
        if row.what in what and row.timed and getattr(row, field) is not None:
            made.setdefault((row.name, row.what), []).append(row)
    return made


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = latest(rows)
    shown = [row for row in rows if row.timed]
    if not shown:
        return
    styles = _styles(shown)
    decoded = [row for row in shown if row.what == "decode"]
    canvas = Canvas(figsize=(11, 10.5), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    FigureCanvasAgg(canvas)
    grid = canvas.add_gridspec(3, 2, height_ratios=[3, 3, 0.4 + 0.22 * len(styles)])
    for place, (title, what, field, unit) in enumerate(PANELS):
        axis = canvas.add_subplot(grid[divmod(place, 2)])
        _panel(axis, lines(shown, what, field), field, styles)
        axis.set_title(f"{title}, {unit}", fontsize=9, loc="left")
    _bars(canvas.add_subplot(grid[2, 0]), decoded)
    _legend(canvas.add_subplot(grid[2, 1]), styles)
    stated = dict.fromkeys(f"{row.device}, commit {row.commit}" for row in shown)
    canvas.suptitle("\n".join(stated), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=150)


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Ours solid and coloured, peers dashed and grey; a marker each."""
    peers = {row.name: row.peer for row in rows}
    made: dict[str, dict[str, Any]] = {}
    counts = {False: 0, True: 0}
    for name, peer in peers.items():
        colors = GREYS if peer else COLORS
        color = colors[counts[peer] % len(colors)]
        counts[peer] += 1
        marker = MARKERS[len(made) % len(MARKERS)]
        made[name] = dict(
            color=color, marker=marker, linestyle="--" if peer else "-", linewidth=1.4, markersize=5
        )
    return made


def _panel(axis: Any, found: Lines, field: str, styles: dict[str, dict[str, Any]]) -> None:
    """Both axes logarithmic. A hollow marker: a step with checkpointing."""
    from matplotlib.ticker import LogLocator

    for (name, _), rows in found.items():
        style = styles[name]
        places = [row.tokens for row in rows]
        axis.plot(places, [getattr(row, field) for row in rows], **style)
        for row in rows:
            if row.checkpointing == "yes":
                hollow = style | dict(markerfacecolor="white", linestyle="none")
                axis.plot([row.tokens], [getattr(row, field)], **hollow)
    axis.set_xscale("log", base=2)
    if found:
        axis.set_yscale("log")
        lengths = sorted({row.tokens for rows in found.values() for row in rows})
        axis.set_xticks(lengths, [_length(n) for n in lengths])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.minorticks_off()
    axis.grid(True, which="major", linewidth=0.4, color="#dddddd")
    axis.set_xlabel("tokens of a row", fontsize=8)
    _tidy(axis)


def _bars(axis: Any, rows: Sequence[Row]) -> None:
    """From top to bottom, numbers at the right."""
    places = range(len(rows), 0, -1)
    rates = [row.tokens_per_s or 0.0 for row in rows]
    axis.barh(places, rates, 0.7, color=[PEER if row.peer else OURS for row in rows])
    for place, row, rate in zip(places, rows, rates, strict=True):
        how = f", {row.note}" if row.note else ""
        axis.annotate(
            f" {rate:,.0f}{how}", (rate, place), va="center", fontsize=7, annotation_clip=False
        )
    axis.set_yticks(list(places), [row.name for row in rows], fontsize=8)
    axis.set_xlim(0, 1.6 * max(rates, default=1.0))
    batches = ", ".join(dict.fromkeys(str(row.batch) for row in rows)) or "no"
    axis.set_title(f"decoding {batches} streams, tokens/s", fontsize=9, loc="left")
    _tidy(axis)


def _legend(axis: Any, styles: dict[str, dict[str, Any]]) -> None:
    """Names of all lines, in a place of their own."""
    handles = [axis.plot([], [], label=name, **style)[0] for name, style in styles.items()]
    hollow = dict(color="black", marker="o", markerfacecolor="white", linestyle="none")
    handles += axis.plot([], [], label="hollow: with checkpointing", **hollow)
    axis.legend(handles=handles, loc="center", ncols=2, fontsize=8, frameon=False)
    axis.axis("off")


def _tidy(axis: Any) -> None:
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _length(tokens: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
