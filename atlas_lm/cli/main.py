"""`atlas`: test-time memory from the command line."""

from typing import Annotated

import typer

from atlas_lm import __version__
from atlas_lm.cli.absorb import absorb
from atlas_lm.cli.ask import ask
from atlas_lm.cli.compare import compare
from atlas_lm.cli.data import app as data
from atlas_lm.cli.demo import demo
from atlas_lm.cli.doctor import doctor
from atlas_lm.cli.evaluate import evaluate
from atlas_lm.cli.experiments import experiments
from atlas_lm.cli.generate import generate
from atlas_lm.cli.memory import app as memory
from atlas_lm.cli.new import new
from atlas_lm.cli.trace import trace
from atlas_lm.cli.train import train

app = typer.Typer(
    name="atlas",
    help="Test-time memory for sequence models: Titans, ATLAS and their family.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.command()(demo)
app.command()(doctor)
app.command()(experiments)
app.command()(new)
app.command()(absorb)
app.command()(ask)
app.command()(generate)
app.command()(trace)
app.command()(train)
app.command()(compare)
app.command("eval")(evaluate)
app.add_typer(data)
app.add_typer(memory)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atlas-lm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Test-time memory for sequence models: Titans, ATLAS and their family."""


def main() -> None:
    app()


if __name__ == "__main__":  # as torchrun starts it: -m atlas_lm.cli.main
    main()
