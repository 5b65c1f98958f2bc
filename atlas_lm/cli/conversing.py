"""What the commands that talk to a model share: their options, and how they open it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli.common import load_model

if TYPE_CHECKING:
    from atlas_lm.stream import Conversation

ModelFolder = Annotated[Path, typer.Argument(help="Folder of a model, as `atlas new` makes it.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="0: always the likeliest token; more: sampled, more freely.")
]
TopP = Annotated[
    float, typer.Option(help="Sample among the likeliest tokens that hold this much probability.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Json = Annotated[bool, typer.Option("--json", help="A JSON record instead of text.")]


def open_conversation(
    model: Path,
    memory: Path | None = None,
    *,
    new: bool = False,
    stride: int | None = None,
    device: str = "cpu",
) -> "Conversation":
    """The model in a folder with its tokenizer, going on from a memory file.

    Args:
        memory: None: from the start.
        new: a file that is not there yet means from the start, too.
    """
    if memory is not None:
        _check_memory(memory, new)
    loaded = load_model(model)
    from atlas_lm.stream import Conversation, Stream
    from atlas_lm.stream.files import open_memory
    from atlas_lm.text import load_tokenizer

    tokenizer = load_tokenizer(model, loaded.config.vocab_size)
    try:
        loaded.to(device)  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {error}") from error
    known = memory is not None and memory.exists()
    reading = open_memory(memory, loaded) if known and memory is not None else None
    stream = Stream(loaded, stride=stride, reading=reading)
    return Conversation(loaded, tokenizer, stream)


def sampling(temperature: float, top_p: float, seed: int | None) -> dict[str, Any]:
    """Options for `generate`."""
    import torch

    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}, wanted more than 0 and at most 1")
    if temperature == 0 and (top_p < 1 or seed is not None):
        raise ValueError("--top-p and --seed are for sampling; give a --temperature above 0, too")
    if seed is not None:
        torch.manual_seed(seed)
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}


def _check_memory(memory: Path, new: bool) -> None:
    """Fail before a model is loaded or a book is read in vain."""
    if memory.is_dir():
        raise ValueError(f"memory {memory} is a folder, wanted a file")
    if not new and not memory.exists():
        raise ValueError(f"there is no memory {memory}; make one with `atlas absorb`")
    if not memory.absolute().parent.is_dir():
        raise ValueError(f"the folder of memory {memory} does not exist; make it first")
