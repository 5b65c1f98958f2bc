"""Large texts as collections of sentences: split once, kept on disk, read without copying.

A context of ten million tokens is then a few hundred stretches of such a collection, whose text, length and
token ids are slices of mapped files.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.files import book_texts, essay_texts
from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.kept import keep_folder
from atlas_lm.data.library import Library, cache_folder
from atlas_lm.text import Tokenizer

VERSION = 1  # of what is kept on disk
SHORTEST = 10  # GPT-2 tokens of a sentence; shorter ones are left out, as in BABILong
LONGEST = 300  # longer ones are tables and lists, which have no sentences; 3 % of the test books
BLOCK = 4096  # sentences that are handed on at once
SEARCHED = 1 << 16  # sentences that are searched at once

OPENING, CLOSING = "\"'“‘([_", "\"'”’)]_"  # noqa: RUF001
END = re.compile(
    rf"[.!?]+[{re.escape(CLOSING)}]*(\s+)(?=[{re.escape(OPENING)}]*[A-Z0-9])|(\n\s*\n\s*)"
)
# a full stop after these is seldom the end of a sentence
SHORT_FORMS = frozenset(
    "Mr Mrs Ms Dr St Prof Rev Hon Sir Capt Col Gen Lieut Lt Maj Sergt Messrs Mme Mlle Jr Sr Esq vol Vol "
    "No no p pp Fig fig ch Chap chap i.e e.g etc viz vs cf".split()
)


def split_sentences(text: str) -> Iterator[str]:
    """The sentences of a text, without the white space around them.

    A sentence ends at `.`, `!` or `?`, quotes and brackets behind it, if white space and a capital or a
    digit follow; not after a title or an initial; and always at an empty line.

    >>> list(split_sentences('Mr. J. Hay left. "Why?" he asked.\\n\\nNobody knew'))
    ['Mr. J. Hay left.', '"Why?" he asked.', 'Nobody knew']
    """
    start = 0
    for found in END.finditer(text):
        blank = found.group(2) is not None
        if not blank and _goes_on(text, start, found.start()):
            continue
        yield text[start : found.start(2 if blank else 1)].strip()
        start = found.end()
    yield text[start:].strip()


def _goes_on(text: str, start: int, stop: int) -> bool:
    """Whether the full stop at `stop` belongs to a title or an initial."""
    word = text[start:stop].rpartition(" ")[2].rpartition("\n")[2].lstrip(OPENING)
    return text[stop] == "." and (word in SHORT_FORMS or (len(word) == 1 and word.isupper()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Sentences:
    """A collection of texts, sentence by sentence, each with one space (or line end) before it.

    Sentence i is text[starts[i] : starts[i + 1]]; tokens up to it are counts[i]; text number b has the
    sentences borders[b] to borders[b + 1] - 1.
    """

    folder: Path
    names: tuple[str, ...]
    text: NDArray[np.uint8]  # UTF-8
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]  # of GPT-2
    borders: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """GPT-2 tokens of the sentences first to last - 1."""
        end = len(self) if last is None else last
        return int(self.counts[end] - self.counts[first])

    def read(self, first: int, last: int) -> str:
        """The text of the sentences first to last - 1, white space before each."""
        return self.text[self.starts[first] : self.starts[last]].tobytes().decode("utf-8")

    def reach(self, first: int, last: int, tokens: int) -> int:
        """The furthest end <= last such that the sentences first to end - 1 have at most so many tokens."""
        most = int(self.counts[first]) + tokens
        end = int(np.searchsorted(self.counts, most, side="right")) - 1
        return max(first, min(end, last))

    def naming(self, words: Iterable[str]) -> NDArray[np.int64]:
        """Numbers of the sentences that hold one of these words, ascending."""
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b".encode())
        found: list[NDArray[np.int64]] = []
        for first in range(0, len(self), SEARCHED):
            last = min(first + SEARCHED, len(self))
            begin = int(self.starts[first])
            text = self.text[begin : self.starts[last]].tobytes()
            places = np.array([hit.start() for hit in pattern.finditer(text)], dtype=np.int64)
            found.append(np.searchsorted(self.starts, places + begin, side="right") - 1)
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def encoded(self, tokenizer: Tokenizer) -> "Encoded":
        """The collection in the ids of a tokenizer, made when it is first wanted and kept on disk."""
        path = self.folder / f"ids-{tokenizer.key}"
        if not path.is_dir():
            keep_folder(path, lambda folder: _encode(self, tokenizer, folder))
        return _open_ids(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Ids of a collection: sentence i is ids[starts[i] : starts[i + 1]]."""

    ids: NDArray[np.uint32]
    starts: NDArray[np.int64]

    def read(self, first: int, last: int) -> NDArray[np.uint32]:
        return self.ids[self.starts[first] : self.starts[last]]


