"""MQAR, multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): many pairs, each asked once."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.rows import NOTHING, Rows, Tokens, draw_rows


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """A row tells all its pairs, then asks for the value of every key, as zoology lays it out.

    Keys are distinct tokens of 1 .. vocab_size // 2 - 1, values distinct ones of the upper half. What
    follows the pairs is cut into slots of two tokens; key after key takes one of those left, slot
    s = 1, 2, ... in proportion to s ** (power_a - 1), and stands at its first token. That is where its
    value is the label. The other tokens mean nothing, but may look like keys and values.

    >>> task = MQAR(vocab_size=16, length=14, pairs=2, random_non_queries=False)
    >>> row = task.rows("train", 3, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   4    8    5   15    5    0    4    0    0    0    0    0    0    0]
     [-100 -100 -100 -100   15 -100    8 -100 -100 -100 -100 -100 -100 -100]]
    """

    name: ClassVar[str] = "mqar"
    vocab_size: int = 8192
    length: int = 64  # tokens of a row
    pairs: int = 4  # told first, two tokens each
    power_a: float = 0.01  # 1: queries stand anywhere; near 0: mostly soon after the pairs
    random_non_queries: bool = True  # tokens between queries are random; False: they are 0

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs is {self.pairs}, wanted 1 or more")
        if self.length % 2 or self.length < 4 * self.pairs:
            raise ValueError(
                f"length is {self.length}, wanted an even number of at least {4 * self.pairs}: two tokens "
                f"for each of {self.pairs} pairs and two for its query; make rows longer or pairs fewer"
            )
        if self.vocab_size <= self.length:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, wanted more than the length {self.length}; "
                "take more tokens or shorter rows"
            )
        if not self.power_a > 0:
            raise ValueError(f"power_a is {self.power_a}, wanted a positive number, e.g. 0.01")

    def rows(self, split: str, first: int, count: int, seed: int = 0) -> Rows:
        """Rows number first .. first + count - 1 of "train" or "test"."""
        return draw_rows(self._row, self.name, split, first, count, seed)

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        told, half = 2 * self.pairs, self.vocab_size // 2
        keys = _distinct(random, 1, half, self.pairs)
        values = _distinct(random, half, self.vocab_size, self.pairs)
        # whichever slot's wait ends first is taken: a draw without replacement, in proportion to weights
        waits = random.standard_exponential(len(self._weights)) / self._weights
        asked = told + 2 * waits.argsort()[: self.pairs]
        inputs = np.zeros(self.length, np.int64)
        labels = np.full_like(inputs, NOTHING)
        if self.random_non_queries:
            inputs[told:] = random.randint(0, self.vocab_size, self.length - told, dtype=np.int64)
        inputs[0:told:2], inputs[1:told:2], inputs[asked] = keys, values, keys
        labels[asked] = values
        return inputs, labels

    @cached_property
    def _weights(self) -> NDArray[np.float64]:
        """Of the slots, up to a factor."""
        slots = (self.length - 2 * self.pairs) // 2
        return np.power(np.arange(1.0, slots + 1), self.power_a - 1)


def _distinct(random: np.random.RandomState, low: int, high: int, count: int) -> list[int]:
    """Different numbers of low .. high - 1 in the order in which they were drawn, repetitions dropped."""
    found: dict[int, None] = {}
    while len(found) < count:
        more = random.randint(low, high, count - len(found), dtype=np.int64)
        found.update(dict.fromkeys(more.tolist()))
    return list(found)


PAIRS = (4, 8, 16, 32, 60)  # as the benchmark of this project asks for them
VOCABULARY = 256  # there: small models learn it within minutes


def dense_mqar(pairs: int) -> MQAR:
    """MQAR with so many pairs, in rows as short as they can be: after the pairs every second token asks."""
    if not 1 <= 4 * pairs < VOCABULARY:
        raise ValueError(f"mqar has {pairs} pairs, wanted 1 to {(VOCABULARY - 1) // 4}")
    return MQAR(vocab_size=VOCABULARY, pairs=pairs, length=4 * pairs)
