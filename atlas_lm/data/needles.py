"""Needles in a haystack as RULER (Hsieh et al. 2024, arXiv 2404.06654) has them, to any length.

Numbers, words or identifiers are told in sentences of one form somewhere in a long text and asked for at its
end. Two things are ours: lengths are GPT-2 tokens, so that every model gets the same samples, and keys are
drawn from words of our own.
"""

import functools
import hashlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState

from atlas_lm.data.asked import Asked
from atlas_lm.data.draws import draw
from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.hiding import background, hide
from atlas_lm.data.library import BUNDLED, Library
from atlas_lm.data.prompt import Prompt, Repeat, Running, Stretch
from atlas_lm.data.sentences import Sentences, collection, essay_sentences
from atlas_lm.data.words import ADJECTIVES, NOUNS

ANSWER_TOKENS = 128  # of an answer, counted into the length
# per cent of a text at which needles may stand
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(np.int64)
LINES = 4096  # of the smallest haystack of needles; each larger one has 4 times as many
# one pair of words in so many is a key that is asked for, the others are for haystacks
ASKED_FOR = 10


@dataclass(frozen=True, kw_only=True)
class Needles:
    """One kind of task."""

    haystack: str  # noise, essays, or needles that nobody asks for
    key: str = "words"  # or uuids
    value: str = "numbers"  # or uuids
    keys: int = 1  # told
    values: int = 1  # of each key
    queries: int = 1  # keys that are asked for


KINDS = {
    "single_1": Needles(haystack="noise"),
    "single_2": Needles(haystack="essays"),
    "single_3": Needles(haystack="essays", value="uuids"),
    "multikey_1": Needles(haystack="essays", keys=4),
    "multikey_2": Needles(haystack="needles"),
    "multikey_3": Needles(haystack="needles", key="uuids", value="uuids"),
    "multivalue": Needles(haystack="essays", values=4),
    "multiquery": Needles(haystack="essays", keys=4, queries=4),
}


def hide_needles(kind: str, length: int, library: Library | None, *name: int | str) -> Asked:
    """One sample.

    Args:
        kind: one of KINDS.
        length: GPT-2 tokens of prompt and answer together, at most; an answer has 128.
        name: of the draw; the same name gives the same sample.
    """
    if kind not in KINDS:
        raise ValueError(f"kind of needles is {kind!r}, wanted one of {', '.join(KINDS)}")
    random, chosen = draw("needles", kind, *name), KINDS[kind]
    told: dict[str, list[str]] = {}
    while len(told) < chosen.keys:
        told.setdefault(_key(chosen.key, random), _values(chosen, random))
    needles = [_needle(chosen.value, key, value) for key in told for value in told[key]]
    needles = [needles[i] for i in random.permutation(len(needles))]
    asked = [list(told)[i] for i in random.permutation(len(told))[: chosen.queries]]
    before, question, lead = _frame(chosen, asked)
    taken = sum(count_tokens([before, question, lead, *(f"\n{text}" for text in needles)]))
    room = length - ANSWER_TOKENS - taken
    context, places = _haystack(chosen, needles, room, library, random)
    return Asked(
        prompt=context.within(before, question),
        lead=lead,
        targets=tuple(value for key in asked for value in told[key]),
        most=ANSWER_TOKENS,
        notes={"places": places},
    )


def share_told(targets: Sequence[str], answer: str) -> float:
    """The share of the targets that the answer holds, whatever the case of its letters.

    >>> share_told(("17", "ab-3"), "They are 17 and AB-4.")
    0.5
    """
    return sum(target.lower() in answer.lower() for target in targets) / len(targets)


