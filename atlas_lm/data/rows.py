"""Rows of tokens with labels: what tasks of a vocabulary of their own are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.draws import draw

NOTHING = -100  # the label where nothing is asked
Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Inputs and labels [N, T] int64: labels[n, t] is what should be said after inputs[n, : t + 1]."""

    inputs: Tokens
    labels: Tokens


class RowTask(Protocol):
    """A task whose samples are rows."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    def rows(self, split: str, first: int, count: int, seed: int = 0) -> Rows:
        """Rows number first .. first + count - 1 of "train" or "test"."""
        ...


def draw_rows(
    make: Callable[[np.random.RandomState, bool], tuple[Tokens, Tokens]],
    name: str,
    split: str,
    first: int,
    count: int,
    seed: int,
) -> Rows:
    """Rows number first .. first + count - 1, each from random numbers of its own.

    Args:
        make: from random numbers, and whether it is for training, inputs and labels of one row.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, wanted 'train' or 'test'")
    if count < 1:
        raise ValueError(f"{count} rows are wanted, at least 1 is needed")
    places = range(first, first + count)
    made = [make(draw(seed, name, split, place), split == "train") for place in places]
    inputs, labels = zip(*made, strict=True)
    return Rows(inputs=np.stack(inputs), labels=np.stack(labels))
