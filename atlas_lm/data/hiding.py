"""Hide a few sentences in a long text: background from a collection, what is told at chosen places."""

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.prompt import Part, Prompt, Running, Stretch, join
from atlas_lm.data.sentences import Sentences

ORDERED = 1024  # sentences that are drawn at once


def background(
    source: Sentences, tokens: int, random: RandomState, repeat: bool = False
) -> list[Stretch]:
    """Running text of at most so many GPT-2 tokens, whole sentences; at most one sentence short of it.

    It begins at a random sentence of a random text and goes on with the other texts in random order, each
    from its beginning; what stands before the first sentence comes last. Nothing is told twice, unless
    `repeat` allows to begin anew, in another order, when all is told.
    """
    if tokens > source.tokens() and not repeat:
        raise ValueError(
            f"a background of {tokens:,} tokens is wanted, and the texts have {source.tokens():,}; take a "
            "shorter one, or larger data (`atlas data` says what there is)"
        )
    found: list[Stretch] = []
    while tokens >= source.tokens():
        found += _round(source, tokens, random)
        tokens -= source.tokens()
    return found + _round(source, tokens, random)


def single_sentences(
    source: Sentences, chosen: NDArray[np.int64], tokens: int, random: RandomState
) -> list[Stretch]:
    """Sentences of a choice in random order, of at most so many tokens, as often as it takes.

    chosen: [n] numbers of sentences, at least one.
    """
    found: list[Stretch] = []
    while True:
        for number in random.permutation(chosen)[:ORDERED].tolist():
            stretch = Stretch(source, number, number + 1)
            if stretch.tokens > tokens:
                return found
            found.append(stretch)
            tokens -= stretch.tokens


def _round(source: Sentences, tokens: int, random: RandomState) -> list[Stretch]:
    """Every text at most once."""
    order = random.permutation(len(source.names))
    borders = [(int(source.borders[text]), int(source.borders[text + 1])) for text in order]
    first, last = borders[0]
    start = first + int(random.randint(max(1, last - first), dtype=np.int64))
    found: list[Stretch] = []
    for begin, end in [(start, last), *borders[1:], (first, start)]:
        reach = source.reach(begin, end, tokens)
        if reach > begin:
            found.append(Stretch(source, begin, reach))
            tokens -= found[-1].tokens
        if reach < end:
            break
    return found


def hide(
    told: Sequence[str], among: Sequence[Running], places: Sequence[int], lead: str = " "
) -> Prompt:
    """The sentences told, in order, each before the background sentence of its place.

    Args:
        places: ascending, 0 to the number of background sentences; there it stands at the very end.
        lead: what stands before a sentence that is told; not before the first of all.
    """
    parts: list[Part] = []
    for part in _interleaved([f"{lead}{text}" for text in told], among, places):
        parts += _begun(part) if not parts else [part]
    return join(parts)


def _interleaved(
    told: Sequence[str], among: Sequence[Running], places: Sequence[int]
) -> Iterator[Part]:
    begin, waiting = 0, list(zip(places, told, strict=True))
    for running in among:
        here = [(place - begin, text) for place, text in waiting if place < begin + len(running)]
        waiting = waiting[len(here) :]
        cuts = [0, *(place for place, _ in here), len(running)]
        for (left, right), text in zip(pairwise(cuts), [*(t for _, t in here), ""], strict=True):
            if right > left:
                yield running.cut(left, right)
            if text:
                yield text
        begin += len(running)
    yield from (text for _, text in waiting)


def _begun(part: Part) -> list[Part]:
    """A text does not begin with white space: of running text at its beginning one sentence is told."""
    if isinstance(part, str):
        return [part[1:]]
    first = "".join(part.cut(0, 1).pieces())[1:]
    return [first, part.cut(1, len(part))]


def told_tokens(told: Sequence[str]) -> int:
    """GPT-2 tokens of sentences with white space before each."""
    return sum(map(_told_tokens, told))


@functools.lru_cache(maxsize=1 << 14)  # stories tell the same few sentences over and over
def _told_tokens(text: str) -> int:
    return count_tokens([f" {text}"])[0]
