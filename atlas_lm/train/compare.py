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
class Line:
    """One model in the table: of each exam its losses and shares of right places, run by run."""

    model: str
    parameters: int
    nats: dict[str, list[float]]
    right: dict[str, list[float]]
    seconds: list[float]


def compare(
    recipes: Mapping[Name, Recipe],
    place: Place,
    machine: Machine,
    listen: Callable[[Name], Sequence[Listener]] = lambda name: (),
) -> Ended | None:
    """Train every recipe in a folder of its own below `place.out`, then write table and picture.

    Runs that were finished before are not trained again. Returns the run that was interrupted, if one was.
    """
    for name, recipe in recipes.items():
        folder = place.out / name.folder
        ended = train(recipe, replace(place, out=folder), machine, listen(name))
        if ended.interrupted:
            return ended
    if machine.first:
        _write(recipes, place.out)
    machine.wait()
    return None


def _write(recipes: Mapping[Name, Recipe], folder: Path) -> None:
    from atlas_lm.train.picture import draw_comparison

    found = {name: read_records(folder / name.folder) for name in recipes}
    recipe = next(iter(recipes.values()))
    models = list(dict.fromkeys(name.model for name in recipes))
    lines = [_line(model, found, recipes) for model in models]
    about = json.loads((folder / next(iter(recipes)).folder / HEADER).read_text(encoding="utf-8"))
    write_atomically(folder / TABLE, [markdown(recipe, lines, about).encode()])
    for part in dict.fromkeys(name.part for name in recipes):
        told = f"{recipe.name}{part and f' {part}'}: {recipe.steps} steps"
        runs = {m: [f for n, f in found.items() if (n.model, n.part) == (m, part)] for m in models}
        draw_comparison(told, runs, folder / (f"curves-{part}.png" if part else CURVES))


def read_records(folder: Path) -> tuple[list[Record], list[Record]]:
    """Steps and exams of a run."""
    lines = (folder / RECORDS).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [r for r in records if "loss" in r], [r for r in records if "exams" in r]


Runs = Mapping[Name, tuple[list[Record], list[Record]]]


def _line(model: str, runs: Runs, recipes: Mapping[Name, Recipe]) -> Line:
    mine = [name for name in runs if name.model == model]
    nats: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    seconds: dict[int, float] = {}
    for name in mine:
        steps, exams = runs[name]
        for exam, mark in exams[-1]["exams"].items():
            nats.setdefault(exam, []).append(mark["nats"])
            right.setdefault(exam, []).append(mark["right"])
        spent = sum(record["seconds"] for record in steps)
        seconds[name.seed] = seconds.get(name.seed, 0.0) + spent
    weights = parameters(recipes[mine[0]].model)["total"]
    return Line(
        model=model, parameters=weights, nats=nats, right=right, seconds=list(seconds.values())
    )


def markdown(recipe: Recipe, lines: Sequence[Line], about: Record) -> str:
    """Share of right places and loss of every model in every exam, median and ends of its runs.

    about: the header of one of the runs.
    """
    exams = list(lines[0].nats)
    seeds = len(lines[0].seconds)
    spread = f"median of {seeds} runs (least–most)" if seeds > 1 else "one run each"
    parts = [f"# {recipe.name}: {recipe.steps} steps, {spread}\n"]
    for what, factor, unit in (("right", 100.0, "% of the places right"), ("nats", 1.0, "nats")):
        head = ["model", "parameters", *exams, "average", "minutes"]
        rows = [head, ["---"] * len(head), *(_cells(line, what, factor) for line in lines)]
        parts += [f"## {unit}\n", *(f"| {' | '.join(row)} |" for row in rows), ""]
    where = about["times"][-1]
    told = {name: where[name] for name in ("accelerator", "threads", "versions")}
    told |= {name: about["what"][name] for name in ("dtype", "arguments", "optimizer")}
    return "\n".join([*parts, "## About\n", *(f"- {k}: {v}" for k, v in told.items()), ""])


def _cells(line: Line, what: str, factor: float) -> list[str]:
    found: dict[str, list[float]] = getattr(line, what)
    average = np.mean(list(found.values()), axis=0).tolist()
    numbers = [*found.values(), average]
    return [
        line.model,
        f"{line.parameters:,}",
        *(_told([factor * value for value in values]) for values in numbers),
        _told([seconds / 60 for seconds in line.seconds]),
    ]


def _told(values: Sequence[float]) -> str:
    """
    >>> _told([1.0]), _told([3.0, 1.0, 2.5])
    ('1.00', '2.50 (1.00–3.00)')
    """
    middle = f"{np.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}–{max(values):.2f})"
