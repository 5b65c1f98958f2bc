"""`atlas demo`: facts hidden in a real book, read once at constant memory, asked for, saved."""

from pathlib import Path
from typing import Annotated

import typer

from atlas_lm.cli.common import fail

SHIPPED = Path(__file__).parent.parent / "pretrained" / "babilong"


def demo(
    tokens: Annotated[
        int, typer.Option(help="Length of the text, in tokens of the model.")
    ] = 100_000,
    out: Annotated[
        Path, typer.Option(help="Folder for the memory, the page and results.json.")
    ] = Path("demo_output"),
    seed: Annotated[int, typer.Option(help="Another seed, another tale and other places.")] = 0,
    model: Annotated[
        Path, typer.Option(help="Folder of a model, by default the one that comes along.")
    ] = SHIPPED,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Hide a tale in a book, let the model read it once, and ask about it.

    The model that comes along was trained on texts of up to 2,048 tokens; what it keeps of longer ones stands
    in docs/results.md.

    Examples:

        atlas demo

        atlas demo --tokens 10000000 --seed 3
    """
    from atlas_lm.cli.conversing import open_conversation
    from atlas_lm.demo import run_demo

    try:
        opened = open_conversation(model, device=device)
        run_demo(opened.stream.model, opened.tokenizer, out, tokens=tokens, seed=seed)
    except (ValueError, OSError) as error:
        fail("demo", error)
