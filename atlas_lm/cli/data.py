"""`atlas data`: what data there is, what is missing, where to get it; and texts made ready for training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli.common import fail
from atlas_lm.cli.progress import progress

if TYPE_CHECKING:
    from atlas_lm.data.library import Found
    from atlas_lm.data.shards import Shards

app = typer.Typer(name="data", rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
def data(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with its SHA-256; takes a moment.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON records instead of text.")] = False,
) -> None:
    """List the data that tasks use: what is here, what is only there as a sample, and where the rest is.

    Large data is looked for in the folder that the variable ATLAS_DATA names.

    Examples:

        atlas data

        ATLAS_DATA=~/atlas-data atlas data --check

        atlas data tokenize books/train --out books
    """
    if context.invoked_subcommand is not None:
        return
    from atlas_lm.data.library import Library, catalogue, data_folder

    try:
        records = [_record(Library().find(name), check) for name in catalogue()]
    except ValueError as error:
        fail("data", error)
    if as_json:
        typer.echo(json.dumps({"folder": str(data_folder()), "items": records}, indent=2))
    else:
        _show(records)
    if any(record["wrong"] for record in records):
        raise typer.Exit(1)


@app.command()
def tokenize(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="Corpora, e.g. books/train, enwik8/train or essays; .txt and .jsonl files; folders of them.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the tokens go; must be new or empty.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, gpt2, bpe-N such as bpe-8192, or a tokenizer's folder.")
    ] = "gpt2",
) -> None:
    """Write texts as tokens, which training reads without loading them.

    A .txt file is one document; each line of a .jsonl file has one under the key `text`.

    Examples:

        atlas data tokenize books/train --out books

        atlas data tokenize notes.txt letters/ --out mine --tokenizer bpe-8192
    """
    try:
        shards = _tokenize(tuple(names), out, tokenizer)
    except (ValueError, OSError) as error:
        fail("data tokenize", error)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(
        f"{out}: {shards.documents:,} documents, {shards.tokens:,} tokens of {tokenizer}, {_size(size)}"
    )


def _tokenize(names: tuple[str, ...], out: Path, tokenizer: str) -> "Shards":
    from atlas_lm.data.corpora import check_corpora, corpus, corpus_fingerprint
    from atlas_lm.data.shards import check_free, write_shards
    from atlas_lm.data.vocabularies import find_tokenizer

    check_free(out)
    check_corpora(names)
    found = find_tokenizer(tokenizer)

    def texts() -> Iterator[tuple[str, str]]:
        for name in names:
            yield from corpus(name)

    about = {"corpora": {name: corpus_fingerprint(name) for name in names}}
    total = sum(len(text) for _, text in texts())  # a moment, beside what encoding takes
    with progress(total) as tell:
        return write_shards(texts(), found, out, about=about, tokenizer_name=tokenizer, tell=tell)


def _record(found: "Found", check: bool) -> dict[str, Any]:
    item = found.item
    there = [path for path in found.paths if not found.sample]
    whole = item.bundled == "complete" or len(there) == len(item.files)
    return {
        "name": item.name,
        "what": item.what,
        "state": "whole" if whole else "part" if there else "sample",
        "bundled": item.bundled,
        "bytes": sum(file.bytes for file in item.files),
        "licence": item.licence,
        "source": item.source,
        "files": [file.path for file in item.files],
        "wrong": _wrong(found) if check and there else [],
    }


def _wrong(found: "Found") -> list[str]:
    """Files that are not what the catalogue says."""
    from atlas_lm.data.library import digest

    known = {file.path: file.sha256 for file in found.item.files}
    return [
        path
        for path, sha256 in known.items()
        for file in found.paths
        if str(file).endswith(path) and digest(file) != sha256
    ]


def _size(count: int) -> str:
    """Bytes as they are read.

    >>> _size(2481), _size(13 << 20)
    ('2 KiB', '13.0 MiB')
    """
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _show(records: list[dict[str, Any]]) -> None:
    from atlas_lm.data.library import data_folder

    states = {"whole": "here", "part": "in part", "sample": "sample only"}
    width = max(len(record["name"]) for record in records)
    for record in records:
        state = "DAMAGED" if record["wrong"] else states[record["state"]]
        size = _size(record["bytes"])
        typer.echo(f"{record['name']:{width}}  {state:11}  {size:>8}  {record['licence']}")
        kept = "" if record["state"] == "whole" else f"; in the package: {record['bundled']}"
        typer.echo(f"{'':{width}}  {record['what']}{kept}")
    typer.echo(f"\ndata folder: {data_folder()} (set ATLAS_DATA for another)")
    missing = [record for record in records if record["state"] != "whole"]
    if missing:
        typer.echo(
            "\nFor the rest, put these files below the data folder (owner/name@commit is a repository on "
            "GitHub; texts are packed as .tar.xz or .xz):"
        )
    for record in missing:
        typer.echo(f"  {', '.join(record['files'])}")
        typer.echo(f"    from {' '.join(record['source'].split())}")
    for record in records:
        for path in record["wrong"]:
            typer.echo(f"{path} is not the file that it should be; get it again", err=True)