def book_sentences(split: str, library: Library | None = None) -> Sentences:
    """The sentences of the books of a split."""
    library = library or Library()
    key = library.find(f"books/{split}").fingerprint
    return collection(f"books-{split}-{key}", lambda: _split_all(book_texts(split, library)))


def essay_sentences(library: Library | None = None) -> Sentences:
    """The sentences of the essays."""
    library = library or Library()
    key = library.find("essays").fingerprint
    return collection(f"essays-{key}", lambda: _split_all(essay_texts(library)))


def collection(name: str, texts: Callable[[], Iterable[tuple[str, list[str]]]]) -> Sentences:
    """A collection, opened from the disk or made there.

    Args:
        name: tells it from all others; what it is made of must follow from it.
        texts: name and sentences of each text, white space before each sentence.
    """
    path = cache_folder() / "sentences" / f"{name}-{VERSION}"
    if not path.is_dir():
        keep_folder(path, lambda folder: _build(texts(), folder))
    return _open(path)


def _split_all(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for name, text in texts:
        yield name, [f" {sentence}" for sentence in split_sentences(text) if sentence]


@functools.cache
def _open(path: Path) -> Sentences:
    def load(name: str) -> NDArray[np.int64]:
        return np.load(path / f"{name}.npy")

    text = np.load(path / "text.npy", mmap_mode="r")
    names = tuple(json.loads((path / "names.json").read_text(encoding="utf-8")))
    parts = {name: load(name) for name in ("starts", "counts", "borders")}
    return Sentences(folder=path, names=names, text=text, **parts)


@functools.cache
def _open_ids(path: Path) -> Encoded:
    ids, starts = np.load(path / "ids.npy", mmap_mode="r"), np.load(path / "starts.npy")
    return Encoded(ids=ids, starts=starts)


def _build(texts: Iterable[tuple[str, list[str]]], folder: Path) -> None:
    """Write what `_open` reads: the sentences that are neither too short nor too long."""
    names, borders = [], [0]
    parts: list[bytes] = []
    counts: list[int] = []
    for name, sentences in texts:
        for sentence, count in zip(sentences, count_tokens(sentences), strict=True):
            if SHORTEST <= count <= LONGEST:
                parts.append(sentence.encode("utf-8"))
                counts.append(count)
        names.append(name)
        borders.append(len(parts))
    np.save(folder / "text.npy", np.frombuffer(b"".join(parts), dtype=np.uint8))
    np.save(folder / "starts.npy", _sums([len(part) for part in parts]))
    np.save(folder / "counts.npy", _sums(counts))
    np.save(folder / "borders.npy", np.array(borders, dtype=np.int64))
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")


def _encode(sentences: Sentences, tokenizer: Tokenizer, folder: Path) -> None:
    lengths: list[int] = []
    blocks = []
    for first in range(0, len(sentences), BLOCK):
        last = min(first + BLOCK, len(sentences))
        found = tokenizer.encode_all([sentences.read(i, i + 1) for i in range(first, last)])
        lengths += map(len, found)
        blocks.append(np.fromiter((n for ids in found for n in ids), dtype=np.uint32))
    np.save(folder / "ids.npy", np.concatenate(blocks))
    np.save(folder / "starts.npy", _sums(lengths))


def _sums(lengths: list[int]) -> NDArray[np.int64]:
    """0 and the running sums."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
