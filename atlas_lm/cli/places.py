"""Options of commands that train: place and machine. What is learned is up to the recipe."""

import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atlas_lm.train.place import Place

Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="Arguments of the recipe, e.g. preset=atlas size=60M steps=500."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or one of several like cuda:1.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of products: float32 or bfloat16; weights stay fp32. [default: by the device]"
    ),
]
Spread = Annotated[
    str | None,
    typer.Option(
        help="How processes share the model: ddp or fsdp. [default: fsdp if there are several]"
    ),
]
Processes = Annotated[
    int,
    typer.Option(min=1, help="Start so many on this machine; on several machines use torchrun."),
]
Micro = Annotated[
    int | None, typer.Option(min=1, help="Rows of a process at once; gradients add up.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Activations again in the backward pass: less memory.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile every block.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that make data.")]
SaveEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between checkpoints. [default: 20 in a run]")
]
Keep = Annotated[int, typer.Option(min=1, help="Checkpoints that are kept.")]


def place_of(context: typer.Context) -> "Place":
    """The place that the options of a command name."""
    from atlas_lm.train.place import Place

    return Place(**{field.name: context.params[field.name] for field in fields(Place)})


def start_processes(count: int) -> None:
    """Run this very command in so many processes, and leave with what they leave with."""
    if count == 1 or "RANK" in os.environ:
        return
    from torch.distributed.run import main as torchrun

    words = _without_processes(sys.argv[1:])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    torchrun(["--standalone", f"--nproc-per-node={count}", "-m", "atlas_lm.cli.main", *words])
    raise typer.Exit


def _without_processes(words: list[str]) -> list[str]:
    """
    >>> _without_processes(["train", "lm", "--processes", "2", "--out", "x", "--processes=3"])
    ['train', 'lm', '--out', 'x']
    """
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--processes="):
            skip = False
        elif word == "--processes":
            skip = True
        else:
            kept.append(word)
    return kept
