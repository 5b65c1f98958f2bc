"""Small models trained on the spot: they learn, what they learn is measured, and nothing is trained twice."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_lm.data.mad import BASELINES, Compression, Memorization
from atlas_lm.data.mqar import MQAR
from atlas_lm.evaluate import learning
from atlas_lm.evaluate.learning import AutoEncoder, Recipe, learn_all, train
from atlas_lm.models import configure
from tests.cli.builders import atlas

QUICK = Recipe(steps=60, tokens=512, tests=32, width=32, layers=1)


def test_a_memory_learns_what_is_to_be_memorized() -> None:
    """Sixteen keys with fixed values are learned by heart in a few steps; without training chance is 1/15."""
    task = Memorization(vocab_size=32, seq_len=16)
    found = train("gated_deltanet", {"m": task}, QUICK, 0)
    assert found["scores"]["m"] > 0.95
    untrained = train("gated_deltanet", {"m": task}, Recipe(steps=1, tests=32, width=32), 0)
    assert untrained["scores"]["m"] < 0.4


def test_runs_with_the_same_seed_are_the_same() -> None:
    task = {"4": MQAR(vocab_size=64, pairs=4, length=16)}
    short = Recipe(steps=5, tokens=256, tests=16, width=32)
    one, two = (train("linear_attention", task, short, 3) for _ in range(2))
    assert one["losses"] == two["losses"] and one["scores"] == two["scores"]
    assert train("linear_attention", task, short, 4)["losses"] != one["losses"]


def test_an_auto_encoder_sees_the_last_encoding_alone() -> None:
    """Logits of every place come from the last token's encoding: with it held, inputs change nothing."""
    task = Compression()
    torch.manual_seed(0)
    config = configure("gated_deltanet", size="tiny", vocab_size=task.vocab_size)
    model = AutoEncoder(config, task.length).eval()
    rows = task.rows("test", 0, 2)
    places = torch.tensor([[0, 0], [0, 31], [1, 5]])
    with torch.no_grad():
        logits = model(torch.from_numpy(rows.inputs), places)
        held = model.encoder(torch.from_numpy(rows.inputs), use_cache=False).last_hidden_state[
            :, -1
        ]
        by_hand = model.decoder(held[[0, 0, 1]] + model.positions[[0, 31, 5]])
    assert torch.equal(logits, by_hand)
    assert not torch.allclose(logits[0], logits[1])  # places differ
    np.testing.assert_allclose(model.positions[:, :1].flatten(), np.sin(np.arange(32)), atol=1e-6)


def test_every_task_of_mad_can_be_trained() -> None:
    for name, task in BASELINES.items():
        found = train(
            "linear_attention", {name: task}, Recipe(steps=2, tokens=256, tests=4, width=32), 0
        )
        assert 0 <= found["scores"][name] <= 1 and len(found["losses"]) == 1


def test_several_sizes_are_learned_together_from_few_to_many(monkeypatch) -> None:
    asked: list[int] = []
    tasks = [MQAR(vocab_size=64, pairs=pairs, length=4 * pairs) for pairs in (2, 4, 8)]
    for rows in learning._batches(tasks, Recipe(steps=60, tokens=64), 0):
        asked.append(rows.inputs.shape[1])
        assert rows.inputs.size <= 64
    assert set(asked[:10]) == {8} and set(asked[30:]) == {8, 16, 32}


def test_what_a_folder_has_is_not_trained_again(tmp_path: Path, monkeypatch) -> None:
    tasks = {"mqar": {"2": MQAR(vocab_size=64, pairs=2, length=8)}, "mad": {"c": Compression()}}
    recipe = Recipe(steps=2, tokens=64, tests=4)
    told: list[float] = []
    first = learn_all(
        tasks,
        ["transformer", "deltanet"],
        tmp_path,
        recipe=recipe,
        seeds=2,
        tell=lambda run, share: told.append(share),
    )
    assert sum(told) == pytest.approx(8)
    assert [tuple(row.cell.values()) for row in first.rows] == [
        ("transformer", "2"),
        ("deltanet", "2"),
        ("transformer", "c"),
        ("deltanet", "c"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "records.jsonl",
        "table.md",
        "mqar.png",
    }
    table = (tmp_path / "table.md").read_text()
    assert "with the worst and best of 2 runs" in table and "95 %" not in table
    lines = (tmp_path / "records.jsonl").read_text()
    monkeypatch.setattr(learning, "train", None)  # whoever trains now fails
    assert learn_all(tasks, ["transformer", "deltanet"], tmp_path, recipe=recipe, seeds=2) == first
    assert (tmp_path / "records.jsonl").read_text() == lines
    record = json.loads(lines.splitlines()[0])
    assert record["id"] == "mqar/2/transformer/0" and record["parameters"] > 1000


def test_mistakes_are_told_before_anything_is_trained(tmp_path: Path) -> None:
    unknown = atlas("eval", "mqar/4", "--train", "transformr", "--out", tmp_path / "a")
    assert unknown.exit_code == 2 and "wanted one of transformer" in unknown.stderr
    other = atlas("eval", "babilong", "--train", "transformer", "--out", tmp_path / "b")
    assert other.exit_code == 2 and "--train is for mqar, mad, cued" in other.stderr
    many = atlas("eval", "mqar/64", "--train", "transformer", "--out", tmp_path / "c")
    assert many.exit_code == 2 and "wanted 1 to 63" in many.stderr
