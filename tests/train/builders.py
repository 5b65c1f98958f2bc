"""A small source with everything that sources may have, and runs of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atlas_lm.data.draws import draw
from atlas_lm.data.source import Batch
from atlas_lm.models.sizes import configure
from atlas_lm.train.listener import Listener, Report
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import Machine, join
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Optimizer, Recipe

VOCAB = 29


@dataclass(frozen=True)
class Exam:
    rows: int = 5
    length: int = 24

    def batch(self, first: int, count: int) -> Batch:
        assert 0 <= first < first + count <= self.rows
        made = [
            draw("exam", row).randint(VOCAB, size=self.length + 1)
            for row in range(first, first + count)
        ]
        ids = np.stack(made).astype(np.int64)
        return Batch(inputs=ids[:, :-1], labels=ids[:, 1:])


@dataclass(frozen=True)
class Walks:
    """Rows of a random walk over the tokens. With `carries` some begin anew by chance, some are short."""

    rows: int = 4
    length: int = 24
    carries: bool = False
    vocab_size: int = VOCAB

    def shape(self, step: int) -> tuple[int, int]:
        return self.rows, self.length

    def batch(self, step: int, first: int, count: int) -> Batch:
        found = [self._row(step, row) for row in range(first, first + count)]
        ids = np.stack([walk for walk, _, _ in found])
        labels = ids[:, 1:].copy()
        labels[:, ::5] = -100
        counts = np.array([n for _, _, n in found])
        if not self.carries:
            return Batch(inputs=ids[:, :-1], labels=labels)
        labels[np.arange(self.length) >= counts[:, None]] = -100
        fresh = np.array([begins for _, begins, _ in found])
        return Batch(inputs=ids[:, :-1], labels=labels, fresh=fresh, count=counts)

    def _row(self, step: int, row: int) -> tuple[Any, bool, int]:
        random = draw("walk", step, row)
        walk = np.cumsum(random.randint(1, 4, size=self.length + 1)) % VOCAB
        begins = step == 0 or random.random_sample() < 0.3
        return walk.astype(np.int64), begins, int(random.randint(self.length // 2, self.length + 1))

    def exams(self) -> dict[str, Exam]:
        return {"walks": Exam()}

    def settings(self) -> dict[str, Any]:
        return {"rows": self.rows, "length": self.length, "carries": self.carries}


class Heard(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.marks: list[Any] = []

    def stepped(self, report: Report) -> None:
        self.reports.append(report)

    def examined(self, step: int, marks: dict[str, Any]) -> None:
        self.marks.append(marks)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


def small_recipe(preset: str = "titans", block: str | None = None, **changes: Any) -> Recipe:
    model = configure(preset, block=block, size="tiny", vocab_size=VOCAB, initializer_range=0.1)
    given: dict[str, Any] = {
        "name": "walks",
        "model": model,
        "source": Walks(),
        "steps": 6,
        "exams": 2,
        "optimizer": Optimizer(rate=1e-2),
    }
    return Recipe(**(given | changes))


def run(
    recipe: Recipe, out: Path, machine: Machine | None = None, **options: Any
) -> tuple[Run, Heard]:
    """Train a recipe to its end in this process."""
    heard = Heard()
    place = Place(out=out, **({"workers": 0} | options))
    out.mkdir(parents=True, exist_ok=True)
    if machine is None:
        with join("cpu") as alone:
            return run(recipe, out, alone, **options)
    made = Run(recipe, place, machine, heard)
    made.resume()
    made.go()
    return made, heard
