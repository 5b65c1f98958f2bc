"""Run tasks on a model: batches that are always the same, progress, and nothing done twice."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from atlas_lm.evaluate.reader import Reader, Refused
from atlas_lm.evaluate.task import Record, Row, Sample, Task
from atlas_lm.runs.journal import Journal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A cell that a model cannot be examined on."""

    task: str
    cell: dict[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    rows: list[Row]
    refusals: list[Refusal]


def run(
    tasks: Sequence[Task],
    reader: Reader,
    journal: Journal,
    batch: int,
    tell: Callable[[Task, Sample, float], object] = lambda task, sample, tokens: None,
) -> Outcome:
    """Examine a model on all samples that the journal does not have yet, and summarise.

    A batch is always of the same samples, whatever was finished before: how many rows run side by side can
    move the rounding, and a run that was interrupted must give what it would have given.

    Args:
        batch: samples side by side.
        tell: called with how much was just read of a batch, which begins with that sample; in all as many
            tokens as its samples say that they have, whatever tokenizer the model has.
    """
    rows: list[Row] = []
    refusals: list[Refusal] = []
    for task in tasks:
        found: list[Record] = []
        for cell in _cells(task.samples()):
            refusal = _run_cell(task, cell, reader, journal, batch, tell)
            if refusal is None:
                found += [journal.records[sample.id] for sample in cell]
            else:  # what came before the sample that does not fit stays in the journal, and is no result
                refusals.append(refusal)
        rows += task.rows(found) if found else []
    return Outcome(rows=rows, refusals=refusals)


def _cells(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    for _, group in groupby(samples, key=lambda sample: sample.cell):
        yield list(group)


def _run_cell(
    task: Task,
    samples: list[Sample],
    reader: Reader,
    journal: Journal,
    batch: int,
    tell: Callable[[Task, Sample, float], object],
) -> Refusal | None:
    size = batch if reader.can.padded else 1
    for first in range(0, len(samples), size):
        together = samples[first : first + size]
        tokens = sum(sample.tokens for sample in together)
        pace = Pace(tokens, reader.per_token, partial(tell, task, together[0]))
        if not all(sample.id in journal.records for sample in together):
            try:
                found = task.examine(reader, together, pace.go)
            except Refused as error:
                return Refusal(task=task.name, cell=dict(samples[0].cell), reason=str(error))
            journal.add(_stamped(together, found))
        pace.finish()
    return None


@dataclass
class Pace:
    """Tells how far a batch is, never more than its whole."""

    left: float
    per_token: int  # ids of the model that make a token of what is left
    tell: Callable[[float], object]

    def go(self, ids: int) -> None:
        step = min(ids / self.per_token, self.left)
        self.left -= step
        self.tell(step)

    def finish(self) -> None:
        self.tell(self.left)


def _stamped(samples: list[Sample], records: list[Record]) -> Iterator[Record]:
    for sample, record in zip(samples, records, strict=True):
        yield {"id": sample.id, "cell": dict(sample.cell), **record}
