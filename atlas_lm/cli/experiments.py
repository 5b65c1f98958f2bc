"""`atlas experiments`: what the memories can and cannot hold, measured on this machine in a few minutes."""

from pathlib import Path
from typing import Annotated

import typer


def experiments(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and results.json.")] = Path(
        "experiments_output"
    ),
    seed: Annotated[int, typer.Option(help="Seed of all random keys and values.")] = 0,
    quick: Annotated[bool, typer.Option(help="A few seconds, coarse numbers.")] = False,
) -> None:
    """Store key-value pairs in memories of equal size and see what comes back.

    Example:

        atlas experiments --out experiments_output
    """
    from atlas_lm.experiments import run_experiments

    try:
        run_experiments(out, quick=quick, seed=seed)
    except ModuleNotFoundError as missing:  # it says what to install
        typer.echo(f"atlas experiments: {missing}", err=True)
        raise typer.Exit(2) from missing
