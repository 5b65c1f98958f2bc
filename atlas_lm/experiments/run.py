"""Four experiments, each a table, a sentence and a picture, and one file of numbers."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from atlas_lm.experiments import capacity, cue, dial, tables, window


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to measure and how to show it."""

    name: str  # of the picture, and of the record in results.json
    title: str
    full: Any  # settings, with the number of `ticks` that a measurement reports
    quick: Any
    measure: Callable[[Any, int, Callable[[], None]], Any]  # (settings, seed, advance) -> result
    table: Callable[[Any], Table]


EXPERIMENTS = (
    Experiment(
        name="capacity",
        title="how many pairs a memory holds",
        full=capacity.CapacitySettings(),
        quick=capacity.QUICK,
        measure=capacity.measure_capacity,
        table=tables.capacity_table,
    ),
    Experiment(
        name="window",
        title="one pair at a time, or the last c",
        full=window.WindowSettings(),
        quick=window.QUICK,
        measure=window.measure_windows,
        table=tables.window_table,
    ),
    Experiment(
        name="newton_schulz",
        title="Newton-Schulz steps as a dial",
        full=dial.DialSettings(),
        quick=dial.QUICK,
        measure=dial.measure_dial,
        table=tables.dial_table,
    ),
    Experiment(
        name="cue",
        title="what to keep is told later",
        full=cue.CueSettings(),
        quick=cue.QUICK,
        measure=cue.measure_cue,
        table=tables.cue_table,
    ),
)


def run_experiments(
    out: Path, *, quick: bool = False, seed: int = 0, console: Console | None = None
) -> None:
    """Measure, print and draw everything; pictures and results.json go to the folder `out`.

    quick: fewer and smaller runs, a few seconds in all   seed: the same seed gives the same numbers
    """
    pictures = _pictures()
    console = console or Console()
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"seed": seed, "quick": quick, "torch": torch.__version__}
    for experiment in EXPERIMENTS:
        result = _measure(experiment, quick, seed, console)
        picture = out / f"{experiment.name}.png"
        pictures[experiment.name](result, picture)
        console.print(experiment.table(result))
        console.print(result.finding, style="bold", highlight=False)
        console.print(f"picture: {picture}\n", highlight=False, markup=False, soft_wrap=True)
        record[experiment.name] = {"finding": result.finding} | dataclasses.asdict(result)
    numbers = out / "results.json"
    numbers.write_text(json.dumps(_finite(record), indent=1) + "\n")
    seconds = time.perf_counter() - started
    done = f"all numbers: {numbers} ({seconds:.0f} s)"
    console.print(done, highlight=False, markup=False, soft_wrap=True)


def _pictures() -> dict[str, Callable[[Any, Path], None]]:
    try:
        from atlas_lm.experiments import pictures
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "the experiments are drawn with matplotlib, which is not installed; pip install 'atlas-lm[demo]'",
            name="matplotlib",
        ) from missing
    return {
        "capacity": pictures.draw_capacity,
        "window": pictures.draw_windows,
        "newton_schulz": pictures.draw_dial,
        "cue": pictures.draw_cue,
    }


def _measure(experiment: Experiment, quick: bool, seed: int, console: Console) -> Any:
    settings = experiment.quick if quick else experiment.full
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with _one_thread(), Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(experiment.title, total=settings.ticks)
        return experiment.measure(settings, seed, lambda: progress.advance(task))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are tiny: more threads only wait for each other, and may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _finite(record: Any) -> Any:
    """The record as JSON can hold it: an error that overflowed becomes null."""
    if isinstance(record, dict):
        return {name: _finite(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [_finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record
