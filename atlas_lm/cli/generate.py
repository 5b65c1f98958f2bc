"""`atlas generate`: continue a text, and remember it on request."""

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


def generate(
    model: ModelFolder,
    memory: Annotated[
        Path | None, typer.Option(help="Go on from here: a file of `atlas absorb`.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="A text to go on from.")] = "",
    save: Annotated[
        bool, typer.Option("--save", help="Remember prompt and answer in the memory file.")
    ] = False,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Continue a text, or what was read.

    Examples:

        atlas generate my-model --prompt "Once upon a time"

        atlas generate my-model --memory book.mem --prompt "Chapter 2" --save
    """
    from atlas_lm.stream.files import save_memory

    try:
        if save and memory is None:
            raise ValueError("--save needs a file to save to; give --memory FILE")
        conversation = open_conversation(model, memory, new=save, device=device)
        tell = None if as_json else lambda text: typer.echo(text, nl=False)
        options = sampling(temperature, top_p, seed)
        answer = conversation.generate(prompt, max_new_tokens, tell, **options)
    except (ValueError, OSError) as error:
        fail("generate", error)
    if not as_json:
        typer.echo()
    stream = conversation.stream
    try:
        if save and memory is not None:
            save_memory(memory, stream.model, stream.snapshot())
    except OSError as error:
        fail("generate", error, code=1)
    if as_json:
        record = {"prompt": prompt, "answer": answer, "tokens": stream.tokens, "saved": save}
        typer.echo(json.dumps(record, indent=2))
