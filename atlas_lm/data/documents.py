"""Sources of training over shards: long documents read in order, and short ones packed into rows."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from atlas_lm.data.draws import draw
from atlas_lm.data.rows import NOTHING, Tokens
from atlas_lm.data.shards import Shards
from atlas_lm.data.source import Batch, Exam, check_rows

PAD = 0


@dataclass(frozen=True, kw_only=True)
class _FromShards:
    """What sources over shards share: every step has as many rows of as many tokens."""

    train: Shards
    validation: Shards
    length: int
    rows: int
    seed: int = 0

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size

    @property
    def tokenizer_key(self) -> str:
        return self.train.tokenizer_key

    def shape(self, step: int) -> tuple[int, int]:
        """Rows of a step, and tokens of a row."""
        return self.rows, self.length

    def _prints(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__.lower(),
            "train": self.train.fingerprint,
            "validation": self.validation.fingerprint,
            "tokenizer": self.tokenizer_key,
        }

    def _check_numbers(self, **least: int) -> None:
        for name, wanted in least.items():
            if getattr(self, name) < wanted:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {wanted} or more")

    def _check_tokenizers(self) -> None:
        if self.train.tokenizer_key != self.validation.tokenizer_key:
            raise ValueError(
                f"wrong tokenizer: {self.train.folder} has ids of {self.train.tokenizer_key}, "
                f"{self.validation.folder} of {self.validation.tokenizer_key}; write both with the same "
                "tokenizer"
            )

    def _check_asked(self, step: int, first: int, count: int) -> None:
        if step < 0:
            raise ValueError(f"step is {step}, wanted 0 or more")
        check_rows(first, count, self.rows, f"step {step}")


@dataclass(frozen=True, kw_only=True)
class Documents(_FromShards):
    """Long documents, piece by piece, so that a memory can be carried from each piece to the next.

    A document is cut into pieces of `length` tokens, the last one padded. In epoch e documents are
    shuffled; of the P pieces in that order lane r reads number r * S to (r + 1) * S - 1, one a step, with
    S = P // rows steps an epoch. The P % rows last pieces are left out, others in each epoch. A row is fresh
    at the beginning of a document and of an epoch.

    Args:
        length: tokens of a piece.
        rows: lanes.
        exam_rows: validation documents that are examined, at most.
        exam_length: tokens of each.
        carries: False: rows are independent.
    """

    exam_rows: int = 8
    exam_length: int = 8192
    carries: bool = True

    def __post_init__(self) -> None:
        self._check_numbers(length=2, rows=1, exam_rows=1, exam_length=2)
        self._check_tokenizers()
        if not self.steps:
            raise ValueError(
                f"{self.rows} rows are wanted, but the documents have only {self._pieces} pieces of "
                f"{self.length} tokens; take fewer rows, a smaller length or more text"
            )
        if self.validation.lengths.max() < 2:
            raise ValueError("no validation document has 2 tokens; take other texts for validation")

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self._pieces // self.rows

    @property
    def _pieces(self) -> int:
        return int(_pieces(self.train, self.length).sum())

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1 of a step."""
        self._check_asked(step, first, count)
        steps = self.steps
        epoch, place = divmod(step, steps)
        order = _pieces_in_order(self.train, self.length, self.seed, epoch)
        found = [order.find(row * steps + place) for row in range(first, first + count)]
        read = [_read(self.train, d, piece * self.length, self.length) for d, piece in found]
        fresh = np.array([piece == 0 or place == 0 for _, piece in found])
        return Batch(
            inputs=np.stack([inputs for inputs, _, _ in read]),
            labels=np.stack([labels for _, labels, _ in read]),
            fresh=fresh if self.carries else None,
            count=np.array([tokens for _, _, tokens in read], dtype=np.int64),
        )

    def exams(self) -> dict[str, Exam]:
        """The beginnings of the longest validation documents that have exam_length tokens. If none has, they
        are as long as the longest document, less what is no whole piece."""
        lengths = self.validation.lengths
        longest = int(lengths.max())
        length = self.exam_length
        if longest < length:
            length = longest - longest % self.length or longest
        by_length = np.argsort(-lengths, kind="stable")[: self.exam_rows]
        chosen = tuple(int(d) for d in by_length if lengths[d] >= length)
        return {"validation": Beginnings(shards=self.validation, documents=chosen, length=length)}

    def settings(self) -> dict[str, Any]:
        """All that determines the batches."""
        names = ("length", "rows", "seed", "exam_rows", "exam_length", "carries")
        return self._prints() | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Packed(_FromShards):
    """Short documents, packed: in a new order each epoch one behind the other, cut into rows.

    Sequences are kept apart; a document that the end of a row cuts goes on in the next row as one of its
    own. Tokens behind the last whole step of an epoch are left out, others in each epoch.

    Args:
        length: tokens of a row.
        rows: of a step.
        exam_rows: of validation documents in their own order, at most.
    """

    carries: ClassVar[bool] = False
    exam_rows: int = 64

    def __post_init__(self) -> None:
        self._check_numbers(length=2, rows=1, exam_rows=1)
        self._check_tokenizers()
        wanted = {"training": self.rows * self.length, "validation": self.length}
        for what, shards in (("training", self.train), ("validation", self.validation)):
            if shards.tokens < wanted[what]:
                raise ValueError(
                    f"the {what} documents have {shards.tokens} tokens, wanted {wanted[what]} or more for "
                    f"rows of {self.length}; take fewer rows, a smaller length or more text"
                )

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self.train.tokens // (self.length * self.rows)

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1 of a step."""
        self._check_asked(step, first, count)
        epoch, place = divmod(step, self.steps)
        line = _tokens_in_order(self.train, self.seed, epoch)
        return _packed(self.train, line, self.length, place * self.rows + first, count)

    def exams(self) -> dict[str, Exam]:
        """The first rows of the validation documents."""
        rows = min(self.exam_rows, self.validation.tokens // self.length)
        return {"validation": PackedRows(shards=self.validation, rows=rows, length=self.length)}

    def settings(self) -> dict[str, Any]:
        """All that determines the batches."""
        names = ("length", "rows", "seed", "exam_rows")
        return self._prints() | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Beginnings:
    """An exam: the first tokens of documents."""

    shards: Shards
    documents: tuple[int, ...]
    length: int

    @property
    def rows(self) -> int:
        return len(self.documents)

    def batch(self, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1."""
        check_rows(first, count, self.rows, "the exam")
        chosen = self.documents[first : first + count]
        read = [_read(self.shards, document, 0, self.length) for document in chosen]
        inputs, labels, _ = zip(*read, strict=True)
        return Batch(inputs=np.stack(inputs), labels=np.stack(labels))


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """An exam: documents in their own order, packed."""

    shards: Shards
    rows: int
    length: int

    def batch(self, first: int, count: int) -> Batch:
        """Rows number first .. first + count - 1."""
        check_rows(first, count, self.rows, "the exam")
        return _packed(self.shards, _as_they_are(self.shards), self.length, first, count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """Documents one behind the other: number order[i] has the places borders[i] to borders[i + 1] - 1."""

    order: Tokens
    borders: Tokens

    def find(self, place: int) -> tuple[int, int]:
        """The document at a place, and how far into it that is."""
        i = int(np.searchsorted(self.borders, place, side="right")) - 1
        return int(self.order[i]), place - int(self.borders[i])


@lru_cache(maxsize=4)
def _pieces_in_order(shards: Shards, length: int, seed: int, epoch: int) -> Line:
    order = draw(seed, "documents", epoch).permutation(shards.documents)
    return Line(order=order, borders=_sums(_pieces(shards, length)[order]))


@lru_cache(maxsize=4)
def _tokens_in_order(shards: Shards, seed: int, epoch: int) -> Line:
    order = draw(seed, "packed", epoch).permutation(shards.documents)
    return Line(order=order, borders=_sums(shards.lengths[order]))


@lru_cache(maxsize=4)
def _as_they_are(shards: Shards) -> Line:
    return Line(order=np.arange(shards.documents), borders=_sums(shards.lengths))


@lru_cache(maxsize=4)
def _pieces(shards: Shards, length: int) -> Tokens:
    """Of each document."""
    return -(-shards.lengths // length)


def _sums(lengths: Tokens) -> Tokens:
    """0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _read(shards: Shards, document: int, begin: int, length: int) -> tuple[Tokens, Tokens, int]:
    """Tokens of a document from `begin` on, padded, the tokens after them, and how many there are."""
    whole = int(shards.lengths[document])
    ids = shards.read(document, begin, min(begin + length + 1, whole))
    inputs, labels = np.full(length, PAD, np.int64), np.full(length, NOTHING, np.int64)
    count = min(length, len(ids))
    inputs[:count] = ids[:count]
    labels[: len(ids) - 1] = ids[1:]
    return inputs, labels, count


def _packed(shards: Shards, line: Line, length: int, first: int, count: int) -> Batch:
    """Rows number first .. first + count - 1 of the line."""
    begin, end = first * length, (first + count) * length
    inside = line.borders[slice(*np.searchsorted(line.borders, (begin, end)))]
    borders = np.union1d(inside, np.arange(begin, end + 1, length))
    inputs, labels = [], []
    for start, stop in pairwise(borders.tolist()):
        document, place = line.find(start)
        said, wanted, _ = _read(shards, document, place, stop - start)
        inputs.append(said)
        labels.append(wanted)
    return Batch(
        inputs=np.concatenate(inputs).reshape(count, length),
        labels=np.concatenate(labels).reshape(count, length),
        borders=borders - begin,
    )
