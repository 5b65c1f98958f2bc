"""Questions in running text, as rows for training: facts hidden in books, and needles in haystacks.

Only what is to be answered is labelled. Rows are drawn by name, so that any of them can be made alone.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from atlas_lm.data.asked import Asked
from atlas_lm.data.babi import Story
from atlas_lm.data.draws import draw
from atlas_lm.data.files import babi_stories
from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.hiding import background, single_sentences
from atlas_lm.data.library import Library
from atlas_lm.data.needles import ANSWER_TOKENS, KINDS, hide_needles
from atlas_lm.data.prompt import Stretch
from atlas_lm.data.rows import NOTHING, Tokens
from atlas_lm.data.sentences import Sentences, book_sentences
from atlas_lm.data.source import Batch, Stage, check_rows, check_stages, stage_at
from atlas_lm.data.stories import OBJECTS, PEOPLE, PLACES, RECEIVERS, TASKS, make_story
from atlas_lm.data.telling import Told, label_answers, lay, permuted, tell, told_length
from atlas_lm.text import Tokenizer, cuts_freely

SPLITS = ("train", "validation")
ATTEMPTS = 100  # stories that are drawn until one fits into a row
DRAWS = 40  # stories that tell how long those of a task usually are
WASTE = 0.03  # of a row's tokens; with more than that left, a longer sample is tried
PROBE = 2048  # GPT-2 tokens of the sample that tells how a tokenizer compares to GPT-2's

Row = tuple[Tokens, Tokens]  # ids and labels [n]


class Lesson(Protocol):
    """Rows of several kinds, its cells."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def cells(self) -> tuple[str, ...]: ...

    def usual(self, cell: str) -> int:
        """Tokens that a row of a cell needs: with fewer, most rows of it could not be made."""
        ...

    def row(self, cell: str, split: str, length: int, *name: int | str) -> Row:
        """Ids and labels [n <= length] of one row of "train" or "validation".

        Args:
            name: of the draw; the same name gives the same row.
        """
        ...

    def settings(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class LessonExam:
    """Rows of one cell, of the split "validation"."""

    lesson: Lesson
    cell: str
    length: int
    rows: int
    seed: int

    def batch(self, first: int, count: int) -> Batch:
        check_rows(first, count, self.rows, "the exam")
        numbers = range(first, first + count)
        rows = [
            self.lesson.row(self.cell, "validation", self.length, self.seed, n) for n in numbers
        ]
        return _padded(rows, self.length)


@dataclass(frozen=True, kw_only=True)
class LessonSource:
    """Rows of a lesson, longer from stage to stage; each is of a cell drawn by chance, all alike.

    A cell is left out as long as rows are shorter than it needs: what is short is learned first.
    """

    lesson: Lesson
    stages: tuple[Stage, ...]
    steps: int
    tokens: int  # of a step, as whole rows; at least one
    seed: int = 0
    exam_rows: int = 64
    exam_lengths: tuple[int, ...] | None = None  # None: that of the last stage

    def __post_init__(self) -> None:
        check_stages(self.stages)
        for name in ("steps", "tokens", "exam_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.exam_lengths is not None and (not self.exam_lengths or min(self.exam_lengths) < 2):
            raise ValueError(
                f"exam_lengths is {self.exam_lengths}, wanted lengths of 2 tokens or more, or None for "
                "that of the last stage"
            )

    @property
    def vocab_size(self) -> int:
        return self.lesson.vocab_size

    @property
    def carries(self) -> bool:
        return False

    def shape(self, step: int) -> tuple[int, int]:
        length = stage_at(self.stages, step, self.steps).length
        return max(1, self.tokens // length), length

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1 of a step; what is short is padded on the right."""
        rows, length = self.shape(step)
        check_rows(first, count, rows, f"step {step}")
        return _padded([self._row(step, n, length) for n in range(first, first + count)], length)

    def exams(self) -> dict[str, LessonExam]:
        lengths = self.exam_lengths or (self.stages[-1].length,)
        return {
            f"{cell}/{length}" if len(lengths) > 1 else cell: LessonExam(
                lesson=self.lesson, cell=cell, length=length, rows=self.exam_rows, seed=self.seed
            )
            for cell in self.lesson.cells()
            for length in lengths
        }

    def settings(self) -> dict[str, Any]:
        return {
            "lesson": self.lesson.settings(),
            "stages": [asdict(stage) for stage in self.stages],
            "steps": self.steps,
            "tokens": self.tokens,
            "seed": self.seed,
            "exam_rows": self.exam_rows,
            "exam_lengths": list(self.exam_lengths or (self.stages[-1].length,)),
        }

    def _row(self, step: int, number: int, length: int) -> Row:
        cells = self._fitting(length)
        random = draw("lesson", "cell", self.seed, step, number)
        cell = cells[int(random.randint(len(cells), dtype=np.int64))]
        return self.lesson.row(cell, "train", length, self.seed, step, number)

    def _fitting(self, length: int) -> tuple[str, ...]:
        cells = self.lesson.cells()
        return tuple(cell for cell in cells if self.lesson.usual(cell) <= length) or cells


@dataclass(frozen=True, kw_only=True)
class BABILongLesson:
    """A story of bAbI hidden in running text of books, with all of its questions.

    Facts stand in order at random places between sentences. A question stands after the last fact that it
    knows and before the next one, the last question at the very end. It is asked and answered as
    "\\nQuestion: Where is Mary?\\nAnswer: garden.", and the answer with its full stop is what is labelled.
    A story that is longer than the row is left out for another one.

    Training: stories of the training file or new ones. Validation: stories of the validation file, in books
    of their own. A story that is one of the validation or test file is never trained on, however it came
    about.
    """

    name: ClassVar[str] = "babilong"
    tasks: tuple[str, ...] = TASKS
    tokenizer: Tokenizer
    library: Library | None = None
    written: float = 0.5  # share of training stories that are of the file; the others are new
    mixed: float = 0.0  # share of new stories that are asked what easier tasks ask, too
    permute: bool = True  # people, places and objects of a training story take each other's names
    lured: float = 0.0  # share of training rows in sentences of books that name what stories name
    silent: float = 0.0  # share of training rows that tell all facts in the first tenth of the text

    def __post_init__(self) -> None:
        _check_names("tasks", self.tasks, TASKS)
        _check_tokenizer(self.tokenizer)
        for name in ("written", "mixed", "lured", "silent"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted a share, 0 to 1")

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def cells(self) -> tuple[str, ...]:
        return self.tasks

    def usual(self, cell: str) -> int:
        """A quarter of the new stories are told in fewer tokens."""
        return self._usual[cell]

    def row(self, cell: str, split: str, length: int, *name: int | str) -> Row:
        """Ids and labels [n <= length] of one story of a task."""
        _check_asked(cell, self.tasks, split)
        for attempt in range(ATTEMPTS):
            random = draw("lesson", self.name, cell, split, length, *name, attempt)
            story = self._story(cell, split, random)
            if story is None:
                continue
            told = tell(story, self.tokenizer)
            room = length - told_length(told, self.tokenizer)
            if room >= 0:
                return self._hidden(told, split, length, room, random)
        raise ValueError(
            f"rows have {length} tokens, and none of {ATTEMPTS} stories of {cell} is as short; take "
            "longer rows"
        )

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tasks": list(self.tasks),
            "tokenizer": self.tokenizer.key,
            "written": self.written,
            "mixed": self.mixed,
            "permute": self.permute,
            "lured": self.lured,
            "silent": self.silent,
            "data": _prints(self.library, "babi", *(f"books/{split}" for split in SPLITS)),
        }

    @cached_property
    def _books(self) -> dict[str, Sentences]:
        """Their tokens are counted as the tokenizer counts them."""
        books = {split: book_sentences(split, self.library) for split in SPLITS}
        return {
            split: replace(found, counts=found.encoded(self.tokenizer).starts)
            for split, found in books.items()
        }

    @cached_property
    def _lures(self) -> NDArray[np.int64]:
        """Sentences of the training books that a hasty reader would take for facts."""
        found = self._books["train"].naming(sorted({*PEOPLE, *RECEIVERS, *PLACES, *OBJECTS}))
        if not len(found):
            raise ValueError(
                "no sentence of the training books names people or things of bAbI; take larger data, or "
                "lured=0"
            )
        return found

    @cached_property
    def _stories(self) -> dict[tuple[str, str], list[Story]]:
        return {
            (task, split): babi_stories(task, split, self.library)
            for task in self.tasks
            for split in SPLITS
        }

    @cached_property
    def _usual(self) -> dict[str, int]:
        found = {}
        for task in self.tasks:
            stories = [
                tuple(make_story(task, draw("lesson", "usual", task, n), self.mixed > 0))
                for n in range(DRAWS)
            ]
            lengths = [
                told_length(tell(story, self.tokenizer), self.tokenizer) for story in stories
            ]
            found[task] = sorted(lengths)[DRAWS // 4]
        return found

    @cached_property
    def _held_out(self) -> dict[str, frozenset[Story]]:
        """Of each task the stories that must not be trained on."""
        return {
            task: frozenset(
                [*self._stories[task, "validation"], *babi_stories(task, "test", self.library)]
            )
            for task in self.tasks
        }

    def _story(self, task: str, split: str, random: RandomState) -> Story | None:
        """A story by chance; None: it is one of those that are held out."""
        if split == "validation":
            return _pick(self._stories[task, split], random)
        if random.random_sample() < self.written:
            story = _pick(self._stories[task, split], random)
        else:
            mixed = self.mixed > 0 and random.random_sample() < self.mixed
            story = tuple(make_story(task, random, mixed))
        if self.permute:
            story = permuted(story, task, random)
        return None if story in self._held_out[task] else story

    def _hidden(
        self, told: list[Told], split: str, length: int, room: int, random: RandomState
    ) -> Row:
        """The row of what is told, in as much running text as there is room for."""
        early = split == "train" and random.random_sample() < self.silent
        lured = self.lured > 0 and split == "train" and random.random_sample() < self.lured
        among = (
            single_sentences(self._books[split], self._lures, room, random)
            if lured
            else background(self._books[split], room, random, repeat=True)
        )
        lots = random.random_sample(len(told))
        while True:
            row = lay(told, among, lots, early, self.tokenizer)
            if len(row[0]) <= length:
                return row
            among = _shorter(among)  # its first word has more tokens without a space before it


@dataclass(frozen=True, kw_only=True)
class NeedleLesson:
    """Needles in a haystack as RULER has them; what is asked for is labelled, and a full stop behind it."""

    name: ClassVar[str] = "needles"
    kinds: tuple[str, ...] = ("single_1", "single_2")
    tokenizer: Tokenizer
    library: Library | None = None

    def __post_init__(self) -> None:
        _check_names("kinds", self.kinds, tuple(KINDS))
        _check_tokenizer(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def cells(self) -> tuple[str, ...]:
        return self.kinds

    def usual(self, cell: str) -> int:
        """Every haystack may be as small as its row wants it."""
        return 0

    def row(self, cell: str, split: str, length: int, *name: int | str) -> Row:
        """Ids and labels [n <= length] of one sample of a kind."""
        _check_asked(cell, self.kinds, split)
        try:
            ids, answer = self._fitting(cell, length, "lesson", split, length, *name)
        except ValueError as error:
            raise ValueError(
                f"rows have {length} tokens, too few for needles of {cell} ({error}); take longer rows"
            ) from error
        return ids, label_answers(ids, [len(ids)], [answer])

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kinds": list(self.kinds),
            "tokenizer": self.tokenizer.key,
            "data": _prints(self.library, "essays"),
        }

    @cached_property
    def _scales(self) -> dict[str, tuple[float, int]]:
        """Of each kind: tokens of a row for one of GPT-2's, and GPT-2 tokens that a length has beyond it."""
        found = {}
        for kind in self.kinds:
            asked = hide_needles(kind, PROBE, self.library, "scale")
            row = asked.prompt.within("", asked.lead + _answer(asked))
            tokens = sum(map(len, row.ids(self.tokenizer)))
            spare = ANSWER_TOKENS - count_tokens([_answer(asked)])[0]
            found[kind] = (tokens / row.tokens, spare)
        return found

    def _fitting(self, kind: str, length: int, *name: int | str) -> tuple[Tokens, int]:
        """The longest sample that is found to fit: by the usual scale, mended by what comes of it."""
        scale, spare = self._scales[kind]
        wanted = int(length / scale) + spare
        ids, answer = self._ids(kind, wanted, *name)
        if len(ids) < (1 - WASTE) * length:
            wanted += int((length - len(ids)) / scale)
            ids, answer = self._ids(kind, wanted, *name)
        while len(ids) > length:
            wanted -= math.ceil((len(ids) - length) / scale)
            ids, answer = self._ids(kind, wanted, *name)
        return ids, answer

    def _ids(self, kind: str, length: int, *name: int | str) -> tuple[Tokens, int]:
        """The ids of a sample of so many GPT-2 tokens, and how many of them are its answer."""
        asked = hide_needles(kind, length, self.library, *name)
        said = self.tokenizer.encode(_answer(asked))
        told = asked.prompt.within("", asked.lead).ids(self.tokenizer)
        return np.concatenate([*told, said]).astype(np.int64), len(said)


def _answer(asked: Asked) -> str:
    return f" {', '.join(asked.targets)}."


def _pick(stories: list[Story], random: RandomState) -> Story:
    return stories[int(random.randint(len(stories), dtype=np.int64))]


def _shorter(among: list[Stretch]) -> list[Stretch]:
    """A background without its last sentence."""
    *others, last = among
    return [*others, last.cut(0, len(last) - 1)] if len(last) > 1 else others


def _padded(rows: Sequence[Row], length: int) -> Batch:
    inputs = np.zeros((len(rows), length), np.int64)
    labels = np.full_like(inputs, NOTHING)
    for n, (ids, wanted) in enumerate(rows):
        inputs[n, : len(ids)], labels[n, : len(ids)] = ids, wanted
    count = np.array([len(ids) for ids, _ in rows], np.int64)
    return Batch(inputs=inputs, labels=labels, count=count)


def _prints(library: Library | None, *names: str) -> dict[str, list[str]]:
    """What the data is, and prints of its contents."""
    found = {name: (library or Library()).find(name) for name in names}
    return {name: [item.description, item.fingerprint] for name, item in found.items()}


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(
            f"{what} is {names}, wanted one or more of {', '.join(known)}, each of them once"
        )


def _check_tokenizer(tokenizer: Tokenizer) -> None:
    if not cuts_freely(tokenizer):
        raise ValueError(
            f"tokenizer {tokenizer.key} gives other ids for a text than for its parts cut before white "
            "space; rows are made of parts, so take bytes or GPT-2's tokenizer"
        )


def _check_asked(cell: str, cells: tuple[str, ...], split: str) -> None:
    if cell not in cells:
        raise ValueError(f"cell is {cell!r}, wanted one of {', '.join(cells)}")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, wanted one of {', '.join(SPLITS)}")
