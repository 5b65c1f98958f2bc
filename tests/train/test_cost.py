"""Costs by formula against what runs do, and the records that runs leave."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from atlas_lm.models.counts import flops_per_token, state_bytes
from atlas_lm.recipes.small import mqar
from atlas_lm.runs.journal import Journal
from atlas_lm.train.checkpoint import Progress
from atlas_lm.train.cost import estimate, matmul_rate, step_flops
from atlas_lm.train.diary import Diary
from atlas_lm.train.listener import Report
from atlas_lm.train.machine import Machine
from atlas_lm.train.place import Place
from tests.train.builders import Walks, run, small_recipe

CPU = Machine(device=torch.device("cpu"))


def test_an_estimate_counts_what_a_run_does(tmp_path: Path) -> None:
    recipe = small_recipe(source=Walks(carries=True), segment=12)
    found = estimate(recipe, Place(out=tmp_path), CPU, trial=False)
    made, heard = run(recipe, tmp_path)
    weights = [weight.numel() for weight in made.module.parameters()]
    assert found.parameters["total"] == sum(weights)
    assert found.weight_bytes == 16 * sum(weights)
    assert found.tokens == 6 * 4 * 24
    assert found.flops == 6 * 4 * 24 * 3 * flops_per_token(recipe.model, 12)["total"]
    assert found.carried_bytes == made.trained.carried.bytes == 4 * state_bytes(recipe.model)
    assert found.seconds is None and found.peak_bytes is None
    assert len(heard.losses) == 6


def test_a_trial_times_every_shape_of_a_curriculum(tmp_path: Path) -> None:
    recipe = mqar("deltanet", steps=60, tokens=64, pairs=(2, 4, 8))
    shapes = Counter(recipe.source.shape(step) for step in range(60))
    assert len(shapes) == 3
    found = estimate(recipe, Place(out=tmp_path), CPU)
    assert found.seconds > 0 and found.peak_bytes > 2**20
    assert found.flops == sum(step_flops(recipe, shape) * times for shape, times in shapes.items())
    assert not any(tmp_path.iterdir())
    assert any(line.startswith("time        about") for line in found.lines())


def test_the_rate_of_the_machine_is_that_of_its_products() -> None:
    found = matmul_rate(torch.device("cpu"), torch.float32, seconds=0.05)
    assert 1e8 < found < 1e15


def report(step: int, loss: float = 1.0) -> Report:
    return Report(step=step, loss=loss, norm=1.0, rate=0.1, tokens=8, labelled=8, seconds=0.5)


def test_what_was_told_after_the_checkpoint_is_told_again(tmp_path: Path) -> None:
    diary = Diary(tmp_path, {"name": "a run"})
    for step in range(1, 8):
        diary.stepped(report(step))
    diary.saving(7)
    lines = (tmp_path / "records.jsonl").read_text()
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(1, 8))
    diary.resumed(Progress(step=4))
    assert (tmp_path / "records.jsonl").read_text() == "".join(lines.splitlines(True)[:4])
    diary.stepped(report(5, loss=2.0))
    diary.flush()
    assert [record["loss"] for record in diary.steps] == [1.0] * 4 + [2.0]


def test_a_journal_is_cut_behind_what_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {}, {})
    journal.add([{"id": str(n), "n": n} for n in range(5)])
    journal.cut(lambda record: record["n"] != 3)
    assert list(journal.records) == ["0", "1", "2"]
    journal.cut(lambda record: True)
    journal.add([{"id": "9", "n": 9}])
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [0, 1, 2, 9]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Diary(tmp_path, {"name": "a run"})
    with pytest.raises(ValueError, match="name was 'a run' and is 'another'"):
        Diary(tmp_path, {"name": "another"})
    assert first.journal.folder == tmp_path
