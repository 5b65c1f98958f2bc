"""A story of bAbI told in running text: what stands where, as ids, and which of them are answers."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from atlas_lm.data.babi import Story
from atlas_lm.data.prompt import Stretch
from atlas_lm.data.rows import NOTHING, Tokens
from atlas_lm.data.stories import OBJECTS, PEOPLE, PLACES, RECEIVERS
from atlas_lm.text import Tokenizer

EARLY = 10  # facts that are told early stand in one of so many parts of the text, the first


@dataclass(frozen=True)
class Told:
    """A fact, or a question with its answer, as it stands in the text."""

    text: str  # white space before it included
    ids: Tokens
    answer: int = 0  # ids at the end that are to be said; 0: a fact


def permuted(story: Story, task: str, random: RandomState) -> Story:
    """The story with names exchanged among people, among places and among objects, everywhere alike."""
    names: dict[str, str] = {}
    for kind in (RECEIVERS if task == "qa5" else PEOPLE, PLACES, OBJECTS):
        names |= {kind[i]: kind[n] for i, n in enumerate(random.permutation(len(kind)).tolist())}
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def renamed(text: str) -> str:
        return pattern.sub(lambda found: names[found[0]], text)

    facts = tuple(map(renamed, story[-1].facts))
    return tuple(
        replace(
            asked,
            facts=facts[: len(asked.facts)],
            question=renamed(asked.question),
            answer=renamed(asked.answer),
        )
        for asked in story
    )


def tell(story: Story, tokenizer: Tokenizer) -> list[Told]:
    """Facts and questions of a story, in the order in which they are told."""
    told: list[Told] = []
    facts = 0
    for asked in story:
        told += [_fact(fact, tokenizer) for fact in asked.facts[facts:]]
        told.append(_question(asked.question, asked.answer, tokenizer))
        facts = len(asked.facts)
    return told


@functools.lru_cache(maxsize=1 << 14)  # stories tell the same few sentences over and over
def _fact(fact: str, tokenizer: Tokenizer) -> Told:
    return Told(f" {fact}", np.array(tokenizer.encode(f" {fact}"), dtype=np.int64))


@functools.lru_cache(maxsize=1 << 14)
def _question(question: str, answer: str, tokenizer: Tokenizer) -> Told:
    asked, answered = f"\nQuestion: {question}\nAnswer:", f" {answer}."
    said = tokenizer.encode(answered)
    ids = np.array([*tokenizer.encode(asked), *said], dtype=np.int64)
    return Told(asked + answered, ids, len(said))


def told_length(told: Sequence[Told], tokenizer: Tokenizer) -> int:
    """Most ids of all that is told, whether or not it is what the row begins with."""
    first = max(len(told[0].ids), len(_bare(told[0].text, tokenizer)))
    return first + sum(len(part.ids) for part in told[1:])


def lay(
    told: Sequence[Told],
    among: Sequence[Stretch],
    lots: NDArray[np.float64],
    early: bool,
    tokenizer: Tokenizer,
) -> tuple[Tokens, Tokens]:
    """Ids and labels of a background with all that is told at places between its sentences.

    Args:
        told: a fact first, a question last, which stands at the very end.
        among: the background; its tokens are counted as the tokenizer counts them.
        lots: [len(told)] in [0, 1), by which places are chosen.
        early: all facts stand in the first tenth.
    """
    starts = _starts(among)
    cuts = starts[_places(told, lots, len(starts) - 1, early)]
    ids = _woven(told, among, cuts, tokenizer)
    ends = cuts + np.cumsum([len(part.ids) for part in told])
    labels = label_answers(ids, ends.tolist(), [part.answer for part in told])
    first = len(told[0].ids) if cuts[0] == 0 else int(starts[1])
    text = (
        told[0].text if cuts[0] == 0 else among[0].source.read(among[0].first, among[0].first + 1)
    )
    bare = _bare(text, tokenizer)
    silence = np.full(len(bare), NOTHING, np.int64)
    return np.concatenate([bare, ids[first:]]), np.concatenate([silence, labels[first:]])


def label_answers(ids: Tokens, ends: Sequence[int], answers: Sequence[int]) -> Tokens:
    """Labels [n] of ids [n]: so many ids up to each end are to be said, each after the one before it."""
    labels = np.full(len(ids), NOTHING, np.int64)
    for end, answer in zip(ends, answers, strict=True):
        labels[end - answer - 1 : end - 1] = ids[end - answer : end]
    return labels


def _starts(among: Sequence[Stretch]) -> Tokens:
    """Where each sentence of a background begins, in tokens, and where the last one ends."""
    lengths = [np.diff(part.source.counts[part.first : part.last + 1]) for part in among]
    return np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)


def _places(told: Sequence[Told], lots: NDArray[np.float64], sentences: int, early: bool) -> Tokens:
    """Of all that is told the number of sentences before it, ascending."""
    is_fact = np.array([not part.answer for part in told])
    latest = sentences // EARLY if early else sentences
    facts = np.sort((lots[is_fact] * (latest + 1)).astype(np.int64))
    known = np.cumsum(is_fact)[~is_fact]  # facts that each question knows
    low, high = facts[known - 1], np.append(facts, sentences)[known]
    places = np.empty(len(told), np.int64)
    places[is_fact] = facts
    places[~is_fact] = low + (lots[~is_fact] * (high - low + 1)).astype(np.int64)
    places[-1] = sentences
    return np.sort(places)  # only questions between the same two facts can change places


def _woven(
    told: Sequence[Told], among: Sequence[Stretch], cuts: Tokens, tokenizer: Tokenizer
) -> Tokens:
    """The ids of a background with those that are told, each before the token of its cut."""
    text = np.concatenate([np.zeros(0, np.int64), *(part.ids(tokenizer) for part in among)])
    pieces = np.split(text, cuts)
    return np.concatenate(
        [ids for piece, part in zip(pieces, told, strict=False) for ids in (piece, part.ids)]
    )


@functools.lru_cache(maxsize=1 << 10)
def _bare(text: str, tokenizer: Tokenizer) -> Tokens:
    """The ids of a text without the white space before it, as the first of all."""
    return np.array(tokenizer.encode(text[1:]), dtype=np.int64)
