"""Prompts of any length: literal text and running text from elsewhere, told as text or as token ids."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.sentences import BLOCK, Sentences
from atlas_lm.text import Tokenizer, cuts_freely

Ids = NDArray[Any]  # [n] of integers


class Running(Protocol):
    """Sentences (or lines) one after the other, each with a space (or line end) before it."""

    def __len__(self) -> int: ...

    def cut(self, first: int, last: int) -> "Running":
        """The sentences first to last - 1 of these."""
        ...

    def pieces(self) -> Iterator[str]:
        """The text, piece by piece."""
        ...

    def ids(self, tokenizer: Tokenizer) -> Ids: ...

    @property
    def tokens(self) -> int:
        """Its length in GPT-2 tokens."""
        ...


@dataclass(frozen=True)
class Stretch:
    """The sentences first to last - 1 of a collection."""

    source: Sentences
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def cut(self, first: int, last: int) -> "Stretch":
        return Stretch(self.source, self.first + first, self.first + last)

    def pieces(self) -> Iterator[str]:
        for first in range(self.first, self.last, BLOCK):
            yield self.source.read(first, min(first + BLOCK, self.last))

    def ids(self, tokenizer: Tokenizer) -> Ids:
        return self.source.encoded(tokenizer).read(self.first, self.last)

    @property
    def tokens(self) -> int:
        return self.source.tokens(self.first, self.last)


@dataclass(frozen=True)
class Repeat:
    """One line again and again."""

    line: str  # white space before it included
    times: int

    def __len__(self) -> int:
        return self.times

    def cut(self, first: int, last: int) -> "Repeat":
        return Repeat(self.line, last - first)

    def pieces(self) -> Iterator[str]:
        for first in range(0, self.times, BLOCK):
            yield self.line * min(BLOCK, self.times - first)

    def ids(self, tokenizer: Tokenizer) -> Ids:
        return np.tile(_line_ids(self.line, tokenizer), self.times)

    @property
    def tokens(self) -> int:
        return self.times * count_tokens([self.line])[0]


@lru_cache(maxsize=64)  # samples repeat the same few lines, several times each
def _line_ids(line: str, tokenizer: Tokenizer) -> Ids:
    return np.array(tokenizer.encode(line), dtype=np.uint32)


Part = str | Running


@dataclass(frozen=True)
class Prompt:
    """Parts that stand one behind the other, nothing between them.

    Running text begins with white space and no part ends with it, so that tokenizers which cut there may
    take the parts one by one.
    """

    parts: tuple[Part, ...]

    def pieces(self) -> Iterator[str]:
        """The text, piece by piece."""
        for part in self.parts:
            yield from [part] if isinstance(part, str) else part.pieces()

    def text(self) -> str:
        return "".join(self.pieces())

    def ids(self, tokenizer: Tokenizer) -> list[Ids]:
        """Its ids, piece by piece; those of running text come from the disk where the tokenizer allows it."""
        if not cuts_freely(tokenizer):
            return [np.array(tokenizer.encode(self.text()), dtype=np.int64)]
        told = iter(tokenizer.encode_all([part for part in self.parts if isinstance(part, str)]))
        return [
            np.array(next(told)) if isinstance(part, str) else part.ids(tokenizer)
            for part in self.parts
        ]

    @cached_property
    def tokens(self) -> int:
        """Its length in GPT-2 tokens."""
        told = [part for part in self.parts if isinstance(part, str)]
        return sum(count_tokens(told)) + sum(p.tokens for p in self.parts if not isinstance(p, str))

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode("utf-8"))
        return digest.hexdigest()

    def within(self, before: str, after: str) -> "Prompt":
        """The prompt with text before and after it."""
        return join([before, *self.parts, after])


def join(parts: list[Part]) -> Prompt:
    """A prompt in which neighbouring literal texts are one part, and empty ones are left out."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif len(part):
            joined.append(part)
    return Prompt(tuple(joined))
