"""`atlas ask`: a question to a memory, which it does not change."""

import json
from pathlib import Path
from typing import Annotated

import typer

from atlas_lm.cli.common import fail
from atlas_lm.cli.conversing import (
    Device,
    Json,
    ModelFolder,
    NewTokens,
    Seed,
    Temperature,
    TopP,
    open_conversation,
    sampling,
)


def ask(
    model: ModelFolder,
    question: Annotated[str, typer.Argument(help="The text that the model goes on from.")],
    memory: Annotated[Path, typer.Option(help="What was read: a file of `atlas absorb`.")],
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Ask about what was read. Neither question nor answer is remembered.

    Examples:

        atlas ask my-model "Who killed the duke?" --memory book.mem

        atlas ask my-model "Once" --memory book.mem --temperature 0.8 --seed 1 --json
    """
    try:
        conversation = open_conversation(model, memory, device=device)
        tell = None if as_json else lambda text: typer.echo(text, nl=False)
        options = sampling(temperature, top_p, seed)
        answer = conversation.ask(question, max_new_tokens, tell, **options)
    except (ValueError, OSError) as error:
        fail("ask", error)
    if as_json:
        record = {"question": question, "answer": answer, "tokens": conversation.stream.tokens}
        typer.echo(json.dumps(record, indent=2))
    else:
        typer.echo()
