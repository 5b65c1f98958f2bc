"""Pictures of runs: loss, exams, loss by position, gates; of one run, or of several side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from atlas_lm.runs.journal import Record
from atlas_lm.runs.look import COLOURS, DASHES, MARKERS, plain

SMOOTH = 50  # points of a smoothed curve
MOST = 8  # lines in one panel


def draw_run(title: str, steps: Sequence[Record], exams: Sequence[Record], path: Path) -> None:
    """Loss and gradient's norm, exams, and the gates that the run looked at."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, right, norm, gates = figure.subplots(2, 2).ravel()
    _curve(loss, steps, "loss", COLOURS[1], None)
    _exam_lines(loss, exams, "nats")
    loss.set(title="loss: training (line), exams (marks)", ylabel="nats per place")
    _exam_lines(right, exams, "right")
    right.set(title="exams: share of places that are right", ylim=(-0.02, 1.02))
    _curve(norm, steps, "norm", COLOURS[2], None)
    norm.set(title="gradient norm, before clipping", yscale="log")
    _gate_lines(gates, [record for record in steps if record.get("gates")])
    for axes in (loss, right, norm, gates):
        axes.set_xlabel("step")
        plain(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=130)


def draw_comparison(
    title: str, runs: Mapping[str, Sequence[tuple[Sequence[Record], Sequence[Record]]]], path: Path
) -> None:
    """Of several models, each with one run or more: training loss, exam loss, and loss by position.

    runs: of each model its runs as (steps, exams). Lines are means, bands reach from the least to the most.
    """
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    training, validation, position = figure.subplots(1, 3)
    for i, (name, found) in enumerate(runs.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS)]}
        _band(training, [_smooth(steps) for steps, _ in found], name, style)
        _band(
            validation,
            [_mean_exam(exams) for _, exams in found],
            name,
            style | {"marker": MARKERS[i % 7]},
        )
        _band(position, [_by_position(exams) for _, exams in found], name, style)
    training.set(title="training loss, smoothed", xlabel="step", ylabel="nats per place")
    validation.set(title="exams: loss, mean over them", xlabel="step")
    position.set(title="loss by position, last exam", xlabel="share of the row")
    for axes in (training, validation, position):
        plain(axes)
    position.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=130)


Curve = tuple[NDArray[np.float64], NDArray[np.float64]]


def _curve(axes: Axes, steps: Sequence[Record], what: str, colour: str, label: str | None) -> None:
    x, y = _values(steps, what)
    axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    smooth_x, smooth_y = _smooth(steps, what)
    axes.plot(smooth_x, smooth_y, color=colour, linewidth=1.6, label=label)


def _values(steps: Sequence[Record], what: str) -> Curve:
    return np.array([r["step"] for r in steps], float), np.array([r[what] for r in steps], float)


def _smooth(steps: Sequence[Record], what: str = "loss") -> Curve:
    """Means over equal stretches."""
    x, y = _values(steps, what)
    size = max(1, len(x) // SMOOTH)
    whole = len(x) // size * size
    return x[:whole].reshape(-1, size).mean(1), y[:whole].reshape(-1, size).mean(1)


def _exam_lines(axes: Axes, exams: Sequence[Record], what: str) -> None:
    names = list(exams[-1]["exams"]) if exams else []
    for i, name in enumerate(names[:MOST]):
        x = [record["step"] for record in exams]
        y = [record["exams"][name][what] for record in exams]
        axes.plot(x, y, marker=MARKERS[i % 7], markersize=4, color=COLOURS[i % 7], label=name)
    if names:
        axes.legend(frameon=False, fontsize=8)


def _gate_lines(axes: Axes, looked: Sequence[Record]) -> None:
    """The means of all gates; retention as what is lost per token, on a log axis."""
    names = [n for n in (looked[-1]["gates"] if looked else {}) if n.endswith("mean")]
    kinds = list(dict.fromkeys(name.split()[2] for name in names))
    for name in names:
        _, layer, kind, _ = name.split()
        y: Any = [record["gates"][name] for record in looked]
        y = [1 - value for value in y] if kind == "alpha" else y
        label = ("1 - alpha" if kind == "alpha" else kind) if layer == "0" else None
        i = kinds.index(kind)
        axes.plot([r["step"] for r in looked], y, color=COLOURS[i % 7], linewidth=1, label=label)
    axes.set(title="gates: a line for each layer" if names else "no gates")
    if names:
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)


def _band(axes: Axes, curves: Sequence[Curve], name: str, style: Mapping[str, Any]) -> None:
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return
    size = min(len(x) for x, _ in curves)
    x, y = curves[0][0][:size], np.stack([values[:size] for _, values in curves])
    axes.plot(x, y.mean(0), label=name, linewidth=1.5, markersize=4, **style)
    if len(curves) > 1:
        axes.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.15, linewidth=0)


def _mean_exam(exams: Sequence[Record]) -> Curve:
    losses = [np.mean([mark["nats"] for mark in r["exams"].values()]) for r in exams]
    return np.array([r["step"] for r in exams], float), np.array(losses, float)


def _by_position(exams: Sequence[Record]) -> Curve:
    """Of the last exam; where there are several, of the last of them, which is the longest or hardest."""
    if not exams:
        return np.zeros(0), np.zeros(0)
    *_, mark = exams[-1]["exams"].values()
    found = [(i, v) for i, v in enumerate(mark["by_position"]) if v is not None]
    x = np.array([(i + 0.5) / len(mark["by_position"]) for i, _ in found])
    return x, np.array([v for _, v in found])
