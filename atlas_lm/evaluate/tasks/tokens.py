"""Tasks of a vocabulary of their own: MQAR, MAD and the cued pairs, for models that were trained on them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from atlas_lm.data.cued import Cued
from atlas_lm.data.mad import BASELINES
from atlas_lm.data.mqar import PAIRS, dense_mqar
from atlas_lm.data.rows import NOTHING, RowTask
from atlas_lm.evaluate.reader import Reader, Refused, Tell, TooLong
from atlas_lm.evaluate.task import Record, Row, Sample, share_rows
from atlas_lm.evaluate.tasks.options import Options

COUNT = 256


def row_tasks(name: str, parts: Sequence[str]) -> dict[str, RowTask]:
    """The tasks of a name by cell: MQAR by pairs, MAD by its task, or the cued pairs."""
    if name == "mqar":
        unknown = [part for part in parts if not part.isdecimal()]
        if unknown:
            raise ValueError(f"mqar has no {unknown[0]!r}, wanted a number of pairs, e.g. mqar/16")
        return {str(pairs): dense_mqar(int(pairs)) for pairs in parts or PAIRS}
    if name == "cued":
        if parts:
            raise ValueError(f"cued has no parts, got {', '.join(parts)}")
        return {"cued": Cued()}
    chosen = parts or list(BASELINES)
    unknown = [part for part in chosen if part not in BASELINES]
    if unknown:
        raise ValueError(f"mad has no {unknown[0]!r}, wanted some of {', '.join(BASELINES)}")
    return {part: BASELINES[part] for part in chosen}


class Tokens:
    """Rows of tokens in which a model has to say the right one at the labelled places."""

    def __init__(self, name: str, parts: Sequence[str], options: Options) -> None:
        options.check(name)
        self.name = name
        self.axis = "pairs" if name == "mqar" else None
        self._tasks = row_tasks(name, parts)
        self._options = options
        self._count = options.count or COUNT

    @property
    def settings(self) -> dict[str, Any]:
        tasks = {cell: asdict(task) for cell, task in self._tasks.items()}  # type: ignore[call-overload]
        return {"tasks": tasks, "count": self._count, "seed": self._options.seed}

    def samples(self) -> list[Sample]:
        return [
            Sample(
                id=f"{self.name}/{cell}/{index}",
                cell={self.axis or "task": cell},
                index=index,
                tokens=task.length,
            )
            for cell, task in self._tasks.items()
            for index in range(self._count)
        ]

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        task = self._tasks[next(iter(samples[0].cell.values()))]
        if getattr(task, "from_last", False):
            raise Refused(
                f"{task.name} wants an auto-encoder, which a language model is not; "
                "`atlas train mad task=compression` trains and examines one"
            )
        if task.vocab_size > reader.vocab_size:
            raise Refused(
                f"{task.name} has {task.vocab_size} tokens and {reader.name} knows {reader.vocab_size}; take "
                "a model that was trained on this task"
            )
        if reader.limit is not None and task.length > reader.limit:
            raise TooLong(
                f"rows of {task.name} have {task.length:,} tokens, but {reader.name} takes {reader.limit:,}"
            )
        rows = task.rows("test", samples[0].index, len(samples), self._options.seed)
        logits = reader.start().read(torch.from_numpy(rows.inputs), None, task.length)
        assert logits is not None
        right = (reader.sound(logits).argmax(-1).cpu().numpy() == rows.labels) & (
            rows.labels != NOTHING
        )
        asked = (rows.labels != NOTHING).sum(1)
        tell(rows.inputs.size)
        return [
            {"score": int(found) / int(number), "right": int(found), "asked": int(number)}
            for found, number in zip(right.sum(1), asked, strict=True)
        ]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """The share of all labelled places, as in the exams of `atlas train`."""
        return share_rows(self.name, records, weight="asked")
