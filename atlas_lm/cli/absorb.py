"""`atlas absorb`: read a text of any length into a memory file."""

import codecs
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from atlas_lm.cli.common import fail
from atlas_lm.cli.conversing import Device, Json, ModelFolder, open_conversation

if TYPE_CHECKING:
    from atlas_lm.stream import Conversation, Reading

INTERRUPTED = 130  # how a shell counts Ctrl-C
HEADER = 1 << 16  # bytes that a memory file has beside the state, with room to spare


@dataclass(frozen=True)
class _Source:
    """What is to be read."""

    file: str
    encoding: str
    skip_bytes: int


@dataclass(frozen=True)
class _Done:
    """What was read, up to the end of a piece: from there reading goes on as if it had never stopped."""

    reading: "Reading"
    bytes: int  # of the source, skipped ones too


def absorb(
    model: ModelFolder,
    file: Annotated[str, typer.Argument(help="A text file, or - for standard input.")],
    memory: Annotated[
        Path, typer.Option(help="The memory file: continued if it is there, else made.")
    ],
    encoding: Annotated[str, typer.Option(help="How the text is encoded.")] = "utf-8",
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per step, for a new memory. [default: 512]"),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Save after each so many tokens, too.")
    ] = None,
    skip_bytes: Annotated[
        int, typer.Option(min=0, help="Begin after so many bytes of the file.")
    ] = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Read a text into a memory, at constant cost. Ctrl-C saves what was read and says how to go on.

    Examples:

        atlas absorb my-model book.txt --memory book.mem

        zcat dump.gz | atlas absorb my-model - --memory dump.mem --every 1000000
    """
    try:
        conversation = open_conversation(model, memory, new=True, stride=stride, device=device)
        _check_room(memory, conversation.stream.bytes)
    except (ValueError, OSError) as error:
        fail("absorb", error)
    source = _Source(file, encoding, skip_bytes)
    job = _Job(conversation, memory, source, every)
    begin, before = time.perf_counter(), conversation.stream.tokens
    try:
        with _bar(source) as tell:
            job.run(tell)
    except KeyboardInterrupt:
        _leave(job, model, "stopped", INTERRUPTED)
    except (ValueError, OSError) as error:
        _leave(job, model, error, 2)
    job.save()
    seconds = time.perf_counter() - begin
    record = _describe(job, conversation.stream.tokens - before, seconds)
    typer.echo(json.dumps(record, indent=2) if as_json else _text(record))


def _check_room(memory: Path, state: int) -> None:
    """Refuse before hours of reading what could not be saved after them. state: its bytes"""
    needed, free = state + HEADER, shutil.disk_usage(memory.absolute().parent).free
    if free < needed:
        raise ValueError(
            f"the disk of {memory} has {free:,} bytes free and a memory of this model needs {needed:,}; free "
            "some space, or choose another place"
        )


class _Job:
    """Reads piece by piece and knows at any moment what may be saved."""

    def __init__(
        self, conversation: "Conversation", memory: Path, source: _Source, every: int | None
    ) -> None:
        self.conversation, self.memory, self.source = conversation, memory, source
        self.every = every
        self.done = _Done(conversation.stream.snapshot(), source.skip_bytes)
        self._saved: Reading | None = None

    @property
    def untouched(self) -> bool:
        return self.done.bytes == self.source.skip_bytes

    def run(self, tell: Callable[[int, int], None]) -> None:
        """Read all. tell: receives bytes and tokens read so far."""
        from atlas_lm.text import cut, read_text

        source, stream = self.source, self.conversation.stream
        saved = before = stream.tokens
        blocks = read_text(source.file, source.encoding, source.skip_bytes)
        encoder = codecs.getincrementalencoder(source.encoding)()
        for piece in cut(blocks):
            stream.absorb(self.conversation.tokenizer.encode(piece))
            size = self.done.bytes + len(encoder.encode(piece))
            self.done = _Done(stream.snapshot(), size)
            tell(size, stream.tokens - before)
            if self.every is not None and stream.tokens - saved >= self.every:
                self.save()
                saved = stream.tokens

    def save(self) -> None:
        """Write what is done, once; on failure leave with the reason, the old file is still there."""
        from atlas_lm.stream.files import save_memory

        if self._saved is self.done.reading:
            return
        try:
            save_memory(self.memory, self.conversation.stream.model, self.done.reading)
        except OSError as error:
            fail("absorb", error, code=1)
        self._saved = self.done.reading


@contextmanager
def _bar(source: _Source) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; gives a function that takes bytes and tokens read so far."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from atlas_lm.stream.resident import resident_bytes

    size = os.path.getsize(source.file) if os.path.isfile(source.file) else None
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[figures]}"))
    console = Console(stderr=True)
    begin = time.perf_counter()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=size, completed=source.skip_bytes, figures="")

        def tell(read: int, tokens: int) -> None:
            rate = tokens / max(time.perf_counter() - begin, 1e-9)
            held = resident_bytes()
            memory = "" if held is None else f", {held / 2**20:,.0f} MiB"
            figures = f"{tokens:,} tokens, {rate:,.0f} tokens/s{memory}"
            bar.update(task, completed=read, figures=figures)

        yield tell


def _leave(job: _Job, model: Path, why: object, code: int) -> NoReturn:
    """Before the end of the text: keep what was read, say why it was no more and how to go on."""
    if job.untouched:
        fail("absorb", f"{why}; nothing was read, and {job.memory} was not touched", code)
    job.save()
    done, rest = job.done, _command(job, model)
    held = f"{job.memory} holds {done.reading.tokens:,} tokens, up to byte {done.bytes} of the text"
    if job.source.file == "-":
        fail("absorb", f"{why}; {held}; go on with the bytes after it: {shlex.join(rest)}", code)
    rest += ["--skip-bytes", str(done.bytes)]
    fail("absorb", f"{why}; {held}; go on with: {shlex.join(rest)}", code)


def _command(job: _Job, model: Path) -> list[str]:
    """What reads on into the same memory."""
    command = ["atlas", "absorb", str(model), job.source.file, "--memory", str(job.memory)]
    if job.source.encoding != "utf-8":
        command += ["--encoding", job.source.encoding]
    return command if job.every is None else [*command, "--every", str(job.every)]


def _describe(job: _Job, tokens: int, seconds: float) -> dict[str, Any]:
    reading = job.done.reading
    return {
        "memory": str(job.memory),
        "tokens_read": tokens,
        "bytes_read": job.done.bytes - job.source.skip_bytes,
        "seconds": round(seconds, 3),
        "tokens": reading.tokens,
        "state_bytes": reading.state.bytes,
    }


def _text(record: dict[str, Any]) -> str:
    rate = record["tokens_read"] / max(record["seconds"], 1e-9)
    return (
        f"read {record['tokens_read']:,} tokens ({record['bytes_read']:,} bytes) at {rate:,.0f} tokens/s; "
        f"{record['memory']} holds {record['tokens']:,} tokens in a state of {record['state_bytes']:,} bytes"
    )
