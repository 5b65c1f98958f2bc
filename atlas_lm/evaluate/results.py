"""The folder of a run: records, table and pictures."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from atlas_lm import __version__
from atlas_lm.evaluate.journal import Journal
from atlas_lm.evaluate.reader import Reader
from atlas_lm.evaluate.report import markdown
from atlas_lm.evaluate.runner import Outcome, run
from atlas_lm.evaluate.task import Sample, Task
from atlas_lm.stream.atomic import write_atomically

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


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


def check_pictures(wanted: bool) -> None:
    """Whether pictures can be drawn, before hours of work end in that question."""
    if wanted and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures of results need matplotlib, which is not here; pip install 'atlas-lm[eval]'",
            name="matplotlib",
        )


def open_journal(folder: Path, what: Mapping[str, Any]) -> Journal:
    """The journal of a run; what determines its results includes the versions of packages."""
    return Journal(folder, {**what, "versions": _versions()}, _beside())


def write_results(
    outcome: Outcome, about: Mapping[str, Any], axes: Mapping[str, str | None], folder: Path
) -> None:
    """Write the table and a picture for each task that has an axis."""
    told = {**about, **_versions()}
    write_atomically(folder / "table.md", [markdown(outcome, told).encode()])
    for name, axis in axes.items():
        rows = [row for row in outcome.rows if row.task == name]
        if axis is not None and rows:
            from atlas_lm.evaluate.plots import draw

            path = folder / f"{name.replace('/', '-')}.png"
            draw(rows, axis, f"{about['model']}: {name}", path)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES} | {"atlas-lm": __version__}


def _beside() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": platform.machine(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _data(task: Task) -> str:
    """Where a task's data came from; a sample is called one."""
    found = task.settings.get("data", {})
    return "; ".join(f"{name}: {told[0]}" for name, told in found.items()) or "made by the task"
