"""The demo from the book to the answers: read once, ask, save, reopen, ask again, show."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.utils import _pytree as pytree

from atlas_lm.data.babilong import is_right
from atlas_lm.demo.hidden import HiddenTale, Span, hide_tale
from atlas_lm.demo.passages import write_page
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.counts import parameters
from atlas_lm.stream import Conversation, Reading
from atlas_lm.stream.resident import resident_bytes
from atlas_lm.text import Tokenizer

ANSWER_TOKENS = 4
KIND = "qa3"  # of the questions: their answers are places
LOOKS = (0.1, 1.0)  # shares of the text after which memory is measured


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the stream and the process held after so many tokens."""

    tokens: int
    state_bytes: int
    process_bytes: int | None  # None: this system does not tell


@dataclass(frozen=True, kw_only=True)
class Answer:
    question: str
    truth: str
    said: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class ReadOnce:
    """What came of reading the text from one end to the other."""

    seconds: float
    looks: list[Look]
    passages: list[tuple[Span, Reading]]  # where each began, the stream as it stood there


def run_demo(
    model: AtlasForCausalLM,
    tokenizer: Tokenizer,
    out: Path,
    *,
    tokens: int,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Hide a tale in books, read, ask, save, reopen, ask again. Returns and writes all numbers.

    The folder `out` receives the memory, a page of what was written where, and results.json.
    """
    console = console or Console()
    began = time.perf_counter()
    _tell(console, "model", _describe(model))
    tale = hide_tale(tokenizer, tokens, seed)
    _tell(console, "text", _origin(tale))
    out.mkdir(parents=True, exist_ok=True)
    conversation = Conversation(model, tokenizer)
    read = read_once(conversation, tale, console)
    speed = tale.tokens / read.seconds
    _tell(
        console, "read", f"{tale.tokens:,} tokens once, {speed:,.0f} a second; {_held(read.looks)}"
    )
    answers = ask(conversation, tale)
    console.print(_table(answers))
    memory = out / "tale.mem"
    conversation.save(memory)
    again = Conversation.open(memory, model, tokenizer)
    same = ask(again, tale) == answers and _equal(again.stream.reading, conversation.stream.reading)
    told = "the same answers from the same state, to the last bit" if same else "NOT the same"
    _tell(console, "memory", f"{memory}, {memory.stat().st_size:,} bytes; opened again: {told}")
    page = out / "passages.html"
    write_page(page, model, tokenizer, tale, read.passages)
    _tell(console, "page", f"{page}: what every memory wrote at the facts and around them")
    record = {
        "model": model.config.name_or_path,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "tokens": tale.tokens,
        "books": tale.books,
        "facts": list(tale.questions[0].facts),
        "places": [span.first for span in tale.facts],
        "seconds": read.seconds,
        "looks": [asdict(look) for look in read.looks],
        "answers": [asdict(answer) for answer in answers],
        "right": sum(answer.right for answer in answers),
        "asked": len(answers),
        "reopened_equal": same,
        "memory_bytes": memory.stat().st_size,
    }
    numbers = out / "results.json"
    numbers.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _tell(console, "numbers", f"{numbers} ({time.perf_counter() - began:.0f} s in all)")
    return record


def read_once(conversation: Conversation, tale: HiddenTale, console: Console) -> ReadOnce:
    """Read the whole text, with a bar."""
    stream, passages = conversation.stream, tale.passages()
    begins = {span.first: span for span in passages}
    looking = [round(share * tale.tokens) for share in LOOKS]
    looks: list[Look] = []
    stood: list[tuple[Span, Reading]] = []
    with _bar(tale.tokens, console) as tell:
        began = time.perf_counter()
        for piece in tale.cut(sorted(begins)):
            if stream.tokens in begins:
                stood.append((begins[stream.tokens], stream.snapshot()))
            stream.absorb(piece, lambda _: tell(stream.tokens))
            while looking and stream.tokens >= looking[0]:
                looking.pop(0)
                looks.append(_look(conversation))
        seconds = time.perf_counter() - began
    return ReadOnce(seconds=seconds, looks=looks, passages=stood)


def ask(conversation: Conversation, tale: HiddenTale) -> list[Answer]:
    """Ask everything; nothing of it is remembered."""
    found = []
    for asked in tale.questions:
        prompt = f"\nQuestion: {asked.question}\nAnswer:"
        said = conversation.ask(prompt, ANSWER_TOKENS, do_sample=False)
        found.append(
            Answer(
                question=asked.question,
                truth=asked.answer,
                said=said.partition(".")[0].strip(),
                right=is_right(KIND, asked, said),
            )
        )
    return found


def _look(conversation: Conversation) -> Look:
    stream = conversation.stream
    return Look(tokens=stream.tokens, state_bytes=stream.bytes, process_bytes=resident_bytes())


def _equal(one: Reading, other: Reading) -> bool:
    found, wanted = (
        [leaf for leaf in pytree.tree_leaves((reading.state, reading.pending)) if leaf is not None]
        for reading in (one, other)
    )
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def _describe(model: AtlasForCausalLM) -> str:
    name = Path(model.config.name_or_path or "model").name
    count, specs = parameters(model.config)["total"], model.config.layer_specs
    with_memory = sum(spec is not None for spec in specs)
    return (
        f"{name}: {count:,} weights, {len(specs)} blocks, {with_memory} of them with a memory that learns "
        "while it reads"
    )


def _origin(tale: HiddenTale) -> str:
    facts, numbers = len(tale.questions[0].facts), ", ".join(tale.books[:3])
    more = f" and {len(tale.books) - 3} more" if len(tale.books) > 3 else ""
    times = f", told {tale.tokens / tale.book_tokens:.0f} times over" * (
        tale.tokens > 1.5 * tale.book_tokens
    )
    return (
        f"{facts} facts about people and things, hidden in {tale.tokens:,} tokens of Project Gutenberg's "
        f"books {numbers}{more}{times}"
    )


def _held(looks: Sequence[Look]) -> str:
    first, last = looks[0], looks[-1]
    state = (
        f"the state had {first.state_bytes:,} bytes at token {first.tokens:,}, {last.state_bytes:,} at "
        "the end"
    )
    if first.process_bytes is None or last.process_bytes is None:
        return state
    return (
        f"{state}; the process {first.process_bytes / 2**20:,.0f} MiB, then "
        f"{last.process_bytes / 2**20:,.0f}"
    )


def _table(answers: Sequence[Answer]) -> Table:
    right = sum(answer.right for answer in answers)
    table = Table(title=f"{right} of {len(answers)} answers are right", title_justify="left")
    for column in ("question", "the model says", "the tale tells", ""):
        table.add_column(column)
    for answer in answers:
        mark = "[green]right[/]" if answer.right else "[red]wrong[/]"
        table.add_row(answer.question, answer.said, answer.truth, mark)
    return table


def _tell(console: Console, name: str, text: str) -> None:
    console.print(f"{name:8}", style="bold", end="")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _bar(total: int, console: Console) -> Iterator[Callable[[int], object]]:
    """A bar; gives a function that takes the number of tokens read so far."""
    columns = (
        TextColumn("reading "),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    began = time.perf_counter()
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total, figures="")

        def tell(read: int) -> None:
            held = resident_bytes()
            memory = "" if held is None else f", {held / 2**20:,.0f} MiB"
            speed = read / max(time.perf_counter() - began, 1e-9)
            figures = f"{read:,} of {total:,} tokens, {speed:,.0f} tokens/s{memory}"
            bar.update(task, completed=read, figures=figures)

        yield tell
