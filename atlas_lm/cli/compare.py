"""`atlas compare`: several models under one recipe and one budget, a table and curves."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli import places
from atlas_lm.cli.common import fail
from atlas_lm.cli.train import INTERRUPTED

if TYPE_CHECKING:
    from atlas_lm.train.compare import Name
    from atlas_lm.train.place import Place
    from atlas_lm.train.recipe import Recipe

PRESETS = "transformer,gated_deltanet,titans,omeganet,atlas,titans_atlas"


def compare(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe, or my_recipes.py:mine.")],
    arguments: places.Arguments = None,
    presets: Annotated[str, typer.Option(help="Models, separated by commas.")] = PRESETS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder of all runs; finished ones are not trained again.")
    ] = Path("compare_output"),
    device: places.Device = "cpu",
    dtype: places.Dtype = None,
    spread: places.Spread = None,
    processes: places.Processes = 1,
    micro: places.Micro = None,
    recompute: places.Recompute = False,
    compiled: places.Compile = False,
    workers: places.Workers = 2,
    save_every: places.SaveEvery = None,
    keep: places.Keep = 1,
) -> None:
    """Train several models under one recipe, with as many weights, steps and tokens each.

    Examples:

        atlas compare mqar --presets transformer,gated_deltanet,titans --seeds 3

        atlas compare lm_bytes steps=1000 --out first-look
    """
    places.start_processes(processes)
    try:
        _compare(recipe, arguments or [], presets.split(","), seeds, places.place_of(context))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("compare", error)


def _compare(
    name: str, arguments: list[str], presets: list[str], seeds: int, place: "Place"
) -> None:
    from atlas_lm.cli.screen import Screen
    from atlas_lm.train.compare import TABLE, compare
    from atlas_lm.train.machine import join

    with join(place.device) as machine:
        recipes = _recipes(name, arguments, presets, seeds)

        def listen(run: "Name") -> list[Any]:
            return [Screen(recipes[run], place, machine, run.folder)]

        interrupted = compare(recipes, place, machine, listen)
        if not machine.first:
            return
        if interrupted is not None:
            fail("compare", "stopped; the same command goes on from there", INTERRUPTED)
        typer.echo((place.out / TABLE).read_text(encoding="utf-8"))
        typer.echo(f"runs, table and curves: {place.out}")


def _recipes(
    name: str, arguments: list[str], presets: list[str], seeds: int
) -> "dict[Name, Recipe]":
    """Every run, built before the first is trained: mistakes are told at once."""
    from atlas_lm.recipes.finding import PARTS, build_recipe, parse_arguments
    from atlas_lm.train.compare import Name

    given = parse_arguments(name, arguments)
    taken = [key for key in ("preset", "seed") if key in given]
    if taken:
        raise ValueError(f"{taken[0]}=… is said by --{taken[0]}s here; leave it out")
    argument, parts = PARTS.get(name, ("", ("",)))
    parts = (given[argument],) if argument in given else parts
    return {
        Name(preset, part, seed): build_recipe(
            name,
            {"preset": preset, **given, **({argument: part} if part else {}), "seed": seed},
        )
        for preset in presets
        for part in parts
        for seed in range(seeds)
    }
