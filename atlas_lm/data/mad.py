"""MAD (Poli et al. 2024, arXiv 2403.17844): six small tasks, each varied in one setting at a time.

What a row holds and where it is labelled is as in mad-lab, with `multi_query`: recall is asked wherever it
can be. Random numbers are our own, so no row equals one of mad-lab's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from atlas_lm.data.draws import draw
from atlas_lm.data.rows import NOTHING, Rows, Tokens, draw_rows

Motif = tuple[int, ...]  # tokens that stand for one key or one value


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Rows of one task, each from random numbers of its own."""

    name: ClassVar[str]
    from_last: ClassVar[bool] = False  # True: all is to be said after, and from, the last token
    least_vocab: ClassVar[int] = 2
    vocab_size: int  # special tokens are its last ones
    seq_len: int  # mad-lab's length of a row
    train_examples: int = 12_800  # rows that a run is trained on, again and again
    test_examples: int = 1_280

    def __post_init__(self) -> None:
        least = dict(vocab_size=self.least_vocab, seq_len=2, train_examples=1, test_examples=1)
        for name, wanted in least.items():
            got = getattr(self, name)
            if got < wanted:
                raise ValueError(f"{name} of {self.name} is {got}, wanted {wanted} or more")

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.seq_len

    def rows(self, split: str, first: int, count: int, seed: int = 0) -> Rows:
        """Rows number first .. first + count - 1 of "train" or "test"."""
        return draw_rows(self._row, self.name, split, first, count, seed)

    @abstractmethod
    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        """Inputs and labels, [length] each."""


