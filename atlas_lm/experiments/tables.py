"""One table per experiment for the terminal, and below it the sentence that says what it shows."""

from rich.table import Table

from atlas_lm.experiments.capacity import Capacity
from atlas_lm.experiments.cue import Cue
from atlas_lm.experiments.dial import Dial
from atlas_lm.experiments.window import WindowResult


def capacity_table(result: Capacity) -> Table:
    settings, curves = result.settings, result.curves
    table = Table(
        title=f"Pairs recalled (relative error) by memories of one size, {settings.key_dim} key "
        f"dimensions, {settings.passes} passes",
        caption=f"step: the best of {_numbers(settings.steps)} by mean recall on other draws",
    )
    table.add_column("pairs", justify="right")
    for curve in curves:
        table.add_column(curve.name, justify="right")
    table.add_row("floats", *(f"{curve.floats:,}" for curve in curves))
    table.add_row("step", *(f"{curve.step:g}" for curve in curves), end_section=True)
    for i, count in enumerate(settings.counts):
        cells = (f"{curve.recall[i]:.0%} ({curve.error[i]:.2f})" for curve in curves)
        table.add_row(str(count), *cells)
    return table


def window_table(result: WindowResult) -> Table:
    settings = result.settings
    table = Table(
        title=f"One pass over {settings.count} pairs: share recalled, by window",
        caption=f"best step: of {_numbers(settings.steps)}, by the recent pairs on other draws",
    )
    table.add_column("window c", justify="right")
    for head in ("step", "newest", f"last {settings.recent}", "all"):
        table.add_column(head, justify="right")
    table.add_column("best step", justify="right")
    for head in ("newest", f"last {settings.recent}", "all"):
        table.add_column(head, justify="right")
    for equal, tuned in zip(result.equal, result.tuned, strict=True):
        cells = [
            cell
            for one in (equal, tuned)
            for cell in (f"{one.step:g}", *(f"{x:.0%}" for x in (one.newest, one.recent, one.all)))
        ]
        table.add_row(str(equal.window), *cells)
    return table


def dial_table(result: Dial) -> Table:
    settings = result.settings
    table = Table(
        title=f"Read error (± deviation over draws) by Newton-Schulz steps, {settings.count} pairs, "
        f"{settings.passes} writes",
        caption=f"step: the best of {settings.steps[0]:g} ... {settings.steps[-1]:g}, for each cell",
    )
    table.add_column("steps k", justify="right")
    for course in result.courses:
        table.add_column(course.schedule, justify="right")
        table.add_column("step", justify="right")
    for i, k in enumerate(settings.iterations):
        cells = [
            cell
            for c in result.courses
            for cell in (f"{c.error[i]:.3f} ± {c.spread[i]:.3f}", f"{c.step[i]:.2g}")
        ]
        table.add_row(str(k), *cells)
    return table


def cue_table(result: Cue) -> Table:
    settings = result.settings
    table = Table(
        title=f"Cued pairs recalled; the cue comes up to {settings.block} tokens after its pair",
        caption=f"window 1 writes every pair with the best constant step of {_numbers(settings.steps)}",
    )
    table.add_column("pairs", justify="right")
    for curve in result.curves:
        table.add_column(f"window {curve.window}", justify="right")
    table.add_column("bound of window 1", justify="right")
    for i, length in enumerate(result.lengths):
        cells = (f"{curve.recall[i]:.1%}" for curve in result.curves)
        table.add_row(str(length), *cells, f"{result.bound[i]:.1%}")
    return table


def _numbers(steps: tuple[float, ...]) -> str:
    return ", ".join(f"{step:g}" for step in steps)
