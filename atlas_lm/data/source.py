"""What training reads: batches by step and row, the same whoever asks for them, when and where.

A source is a pure function. Nothing has to be saved to go on with it at any step, and any number of processes
can share a step: each asks for rows of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.rows import NOTHING, Tokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and labels [N, T] int64: labels[n, t] is what should be said after inputs[n, : t + 1].

    fresh: [N] bool, rows that begin a stream; the others go on where they stopped a step before. None: all
        begin, and none is gone on with.
    count: [N] tokens of each row that count, the rest is padding; None: all.
    borders: [M + 1], where sequences begin that are packed into the rows, counted row after row, ends of
        rows among them; None: each row is one.
    """

    inputs: Tokens
    labels: Tokens
    fresh: NDArray[np.bool_] | None = None
    count: Tokens | None = None
    borders: Tokens | None = None

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self.inputs.size if self.count is None else self.count.sum())

    @property
    def labelled(self) -> int:
        """Places at which something should be said."""
        return int((self.labels != NOTHING).sum())


class Exam(Protocol):
    """Rows that are never learned from."""

    @property
    def rows(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    def batch(self, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1. Each begins a stream of its own."""
        ...


class Source(Protocol):
    """Batches for training, and exams."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def carries(self) -> bool:
        """Whether rows go on from step to step; then every step has as many of them."""
        ...

    def shape(self, step: int) -> tuple[int, int]:
        """Rows of a step, in all processes together, and tokens of a row."""
        ...

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1 of a step."""
        ...

    def exams(self) -> Mapping[str, Exam]:
        """By the names under which they are reported."""
        ...

    def settings(self) -> dict[str, Any]:
        """All that determines the batches, for the record of a run: numbers, names, prints of the data."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a curriculum: from this share of the steps on, rows have so many tokens."""

    begin: float  # in [0, 1)
    length: int


def stage_at(stages: tuple[Stage, ...], step: int, steps: int) -> Stage:
    """The stage that a step belongs to.

    >>> stages = (Stage(begin=0.0, length=64), Stage(begin=0.5, length=256))
    >>> [stage_at(stages, step, 10).length for step in (0, 4, 5, 9)]
    [64, 64, 256, 256]
    """
    return max(
        (stage for stage in stages if stage.begin * steps <= step), key=lambda stage: stage.begin
    )


def check_stages(stages: tuple[Stage, ...]) -> None:
    begins = [stage.begin for stage in stages]
    if not begins or begins[0] != 0 or begins != sorted(set(begins)) or begins[-1] >= 1:
        raise ValueError(
            f"stages begin at {begins}, wanted rising shares of the steps from 0 on, below 1"
        )
    if any(stage.length < 2 for stage in stages):
        raise ValueError(
            f"stages have {[stage.length for stage in stages]} tokens a row, wanted 2 or more"
        )


def check_rows(first: int, count: int, rows: int, where: str) -> None:
    """Refuse rows that are not there."""
    if first < 0 or count < 1 or first + count > rows:
        raise ValueError(
            f"{count} rows from number {first} on are wanted, there are 0 to {rows - 1}; ask for one or more "
            f"of {where}, which has {rows}"
        )
