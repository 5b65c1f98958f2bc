"""Facts, then something that may drive them out: how much of a memory is left after an attack.

A few facts are told once, hostile text follows, then one of the facts is asked for. Attacks:

noise          random words, which mean nothing
repetition     one of the other facts, again and again
contradiction  other values for some of the other facts; the one asked for is not among them
near_keys      other values for keys that look almost like those of the facts
correction     no attack: the fact asked for is told anew with another value, and that one is right

`letters` are the texts of examples/recall-tiny (`k=7 `, then `k?`), `sentences` plain English.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from atlas_lm.data.asked import Asked
from atlas_lm.data.draws import draw
from atlas_lm.data.prompt import join
from atlas_lm.data.words import ADJECTIVES, NOUNS

FACTS = 8
Pair = tuple[str, str]  # key and value

FIRST_NAMES = (
    "Alice Bruno Clara Daniel Edith Felix Greta Hugo "
    "Irene Jonas Karla Leon Marta Nils Olga Peter".split()
)
LAST_NAMES = (
    "Archer Baker Carter Dyer Fisher Glover Hunter Mason Miller Potter Smith Turner".split()
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How facts, questions and noise are written."""

    tell: Callable[[str, str], str]
    ask: Callable[[str], tuple[str, str]]  # of a key the question, and how the answer begins
    keys: Callable[[RandomState], list[str]]  # different ones, in random order, more than enough
    near: Callable[[str, RandomState], str]  # a key that looks like this one
    value: Callable[[RandomState], str]
    noise: Callable[[RandomState], str]  # a word of it
    answer_tokens: int


def _text(letters: str, size: int, random: RandomState) -> str:
    return "".join(letters[i] for i in random.randint(len(letters), size=size, dtype=np.int64))


def _choice(words: tuple[str, ...] | list[str], random: RandomState) -> str:
    return words[int(random.randint(len(words), dtype=np.int64))]


def _shuffled(words: list[str], random: RandomState) -> list[str]:
    return [words[i] for i in random.permutation(len(words))]


def _other_surname(key: str, random: RandomState) -> str:
    first, last = key.split()
    return f"{first} {_choice([name for name in LAST_NAMES if name != last], random)}"


STYLES = {
    "letters": Style(
        tell=lambda key, value: f"{key}={value} ",
        ask=lambda key: (f"{key}?", ""),
        keys=lambda random: _shuffled(list(string.ascii_lowercase), random),
        near=lambda key, random: key.upper(),
        value=lambda random: _text(string.digits, 1, random),
        noise=lambda random: _text(string.ascii_lowercase + string.digits, 3, random) + " ",
        answer_tokens=1,
    ),
    "sentences": Style(
        tell=lambda key, value: f"The code of {key} is {value}. ",
        ask=lambda key: (
            f"\nQuestion: What is the code of {key}?\nAnswer:",
            f" The code of {key} is",
        ),
        keys=lambda random: [
            f"{first} {_choice(LAST_NAMES, random)}" for first in _shuffled(FIRST_NAMES, random)
        ],
        near=_other_surname,
        value=lambda random: _text(string.digits, 4, random),
        noise=lambda random: _choice(ADJECTIVES + NOUNS, random) + " ",
        answer_tokens=8,
    ),
}


def poison(attack: str, strength: int, style: str, *name: int | str) -> Asked:
    """One sample: facts, an attack of so many hostile words or facts, and a question.

    The same name gives the same facts and question, whatever the strength.
    """
    if attack not in ATTACKS or style not in STYLES or strength < 0:
        raise ValueError(
            f"got attack {attack!r}, style {style!r}, strength {strength}; wanted an attack of "
            f"{', '.join(ATTACKS)}, a style of {', '.join(STYLES)}, and a strength of 0 or more"
        )
    written, random = STYLES[style], draw("poison", style, *name)
    keys = written.keys(random)[:FACTS]
    facts = [(key, written.value(random)) for key in keys]
    asked, value = facts[int(random.randint(FACTS, dtype=np.int64))]
    others = [fact for fact in facts if fact[0] != asked]
    hostile, value = ATTACKS[attack](written, (asked, value), others, strength, random)
    question, lead = written.ask(asked)
    told = "".join(written.tell(*fact) for fact in facts)
    text = f"{told}{hostile}"
    # a question on a line of its own ends the text; in letters the white space belongs to the facts
    prompt = text.rstrip() + question if question.startswith("\n") else text + question
    return Asked(prompt=join([prompt]), lead=lead, targets=(value,), most=written.answer_tokens)


def _noise(
    style: Style, asked: Pair, others: list[Pair], strength: int, random: RandomState
) -> tuple[str, str]:
    return "".join(style.noise(random) for _ in range(strength)), asked[1]


def _repetition(
    style: Style, asked: Pair, others: list[Pair], strength: int, random: RandomState
) -> tuple[str, str]:
    return style.tell(*others[0]) * strength, asked[1]


def _contradiction(
    style: Style, asked: Pair, others: list[Pair], strength: int, random: RandomState
) -> tuple[str, str]:
    false = [(key, _another(style, value, random)) for key, value in others[: FACTS // 2]]
    return _told(style, false, strength, random), asked[1]


def _near_keys(
    style: Style, asked: Pair, others: list[Pair], strength: int, random: RandomState
) -> tuple[str, str]:
    near = [(style.near(key, random), _another(style, v, random)) for key, v in [asked, *others]]
    return _told(style, near, strength, random), asked[1]


def _correction(
    style: Style, asked: Pair, others: list[Pair], strength: int, random: RandomState
) -> tuple[str, str]:
    value = _another(style, asked[1], random) if strength else asked[1]
    return style.tell(asked[0], value) * strength, value


def _told(style: Style, facts: list[Pair], strength: int, random: RandomState) -> str:
    """So many facts, drawn from these."""
    places = random.randint(len(facts), size=strength, dtype=np.int64)
    return "".join(style.tell(*facts[place]) for place in places)


def _another(style: Style, value: str, random: RandomState) -> str:
    while (other := style.value(random)) == value:
        pass
    return other


ATTACKS = {
    "noise": _noise,
    "repetition": _repetition,
    "contradiction": _contradiction,
    "near_keys": _near_keys,
    "correction": _correction,
}