def _haystack(
    kind: Needles, needles: list[str], room: int, library: Library | None, random: RandomState
) -> tuple[Prompt, list[int]]:
    """The context of at most `room` tokens beside the needles, and where they stand in it."""
    room = max(room, 0)
    among: Sequence[Running]
    if kind.haystack == "essays":
        among = background(essay_sentences(library), room, random, repeat=True)
    else:
        among = [_noise(room) if kind.haystack == "noise" else _other_needles(kind, room, random)]
    sentences = sum(map(len, among))
    if sentences < len(needles):
        raise ValueError(
            f"{len(needles)} needles and their question leave {room} tokens for a haystack, too few; "
            "take a longer length"
        )
    if kind.haystack == "essays":
        depths = random.permutation(DEPTHS)[: len(needles)]
        places = sorted(int(sentences * depth / 100) for depth in depths)
        return hide(needles, among, places), places
    places = sorted(random.permutation(sentences)[: len(needles)].tolist())
    return hide(needles, among, places, lead="\n"), places


def _noise(room: int) -> Running:
    line = f"\n{ruler_words()['noise']}"
    return Repeat(line, room // count_tokens([line])[0])


def _other_needles(kind: Needles, room: int, random: RandomState) -> Running:
    """A stretch of a large collection of needles, from a random place on."""
    lines, source = LINES, _collection(kind, LINES)
    while lines * source.tokens() / len(source) < 2 * room:
        lines *= 4
    source = _collection(kind, lines)
    latest = int(np.searchsorted(source.counts, source.tokens() - room, side="right")) - 1
    first = int(random.randint(latest + 1, dtype=np.int64))
    return Stretch(source, first, source.reach(first, len(source), room))


def _collection(kind: Needles, lines: int) -> Sentences:
    name = f"needles-{kind.key}-{kind.value}-{lines}-{_made_of()}"
    return collection(name, lambda: [("needles", list(_lines(kind, lines)))])


@functools.cache
def _made_of() -> str:
    """Tells collections apart that were made of other words."""
    words = json.dumps([ruler_words()["needle"], ADJECTIVES, NOUNS, ASKED_FOR])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _lines(kind: Needles, lines: int) -> Iterator[str]:
    random = draw("needles", "haystack", kind.key, kind.value)
    for _ in range(lines):
        key, value = _key(kind.key, random, asked=False), _value(kind.value, random)
        yield f"\n{_needle(kind.value, key, value)}"


def _needle(kinds: str, key: str, value: str) -> str:
    text: str = ruler_words()["needle"].format(kinds=kinds, key=key, value=value)
    return text


def _frame(kind: Needles, asked: list[str]) -> tuple[str, str, str]:
    """What stands before the context, the question behind it, and how the answer begins."""
    words = ruler_words()["one" if kind.queries * kind.values == 1 else "many"]
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    fill = {"kind": kind.value[:-1], "kinds": kind.value, "query": query}
    before, question, lead = (
        words[part].format(**fill) for part in ("before", "question", "answer")
    )
    return before, question, lead


def _values(kind: Needles, random: RandomState) -> list[str]:
    return [_value(kind.value, random) for _ in range(kind.values)]


def _value(kind: str, random: RandomState) -> str:
    return _uuid(random) if kind == "uuids" else str(random.randint(10**6, 10**7, dtype=np.int64))


def _key(kind: str, random: RandomState, asked: bool = True) -> str:
    """A key; of the pairs of words some are only asked for and the others only stand in haystacks."""
    if kind == "uuids":
        return _uuid(random)
    while True:
        number = int(random.randint(len(ADJECTIVES) * len(NOUNS), dtype=np.int64))
        left, right = divmod(number, len(NOUNS))
        if ((left + right) % ASKED_FOR == 0) == asked:
            return f"{ADJECTIVES[left]}-{NOUNS[right]}"


def _uuid(random: RandomState) -> str:
    return str(uuid.UUID(bytes=random.bytes(16), version=4))


@functools.cache
def ruler_words() -> dict[str, Any]:
    """The sentences of RULER."""
    words: dict[str, Any] = json.loads((BUNDLED / "ruler_prompts.json").read_text(encoding="utf-8"))
    return words
