"""A recipe in a folder: begun, gone on with, or found finished; its model and its picture at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_lm.runs.about import check_pictures
from atlas_lm.train.diary import Diary, Several, TensorBoard
from atlas_lm.train.listener import Ended, Listener
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import Machine
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe

MODEL, PICTURE = "model", "run.png"


def train(
    recipe: Recipe, place: Place, machine: Machine, listeners: Sequence[Listener] = ()
) -> Ended:
    """Train a recipe in a folder, from its newest checkpoint on if there is one.

    The folder holds `run.json` (the recipe, and every start), `records.jsonl` (every step and exam),
    `checkpoints/`, logs of TensorBoard, and at the end `model/` and `run.png`.
    """
    check_pictures(True)
    place.out.mkdir(parents=True, exist_ok=True)
    run = Run(recipe, place, machine)  # first: what cannot be done should leave no records
    diary = Diary(place.out, what_is(recipe, place, machine)) if machine.first else None
    if diary:
        run.listener = Several([diary, *_boards(place.out), *listeners])
    machine.wait()
    try:
        run.resume()
        ended = run.go()
    finally:
        run.listener.closed()
    if not ended.interrupted:
        run.export(place.out / MODEL)
    if diary:
        _draw(recipe, diary, place.out / PICTURE)
    return ended


def what_is(recipe: Recipe, place: Place, machine: Machine) -> dict[str, Any]:
    """All that determines what a run learns."""
    return {**recipe.record(), "dtype": str(place.chosen_dtype(machine.device))}


def title(recipe: Recipe) -> str:
    """The recipe and what it was asked for, e.g. `lm(preset=titans, seed=1)`."""
    told = ", ".join(f"{name}={value}" for name, value in recipe.arguments.items())
    return f"{recipe.name}({told})"


def _boards(folder: Path) -> list[Listener]:
    return [] if TensorBoard.missing() else [TensorBoard(folder / "tensorboard")]


def _draw(recipe: Recipe, diary: Diary, path: Path) -> None:
    if diary.steps:
        from atlas_lm.train.picture import draw_run

        draw_run(title(recipe), diary.steps, diary.exams, path)
