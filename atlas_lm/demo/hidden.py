"""The text of the demo: a tale of a few people, its sentences hidden between those of a book."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from atlas_lm.data.babi import Question
from atlas_lm.data.draws import draw
from atlas_lm.data.hiding import background, hide
from atlas_lm.data.library import Library
from atlas_lm.data.prompt import Ids, Prompt
from atlas_lm.data.sentences import book_sentences
from atlas_lm.data.stories import make_tale
from atlas_lm.text import Tokenizer

BEFORE, AFTER = 40, 24  # tokens of the book that are shown around a fact
LEAST = 1000  # tokens of a text


@dataclass(frozen=True)
class Span:
    """The tokens first to last - 1 of a text."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class HiddenTale:
    """A text as ids, piece by piece, and what can be asked at its end."""

    pieces: list[Ids]
    facts: list[Span]  # neighbouring facts are one
    questions: list[Question]
    books: list[str]  # numbers at Project Gutenberg
    book_tokens: (
        int  # of all books that are here; with more of them in the text, they are told again
    )

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))

    def passages(self) -> list[Span]:
        """Where facts stand, with some of the book around them, in order and apart from each other."""
        found: list[Span] = []
        for fact in self.facts:
            first, last = max(0, fact.first - BEFORE), min(self.tokens, fact.last + AFTER)
            if found and first <= found[-1].last:
                found[-1] = Span(found[-1].first, last)
            else:
                found.append(Span(first, last))
        return found

    def cut(self, places: list[int]) -> Iterator[Ids]:
        """The text again, cut at these places as well; they ascend."""
        cuts, begin = iter(places), 0
        cut = next(cuts, None)
        for piece in self.pieces:
            rest = piece
            while cut is not None and cut < begin + len(rest):
                if cut > begin:
                    yield rest[: cut - begin]
                    rest, begin = rest[cut - begin :], cut
                cut = next(cuts, None)
            yield rest
            begin += len(rest)

    def read(self, span: Span) -> Ids:
        """The ids of a span."""
        parts, begin = [], 0
        for piece in self.pieces:
            first, last = span.first - begin, span.last - begin
            if first < len(piece) and last > 0:
                parts.append(piece[max(0, first) : last])
            begin += len(piece)
        return np.concatenate(parts).astype(np.int64)


def hide_tale(
    tokenizer: Tokenizer, tokens: int, seed: int, library: Library | None = None
) -> HiddenTale:
    """A new tale in so many tokens of the test books, at most one sentence short of it."""
    if tokens < LEAST:
        raise ValueError(
            f"tokens is {tokens}, wanted {LEAST} or more: the tale has some 150 itself"
        )
    random = draw("demo", seed)
    questions = make_tale(random)
    facts = questions[0].facts
    books = book_sentences("test", library)
    counted = replace(books, counts=books.encoded(tokenizer).starts)
    told = sum(len(tokenizer.encode(f" {fact}")) for fact in facts)
    among = background(counted, tokens - told, random, repeat=True)
    places = np.sort(random.randint(sum(map(len, among)) + 1, size=len(facts), dtype=np.int64))
    prompt = hide(facts, among, places.tolist())
    pieces = prompt.ids(tokenizer)
    return HiddenTale(
        pieces=pieces,
        facts=_told(facts, prompt, pieces),
        questions=questions,
        books=sorted({books.names[_book(books.borders, part.first)] for part in among}),
        book_tokens=counted.tokens(),
    )


def _told(facts: Sequence[str], prompt: Prompt, pieces: list[Ids]) -> list[Span]:
    """Where the parts of a prompt stand that hold facts."""
    if len(prompt.parts) != len(pieces):
        raise ValueError(
            "the tokenizer joins characters across spaces, so nothing can be said of where facts stand; take "
            "one that begins a token at a space, as bpe-8192 does"
        )
    ends = list(accumulate(map(len, pieces)))
    spans = [Span(end - len(piece), end) for end, piece in zip(ends, pieces, strict=True)]
    return [
        span
        for span, part in zip(spans, prompt.parts, strict=True)
        if isinstance(part, str) and any(fact in part for fact in facts)
    ]


def _book(borders: np.ndarray, sentence: int) -> int:
    return int(np.searchsorted(borders, sentence, side="right")) - 1
