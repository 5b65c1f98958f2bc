"""`atlas new`: a fresh model with random weights, to be trained or tried."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli.common import fail

if TYPE_CHECKING:
    from atlas_lm.models import AtlasForCausalLM
    from atlas_lm.text import Tokenizer


def new(
    folder: Annotated[Path, typer.Argument(help="Where the model goes; must be new or empty.")],
    preset: Annotated[
        str, typer.Option(help="Rule of the memory, e.g. titans; or transformer.")
    ] = "atlas",
    block: Annotated[
        str | None,
        typer.Option(
            help="attention, sliding, lmm, mal, mag or mac. [default: lmm, the memory alone]"
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="tiny, 20M, 60M, 170M, 340M, 760M or 1.3B.")] = "tiny",
    vocab_size: Annotated[
        int | None, typer.Option(help="[default: that of the tokenizer; without one 259, bytes]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a tokenizer, copied into the model; or gpt2, which is here."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON record instead of text.")] = False,
) -> None:
    """Make a model with random weights.

    Examples:

        atlas new my-model --preset titans --block mag

        atlas new my-model --preset atlas --size 170M --tokenizer gpt2
    """
    try:
        _check_free(folder)
        words = _tokenizer(tokenizer, vocab_size)
        model = _model(preset, block, size, vocab_size, words, seed)
        _save(folder, model, words)
    except (ValueError, OSError) as error:
        fail("new", error)
    record = _describe(folder, preset, model)
    typer.echo(json.dumps(record, indent=2) if as_json else _text(record))


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; choose another name")


def _tokenizer(folder: Path | None, vocab_size: int | None) -> "Tokenizer | None":
    """The tokenizer of the model to be; None for one that knows ids alone."""
    from atlas_lm.data.vocabularies import gpt2
    from atlas_lm.text import ByteTokenizer, load_tokenizer

    if folder is None:
        return ByteTokenizer() if vocab_size in (None, ByteTokenizer.vocab_size) else None
    if str(folder) == "gpt2" and not folder.exists():
        return gpt2()
    return load_tokenizer(folder, 2**31 if vocab_size is None else vocab_size)


def _model(
    preset: str,
    block: str | None,
    size: str,
    vocab_size: int | None,
    words: "Tokenizer | None",
    seed: int,
) -> "AtlasForCausalLM":
    import torch

    from atlas_lm.models import AtlasForCausalLM
    from atlas_lm.models.sizes import configure

    fields: dict[str, Any] = {}
    if words is not None:
        fields = {"vocab_size": words.vocab_size, **words.special}
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    torch.manual_seed(seed)
    return AtlasForCausalLM(configure(preset, block=block, size=size, **fields))


def _save(folder: Path, model: "AtlasForCausalLM", words: "Tokenizer | None") -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if words is not None:
        words.save(folder)


def _describe(folder: Path, preset: str, model: "AtlasForCausalLM") -> dict[str, Any]:
    import torch

    with torch.no_grad():
        state = model.initial_state(1).bytes
    return {
        "folder": str(folder),
        "preset": preset,
        "blocks": model.config.blocks,
        "vocab_size": model.config.vocab_size,
        "parameters": model.num_parameters(),
        "state_bytes": state,
        "grows": model.config.grows,
    }


def _text(record: dict[str, Any]) -> str:
    names = " ".join(dict.fromkeys(record["blocks"]))
    state = f"a state of {record['state_bytes']:,} bytes"
    if record["grows"]:
        state += f" at the start, which grows with the text: {record['grows']}"
    return (
        f"{record['folder']}: {record['preset']}, {len(record['blocks'])} blocks {names}, "
        f"{record['vocab_size']:,} ids, {record['parameters']:,} parameters, {state}"
    )
