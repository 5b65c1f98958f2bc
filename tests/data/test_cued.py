"""The cued task, and its proof: what a memory that writes token by token cannot do, and a window can."""

import hashlib
from itertools import permutations
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from atlas_lm import presets
from atlas_lm.data.cued import Cued
from atlas_lm.memory import memorize
from atlas_lm.memory.features import Polynomial
from atlas_lm.memory.optimizers import Descent, Momentum
from atlas_lm.memory.retention import Keep
from atlas_lm.memory.windows import Window
from atlas_lm.models import AtlasForCausalLM, configure

TASK = Cued(keys=5, values=7, block=3)
PAIRS = TASK.keys * TASK.values
BLOCK = TASK.block + 1  # tokens, the cue among them


def answers(task: Cued, inputs: NDArray[np.int64]) -> list[int]:
    """What should be said at the queries of a row, found by reading it from the left."""
    pairs, named, said = task.keys * task.values, {}, []
    for t, token in enumerate(inputs.tolist()):
        if token >= pairs + task.block:
            said.append(named[token - pairs - task.block])
        elif token >= pairs:
            kept = inputs[t - (token - pairs + 1)]
            named[kept // task.values] = kept
    return said


@pytest.mark.parametrize("task", [TASK, Cued(), Cued(keys=1, values=2, block=2)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_are_the_named_pairs(task: Cued, split: str) -> None:
    rows = task.rows(split, 0, 50)
    assert rows.inputs.shape == rows.labels.shape == (50, task.length)
    assert rows.inputs.dtype == rows.labels.dtype == np.int64
    assert (rows.labels[:, : -task.keys] == -100).all()
    for inputs, labels in zip(rows.inputs, rows.labels, strict=True):
        assert labels[-task.keys :].tolist() == answers(task, inputs)
        queries = inputs[-task.keys :] - task.keys * task.values - task.block
        assert sorted(queries) == list(range(task.keys))
        assert (labels[-task.keys :] // task.values == queries).all()


def test_a_block_has_one_key_and_different_values() -> None:
    blocks = TASK.rows("train", 0, 100).inputs[:, : -TASK.keys].reshape(100, TASK.keys, BLOCK)
    pairs, cues = blocks[..., :-1], blocks[..., -1]
    keys = pairs // TASK.values
    assert (keys == keys[..., :1]).all()
    assert (np.sort(keys[..., 0]) == np.arange(TASK.keys)).all()
    assert (np.diff(np.sort(pairs)) > 0).all()
    assert cues.min() == PAIRS and cues.max() == PAIRS + TASK.block - 1


def test_orders_cues_and_queries_are_uniform() -> None:
    """Every pair of a block is the named one equally often, whatever the cue and the value."""
    count = 2000
    rows = TASK.rows("train", 0, count)
    blocks = rows.inputs[:, : -TASK.keys].reshape(-1, BLOCK)
    ranks = np.argsort(np.argsort(blocks[:, :-1])) @ [9, 3, 1]  # which order the values have
    cues, total = blocks[:, -1] - PAIRS, count * TASK.keys
    orders = np.unique(ranks * 3 + cues, return_counts=True)[1]
    assert len(orders) == 18 and abs(orders - total / 18).max() < 5 * (total / 18) ** 0.5
    values = np.bincount((rows.labels[:, -TASK.keys :] % TASK.values).ravel())
    assert abs(values - total / 7).max() < 5 * (total / 7) ** 0.5
    first_asked = np.bincount(rows.inputs[:, -TASK.keys] - PAIRS - TASK.block)
    assert abs(first_asked - count / 5).max() < 5 * (count / 5) ** 0.5
    first_told = np.bincount(rows.inputs[:, 0] // TASK.values)
    assert abs(first_told - count / 5).max() < 5 * (count / 5) ** 0.5


def model(preset: str = "linear_attention", **changes: Any) -> AtlasForCausalLM:
    """One block of a memory alone, random weights large enough that every part of it matters."""
    fields = dict(block="lmm", num_hidden_layers=1, conv_size=1, initializer_range=0.4)
    torch.manual_seed(0)
    config = configure(preset, size="tiny", vocab_size=TASK.vocab_size, **(fields | changes))
    return AtlasForCausalLM(config).double().eval()


def exchanged(inputs: NDArray[np.int64]) -> NDArray[np.int64]:
    """A row with the named pair of its third block exchanged for a neighbour."""
    inputs, start = inputs.copy(), 2 * BLOCK
    named = start + TASK.block - (inputs[start + TASK.block] - PAIRS + 1)
    other = named + 1 if named == start else named - 1
    inputs[[named, other]] = inputs[[other, named]]
    return inputs


@torch.no_grad()
def query_logits(model: AtlasForCausalLM, inputs: NDArray[np.int64]) -> Tensor:
    return model(torch.from_numpy(inputs)).logits[:, -TASK.keys :]


def move(model: AtlasForCausalLM) -> float:
    """How far the logits at the queries go with an exchange that changes one answer in each row."""
    rows = TASK.rows("train", 0, 8)
    swapped = np.stack([exchanged(inputs) for inputs in rows.inputs])
    changed = np.array([answers(TASK, row) for row in swapped]) != rows.labels[:, -TASK.keys :]
    assert (changed.sum(1) == 1).all()
    return (query_logits(model, rows.inputs) - query_logits(model, swapped)).abs().max().item()


ORDERLESS = {
    "linear attention": dict(),
    "with a step from the token": dict(memory={"optimizer": Descent()}),
    "with one gate from the token": dict(memory={"window": Window(size=1, gate="offset")}),
    "with features": dict(memory={"features": Polynomial(degree=2, project=8)}),
    "with an anchor": dict(memory={"chunk": 5}),
    "delta rule, a block to a chunk": dict(preset="deltanet", memory={"chunk": BLOCK}),
}
ORDERED = {
    "window over a block": dict(memory={"window": Window(size=BLOCK, gate="offset")}),
    "convolution": dict(conv_size=2),
    "second layer": dict(num_hidden_layers=2),
    "attention": dict(preset="transformer", block="attention"),
    "delta rule": dict(preset="deltanet"),
    "delta rule, blocks across chunks": dict(preset="deltanet", memory={"chunk": 5}),
    "deep memory": dict(preset="dla", memory={"retention": Keep(), "chunk": 1}),
    "forgetting": dict(preset="retnet"),
    "momentum": dict(memory={"optimizer": Momentum()}),
}


@pytest.mark.parametrize("changes", ORDERLESS.values(), ids=ORDERLESS)
def test_order_never_reaches_the_logits(changes: dict[str, Any]) -> None:
    assert move(model(**changes)) < 1e-10


def test_the_logits_do_depend_on_what_was_told() -> None:
    """So it is order that they miss, and not the row."""
    inputs = TASK.rows("train", 0, 1).inputs
    other = inputs.copy()
    other[0, 0] = next(p for p in range(PAIRS) if p not in inputs)
    assert (query_logits(model(), inputs) - query_logits(model(), other)).abs().min() > 1e-6


@pytest.mark.parametrize("changes", ORDERED.values(), ids=ORDERED)
def test_what_the_proof_leaves_open_does_see_order(changes: dict[str, Any]) -> None:
    assert move(model(**changes)) > 1e-4


def test_over_all_orders_of_a_block_its_query_is_right_once_in_b() -> None:
    """Exactly, if what is said is at least a pair of the block; the model says the same each time."""
    inputs = TASK.rows("test", 0, 1).inputs[0]
    orders = np.tile(inputs, (factorial(TASK.block), 1))
    orders[:, : TASK.block] = list(permutations(inputs[: TASK.block]))
    query = PAIRS + TASK.block + inputs[0] // TASK.values
    place = inputs[-TASK.keys :].tolist().index(query)
    right = np.array([answers(TASK, row)[place] for row in orders])
    said = query_logits(model(), orders)[:, place, inputs[: TASK.block]].argmax(-1).numpy()
    assert len(set(said)) == 1
    assert (inputs[said] == right).mean() == 1 / TASK.block


def by_hand(inputs: NDArray[np.int64], window: int, form: Any) -> Tensor:
    """What is read at the queries with the keys, values and gates of the proof, [B, K, pairs].

    Keys and values of cues and queries, and queries of other tokens, are noise: no gate lets them in.
    """
    tokens, noise = torch.from_numpy(inputs), torch.Generator().manual_seed(0)
    is_pair, is_query = tokens < PAIRS, tokens >= PAIRS + TASK.block
    cue = torch.where(is_pair | is_query, 0, tokens - PAIRS + 1)  # j; 0: none
    key = torch.where(is_query, tokens - PAIRS - TASK.block, tokens // TASK.values).clamp(
        0, TASK.keys - 1
    )
    keys = one_hot(key, TASK.keys).double()
    values = one_hot(tokens.clamp(max=PAIRS - 1), PAIRS).double()
    q, k, v = (
        torch.where(rule.unsqueeze(-1), x, torch.randn(x.shape, generator=noise, dtype=x.dtype))
        for rule, x in ((is_query, keys), (is_pair, keys), (is_pair, values))
    )
    gamma = one_hot(cue, BLOCK).double()[..., :window]
    gamma[..., 0] = 0.0
    spec = presets.build(
        "linear_attention",
        heads=1,
        key_dim=TASK.keys,
        value_dim=PAIRS,
        window=Window(size=window, gate="offset"),
    )
    weights = spec.init_weights()
    given = (x.unsqueeze(2) for x in (q, k, v))
    y, _ = memorize(spec, weights, None, *given, {"gamma": gamma.unsqueeze(2)}, form=form)
    return y[:, -TASK.keys :, 0]


@pytest.mark.parametrize("form", ["reference", "parallel"])
@pytest.mark.parametrize("window", range(2, BLOCK + 1))
def test_a_window_recalls_every_pair_that_a_cue_within_it_names(window: int, form: str) -> None:
    rows = TASK.rows("test", 0, 90)
    labels = torch.from_numpy(rows.labels[:, -TASK.keys :])
    reads = by_hand(rows.inputs, window, form)
    reached = torch.zeros_like(labels, dtype=torch.bool)
    for row, label, found in zip(rows.inputs.tolist(), labels.tolist(), reached, strict=True):
        for n, pair in enumerate(label):
            place = row.index(pair)
            distance = BLOCK - 1 - place % BLOCK  # from the pair to its cue
            found[n] = distance < window
    wanted = one_hot(labels, PAIRS).double() * reached.unsqueeze(-1)
    assert torch.equal(reads, wanted)
    assert bool(reached.all()) == (window == BLOCK)
    assert abs(reached.double().mean().item() - (window - 1) / TASK.block) < 0.1


def fingerprint(task: Cued, split: str) -> str:
    rows = task.rows(split, 100, 3)
    return hashlib.sha256(rows.inputs.tobytes() + rows.labels.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("task", "split", "wanted"),
    [(TASK, "train", "b350a822fd936988"), (Cued(), "test", "d8a8bde2ffc6c6d3")],
)
def test_rows_never_change(task: Cued, split: str, wanted: str) -> None:
    assert fingerprint(task, split) == wanted


def test_a_row_is_the_same_alone_and_among_others() -> None:
    batch = TASK.rows("test", 5, 6, seed=3)
    for n in range(6):
        alone = TASK.rows("test", 5 + n, 1, seed=3)
        assert (alone.inputs[0] == batch.inputs[n]).all()
        assert (alone.labels[0] == batch.labels[n]).all()
    others = [TASK.rows("train", 5, 1, 3), TASK.rows("test", 5, 1, 4), TASK.rows("test", 6, 1, 3)]
    assert all((batch.inputs[0] != other.inputs[0]).any() for other in others)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(keys=0), "keys is 0, wanted 1 or more"),
        (dict(block=1), "block is 1, wanted 2 pairs or more"),
        (dict(values=3), "values is 3 for blocks of 4 different ones"),
    ],
)
def test_settings_must_make_sense(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cued(**settings)
    with pytest.raises(ValueError, match="split is 'valid', wanted 'train' or 'test'"):
        TASK.rows("valid", 0, 1)
