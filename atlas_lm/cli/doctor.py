"""`atlas doctor`: hold presets, saved models or any layer to the laws of a causal memory."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_lm.cli.common import fail, load_model

if TYPE_CHECKING:
    from atlas_lm.doctor import Verdict
    from atlas_lm.doctor.subjects import Subject


def doctor(
    preset: Annotated[
        list[str] | None, typer.Option(help="A preset by name, or `all`. May be repeated.")
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="`package.module:factory`; the factory returns a layer [B,T,D] -> [B,T,D]."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="The folder of a saved model. May be repeated.")
    ] = None,
    width: Annotated[int, typer.Option(help="D, the width of a layer's input.")] = 32,
    length: Annotated[
        int, typer.Option(help="Tokens with which a layer or model is examined.")
    ] = 80,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float64 (limit 1e-9; default for layers) or float32 (limit 1e-4; for models)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Records instead of a table.")] = False,
) -> None:
    """Run the laws on presets, saved models or any layer; exit 1 when a law is broken.

    A layer is any callable `x -> y` or `x -> (y, state)`. It is fed a stream in pieces if it takes
    `state`, and padding if it takes `valid` or `mask` (bool [B, T], True for tokens that count).

    A model that amplifies rounding may miss the limit of float32; --dtype float64 tells that from a fault.

    Examples:

        atlas doctor --preset all

        atlas doctor --model my-model

        atlas doctor --layer mypackage.layers:make_layer --width 64 --json
    """
    from rich.console import Console

    from atlas_lm.doctor import as_records, as_table, passed

    try:
        subjects = _subjects(preset or [], layer or [], model or [], width, length, dtype)
        verdicts = _examine(subjects)
    except ValueError as error:
        fail("doctor", error)
    if as_json:
        typer.echo(json.dumps(as_records(verdicts), indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(as_table(verdicts, console.width))
    raise typer.Exit(0 if passed(verdicts) else 1)


def _subjects(
    names: list[str],
    layers: list[str],
    models: list[str],
    width: int,
    length: int,
    dtype: str | None,
) -> "list[Subject]":
    import torch

    from atlas_lm.doctor import load_layer, preset_subject
    from atlas_lm.memory import presets

    dtypes: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32}
    if dtype is not None and dtype not in dtypes:
        raise ValueError(f"dtype is {dtype!r}, wanted one of {', '.join(dtypes)}")
    if not names and not layers and not models:
        raise ValueError(
            "nothing to examine; pass --preset all, --preset NAME, --model DIR or --layer MODULE:FACTORY"
        )
    if "all" in names:
        names = list(presets.PRESETS)
    sys.path.insert(0, "")  # a layer in the current folder needs no installation
    options = {"width": width, "length": length, "dtype": dtypes[dtype or "float64"]}
    subjects: list[Subject] = [preset_subject(name) for name in names]
    subjects += [load_layer(path, **options) for path in layers]
    if models:
        from atlas_lm.doctor.model_subject import ModelSubject

        examined = dtypes[dtype or "float32"]
        for path in models:
            name, opened = Path(path).name, load_model(path)
            subjects.append(ModelSubject(name, opened, dtype=examined, length=length))
    return subjects


def _examine(subjects: "list[Subject]") -> "list[Verdict]":
    from rich.console import Console
    from rich.progress import Progress

    from atlas_lm.doctor import examine, laws_for

    verdicts = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("examining", total=sum(len(laws_for(one)) for one in subjects))
        for verdict in examine(subjects):
            progress.update(bar, advance=1, description=f"{verdict.subject}: {verdict.law}")
            verdicts.append(verdict)
    return verdicts
