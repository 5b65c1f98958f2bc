"""Several models under one recipe: trained one after the other, then one table and one picture."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atlas_lm.models.counts import parameters
from atlas_lm.runs.journal import HEADER, RECORDS, Record
from atlas_lm.stream.atomic import write_atomically
from atlas_lm.train.health import Stopped
from atlas_lm.train.listener import Ended, Listener
from atlas_lm.train.machine import Machine
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe
from atlas_lm.train.run import train

TABLE, CURVES = "table.md", "curves.png"


class Name(NamedTuple):
    """Of a run among others."""

    model: str
    part: str  # what it learns, where every model is trained for each of several things; else empty
    seed: int

    @property
    def folder(self) -> str:
        return "-".join(filter(None, [self.model, self.part, str(self.seed)]))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run left."""

    steps: list[Record]
    exams: list[Record]
    stopped: str | None  # why it could not be trained to its end; None: it was

    @property
    def seconds(self) -> float:
        return float(sum(record["seconds"] for record in self.steps))

    @property
    def curves(self) -> tuple[list[Record], list[Record]]:
        return self.steps, self.exams


def compare(
    recipes: Mapping[Name, Recipe],
    place: Place,
    machine: Machine,
    listen: Callable[[Name], Sequence[Listener]] = lambda name: (),
) -> Ended | None:
    """Train every recipe in a folder of its own below `place.out`, then write table and pictures.

    Runs that were finished before are not trained again. One that goes wrong is told in the table, and the
    others go on. Returns the run that a signal interrupted, if one was.
    """
    stopped: dict[Name, str] = {}
    for name, recipe in recipes.items():
        folder = place.out / name.folder
        try:
            ended = train(recipe, replace(place, out=folder), machine, listen(name))
        except Stopped as error:
            stopped[name] = str(error)
            continue
        if ended.interrupted:
            return ended
    if machine.first:
        found = {n: _read(place.out / n.folder, stopped.get(n)) for n in recipes}
        _write(recipes, found, place.out)
    machine.wait()
    return None


def _read(folder: Path, stopped: str | None) -> Found:
    lines = (folder / RECORDS).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return Found(
        steps=[record for record in records if "loss" in record],
        exams=[record for record in records if "exams" in record],
        stopped=stopped,
    )


def _write(recipes: Mapping[Name, Recipe], found: Mapping[Name, Found], folder: Path) -> None:
    from atlas_lm.train.picture import draw_comparison

    recipe = next(iter(recipes.values()))
    about = json.loads((folder / next(iter(recipes)).folder / HEADER).read_text(encoding="utf-8"))
    write_atomically(folder / TABLE, [markdown(recipes, found, about).encode()])
    models = list(dict.fromkeys(name.model for name in recipes))
    for part in dict.fromkeys(name.part for name in recipes):
        title = f"{recipe.name}{part and f' {part}'}: {recipe.steps} steps"
        runs = {
            model: [f.curves for n, f in found.items() if (n.model, n.part) == (model, part)]
            for model in models
        }
        draw_comparison(title, runs, folder / (f"curves-{part}.png" if part else CURVES))


def markdown(recipes: Mapping[Name, Recipe], found: Mapping[Name, Found], about: Record) -> str:
    """Share of right places and loss of every model in every exam, median and ends of its runs.

    about: the header of one of the runs.
    """
    recipe = next(iter(recipes.values()))
    seeds = 1 + max(name.seed for name in recipes)
    spread = f"median of {seeds} runs (least–most)" if seeds > 1 else "one run each"
    text = [f"# {recipe.name}: {recipe.steps} steps, {spread}\n"]
    for what, factor, unit in (("right", 100.0, "% of the places right"), ("nats", 1.0, "nats")):
        text += [f"## {unit}\n", *_table(recipes, found, what, factor), ""]
    ended = [f"- {name.folder}: {run.stopped}" for name, run in found.items() if run.stopped]
    if ended:
        text += ["## Stopped, and left out above\n", *ended, ""]
    where = about["times"][-1]
    told = {name: where[name] for name in ("accelerator", "threads", "versions")}
    told |= {name: about["what"][name] for name in ("dtype", "arguments", "optimizer")}
    return "\n".join([*text, "## About\n", *(f"- {k}: {v}" for k, v in told.items()), ""])


def _table(
    recipes: Mapping[Name, Recipe], found: Mapping[Name, Found], what: str, factor: float
) -> list[str]:
    """Lines of Markdown: a row for each model, a column for each exam."""
    whole = {name: run for name, run in found.items() if run.stopped is None}
    exams = list(dict.fromkeys(e for run in whole.values() for e in run.exams[-1]["exams"]))
    head = ["model", "parameters", *exams, "average", "minutes"]
    rows = [head, ["---"] * len(head)]
    for model in dict.fromkeys(name.model for name in recipes):
        weights = next(parameters(r.model)["total"] for n, r in recipes.items() if n.model == model)
        mine = {name: run for name, run in whole.items() if name.model == model}
        values = {exam: _values(mine, exam, what, factor) for exam in exams}
        alike = len({len(some) for some in values.values()}) == 1 and all(values.values())
        average = np.mean(list(values.values()), axis=0).tolist() if alike else []
        minutes = [
            sum(run.seconds for name, run in mine.items() if name.seed == seed) / 60
            for seed in sorted({name.seed for name in mine})
        ]
        rows.append(
            [model, f"{weights:,}", *map(_told, values.values()), _told(average), _told(minutes)]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def _values(runs: Mapping[Name, Found], exam: str, what: str, factor: float) -> list[float]:
    marks = [run.exams[-1]["exams"].get(exam) for run in runs.values()]
    return [factor * mark[what] for mark in marks if mark is not None]


def _told(values: Sequence[float]) -> str:
    """
    >>> _told([1.0]), _told([3.0, 1.0, 2.5]), _told([])
    ('1.000', '2.500 (1.000–3.000)', '—')
    """
    if not values:
        return "—"
    middle = f"{np.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f}–{max(values):.3f})"
