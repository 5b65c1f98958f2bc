"""Corpora by name, document by document: those of the catalogue, and files and folders of the user."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from atlas_lm.data.files import SPLITS, book_texts, enwik8, essay_texts, wikitext
from atlas_lm.data.library import Library
from atlas_lm.text import read_text

VERSION = 1  # of how corpora are cut into documents
SUFFIXES = (".txt", ".jsonl")
SHARES = {"train": (0, 90), "validation": (90, 95), "test": (95, 100)}  # of enwik8, in percent
PAGE = re.compile(rb"<page>")
TITLE = re.compile(r"(?<=\n) = [^=\n]+ = \n(?= \n)")  # of an article of WikiText

Texts = Iterator[tuple[str, str]]


def corpus(name: str, library: Library | None = None) -> Texts:
    """Name and text of each document of a corpus.

    Args:
        name: one of `CORPORA`, else a path: a .txt file is a document, each line of a .jsonl file has one
            under `text`, and a folder has those of all such files in it, by name.
    """
    check_corpora((name,))
    if name in CORPORA:
        return CORPORA[name](library or Library())
    return (document for path in _files(Path(name)) for document in _documents(path))


def corpus_fingerprint(name: str, library: Library | None = None) -> str:
    """Of all that determines the documents."""
    check_corpora((name,))
    if name in CORPORA:
        item = name if name.startswith("books/") else name.partition("/")[0]
        parts = [name, (library or Library()).find(item).fingerprint]
    else:
        parts = [f"{path.suffix}:{_sha256(path)}" for path in _files(Path(name))]
    return hashlib.sha256(" ".join([str(VERSION), *parts]).encode()).hexdigest()[:16]


def check_corpora(names: tuple[str, ...]) -> None:
    """Refuse what is neither a known corpus nor a path of texts."""
    if not names:
        raise ValueError(f"no corpus is named, wanted some of {_known()}")
    for name in names:
        if name not in CORPORA and not _files(Path(name)):
            what = "a path without texts" if Path(name).exists() else "none that is known"
            raise ValueError(f"corpus is {name!r}, {what}; wanted one of {_known()}")


def _known() -> str:
    return f"{', '.join(CORPORA)}, or a .txt file, a .jsonl file or a folder of such"


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        return sorted(found)
    return [path] if path.suffix in SUFFIXES and path.is_file() else []


def _documents(path: Path) -> Texts:
    if path.suffix == ".txt":
        yield str(path), "".join(read_text(path))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _text_of(line, f"{path}, line {number}")


def _text_of(line: bytes, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}); mend or remove it") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f"{place} has no text under the key 'text'; mend or remove it, or name the key so"
        )
    return text


def _sha256(path: Path) -> str:
    """Not kept as `library.digest` is: a user's file may change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _articles(split: str, library: Library) -> Texts:
    """WikiText, article by article."""
    text = wikitext(split, library)
    borders = [0, *(found.start() for found in TITLE.finditer(text)), len(text)]
    for begin, end in pairwise(borders):
        if text[begin:end].strip():
            yield f"wikitext/{split}:{begin}", text[begin:end]


def _pages(split: str, library: Library) -> Texts:
    """A split of enwik8, cut where pages begin: no byte is left out. What a border of splits cuts is a
    document on either side; of a character there, either side has U+FFFD."""
    data = enwik8(library)
    begin, end = (len(data) * share // 100 for share in SHARES[split])
    inside = [found.start() for found in PAGE.finditer(data, begin, end)]
    borders = sorted({begin, *inside, end})
    for first, last in pairwise(borders):
        yield f"enwik8:{first}", data[first:last].decode("utf-8", errors="replace")


def _of(read: Callable[[str, Library], Texts], split: str) -> Callable[[Library], Texts]:
    return lambda library: read(split, library)


CORPORA: dict[str, Callable[[Library], Texts]] = {
    **{f"books/{split}": _of(book_texts, split) for split in SPLITS},
    "essays": essay_texts,
    **{f"wikitext/{split}": _of(_articles, split) for split in ("validation", "test")},
    **{f"enwik8/{split}": _of(_pages, split) for split in SPLITS},
}
