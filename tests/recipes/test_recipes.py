"""Recipes: every preset under each, equal sizes, arguments, recipes of one's own."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atlas_lm.data.mad import BASELINES, variations
from atlas_lm.models.counts import parameters
from atlas_lm.recipes.finding import PARTS, RECIPES, build_recipe, describe, parse_arguments
from atlas_lm.train.recipe import Recipe
from tests.train.builders import run

PRESETS = ("transformer", "gated_deltanet", "titans", "omeganet", "atlas", "titans_atlas")
LESSON = {
    "size": "tiny",
    "tokenizer": "bytes",
    "steps": 2,
    "tokens": 4096,
    "lengths": (2048, 4096),
    "exam_rows": 1,
}
SMALL = {
    "lm": {"size": "tiny", "tokenizer": "bytes", "steps": 2, "rows": 2, "length": 32},
    "lm_bytes": {"steps": 2, "rows": 2, "length": 32},
    "babilong": LESSON,
    "reader": LESSON | {"block": None, "shares": (0.5, 0.5)},
    "needle": LESSON,
    "mqar": {"steps": 2, "tokens": 64, "pairs": (2, 4)},
    "mad": {"steps": 2, "tokens": 256, "exam_rows": 2},
    "mad_paper": {"task": "memorization"},
    "cued": {"steps": 2},
}


def test_every_recipe_is_tried_here() -> None:
    assert SMALL.keys() | {"keeper"} == RECIPES.keys()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "cued"])
def test_every_preset_has_the_same_budget(name: str, preset: str) -> None:
    """As many weights to within half a unit of every MLP, the same rows and tokens."""
    made = build_recipe(name, {"preset": preset, **SMALL[name]})
    base = build_recipe(name, {"preset": "atlas", **SMALL[name]})
    unit = 3 * made.model.hidden_size * made.model.num_hidden_layers
    counts = [parameters(recipe.model)["total"] for recipe in (made, base)]
    assert abs(counts[0] - counts[1]) <= unit / 2
    assert [made.source.shape(i) for i in range(2)] == [base.source.shape(i) for i in range(2)]
    mine, theirs = (r.source.batch(1, 0, 1) for r in (made, base))
    np.testing.assert_array_equal(mine.inputs, theirs.inputs)
    np.testing.assert_array_equal(mine.labels, theirs.labels)
    assert made.record()["arguments"]["preset"] == preset
    assert made.source.carries == (name in ("lm", "lm_bytes") and preset != "transformer")


@pytest.mark.parametrize("block", ["lmm", "mal", "mag", "mac"])
def test_blocks_are_an_option(block: str) -> None:
    made = build_recipe("lm", {"preset": "titans", "block": block, **SMALL["lm"]})
    assert set(made.model.blocks) == {block}


@pytest.mark.parametrize("name", [name for name in SMALL if name != "mad_paper"])
def test_every_recipe_can_be_trained(name: str, tmp_path: Path) -> None:
    preset = {} if name == "cued" else {"preset": "gated_deltanet"}
    made, heard = run(build_recipe(name, {**preset, **SMALL[name]}), tmp_path)
    assert len(heard.losses) == 2 and all(np.isfinite(heard.losses))
    assert made.marks and all(mark.places > 0 for mark in made.marks.values())


@pytest.mark.parametrize("task", BASELINES)
def test_every_task_of_mad_can_be_trained(task: str, tmp_path: Path) -> None:
    recipe = build_recipe("mad", {"preset": "deltanet", "task": task, **SMALL["mad"]})
    _, heard = run(recipe, tmp_path)
    assert 0 <= heard.marks[-1][task].right <= 1


def test_mad_as_published() -> None:
    made = build_recipe("mad_paper", {"task": "in-context-recall", "setting": 4})
    task = list(variations("in-context-recall"))[4]
    assert made.source.shape(0) == (128, task.length) and made.model.hidden_size == 128
    assert made.steps == 200 * 12_800 // 128
    assert made.source.exams()["in-context-recall"].rows == 1280
    assert PARTS["mad_paper"][1] == tuple(BASELINES)


def test_shares_of_lengths_and_blocks_of_layers() -> None:
    made = build_recipe("reader", {"steps": 100})
    assert made.model.blocks == ["sliding", "lmm", "lmm", "lmm"] and made.price == 0
    counts = Counter(made.source.shape(step) for step in range(100))
    wanted = {(64, 128): 3, (32, 256): 7, (16, 512): 45, (8, 1024): 25, (4, 2048): 20}
    assert counts.keys() == wanted.keys()
    assert all(abs(counts[shape] - number) <= 1 for shape, number in wanted.items())
    with pytest.raises(ValueError, match="wanted one for each of the 5 lengths, above 0 and 1 in"):
        build_recipe("reader", {"shares": (0.5, 0.5)})


def test_a_keeper_goes_on_with_a_reader(tmp_path: Path) -> None:
    """With its weights and sizes, but without decay and with gates that can close."""
    first, _ = run(build_recipe("reader", SMALL["reader"]), tmp_path / "first")
    first.export(tmp_path / "model")
    given = {"start": str(tmp_path / "model"), **SMALL["reader"]}
    made = build_recipe("keeper", given)
    assert made.model.intermediate_size == first.recipe.model.intermediate_size
    assert (
        made.model.gate_margin == 0.1
        and made.price == 0.2
        and not made.model.spec.retention.gates()
    )
    _, heard = run(made, tmp_path / "second")
    assert len(heard.losses) == 2 and all(np.isfinite(heard.losses))


def test_packed_documents_are_read_as_they_are_alone(tmp_path: Path) -> None:
    recipe = build_recipe("lm", {"preset": "titans", "packed": True, **SMALL["lm"]})
    assert recipe.source.batch(0, 0, 2).borders is not None
    _, heard = run(recipe, tmp_path, micro=1)
    assert len(heard.losses) == 2


def test_arguments_have_the_types_of_the_recipe() -> None:
    given = ["preset=atlas", "steps=7", "rate=0.5", "pairs=2,4", "block=none"]
    wanted = {"preset": "atlas", "steps": 7, "rate": 0.5, "pairs": (2, 4), "block": None}
    assert parse_arguments("mqar", given) == wanted
    assert parse_arguments("lm_bytes", ["packed=true", "size=20M"]) == {
        "packed": True,
        "size": "20M",
    }
    assert parse_arguments("mad_paper", ["rate=1e-3"]) == {"rate": 1e-3}
    with pytest.raises(ValueError, match=r"'stepps=7' is no argument of mqar; it takes preset=…"):
        parse_arguments("mqar", ["stepps=7"])
    with pytest.raises(ValueError, match="steps is 'many', wanted int"):
        parse_arguments("mqar", ["steps=many"])
    with pytest.raises(ValueError, match="packed is 'yes', wanted bool"):
        parse_arguments("lm", ["packed=yes"])


def test_recipes_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from atlas_lm.recipes.small import mqar\n"
        "def short(preset: str = 'titans', steps: int = 5):\n"
        "    return replace(mqar(preset, steps=steps), exams=1)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    name = f"{file}:short"
    made = build_recipe(name, parse_arguments(name, ["steps=3"]))
    assert isinstance(made, Recipe) and (made.steps, made.exams, made.name) == (3, 1, "short")
    with pytest.raises(ValueError, match="returned int, wanted a Recipe"):
        build_recipe(f"{file}:wrong", {})
    with pytest.raises(ValueError, match="has no function 'other'"):
        build_recipe(f"{file}:other", {})
    with pytest.raises(ValueError, match="is missing"):
        build_recipe("nowhere.py:mine", {})
    with pytest.raises(ValueError, match="recipe is 'lmm', wanted one of lm, "):
        build_recipe("lmm", {})


def test_recipes_describe_themselves() -> None:
    for name in RECIPES:
        assert describe(name).startswith(f"{name}: ")
    assert "pairs=4,8,16,32,60" in describe("mqar") and "block=none" in describe("lm")
