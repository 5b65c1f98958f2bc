"""`atlas train`: a recipe from the first step to the model, on one device or many, resumable anywhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli import places
from atlas_lm.cli.common import fail

if TYPE_CHECKING:
    from atlas_lm.train.machine import Machine
    from atlas_lm.train.place import Place
    from atlas_lm.train.recipe import Recipe

INTERRUPTED = 130


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A recipe, my_recipes.py:mine, or `list` for those there are.")
    ],
    arguments: places.Arguments = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; an unfinished run there goes on.")
    ] = Path("train_output"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would cost, and begin nothing.")
    ] = False,
    device: places.Device = "cpu",
    dtype: places.Dtype = None,
    spread: places.Spread = None,
    processes: places.Processes = 1,
    micro: places.Micro = None,
    recompute: places.Recompute = False,
    compiled: places.Compile = False,
    workers: places.Workers = 2,
    save_every: places.SaveEvery = None,
    keep: places.Keep = 2,
) -> None:
    """Train a model by a recipe. A killed run goes on from its last checkpoint with the same command.

    Examples:

        atlas train list

        atlas train lm_bytes preset=atlas --out first

        atlas train lm preset=titans size=60M --device cuda --out titans-60M

        torchrun --nproc-per-node 8 -m atlas_lm.cli.main train lm size=340M --device cuda --out big
    """
    if recipe == "list":
        _list()
        return
    places.start_processes(processes)
    try:
        _train(recipe, arguments or [], places.place_of(context), dry_run)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("train", error)


def _train(name: str, arguments: list[str], place: "Place", dry_run: bool) -> None:
    from atlas_lm.recipes.finding import build_recipe, parse_arguments
    from atlas_lm.train.machine import join

    given = parse_arguments(name, arguments)
    with join(place.device) as machine:
        made = build_recipe(name, given)
        if dry_run:
            _estimate(made, place, machine)
        else:
            _run(made, place, machine)


def _estimate(recipe: "Recipe", place: "Place", machine: "Machine") -> None:
    from atlas_lm.train.cost import estimate
    from atlas_lm.train.run import title

    found = estimate(recipe, place, machine)
    if machine.first:
        typer.echo("\n".join([f"recipe      {title(recipe)}", *found.lines()]))


def _run(recipe: "Recipe", place: "Place", machine: "Machine") -> None:
    from atlas_lm.cli.screen import Screen
    from atlas_lm.train.diary import TensorBoard
    from atlas_lm.train.health import Stopped
    from atlas_lm.train.run import train as run

    screen = Screen(recipe, place, machine, recipe.name)
    missing = TensorBoard.missing()
    if machine.first and missing:
        typer.echo(missing, err=True)
    try:
        ended = run(recipe, place, machine, [screen])
    except Stopped as stopped:
        fail("train", stopped, 1)
    if not machine.first:
        return
    if ended.interrupted:
        fail(
            "train",
            f"stopped after step {ended.progress.step}; the same command goes on from there",
            INTERRUPTED,
        )
    typer.echo(_told(ended, place))


def _told(ended: Any, place: "Place") -> str:
    progress = ended.progress
    speed = progress.tokens / max(progress.seconds, 1e-9)
    marks = [
        f"  {name}: {mark.nats:.4f} nats, {100 * mark.right:.2f} % of {mark.places} places right"
        for name, mark in ended.marks.items()
    ]
    return "\n".join(
        [
            f"{progress.step} steps, {progress.tokens:,} tokens, {speed:,.0f} tokens/s, "
            f"{100 * ended.waited:.2f} % of the time waiting for data",
            *marks,
            f"model, picture, records and checkpoints: {place.out}",
        ]
    )


def _list() -> None:
    from atlas_lm.recipes.finding import RECIPES, describe

    for name in RECIPES:
        typer.echo(describe(name))