@dataclass(frozen=True, kw_only=True)
class InContextRecall(Task):
    """Pairs of a key and a value; a key keeps its value through the row, and draws anew for the next.

    In training the label is the next token, everywhere. In test it is the value alone, at keys that were
    there before; the last pair repeats one of them. The last value is no input: length is seq_len - 1.

    >>> task = InContextRecall(vocab_size=8, seq_len=14)  # keys 0-3, values 4-7
    >>> row = task.rows("test", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   1    7    0    4    3    6    0    4    0    4    1    7    3]
     [-100 -100 -100 -100 -100 -100    4 -100    4 -100    7 -100    6]]
    """

    name: ClassVar[str] = "in-context-recall"
    vocab_size: int = 16  # a half are keys, then values, then noise
    seq_len: int = 128
    noise_vocab_size: int = 0  # tokens of the vocabulary that are noise
    frac_noise: float = 0.0  # probability that two tokens of noise stand in a pair's place

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len % 2 or self.seq_len < 4:
            raise ValueError(f"seq_len is {self.seq_len}, wanted pairs: an even number, at least 4")
        if self.vocab_size - self.noise_vocab_size < 2:
            raise ValueError(
                f"vocab_size is {self.vocab_size} with {self.noise_vocab_size} tokens of noise, wanted a "
                "key and a value besides; noise is counted in vocab_size"
            )
        if not 0 <= self.frac_noise < 1 or self.noise_vocab_size < (self.frac_noise > 0):
            raise ValueError(
                f"frac_noise is {self.frac_noise} and noise_vocab_size {self.noise_vocab_size}, wanted a "
                "share in [0, 1) and, if it is not 0, a token of noise or more"
            )

    @property
    def length(self) -> int:
        return self.seq_len - 1

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        known, last = self.vocab_size - self.noise_vocab_size, self.seq_len // 2 - 1
        told = random.randint(known // 2, known, known // 2, dtype=np.int64)  # each key's value
        keys = random.randint(0, known // 2, last + 1, dtype=np.int64)
        noise = random.random_sample(last) < self.frac_noise  # of the pairs before the last
        noise[random.randint(last, dtype=np.int64)] = False  # so that there is a key to ask for
        pairs = np.flatnonzero(~noise)
        shown, first = np.unique(keys[pairs], return_index=True)
        keys[last] = shown[random.randint(len(shown), dtype=np.int64)]
        asked = np.append(np.delete(pairs, first), last)
        tokens = np.stack([keys, told[keys]], axis=1)
        targets = np.full_like(tokens, NOTHING)
        targets[asked, 1] = tokens[asked, 1]
        if noise.any():
            tokens[:last][noise] = random.randint(
                known, self.vocab_size, (int(noise.sum()), 2), dtype=np.int64
            )
        return _shift(tokens.ravel(), targets.ravel(), training)


@dataclass(frozen=True, kw_only=True)
class NoisyInContextRecall(InContextRecall):
    """Recall with noise between the pairs, from tokens of its own and never labelled in test.

    >>> task = NoisyInContextRecall(vocab_size=12, noise_vocab_size=4, seq_len=14)  # 8-11 are noise
    >>> row = task.rows("test", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   2    4    1    6    0    5    0    5    1    6    8   11    2]
     [-100 -100 -100 -100 -100 -100    5 -100    6 -100 -100 -100    4]]
    """

    name: ClassVar[str] = "noisy-in-context-recall"
    vocab_size: int = 32
    noise_vocab_size: int = 16
    frac_noise: float = 0.2


@dataclass(frozen=True, kw_only=True)
class FuzzyInContextRecall(Task):
    """Recall where a key is a tuple of different tokens, and a value is one too.

    In training tuples have one token to k_motif_size or v_motif_size, first the size and then the tuple
    drawn uniformly, and the label is the next token. In test keys have k_motif_size always, and the tokens
    of a value are labelled if its key was there before; the last pair, the probe, in any case. The probe is
    told at a place drawn beforehand, which in 1 row of 40 (at the baseline) lies past the end: as in
    mad-lab, its value is then asked but was never told. Padding, the last token of the vocabulary, fills
    the row from the left.

    >>> task = FuzzyInContextRecall(vocab_size=8, seq_len=14, k_motif_size=2, v_motif_size=1)
    >>> row = task.rows("test", 1, 1)  # keys 0-2, values 3-6, padding 7
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   7    7    7    2    0    5    2    1    3    2    1    3    2    1]
     [-100 -100 -100 -100 -100 -100 -100 -100 -100 -100    3 -100 -100    3]]
    """

    name: ClassVar[str] = "fuzzy-in-context-recall"
    vocab_size: int = 16
    seq_len: int = 128
    k_motif_size: int = 3  # most tokens of a key
    v_motif_size: int = 3  # most tokens of a value

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self._sizes
        if not (1 <= self.k_motif_size <= keys and 1 <= self.v_motif_size <= values):
            raise ValueError(
                f"k_motif_size is {self.k_motif_size} and v_motif_size {self.v_motif_size}, wanted 1 to "
                f"{keys} and 1 to {values} tokens; a vocab_size above {self.vocab_size} allows more"
            )
        most = self.k_motif_size + self.v_motif_size
        if self.seq_len <= 2 * most:
            raise ValueError(
                f"seq_len is {self.seq_len}, wanted more than {2 * most}: room for two pairs of up to "
                f"{most} tokens"
            )

    @property
    def _sizes(self) -> tuple[int, int]:
        """Tokens of keys and of values."""
        keys = (self.vocab_size - 1) // 2
        return keys, self.vocab_size - 1 - keys

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        pairs = self._story(random, training)
        tokens: list[int] = []
        targets: list[int] = []
        shown: set[Motif] = set()
        for n, (key, value) in enumerate(pairs, start=1):
            asked = key in shown or n == len(pairs)
            tokens += key + value
            targets += [NOTHING] * len(key) + (list(value) if asked else [NOTHING] * len(value))
            shown.add(key)
        padding = self.seq_len + 1 - len(tokens)
        return _shift(
            np.array([self.vocab_size - 1] * padding + tokens),
            np.array([NOTHING] * padding + targets),
            training,
        )

    def _story(self, random: np.random.RandomState, training: bool) -> list[tuple[Motif, Motif]]:
        """The pairs of a row in order, the probe last."""
        (probe, answer), *drawn = self._pairs(random, training)
        size = len(probe) + len(answer)
        place = random.randint(self.seq_len - 2 * size, dtype=np.int64)
        end = self.seq_len - size - self.k_motif_size - self.v_motif_size
        told, tokens = {probe: answer}, 0
        story: list[tuple[Motif, Motif]] = []
        waiting = True
        for key, value in drawn:
            if tokens >= end:
                break
            key = probe if waiting and tokens >= place else key
            waiting = waiting and key != probe
            story.append((key, told.setdefault(key, value)))
            tokens += len(key) + len(told[key])
        return [*story, (probe, answer)]

    def _pairs(self, random: np.random.RandomState, training: bool) -> list[tuple[Motif, Motif]]:
        """Independent pairs, enough for a row."""
        count, (keys, values) = 1 + self.seq_len // 2, self._sizes
        least = 1 if training else self.k_motif_size
        k_sizes = random.randint(least, self.k_motif_size + 1, count, dtype=np.int64)
        v_sizes = random.randint(1, self.v_motif_size + 1, count, dtype=np.int64)
        k_tokens = _different(random, keys, (count, self.k_motif_size))
        v_tokens = keys + _different(random, values, (count, self.v_motif_size))
        return list(zip(_cut(k_tokens, k_sizes), _cut(v_tokens, v_sizes), strict=True))


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Tokens among blanks, then a token that asks for them, and blanks where they are to be said in order.

    Each blank stands before one of the tokens, drawn uniformly; none between the last of them and the
    question. The same in training and test.

    >>> task = SelectiveCopying(vocab_size=8, seq_len=14, tokens_to_copy=3)  # 6: blank, 7: say them now
    >>> row = task.rows("test", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   6    6    6    6    5    6    4    6    6    3    7    6    6    6]
     [-100 -100 -100 -100 -100 -100 -100 -100 -100 -100 -100    5    4    3]]
    """

    name: ClassVar[str] = "selective-copying"
    least_vocab: ClassVar[int] = 3
    vocab_size: int = 16
    seq_len: int = 256
    tokens_to_copy: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_to_copy < 1 or self.seq_len <= 2 * self.tokens_to_copy + 1:
            raise ValueError(
                f"tokens_to_copy is {self.tokens_to_copy} with seq_len {self.seq_len}, wanted 1 or more and "
                "rows longer than twice that and one: tokens, question, answers and a blank"
            )

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        count, blank = self.tokens_to_copy, self.vocab_size - 2
        wanted = random.randint(0, blank, count, dtype=np.int64)
        before = random.randint(0, count, self.seq_len - 2 * count - 1, dtype=np.int64)
        places = np.arange(count) + np.bincount(before, minlength=count).cumsum()
        inputs = np.full(self.seq_len, blank, np.int64)
        inputs[places] = wanted
        inputs[-count - 1] = blank + 1
        labels = np.full_like(inputs, NOTHING)
        labels[-count:] = wanted
        return inputs, labels


@dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """Random tokens and a last one; the whole row, itself included, is to be said from that last token.

    Labels are the inputs: they belong to a decoder that knows the encoding of the last token and a place,
    not to a language model, which would have each token before its eyes.

    >>> task = Compression(vocab_size=8, seq_len=6)
    >>> row = task.rows("test", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[4 0 1 4 5 7]
     [4 0 1 4 5 7]]
    """

    name: ClassVar[str] = "compression"
    from_last: ClassVar[bool] = True
    vocab_size: int = 16
    seq_len: int = 32

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        special = self.vocab_size - 1
        inputs = np.append(random.randint(0, special, self.seq_len - 1, dtype=np.int64), special)
        return inputs, inputs


@dataclass(frozen=True, kw_only=True)
class Memorization(Task):
    """Keys, each followed by a token at which its value is to be said; which value, no row ever tells.

    The values are the same in all rows, of training and test: they have to be learned into the weights.

    >>> task = Memorization(vocab_size=10, seq_len=10)  # keys 0-3, values 4-8
    >>> row = task.rows("test", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   2    9    2    9    1    9    3    9    3    9]
     [-100    7 -100    7 -100    6 -100    4 -100    4]]
    """

    name: ClassVar[str] = "memorization"
    least_vocab: ClassVar[int] = 3
    vocab_size: int = 256
    seq_len: int = 32
    train_examples: int = 256
    map_seed: int = 0  # which key has which value; the seed of the rows does not change it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len % 2:
            raise ValueError(f"seq_len is {self.seq_len}, wanted an even number: keys and values")

    @cached_property
    def _values(self) -> Tokens:
        """The value of each key, all different."""
        keys = (self.vocab_size - 1) // 2
        values = np.arange(keys, self.vocab_size - 1, dtype=np.int64)
        return draw(self.map_seed, self.name, "map").permutation(values)[:keys]

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        keys = random.randint(0, len(self._values), self.seq_len // 2, dtype=np.int64)
        inputs = np.full(self.seq_len, self.vocab_size - 1, np.int64)
        inputs[::2] = keys
        labels = np.full_like(inputs, NOTHING)
        labels[1::2] = self._values[keys]
        return inputs, labels


USUAL: dict[str, tuple[float, ...]] = {
    "vocab_size": (32, 64, 128),
    "seq_len": (256, 512, 1024),
    "train_examples": (6400, 3200, 1600, 800),
}
BASELINES: dict[str, Task] = {
    task.name: task
    for task in (
        InContextRecall(),
        NoisyInContextRecall(),
        FuzzyInContextRecall(),
        Memorization(),
        Compression(),
        SelectiveCopying(),
    )
}
CHANGES: dict[str, dict[str, tuple[float, ...]]] = {  # task -> setting -> what it is changed to
    "in-context-recall": USUAL,
    "noisy-in-context-recall": USUAL
    | {"vocab_size": (48, 80, 144), "frac_noise": (0.4, 0.6, 0.8)},  # 16 tokens are noise
    "fuzzy-in-context-recall": USUAL,
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "compression": USUAL | {"seq_len": (64, 128, 256)},
    "selective-copying": USUAL | {"seq_len": (512, 1024), "tokens_to_copy": (32, 64, 96)},
}


def variations(name: str) -> Iterator[Task]:
    """The baseline of a task, then its changes, one setting at a time.

    >>> [task.vocab_size for task in variations("memorization")]
    [256, 512, 1024, 2048, 4096, 8192]
    """
    if name not in BASELINES:
        raise ValueError(f"task is {name!r}, wanted one of {', '.join(BASELINES)}")
    yield BASELINES[name]
    for setting, values in CHANGES[name].items():
        for value in values:
            change: dict[str, Any] = {setting: value}
            yield replace(BASELINES[name], **change)


def _shift(tokens: Tokens, targets: Tokens, training: bool) -> tuple[Tokens, Tokens]:
    """Inputs and labels: what comes next; in training every token, else the targets alone."""
    return tokens[:-1], (tokens if training else targets)[1:]


def _different(random: np.random.RandomState, tokens: int, shape: tuple[int, int]) -> Tokens:
    """[N, size] of 0 .. tokens - 1, different within a row; all orders and choices are equally likely."""
    drawn = random.randint(0, tokens - np.arange(shape[1]), shape, dtype=np.int64)
    for i in range(1, shape[1]):  # from the drawn-th of those that are left to its number among all
        for earlier in np.sort(drawn[:, :i]).T:
            drawn[:, i] += drawn[:, i] >= earlier
    return drawn


def _cut(tokens: Tokens, sizes: Tokens) -> Iterator[Motif]:
    """The first tokens of each row."""
    for row, size in zip(tokens.tolist(), sizes.tolist(), strict=True):
        yield tuple(row[:size])
