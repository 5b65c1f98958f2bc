"""Rows of tasks of one vocabulary, as batches for training and exams."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import RandomState

from atlas_lm.data.draws import draw
from atlas_lm.data.rows import Rows, RowTask, Tokens
from atlas_lm.data.source import Batch, check_rows

TABLES = 8  # tasks whose training rows are kept at a time


@dataclass(frozen=True, kw_only=True)
class RowExam:
    """Rows of a task's split "test"."""

    task: RowTask
    rows: int
    seed: int

    @property
    def length(self) -> int:
        return self.task.length

    def batch(self, first: int, count: int) -> Batch:
        check_rows(first, count, self.rows, "the exam")
        return _batch(self.task.rows("test", first, count, self.seed))


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Every step has rows of one task, drawn by chance: fresh ones, or some of those it has for training.

    At first the first task comes alone, then more and more of them, after half of the steps all.
    """

    tasks: Mapping[str, RowTask]  # by the names of their exams
    steps: int
    tokens: int  # of a step, as whole rows; at least one
    seed: int = 0
    exam_rows: int = 256
    together: bool = False  # all tasks from the first step on

    def __post_init__(self) -> None:
        sizes = sorted({task.vocab_size for task in self.tasks.values()})
        if len(sizes) != 1:
            raise ValueError(
                f"{len(self.tasks)} tasks have vocabularies of {sizes} tokens, wanted one task or more, all "
                "of one vocabulary; give the others a source of their own"
            )
        for name in ("steps", "tokens", "exam_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")

    @property
    def vocab_size(self) -> int:
        return next(iter(self.tasks.values())).vocab_size

    @property
    def carries(self) -> bool:
        return False

    def shape(self, step: int) -> tuple[int, int]:
        task, _ = self._chosen(step)
        return self._count(task), task.length

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1 of a step."""
        task, random = self._chosen(step)
        rows = self._count(task)
        check_rows(first, count, rows, f"step {step}")
        there = getattr(task, "train_examples", None)
        if there is None:
            return _batch(task.rows("train", step * rows + first, count, self.seed))
        numbers = random.randint(there, size=rows, dtype=np.int64)[first : first + count]
        return _batch_of(task, there, self.seed, numbers)

    def exams(self) -> dict[str, RowExam]:
        return {
            name: RowExam(task=task, rows=self.exam_rows, seed=self.seed)
            for name, task in self.tasks.items()
        }

    def settings(self) -> dict[str, Any]:
        return {
            "tasks": {name: _settings(task) for name, task in self.tasks.items()},
            "steps": self.steps,
            "tokens": self.tokens,
            "seed": self.seed,
            "exam_rows": self.exam_rows,
            "together": self.together,
        }

    def _chosen(self, step: int) -> tuple[RowTask, RandomState]:
        """The task of a step, and the random numbers with which the step goes on."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step is {step}, wanted 0 to {self.steps - 1}")
        random, tasks = draw("learning", self.seed, step), list(self.tasks.values())
        reach = 1 + int(2 * len(tasks) * step / self.steps)
        among = len(tasks) if self.together else min(reach, len(tasks))
        return tasks[int(random.randint(among, dtype=np.int64))], random

    def _count(self, task: RowTask) -> int:
        return max(1, self.tokens // task.length)


def _batch_of(task: Any, there: int, seed: int, numbers: Tokens) -> Batch:
    """The rows of these numbers, of those that a task has for training."""
    known = _training_rows(task, there, seed)
    return Batch(inputs=known.inputs[numbers], labels=known.labels[numbers])


@lru_cache(maxsize=TABLES)
def _training_rows(task: RowTask, count: int, seed: int) -> Rows:
    """All rows that a task has for training: to make them takes a second, and each is read many times."""
    return task.rows("train", 0, count, seed)


def _batch(rows: Rows) -> Batch:
    return Batch(inputs=rows.inputs, labels=rows.labels)


def _settings(task: Any) -> dict[str, Any]:
    return {"task": type(task).__name__, **asdict(task)}
