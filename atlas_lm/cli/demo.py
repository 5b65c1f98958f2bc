"""`atlas demo`: what the memories can and cannot hold, measured on this machine in a few minutes."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and results.json.")] = Path(
        "demo_output"
    ),
    seed: Annotated[int, typer.Option(help="Seed of all random keys and values.")] = 0,
    quick: Annotated[bool, typer.Option(help="A few seconds, coarse numbers.")] = False,
) -> None:
    """Store key-value pairs in memories of equal size and see what comes back.

    Example:

        atlas demo --out demo_output
    """
    from atlas_lm.demo import run_demo

    try:
        run_demo(out, quick=quick, seed=seed)
    except ModuleNotFoundError as missing:  # it says what to install
        typer.echo(f"atlas demo: {missing}", err=True)
        raise typer.Exit(2) from missing
