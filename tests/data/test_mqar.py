"""MQAR: every query asks for what the row told, and stands where the power law puts it."""

import hashlib
from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from atlas_lm.data.mqar import MQAR
from atlas_lm.data.rows import Rows

SETTINGS: list[dict[str, Any]] = [
    {},
    dict(random_non_queries=False),
    dict(vocab_size=18, length=16, pairs=4),  # every slot is asked
    dict(vocab_size=67, length=66, pairs=5, power_a=1.0),
    dict(vocab_size=600, length=512, pairs=64, power_a=0.1),
]


def too_far(counts: Any, expected: Any) -> bool:
    """Chi-square is above what one draw in a million exceeds (Wilson and Hilferty)."""
    counts, expected = np.asarray(counts), np.asarray(expected)
    free = len(counts) - 1
    spread = 2 / (9 * free)
    bound = free * (1 - spread + 4.75 * spread**0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() > bound)


def fingerprint(rows: Rows) -> str:
    return hashlib.sha256(rows.inputs.tobytes() + rows.labels.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_are_the_values_told_for_the_keys_that_stand_there(settings, split: str) -> None:
    task = MQAR(**settings)
    rows = task.rows(split, 0, 40)
    assert rows.inputs.shape == rows.labels.shape == (40, task.length)
    assert rows.inputs.dtype == rows.labels.dtype == np.int64
    assert rows.inputs.min() >= 0 and rows.inputs.max() < task.vocab_size
    for inputs, labels in zip(rows.inputs.tolist(), rows.labels.tolist(), strict=True):
        told = dict(
            zip(inputs[0 : 2 * task.pairs : 2], inputs[1 : 2 * task.pairs : 2], strict=True)
        )
        asked = {inputs[t]: label for t, label in enumerate(labels) if label != -100}
        assert asked == told and len(told) == len(set(told.values())) == task.pairs
        assert sum(label != -100 for label in labels) == task.pairs  # each is asked once
        places = [t for t, label in enumerate(labels) if label != -100]
        assert all(t >= 2 * task.pairs and t % 2 == 0 for t in places)
        half = task.vocab_size // 2
        assert all(1 <= key < half <= value < task.vocab_size for key, value in told.items())
        if not task.random_non_queries:
            rest = [inputs[t] for t in range(2 * task.pairs, task.length) if t not in places]
            assert set(rest) == {0}


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_a_single_query_follows_the_power_law(power_a: float) -> None:
    task, count = MQAR(vocab_size=40, length=34, pairs=1, power_a=power_a), 3000
    labels = task.rows("train", 0, count).labels
    slots = (labels != -100).argmax(1) // 2  # 1, 2, ...
    law = np.arange(1, 17) ** (power_a - 1)
    counts = np.bincount(slots, minlength=17)[1:]
    assert not too_far(counts, count * law / law.sum())
    assert power_a == 1.0 or too_far(counts, np.full(16, count / 16))


def test_later_keys_take_from_the_slots_that_are_left() -> None:
    """P(first key in i, second in j) = p_i p_j / (1 - p_i)."""
    task, count = MQAR(vocab_size=20, length=12, pairs=2), 4000
    rows = task.rows("test", 0, count)
    seen: Counter[tuple[int, ...]] = Counter()
    for inputs, labels in zip(rows.inputs, rows.labels, strict=True):
        places = np.flatnonzero(labels != -100)
        where = {inputs[t]: (t - 4) // 2 for t in places}
        seen[where[inputs[0]], where[inputs[2]]] += 1
    p = np.arange(1, 5) ** -0.99
    p /= p.sum()
    orders = list(permutations(range(4), 2))
    assert not too_far(
        [seen[o] for o in orders], [count * p[i] * p[j] / (1 - p[i]) for i, j in orders]
    )


def test_keys_values_and_other_tokens_are_uniform() -> None:
    task, count = MQAR(vocab_size=16, length=14, pairs=2), 3000
    rows = task.rows("train", 0, count)
    keys, values = rows.inputs[:, [0, 2]].ravel(), rows.inputs[:, [1, 3]].ravel()
    others = rows.inputs[:, 4:][rows.labels[:, 4:] == -100]
    assert not too_far(np.bincount(keys, minlength=8)[1:], np.full(7, 2 * count / 7))
    assert not too_far(np.bincount(values, minlength=16)[8:], np.full(8, 2 * count / 8))
    assert not too_far(np.bincount(others, minlength=16), np.full(16, 8 * count / 16))


def test_a_row_is_the_same_alone_and_among_others() -> None:
    task = MQAR()
    batch = task.rows("train", 5, 6, seed=3)
    for n in range(6):
        alone = task.rows("train", 5 + n, 1, seed=3)
        assert (alone.inputs[0] == batch.inputs[n]).all()
        assert (alone.labels[0] == batch.labels[n]).all()
    with pytest.raises(ValueError, match="0 rows are wanted"):
        task.rows("train", 0, 0)


def test_splits_seeds_and_rows_differ() -> None:
    task = MQAR()
    rows = [
        task.rows(s, i, 1, seed).inputs
        for s in ("train", "test")
        for i in (0, 1)
        for seed in (0, 1)
    ]
    assert len({row.tobytes() for row in rows}) == 8


@pytest.mark.parametrize(
    ("settings", "split", "wanted"),
    [
        (SETTINGS[0], "train", "3b0ae1dad1344334"),
        (SETTINGS[1], "test", "d191365889c2ee67"),
        (SETTINGS[4], "train", "caa78e71533f86f5"),
    ],
)
def test_rows_never_change(settings, split: str, wanted: str) -> None:
    assert fingerprint(MQAR(**settings).rows(split, 100, 3)) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(pairs=0), "pairs is 0, wanted 1 or more"),
        (dict(length=63), "length is 63, wanted an even number of at least 16"),
        (dict(pairs=17), "length is 64, wanted an even number of at least 68"),
        (dict(vocab_size=64), "vocab_size is 64, wanted more than the length 64"),
        (dict(power_a=0.0), "power_a is 0.0, wanted a positive number"),
    ],
)
def test_settings_must_make_sense(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MQAR(**settings)


def test_there_are_two_splits() -> None:
    with pytest.raises(ValueError, match="split is 'valid', wanted 'train' or 'test'"):
        MQAR().rows("valid", 0, 1)
