"""One picture per experiment. Nothing is drawn that was not measured; titles are the findings."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from atlas_lm.experiments.capacity import Capacity
from atlas_lm.experiments.cue import Cue
from atlas_lm.experiments.dial import Dial
from atlas_lm.experiments.window import WindowResult

# Okabe and Ito: told apart by colour-blind readers too; markers differ as well
COLOURS = ("#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v")
GREY = "#666666"


def draw_capacity(result: Capacity, path: Path) -> None:
    """Recall and relative error against the number of pairs, one line per memory."""
    counts = result.settings.counts
    figure, (left, right) = _panels(2)
    for i, curve in enumerate(result.curves):
        _line(left, counts, curve.recall, i, curve.name)
        left.fill_between(
            counts, curve.recall_low, curve.recall_high, color=COLOURS[i], alpha=0.15, linewidth=0
        )
        _line(right, counts, curve.error, i, curve.name)
    for axes in (left, right):
        _doubling_axis(axes, counts, "pairs written, n")
        _mark_directions(axes, result)
    _share_axis(left, "pairs recalled (share; band: all draws)")
    _legend(left, "lower left")
    right.set_ylabel("relative error of the reads, |Y - V| / |V|")
    right.set_ylim(0, None)
    _save(figure, result.finding, path)


def draw_windows(result: WindowResult, path: Path) -> None:
    """Recall by age at equal step, and recall against the window at equal and at best step."""
    recent = result.settings.recent
    sizes = [one.window for one in result.equal]
    figure, (left, right) = _panels(2)
    for i, one in enumerate(result.equal):
        left.plot(
            range(len(one.by_age)), one.by_age, color=COLOURS[i], label=f"window {one.window}"
        )
    left.set_xlabel("age of the pair (tokens before the end)")
    left.set_title("every window at total step 1", fontsize=10, color=GREY)
    _share_axis(left, "recalled (share of draws)")
    _legend(left, "upper right")
    _line(right, sizes, [one.newest for one in result.equal], 0, "newest pair, step 1")
    _line(right, sizes, [one.recent for one in result.equal], 1, f"last {recent}, step 1")
    _line(right, sizes, [one.recent for one in result.tuned], 3, f"last {recent}, best step")
    for one in result.tuned:
        right.annotate(
            f"{one.step:g}",
            (one.window, one.recent),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=COLOURS[3],
            fontsize=8,
        )
    _doubling_axis(right, sizes, "window c (pairs)")
    right.set_title("numbers: the best total step of each window", fontsize=10, color=GREY)
    _share_axis(right, "recalled (share)")
    _legend(right, "lower left")
    _save(figure, result.finding, path)


def draw_dial(result: Dial, path: Path) -> None:
    """Read error against the number of Newton-Schulz steps, one line per schedule."""
    figure, (axes,) = _panels(1)
    for i, course in enumerate(result.courses):
        _line(axes, result.settings.iterations, course.error, i, course.schedule)
        low = [e - s for e, s in zip(course.error, course.spread, strict=True)]
        high = [e + s for e, s in zip(course.error, course.spread, strict=True)]
        axes.fill_between(
            result.settings.iterations, low, high, color=COLOURS[i], alpha=0.15, linewidth=0
        )
    axes.set_xticks(result.settings.iterations)
    axes.set_xlabel("Newton-Schulz steps per write, k (0: plain descent)")
    axes.set_ylabel("relative error of the reads (band: ± 1 deviation)")
    axes.set_ylim(0, None)
    _legend(axes, "upper right")
    _save(figure, result.finding, path)


def draw_cue(result: Cue, path: Path) -> None:
    """Recall of the cued pairs against the length of the stream, one line per window."""
    figure, (axes,) = _panels(1)
    axes.plot(
        result.lengths, result.bound, color=GREY, linestyle="--", label="bound of window 1, K/n"
    )
    for i, curve in enumerate(result.curves):
        _line(axes, result.lengths, curve.recall, i, f"window {curve.window}")
    _doubling_axis(axes, result.lengths, "pairs in the stream, n")
    _share_axis(axes, "cued pairs recalled (share)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _save(figure, result.finding, path)


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(
        figsize=(5.2 * count + (1.8 if count == 1 else 0.4), 4.4),
        layout=ConstrainedLayoutEngine(wspace=0.06),
    )
    panels = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, panels


def _legend(axes: Axes, place: Literal["lower left", "upper right"]) -> None:
    axes.legend(loc=place, facecolor="white", edgecolor="none", framealpha=0.9)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], index: int, label: str) -> None:
    axes.plot(x, y, color=COLOURS[index], marker=MARKERS[index], markersize=5, label=label)


def _doubling_axis(axes: Axes, ticks: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _share_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(-0.03, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel(label)


def _mark_directions(axes: Axes, result: Capacity) -> None:
    """A line where the pairs outnumber the independent features of a key."""
    for count in sorted({curve.directions for curve in result.curves if curve.directions}):
        axes.axvline(count, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(
            f"{count} features",
            (count, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
            color=GREY,
        )


def _save(figure: Figure, finding: str, path: Path) -> None:
    width = int(figure.get_figwidth() * 10.5)  # letters that fit into a line
    figure.suptitle(textwrap.fill(finding, width), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
