"""The folder of a run: records, table and pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_lm.evaluate.reader import Reader
from atlas_lm.evaluate.report import markdown
from atlas_lm.evaluate.runner import Outcome, run
from atlas_lm.evaluate.task import Sample, Task
from atlas_lm.runs.about import check_pictures, surroundings, versions
from atlas_lm.runs.journal import Journal
from atlas_lm.stream.atomic import write_atomically


def evaluate(
    tasks: Sequence[Task],
    reader: Reader,
    folder: Path,
    *,
    batch: int = 8,
    tell: Callable[[Task, Sample, float], object] = lambda task, sample, tokens: None,
) -> Outcome:
    """Examine a model and write all that was found to a folder: `run.json`, `records.jsonl`, `table.md` and a
    picture for each task that has an axis.

    A folder with an unfinished run of the same kind is gone on with; one with another run is refused.
    """
    what = {
        "model": reader.name,
        "fingerprint": reader.fingerprint,
        "tasks": {task.name: task.settings for task in tasks},
        "batch": batch,
        "stride": reader.stride,
        "chat": reader.chat,
        "truncate": reader.truncate,
        **reader.about,
    }
    check_pictures(any(task.axis for task in tasks))
    journal = open_journal(folder, what)
    outcome = run(tasks, reader, journal, batch, tell)
    about = {
        "model": reader.name,
        "fingerprint": reader.fingerprint,
        "prompts": "in a chat" if reader.chat else "plain text",
        "batch": batch,
        **{name: value for name, value in reader.about.items() if value is not None},
        **{f"data of {task.name}": _data(task) for task in tasks},
    }
    write_results(outcome, about, {task.name: task.axis for task in tasks}, folder)
    return outcome


def open_journal(folder: Path, what: Mapping[str, Any]) -> Journal:
    """The journal of a run; what determines its results includes the versions of packages."""
    return Journal(folder, {**what, "versions": versions()}, surroundings())


def write_results(
    outcome: Outcome, about: Mapping[str, Any], axes: Mapping[str, str | None], folder: Path
) -> None:
    """Write the table and a picture for each task that has an axis."""
    told = {**about, **versions()}
    write_atomically(folder / "table.md", [markdown(outcome, told).encode()])
    for name, axis in axes.items():
        rows = [row for row in outcome.rows if row.task == name]
        if axis is not None and rows:
            from atlas_lm.evaluate.plots import draw

            path = folder / f"{name.replace('/', '-')}.png"
            draw(rows, axis, f"{about['model']}: {name}", path)


def _data(task: Task) -> str:
    """Where a task's data came from; a sample is called one."""
    found = task.settings.get("data", {})
    return "; ".join(f"{name}: {told[0]}" for name, told in found.items()) or "made by the task"
