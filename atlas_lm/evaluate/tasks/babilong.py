"""BABILong: questions about facts that are hidden in books."""

import functools
from collections.abc import Sequence
from typing import Any

from atlas_lm.data import babilong
from atlas_lm.data.asked import Asked
from atlas_lm.data.babi import TASKS, Question
from atlas_lm.data.draws import draw
from atlas_lm.data.files import babi_questions, babilong_indices
from atlas_lm.data.sentences import Sentences, book_sentences
from atlas_lm.evaluate.task import Record, Row, Sample, averages
from atlas_lm.evaluate.tasks.asking import Asking
from atlas_lm.evaluate.tasks.options import Options, first_few

ANSWER_TOKENS = 20  # at most, as published
COUNT = 100  # questions of a task in the published sets
LENGTHS = ("0k", "1k", "2k", "4k", "8k")


class BABILong(Asking):
    """Facts of bAbI in running text of books, at any length.

    Questions are the published hundred of each of qa1 to qa5, then others of the same file; for qa6 to qa10
    and for other splits than test the order is drawn.
    """

    name = "babilong"
    axis = "length"

    def __init__(self, questions: Sequence[str], options: Options) -> None:
        options.check(self.name, "lengths", "split", "style")
        self._tasks = tuple(questions) or tuple(TASKS)[:5]
        unknown = [task for task in self._tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"babilong has no {unknown[0]!r}, wanted some of {', '.join(TASKS)}")
        self._options = options
        self._lengths = options.lengths or LENGTHS
        self._style = options.style or "published"
        self._numbers = {length: babilong.parse_length(length) for length in self._lengths}

    @property
    def settings(self) -> dict[str, Any]:
        library, split = self._options.library, self._options.split
        return {
            "questions": list(self._tasks),
            "lengths": list(self._lengths),
            "count": self._options.count,
            "seed": self._options.seed,
            "split": split,
            "style": self._style,
            "data": {
                name: [library.find(name).description, library.find(name).fingerprint]
                for name in ("babi", "babilong", f"books/{split}")
            },
        }

    def samples(self) -> list[Sample]:
        return [
            Sample(
                id=f"babilong/{task}/{length}/{index}",
                cell={"question": task, "length": length},
                index=index,
                tokens=max(self._numbers[length], babilong.RESERVED),
            )
            for length in self._lengths
            for task in self._tasks
            for index in self._places(task)
        ]

    def make(self, sample: Sample) -> Asked:
        task, length = sample.cell["question"], sample.cell["length"]
        question = self._questions(task)[sample.index]
        name = (self._options.seed, self._options.split, task, length, sample.index)
        hidden = babilong.hide_facts(question, self._books, self._numbers[length], *name)
        return Asked(
            prompt=babilong.ask(task, hidden, self._style),
            targets=(question.answer,),
            most=ANSWER_TOKENS,
            notes={"question": question.question, "places": list(hidden.places)},
        )

    def score(self, sample: Sample, asked: Asked, answer: str) -> float:
        task = sample.cell["question"]
        return float(babilong.is_right(task, self._questions(task)[sample.index], answer))

    def complete(self, answer: str) -> bool:
        return "." in answer  # only the first sentence counts

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows = super().rows(records)
        return [*rows, *averages(rows, over="question")]

    @functools.cached_property
    def _books(self) -> Sentences:
        return book_sentences(self._options.split, self._options.library)

    @functools.cache  # noqa: B019, a task lives as long as its run
    def _questions(self, task: str) -> list[Question]:
        return babi_questions(task, self._options.split, self._options.library)

    def _places(self, task: str) -> list[int]:
        """Which questions of the file, in which order."""
        there = len(self._questions(task))
        order = draw("babilong", "order", self._options.split, task).permutation(there).tolist()
        known = babilong_indices(self._options.library) if self._options.split == "test" else {}
        first = known.get(task, [])
        known_places = set(first)
        order = [*first, *(place for place in order if place not in known_places)]
        count = min(COUNT, there) if self._options.count is None else self._options.count
        return order[: first_few(count, there, f"{task} ({self._options.split})")]
