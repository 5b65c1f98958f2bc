"""How well a model foretells running text: books by position and by context, and enwik8."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.babilong import parse_length
from atlas_lm.data.files import book_texts, enwik8
from atlas_lm.evaluate.line import Line
from atlas_lm.evaluate.reader import Reader, Tell, TooLong
from atlas_lm.evaluate.task import Cell, Record, Row, Sample, truncation, windowing
from atlas_lm.evaluate.tasks.options import Options, first_few
from atlas_lm.text import Tokenizer

BOOKS = 8  # read of a split, the longest
LENGTH = "16k"
SHORTEST_TEXT = 16  # tokens or bytes; less says nothing
TARGET = 1024  # tokens at the end of a text that every context has to foretell
SHORTEST = 256  # tokens before the first border between positions; then they double
TEST_BYTES = 5_000_000  # at the end of enwik8
LETTERS = 8  # of a text for each token that is wanted; enough for any tokenizer of words


class BooksByPosition:
    """Loss by position: books are read from their beginning; does a model still gain far into them?"""

    name = "books/position"
    axis = "position"

    def __init__(self, options: Options) -> None:
        options.check(self.name, "lengths", "split")
        self._length = _one_length(self.name, options)
        self._options = options
        self._books = _longest_books(options)

    @property
    def settings(self) -> dict[str, Any]:
        return _settings(self._options, self._length, self._books)

    def samples(self) -> list[Sample]:
        return [
            Sample(id=f"{self.name}/{name}", cell={}, index=index, tokens=self._length)
            for index, (name, _) in enumerate(self._books)
        ]

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        lines = [_beginning(self._books[s.index], reader.tokenizer, self._length) for s in samples]
        return [
            {
                "book": self._books[sample.index][0],
                "tokens": len(nats),
                "window": reader.window(line),
                "nats": _by_position(nats),
            }
            for sample, line, nats in zip(samples, lines, reader.losses(lines, tell), strict=True)
        ]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows = []
        for border in records[0]["nats"]:
            found = [record["nats"][border] for record in records if border in record["nats"]]
            cell = {"position": border}
            means = [nats / count for nats, count in found]
            rows.append(_mean_row(self.name, cell, means, windowing(records)))
        return rows


class BooksByContext:
    """Loss of the same tokens with more and more text before them: what is context worth?"""

    name = "books/context"
    axis = "context"

    def __init__(self, options: Options) -> None:
        options.check(self.name, "lengths", "split")
        lengths = options.lengths or ("0", "1k", "4k", LENGTH)
        self._contexts = {length: parse_length(length) for length in lengths}
        self._options = options
        self._books = _longest_books(options)

    @property
    def settings(self) -> dict[str, Any]:
        longest = max(self._contexts.values())
        return _settings(self._options, longest, self._books) | {"contexts": list(self._contexts)}

    def samples(self) -> list[Sample]:
        return [
            Sample(
                id=f"{self.name}/{length}/{name}",
                cell={"context": length},
                index=index,
                tokens=tokens + TARGET,
            )
            for length, tokens in self._contexts.items()
            for index, (name, _) in enumerate(self._books)
        ]

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        longest, context = max(self._contexts.values()), self._contexts[samples[0].cell["context"]]
        lines = []
        for sample in samples:
            whole = _beginning(self._books[sample.index], reader.tokenizer, longest + TARGET)
            lines.append(_with_target(reader, whole.cut(longest - context, len(whole))))
        return [
            {
                "score": float(np.nanmean(nats[-TARGET:])),
                "tokens": len(nats),
                "truncated": line.left_out,
            }
            for line, nats in zip(lines, reader.losses(lines, tell), strict=True)
        ]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        cells: dict[str, list[Record]] = {}
        for record in records:
            cells.setdefault(record["cell"]["context"], []).append(record)
        return [
            _mean_row(self.name, {"context": c}, [one["score"] for one in found], truncation(found))
            for c, found in cells.items()
        ]


class Enwik8:
    """Bits per byte of the last five million bytes of enwik8, the customary test part, in one stream."""

    name = "enwik8"
    axis = None

    def __init__(self, options: Options) -> None:
        options.check(self.name, "lengths")
        self._bytes = _one_length(self.name, options, TEST_BYTES)
        if options.count not in (None, 1):
            raise ValueError(f"enwik8 is one stream, got {options.count} samples; leave that out")
        self._options = options

    @property
    def settings(self) -> dict[str, Any]:
        found = self._options.library.find("enwik8")
        return {"bytes": self._bytes, "data": {"enwik8": [found.description, found.fingerprint]}}

    def samples(self) -> list[Sample]:
        return [Sample(id=self.name, cell={}, index=0, tokens=self._bytes)]

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        data = enwik8(self._options.library)[-TEST_BYTES:][: self._bytes]
        text = data.decode("utf-8", errors="ignore")  # a letter that the border cuts is left out
        ids = reader.tokenizer.encode(text)
        line = Line.of(ids)
        [nats] = reader.losses([line], tell)
        foretold = len(text.encode("utf-8"))
        if math.isnan(nats[0]):  # nothing stood before the first token
            foretold -= len(reader.tokenizer.decode(ids[:1]).encode("utf-8"))
        return [
            {
                "nats": float(np.nansum(nats, dtype=np.float64)),
                "bytes": foretold,
                "tokens": len(nats),
                "window": reader.window(line),
            }
        ]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        [record] = records
        bits = record["nats"] / math.log(2) / record["bytes"]
        notes = (f"{record['bytes']:,} bytes", *windowing(records))
        return [
            Row(task=self.name, cell={}, metric="bits per byte", value=bits, count=1, notes=notes)
        ]


def _one_length(task: str, options: Options, usual: int | None = None) -> int:
    if options.lengths is None:
        return parse_length(LENGTH) if usual is None else usual
    if len(options.lengths) != 1:
        raise ValueError(f"{task} takes one length, got {', '.join(options.lengths)}")
    length = parse_length(options.lengths[0])
    if length < SHORTEST_TEXT:
        raise ValueError(f"{task} has a length of {length}, wanted {SHORTEST_TEXT} or more")
    return length


def _longest_books(options: Options) -> list[tuple[str, str]]:
    """Name and text; which they are depends on the texts alone, so every model reads the same ones."""
    texts = sorted(book_texts(options.split, options.library), key=lambda book: -len(book[1]))
    count = first_few(options.count, len(texts), f"books ({options.split})")
    return texts[: count if options.count else min(BOOKS, count)]


def _settings(options: Options, length: int, books: list[tuple[str, str]]) -> dict[str, Any]:
    found = options.library.find(f"books/{options.split}")
    return {
        "length": length,
        "split": options.split,
        "books": [name for name, _ in books],
        "data": {f"books/{options.split}": [found.description, found.fingerprint]},
    }


def _beginning(book: tuple[str, str], tokenizer: Tokenizer, tokens: int) -> Line:
    """The first tokens of a book."""
    name, text = book
    ids = tokenizer.encode(text[: LETTERS * tokens])
    if len(ids) < tokens:
        raise ValueError(
            f"book {name} has {len(ids):,} tokens for this model, and {tokens:,} are wanted; take a shorter "
            "length, fewer books (--samples), or larger data (`atlas data` says what there is)"
        )
    return Line.of(ids[:tokens])


def _with_target(reader: Reader, line: Line) -> Line:
    """The line, if the model takes it; else, if it may be cut, without the oldest of its context."""
    if reader.limit is None or len(line) <= reader.limit or not reader.truncate:
        return reader.fitting(line)
    if reader.limit < TARGET:
        raise TooLong(
            f"{TARGET:,} tokens are to be foretold, but {reader.name} takes {reader.limit:,}"
        )
    return line.ending(reader.limit)


def _by_position(nats: NDArray[np.float32]) -> dict[str, tuple[float, int]]:
    """Sum and number of the losses between doubling positions, by the position where each stretch ends."""
    found, first, border = {}, 0, SHORTEST
    while first < len(nats):
        part = nats[first:border]
        part = part[~np.isnan(part)]
        if len(part):
            found[str(min(border, len(nats)))] = (float(part.sum(dtype=np.float64)), len(part))
        first, border = border, 2 * border
    return found


def _mean_row(task: str, cell: Cell, values: list[float], notes: tuple[str, ...] = ()) -> Row:
    """The mean over books, and how far books differ."""
    if len(values) > 1:
        notes = (f"books differ by {np.std(values):.2f} (standard deviation)", *notes)
    return Row(
        task=task,
        cell=cell,
        metric="nats per token",
        value=float(np.mean(values)),
        count=len(values),
        notes=notes,
    )
