"""`atlas trace`: a text as a heat map of what a model's memories did while they read it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_lm.cli.common import fail, load_model

if TYPE_CHECKING:
    from torch import Tensor

    from atlas_lm.models import AtlasForCausalLM
    from atlas_lm.stream.reading import Reading
    from atlas_lm.text import Tokenizer
    from atlas_lm.watch import Record

LIMIT = 20000  # tokens that a page takes if no part of the text is chosen


def trace(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    file: Annotated[str, typer.Argument(help="A text (- for stdin).")],
    html: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of writing a page.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(help=f"Show only so many tokens; longer texts than {LIMIT} need it."),
    ] = None,
    skip: Annotated[
        int, typer.Option(help="Leave out so many tokens first; the model does not read them.")
    ] = 0,
    memory: Annotated[
        Path | None, typer.Option(help="A memory file: the text continues what it has read.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="How the text is encoded.")] = "utf-8",
    force: Annotated[bool, typer.Option(help="Overwrite what is there.")] = False,
) -> None:
    """Watch the memories of a model while it reads: surprise, write strength and retention per layer.

    The page is one file that opens from disk. The memory file, if there is one, is not changed.

    Examples:

        atlas trace my-model book.txt --html book.html --tokens 5000

        atlas trace my-model - --json --memory book.mem < page.txt
    """
    try:
        part = Part(name=file, tokens=tokens, skip=skip)
        _check_output(html, as_json, force, file)
        loaded = load_model(model)
        _trace(loaded, model, part, html, memory, encoding)
    except (ValueError, OSError) as error:
        fail("trace", error)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which tokens of a text are shown."""

    name: str
    tokens: int | None  # None: all of them, up to LIMIT
    skip: int

    def __post_init__(self) -> None:
        if self.skip < 0 or (self.tokens is not None and self.tokens < 1):
            raise ValueError(
                f"--tokens is {self.tokens} and --skip {self.skip}, wanted at least 1 and at least 0"
            )

    def take(self, ids: Iterator[int]) -> tuple[list[int], bool]:
        """These tokens, and whether more follow. What does not fit is refused, not cut off in silence."""
        skipped = sum(1 for _ in islice(ids, self.skip))
        wanted = LIMIT if self.tokens is None else self.tokens
        found = list(islice(ids, wanted))
        more = next(ids, None) is not None
        if not found:
            raise ValueError(
                f"{self.name} has {skipped} tokens"
                + (f", --skip {self.skip} leaves none; skip fewer" if skipped else "; pass a text")
            )
        if more and self.tokens is None:
            raise ValueError(
                f"{self.name} has more than {LIMIT} tokens; choose a part: --tokens {LIMIT} for this "
                f"beginning, --skip {self.skip + LIMIT} --tokens {LIMIT} for what follows, or more at once"
            )
        return found, more

    def note(self, number: int, more: bool) -> str:
        """What the page says about a part; empty for a whole text."""
        if not self.skip and not more:
            return ""
        end = "more follow" if more else "the text ends there"
        first = f"the first {self.skip:,} were left out" if self.skip else "the text begins there"
        return f"A part of the text: tokens {self.skip:,} to {self.skip + number - 1:,}; {first}, {end}."


def _check_output(html: Path | None, as_json: bool, force: bool, file: str) -> None:
    """Refuse before any work what could not be written after it."""
    if (html is None) != as_json:
        raise ValueError("pass --html PAGE for a page or --json for a record, one of the two")
    if html is None:
        return
    if not html.parent.is_dir():
        raise ValueError(f"{html.parent} is no folder; make it first, or correct --html")
    if file != "-" and Path(file).exists() and html.exists() and html.samefile(file):
        raise ValueError(f"--html {html} is the text itself; choose another name")
    if html.exists() and not force:
        raise ValueError(f"{html} exists already; choose another name, or pass --force")


def _trace(
    model: "AtlasForCausalLM",
    folder: Path,
    part: Part,
    html: Path | None,
    memory: Path | None,
    encoding: str,
) -> None:
    import torch

    from atlas_lm.text import cut, load_tokenizer, read_text

    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    reading = None
    if memory is not None:
        from atlas_lm.stream.files import open_memory

        reading = open_memory(memory, model)
    pieces = cut(read_text(part.name, encoding))
    ids, more = part.take(chain.from_iterable(map(tokenizer.encode, pieces)))
    record = _observe(model, torch.tensor(ids), reading)
    notes = [part.note(len(ids), more)]
    if memory is not None:
        notes.append(
            f"The model had read {record.start:,} tokens before, kept in {memory.name}; these come after."
        )
    if html is None:
        typer.echo(json.dumps({"model": str(folder), "text": part.name} | record.to_dict()))
    else:
        _write_page(html, model, folder, tokenizer, record, part, " ".join(notes).strip())


def _observe(model: "AtlasForCausalLM", ids: "Tensor", reading: "Reading | None") -> "Record":
    from rich.console import Console
    from rich.progress import Progress

    from atlas_lm.watch import observe

    with Progress(console=Console(stderr=True), transient=True) as progress:
        before = 0 if reading is None else len(reading.pending)
        bar = progress.add_task("reading", total=before + len(ids))
        return observe(
            model, ids, reading=reading, advance=lambda n: progress.update(bar, advance=n)
        )


def _write_page(
    html: Path,
    model: "AtlasForCausalLM",
    folder: Path,
    tokenizer: "Tokenizer",
    record: "Record",
    part: Part,
    note: str,
) -> None:
    from atlas_lm.stream.atomic import write_atomically
    from atlas_lm.watch import About, build_page, describe_model, to_cells

    spec = model.config.spec
    assert spec is not None
    facts = {
        "model": str(folder),
        **describe_model(model),
        "text": part.name,
        "tokens": f"{len(record.ids):,}",
    }
    about = About(
        model=folder.resolve().name,
        text="standard input" if part.name == "-" else Path(part.name).name,
        facts=facts,
        first=part.skip,
        note=note,
    )
    page = build_page(record, to_cells(tokenizer, record.ids.tolist()), spec, about)
    write_atomically(html, [page.encode()])
    typer.echo(f"{html}: {len(record.ids):,} tokens, open it in a browser")
