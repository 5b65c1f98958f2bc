"""MAD's tasks: rows read back from the left hold what their labels say, in the shares that were set."""

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise, permutations
from typing import Any

import numpy as np
import pytest

from atlas_lm.data.mad import (
    BASELINES,
    CHANGES,
    Compression,
    FuzzyInContextRecall,
    InContextRecall,
    Memorization,
    NoisyInContextRecall,
    SelectiveCopying,
    Task,
    variations,
)

NOTHING = -100
RECALLS = [
    InContextRecall(),
    InContextRecall(vocab_size=7, seq_len=4),
    NoisyInContextRecall(),
    NoisyInContextRecall(frac_noise=0.8, seq_len=20),
    NoisyInContextRecall(vocab_size=8, noise_vocab_size=1, frac_noise=0.99, seq_len=6),
]
FUZZY = [
    FuzzyInContextRecall(),
    FuzzyInContextRecall(vocab_size=128, seq_len=64),
    FuzzyInContextRecall(vocab_size=8, seq_len=13, k_motif_size=3, v_motif_size=3),
    FuzzyInContextRecall(vocab_size=9, seq_len=60, k_motif_size=1, v_motif_size=4),
]


def even(counts: Any) -> bool:
    """Chi-square of equal shares is below what one draw in a million exceeds (Wilson and Hilferty)."""
    counts = np.asarray(counts)
    free, mean = len(counts) - 1, counts.mean()
    spread = 2 / (9 * free)
    return bool(((counts - mean) ** 2 / mean).sum() < free * (1 - spread + 4.75 * spread**0.5) ** 3)


