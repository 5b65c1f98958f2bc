"""`atlas memory`: look at memory files, compare, fork and shrink them."""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli.common import fail, load_model

if TYPE_CHECKING:
    from rich.table import Table

    from atlas_lm.models import AtlasForCausalLM
    from atlas_lm.stream.files import MemoryFile
    from atlas_lm.stream.reading import Reading

app = typer.Typer(
    name="memory",
    help="Memory files: what a model has read, kept on disk.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

File = Annotated[Path, typer.Argument(help="A memory file.")]
Json = Annotated[bool, typer.Option("--json", help="A JSON record instead of tables.")]
Force = Annotated[bool, typer.Option(help="Overwrite what is there.")]
Encoding = Annotated[str, typer.Option(help="How the text is encoded.")]
Record = dict[str, Any]


@app.command()
def show(
    file: File,
    model: Annotated[
        Path | None, typer.Option(help="Folder of its model: also show how far the memory moved.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Header, sizes and norms of a memory, after its checksum was verified.

    Examples:

        atlas memory show book.mem

        atlas memory show book.mem --model my-model --json
    """
    with _refusals("memory show"):
        record = _describe(file, model)
    if as_json:
        _print_json(record)
    else:
        _print(_facts(record, ABOUT), _layers_table(record["layers"]))


@app.command()
def diff(
    a: File,
    b: Annotated[Path, typer.Argument(help="Another one.")],
    model: Annotated[Path | None, typer.Option(help="Folder of the model of both.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text (- for stdin) on which predictions are compared.")
    ] = None,
    encoding: Encoding = "utf-8",
    as_json: Json = False,
) -> None:
    """How far two memories lie apart, tensor by tensor; with a text, also what the model predicts.

    Distances are |A - B| over the larger of both norms. KL is KL(A || B) of the next token in nats.

    Examples:

        atlas memory diff monday.mem tuesday.mem

        atlas memory diff full.mem small.mem --model my-model --text page.txt
    """
    from atlas_lm.stream.files import open_memory

    with _refusals("memory diff"):
        if (model is None) != (text is None):
            raise ValueError("predictions need both, --model and --text; give both or neither")
        record = _compare(a, b)
        if model is not None and text is not None:
            loaded = load_model(model)
            readings = [open_memory(path, loaded) for path in (a, b)]
            ids = _ids(model, loaded, text, encoding)
            record["predictions"] = _predictions(loaded, readings[0], readings[1], ids)
    if as_json:
        _print_json(record)
    else:
        _print(_both_table(record), _distance_table(record["tensors"]), *_predicted(record))


@app.command()
def fork(
    file: File,
    copy: Annotated[Path, typer.Argument(help="Where the copy goes.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy a memory, so that two streams go on from it. A damaged one is not copied.

    Example:

        atlas memory fork book.mem chapter-two.mem
    """
    from atlas_lm.stream.files import copy_memory
    from atlas_lm.stream.header import read_header

    with _refusals("memory fork"):
        _check_free(copy, force)
        copy_memory(file, copy, overwrite=force)
        header = read_header(copy)
    record = {"file": str(file), "copy": str(copy), "tokens": header.tokens}
    if as_json:
        _print_json(record | {"checksum": header.checksum})
    else:
        typer.echo(f"{copy}: a copy of {file}, {header.tokens} tokens read")


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    file: File,
    out: Annotated[Path, typer.Argument(help="The small memory file to write.")],
    bits: Annotated[int, typer.Option(help="Bits of each fast weight: 8 or 4.")] = 8,
    text: Annotated[
        Path | None, typer.Option(help="A text (- for stdin) on which the loss is measured.")
    ] = None,
    encoding: Encoding = "utf-8",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Store a memory in few bits, and measure what that changes in the predictions on a text.

    Example:

        atlas memory quantize my-model book.mem book-8.mem --bits 8 --text page.txt
    """
    with _refusals("memory quantize"):
        _check_free(out, force)
        record = _shrink(model, file, out, bits, text, encoding)
    if as_json:
        _print_json(record)
    else:
        _print(_facts(record, SMALLER), *_predicted(record))


@contextmanager
def _refusals(command: str) -> Iterator[None]:
    """Bad input ends a command in one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(command, error)


def _check_free(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(f"{path} exists already; choose another name, or pass --force")


def _describe(path: Path, folder: Path | None) -> Record:
    from atlas_lm.stream.compare import layer_norms
    from atlas_lm.stream.files import open_memory, read_memory

    file, start = read_memory(path), None
    if folder is not None:
        model = load_model(folder)
        open_memory(path, model)  # refuses a memory of another model
        start = model.initial_state(1).detach().leaves()
    layers = layer_norms(file.leaves, len(file.header.layers), start)
    about = _summary(path, file) | {
        "format_version": file.header.format_version,
        "atlas_lm_version": file.header.atlas_lm_version,
        "state_bytes": sum(leaf.nbytes for leaf in file.leaves.values()),
        "specs": file.header.specs,
        "config": file.header.config,
    }
    rules = zip(layers, file.header.layers, strict=True)
    return about | {"layers": [asdict(layer) | {"spec": spec} for layer, spec in rules]}


def _summary(path: Path, file: "MemoryFile") -> Record:
    return {
        "file": str(path),
        "bytes": file.size,
        "tokens": file.header.tokens,
        "pending": len(file.pending),
        "stride": file.header.stride,
        "dtype": file.header.dtype,
        "bits": file.header.bits,
        "model_fingerprint": file.header.model_fingerprint,
        "checksum": file.header.checksum,
    }


def _compare(a: Path, b: Path) -> Record:
    import torch

    from atlas_lm.stream.belongs import differences
    from atlas_lm.stream.compare import distances
    from atlas_lm.stream.files import read_memory

    first, second = read_memory(a), read_memory(b)
    same = first.leaves.keys() == second.leaves.keys() and all(
        torch.equal(leaf, second.leaves[name]) for name, leaf in first.leaves.items()
    )
    fingerprints = [one.header.model_fingerprint for one in (first, second)]
    return {
        "a": _summary(a, first),
        "b": _summary(b, second),
        "same_model": fingerprints[0] == fingerprints[1],
        "config_differences": differences(
            first.header.config, second.header.config, ("in A", "in B")
        ),
        "equal": same and torch.equal(first.pending, second.pending),
        "tensors": distances(first.leaves, second.leaves),
    }


def _shrink(
    folder: Path, file: Path, out: Path, bits: int, text: Path | None, encoding: str
) -> Record:
    from atlas_lm.stream.files import open_memory, save_memory
    from atlas_lm.stream.header import read_header
    from atlas_lm.stream.quantize import quantize

    model = load_model(folder)
    before = read_header(file)
    full = open_memory(file, model)
    small, change = quantize(full, bits), None
    if text is not None:
        change = _predictions(model, full, small, _ids(folder, model, text, encoding))
    size = file.stat().st_size
    save_memory(out, model, full, bits)
    errors = {name: one.error for name, one in read_header(out).quantized.items()}
    return {
        "file": str(file),
        "out": str(out),
        "bits_before": before.bits,
        "bits": bits,
        "bytes_before": size,
        "bytes": out.stat().st_size,
        "largest_error": max(errors.values()),
        "errors": errors,
        "predictions": change,
    }


def _ids(folder: Path, model: "AtlasForCausalLM", text: Path, encoding: str) -> Iterator[list[int]]:
    """The tokens of a text, piece by piece."""
    from atlas_lm.text import cut, load_tokenizer, read_text

    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    return (tokenizer.encode(piece) for piece in cut(read_text(text, encoding)))


def _predictions(
    model: "AtlasForCausalLM", first: "Reading", second: "Reading", ids: Iterable[list[int]]
) -> Record:
    from atlas_lm.stream.compare import compare_predictions

    change = compare_predictions(model, first, second, ids)
    return asdict(change) | {"loss_change": change.loss_change}


ABOUT = {
    "file": "file",
    "bytes": "bytes on disk",
    "state_bytes": "bytes opened",
    "tokens": "tokens read",
    "pending": "of them pending",
    "stride": "tokens per stride",
    "dtype": "dtype of the model",
    "bits": "bits per fast weight",
    "model_fingerprint": "fingerprint of the model",
    "atlas_lm_version": "written by atlas-lm",
    "format_version": "version of the format",
    "checksum": "checksum (verified)",
}
SMALLER = {
    "out": "written",
    "bits_before": "bits per fast weight before",
    "bits": "bits per fast weight",
    "bytes_before": "bytes before",
    "bytes": "bytes",
    "largest_error": "largest relative error of a tensor",
}
PREDICTED = {
    "tokens": "tokens of the text",
    "mean_kl": "KL of the next token, mean (nats)",
    "max_kl": "KL of the next token, largest (nats)",
    "first_loss": "loss before (nats per token)",
    "second_loss": "loss after (nats per token)",
    "loss_change": "change of the loss (nats per token)",
    "same_top1": "share of equal first choices",
}


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _facts(record: Record, names: dict[str, str]) -> "Table":
    table = _table("", "value")
    for name, words in names.items():
        table.add_row(words, _say(record[name]))
    return table


def _layers_table(layers: list[Record]) -> "Table":
    columns = ("memory", "momentum", "start", "moved", "bytes")
    table = _table("layer", "|memory|", "|momentum|", "|start|", "|memory - start|", "bytes")
    for layer in layers:
        table.add_row(str(layer["layer"]), *(_say(layer[name]) for name in columns))
    return table


def _both_table(record: Record) -> "Table":
    table = _table("", "A", "B")
    for name in ("file", "bytes", "tokens", "bits", "dtype", "model_fingerprint"):
        table.add_row(ABOUT[name], _say(record["a"][name]), _say(record["b"][name]))
    table.add_row("same model", _say(record["same_model"]))
    table.add_row("equal to the last bit", _say(record["equal"]))
    for field in record["config_differences"]:
        table.add_row("configuration", field)
    return table


def _distance_table(tensors: dict[str, float | None]) -> "Table":
    table = _table("tensor", "relative distance")
    for name, distance in tensors.items():
        table.add_row(name, "other shape" if distance is None else _say(distance))
    return table


def _predicted(record: Record) -> "list[Table]":
    change = record.get("predictions")
    return [] if change is None else [_facts(change, PREDICTED)]


def _say(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(*tables: "Table") -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for table in tables:
        console.print(table)


def _print_json(record: Record) -> None:
    typer.echo(json.dumps(_finite(record), indent=2))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number becomes null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