def lists(task: Task, split: str, count: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of the first rows, their form checked."""
    rows = task.rows(split, 0, count)
    assert rows.inputs.shape == rows.labels.shape == (count, task.length)
    assert rows.inputs.dtype == rows.labels.dtype == np.int64
    assert rows.inputs.min() >= 0 and max(rows.inputs.max(), rows.labels.max()) < task.vocab_size
    assert ((rows.labels >= 0) | (rows.labels == NOTHING)).all()
    return list(zip(rows.inputs.tolist(), rows.labels.tolist(), strict=True))


@pytest.mark.parametrize("task", RECALLS)
def test_recall_is_asked_at_keys_that_were_there(task: InContextRecall) -> None:
    known = task.vocab_size - task.noise_vocab_size
    for inputs, labels in lists(task, "test", 60):
        told: dict[int, int] = {}
        for t in range(0, task.length, 2):
            token, last = inputs[t], t == task.length - 1
            follows = labels[t] if last else inputs[t + 1]
            wanted = NOTHING
            if token >= known:
                assert follows >= known and not last
            else:
                assert token < known // 2 <= follows < known
                wanted = told.get(token, NOTHING)
                assert follows == told.setdefault(token, follows)
            assert labels[t] == wanted
        assert labels[-1] != NOTHING
        assert set(labels[1::2]) <= {NOTHING}


@pytest.mark.parametrize("task", [*RECALLS, *FUZZY])
def test_recall_is_trained_on_every_next_token(task: Task) -> None:
    for inputs, labels in lists(task, "train", 30):
        assert labels[:-1] == inputs[1:]
        key, value = inputs[-1], labels[-1]
        if isinstance(task, InContextRecall):  # the last pair repeats one that was there
            assert (key, value) in {p for t, p in enumerate(pairwise(inputs)) if t % 2 == 0}


def test_keys_values_and_the_last_key_are_uniform() -> None:
    rows = InContextRecall(vocab_size=8, seq_len=16).rows("train", 0, 2000)
    pairs = rows.inputs[:, :-1].reshape(-1, 7, 2)
    assert even(np.bincount(pairs[..., 0].ravel(), minlength=4))
    assert even(np.bincount(pairs[:, 0, 1], minlength=8)[4:])
    ranks, shown = [], []
    for keys, last in zip(pairs[..., 0], rows.inputs[:, -1], strict=True):
        there = np.unique(keys).tolist()
        shown.append(len(there))
        ranks.append(there.index(last))
    for size in (3, 4):
        assert even(np.bincount(np.array(ranks)[np.array(shown) == size], minlength=size))


def test_noise_has_its_share_and_its_tokens() -> None:
    task, count = NoisyInContextRecall(), 600
    inputs = task.rows("train", 0, count).inputs[:, :-1].reshape(-1, 2)
    noise = inputs[inputs[:, 0] >= 16]
    places = count * 63
    share = 0.2 * 62 / 63  # one place of 63 is spared
    assert abs(len(noise) - places * share) < 5 * (places * share * (1 - share)) ** 0.5
    assert even(np.bincount(noise.ravel(), minlength=32)[16:])


def test_noise_spares_one_place_wherever_it_is() -> None:
    task = NoisyInContextRecall(vocab_size=8, noise_vocab_size=4, frac_noise=0.999, seq_len=10)
    places = task.rows("test", 0, 1500).inputs[:, 0:8:2] < 4
    assert (places.sum(1) >= 1).all() and places.sum() < 1520
    assert even(places.sum(0))


def motifs(task: FuzzyInContextRecall, inputs: list[int], labels: list[int], split: str) -> Any:
    """The pairs of a row with the labels of their values; how keys and values alternate tells them apart."""
    tokens = [*inputs, labels[-1]]
    targets = [NOTHING, *labels]  # what each token was to be said as
    padding = [n for n, token in enumerate(tokens) if token == task.vocab_size - 1]
    assert padding == list(range(len(padding))) and len(padding) >= 2
    if split == "test":
        assert set(targets[: len(padding)]) == {NOTHING}
    keys = (task.vocab_size - 1) // 2
    rest = zip(tokens[len(padding) :], targets[len(padding) :], strict=True)
    runs = [tuple(run) for _, run in groupby(rest, lambda pair: pair[0] < keys)]
    assert len(runs) % 2 == 0
    return [tuple(zip(*run, strict=True)) for run in runs]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", FUZZY)
def test_fuzzy_recall_is_asked_for_values_of_keys_that_were_there(task, split: str) -> None:
    for inputs, labels in lists(task, split, 60):
        runs = motifs(task, inputs, labels, split)
        told: dict[Any, Any] = {}
        for n in range(0, len(runs), 2):
            (key, no_targets), (value, targets) = runs[n], runs[n + 1]
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            assert len(key) <= task.k_motif_size and len(value) <= task.v_motif_size
            if split == "test":
                assert len(key) == task.k_motif_size and set(no_targets) == {NOTHING}
                asked = key in told or n == len(runs) - 2
                assert targets == (value if asked else (NOTHING,) * len(value))
            assert value == told.setdefault(key, value)
        sizes = [len(tokens) for tokens, _ in runs]
        end = task.seq_len - sum(sizes[-2:]) - task.k_motif_size - task.v_motif_size
        assert sum(sizes[:-4]) < end <= sum(sizes[:-2])


def test_fuzzy_probes_are_told_in_all_but_a_few_rows() -> None:
    """mad-lab draws some places at which a row is over already."""
    task, places = FuzzyInContextRecall(), []
    rows = lists(task, "test", 800)
    for inputs, labels in rows:
        runs = [tokens for tokens, _ in motifs(task, inputs, labels, "test")]
        if runs[-2] in runs[:-2]:
            before = runs[: runs.index(runs[-2])]
            places.append(sum(map(len, before)))
    assert 0.96 < len(places) / len(rows) < 0.99
    thirds = np.histogram(places, bins=3, range=(0, 117))[0]
    assert even(thirds)  # wherever in the row


def test_fuzzy_sizes_and_tuples_are_uniform() -> None:
    task = FuzzyInContextRecall(vocab_size=8, seq_len=26)  # keys 0-2, values 3-6
    firsts = [
        [tokens for tokens, _ in motifs(task, *row, "train")[:2]]
        for row in lists(task, "train", 1500)
    ]
    keys, values = Counter(key for key, _ in firsts), Counter(value for _, value in firsts)
    for size in (1, 2, 3):
        assert even([keys[p] for p in permutations(range(3), size)])
        assert even([values[p] for p in permutations(range(3, 7), size)])
    assert even(list(Counter(len(key) for key, _ in firsts).values()))
    assert even(list(Counter(len(value) for _, value in firsts).values()))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "task", [SelectiveCopying(), SelectiveCopying(vocab_size=3, seq_len=4, tokens_to_copy=1)]
)
def test_copying_says_the_tokens_between_the_blanks(task: SelectiveCopying, split: str) -> None:
    count, blank = task.tokens_to_copy, task.vocab_size - 2
    for inputs, labels in lists(task, split, 60):
        question = inputs.index(blank + 1)
        assert question == task.seq_len - count - 1
        assert labels[question + 1 :] == [t for t in inputs[:question] if t != blank]
        assert inputs[question + 1 :] == [blank] * count
        assert set(labels[: question + 1]) == {NOTHING}
        assert inputs[question - 1] != blank


def test_copied_tokens_and_the_places_of_blanks_are_uniform() -> None:
    task, blanks = SelectiveCopying(vocab_size=8, seq_len=30, tokens_to_copy=5), np.zeros(5)
    rows = task.rows("train", 0, 1500)
    for inputs in rows.inputs[:, :24]:
        blanks += np.diff(np.flatnonzero(inputs != 6), prepend=-1) - 1
    assert blanks.sum() == 1500 * 19 and even(blanks)
    assert even(np.bincount(rows.labels[:, -5:].ravel()))


@pytest.mark.parametrize("split", ["train", "test"])
def test_compression_is_of_everything_into_the_last_token(split: str) -> None:
    task = Compression()
    rows = lists(task, split, 300)
    for inputs, labels in rows:
        assert inputs == labels and inputs[-1] == 15
    assert even(np.bincount([token for inputs, _ in rows for token in inputs[:-1]], minlength=15))
    assert {name for name, task in BASELINES.items() if task.from_last} == {"compression"}


@pytest.mark.parametrize("task", [Memorization(), Memorization(vocab_size=33, seq_len=64)])
def test_memorised_values_are_the_same_everywhere_and_all_different(task: Memorization) -> None:
    told: dict[int, int] = {}
    keys = (task.vocab_size - 1) // 2
    for split, seed in (("train", 0), ("train", 1), ("test", 0)):
        rows = task.rows(split, 0, 100, seed)
        assert (rows.inputs[:, 1::2] == task.vocab_size - 1).all()
        assert (rows.labels[:, ::2] == NOTHING).all()
        asked = rows.inputs[:, ::2].ravel()
        assert even(np.bincount(asked, minlength=keys))
        for key, value in zip(asked.tolist(), rows.labels[:, 1::2].ravel().tolist(), strict=True):
            assert told.setdefault(key, value) == value
    assert sorted(told) == list(range(keys))
    assert len(set(told.values())) == keys
    assert keys <= min(told.values()) and max(told.values()) < task.vocab_size - 1
    other = replace(task, map_seed=1).rows("train", 0, 100)
    ours = task.rows("train", 0, 100)
    assert (other.inputs == ours.inputs).all() and (other.labels != ours.labels).any()


def test_baselines_are_those_of_mad_lab() -> None:
    got = {n: (t.vocab_size, t.seq_len, t.train_examples) for n, t in BASELINES.items()}
    assert got == {
        "in-context-recall": (16, 128, 12800),
        "noisy-in-context-recall": (32, 128, 12800),
        "fuzzy-in-context-recall": (16, 128, 12800),
        "memorization": (256, 32, 256),
        "compression": (16, 32, 12800),
        "selective-copying": (16, 256, 12800),
    }
    assert {t.test_examples for t in BASELINES.values()} == {1280}
    assert BASELINES.keys() == CHANGES.keys()


@pytest.mark.parametrize(
    ("name", "count"), list(zip(BASELINES, (11, 14, 11, 6, 11, 13), strict=True))
)
def test_variations_change_one_setting(name: str, count: int) -> None:
    baseline, *changed = variations(name)
    assert baseline == BASELINES[name] and len(changed) == count - 1
    for task in changed:
        different = [
            f for f in vars(task) if vars(task)[f] != vars(baseline).get(f) and f[0] != "_"
        ]
        assert len(different) == 1 and getattr(task, different[0]) in CHANGES[name][different[0]]
        lists(task, "train", 1), lists(task, "test", 1)


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="task is 'recall', wanted one of in-context-recall, "):
        list(variations("recall"))


@pytest.mark.parametrize("task", BASELINES.values(), ids=BASELINES)
def test_a_row_is_the_same_alone_and_among_others(task: Task) -> None:
    batch = task.rows("test", 5, 4, seed=3)
    for n in range(4):
        alone = task.rows("test", 5 + n, 1, seed=3)
        assert (alone.inputs[0] == batch.inputs[n]).all()
        assert (alone.labels[0] == batch.labels[n]).all()
    others = [task.rows("train", 5, 1, 3), task.rows("test", 5, 1, 4), task.rows("test", 6, 1, 3)]
    assert all((batch.inputs[0] != other.inputs[0]).any() for other in others)


PINNED = {
    "in-context-recall": "66a12135e034b7aa",
    "noisy-in-context-recall": "bd383c61e323fa39",
    "fuzzy-in-context-recall": "d69e842c297ecd44",
    "memorization": "b4d1be79df299159",
    "compression": "09057f0648327714",
    "selective-copying": "9610d15419ea2ffc",
}


@pytest.mark.parametrize("name", PINNED)
def test_rows_never_change(name: str) -> None:
    digest = hashlib.sha256()
    for split in ("train", "test"):
        rows = BASELINES[name].rows(split, 100, 3)
        digest.update(rows.inputs.tobytes() + rows.labels.tobytes())
    assert digest.hexdigest()[:16] == PINNED[name]


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (InContextRecall, dict(seq_len=127), "seq_len is 127, wanted pairs: an even number"),
        (
            InContextRecall,
            dict(vocab_size=1),
            "vocab_size of in-context-recall is 1, wanted 2 or more",
        ),
        (InContextRecall, dict(frac_noise=0.1), "frac_noise is 0.1 and noise_vocab_size 0"),
        (InContextRecall, dict(train_examples=0), "train_examples of in-context-recall is 0"),
        (NoisyInContextRecall, dict(vocab_size=17), "vocab_size is 17 with 16 tokens of noise"),
        (NoisyInContextRecall, dict(frac_noise=1.0), "frac_noise is 1.0"),
        (
            FuzzyInContextRecall,
            dict(vocab_size=6),
            "k_motif_size is 3 .*, wanted 1 to 2 and 1 to 3",
        ),
        (FuzzyInContextRecall, dict(v_motif_size=0), "v_motif_size 0, wanted 1 to 7 and 1 to 8"),
        (FuzzyInContextRecall, dict(seq_len=12), "seq_len is 12, wanted more than 12"),
        (SelectiveCopying, dict(seq_len=33), "tokens_to_copy is 16 with seq_len 33"),
        (SelectiveCopying, dict(vocab_size=2), "vocab_size of selective-copying is 2, wanted 3"),
        (Compression, dict(seq_len=1), "seq_len of compression is 1, wanted 2 or more"),
        (Memorization, dict(seq_len=31), "seq_len is 31, wanted an even number"),
        (Memorization, dict(vocab_size=2), "vocab_size of memorization is 2, wanted 3 or more"),
    ],
)
def test_settings_must_make_sense(task: type[Task], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**settings)


def test_there_are_two_splits() -> None:
    with pytest.raises(ValueError, match="split is 'valid', wanted 'train' or 'test'"):
        Compression().rows("valid", 0, 1)
