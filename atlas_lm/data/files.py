"""Readers of the files in the library: what each holds, as texts and records."""

import functools
import json
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atlas_lm.data.babi import TASKS, Question, Story, read_stories
from atlas_lm.data.library import Library

DAMAGE = (EOFError, lzma.LZMAError, tarfile.TarError, UnicodeDecodeError, json.JSONDecodeError)
SPLITS = ("train", "validation", "test")
HELD_OUT = 10  # every tenth part of the training stories is for validation, the last


def babi_questions(task: str, split: str, library: Library | None = None) -> list[Question]:
    """The questions of a bAbI task, in the order of its file.

    test: the published test file.  train, validation: the training file of 10,000 questions, but for its
    last tenth of stories, and that tenth; of qa3 no such file is public, so the small training file and a
    published validation file stand in. Stories that recur in validation are left out of training, and those
    of the test file out of both: of qa4, whose stories have two facts, many do.
    """
    return [question for story in babi_stories(task, split, library) for question in story]


def babi_stories(task: str, split: str, library: Library | None = None) -> list[Story]:
    """The stories of a bAbI task, each with its questions."""
    check_split(split)
    if task not in TASKS:
        raise ValueError(f"bAbI task is {task!r}, wanted one of {', '.join(TASKS)}")
    members = _babi_members((library or Library()).find("babi").paths[0])
    name = f"{task}_{TASKS[task]}"
    test = list(read_stories(_lines(members, f"en-10k/{name}_test.txt")))
    if split == "test":
        return test
    large, held_out = f"en-10k/{name}_train.txt", f"en-valid-10k/{task}_valid.txt"
    lines = _lines(members, large if large in members else f"en/{name}_train.txt")
    training = list(read_stories(lines))
    border = len(training) - len(training) // HELD_OUT
    if held_out in members:
        validation = list(read_stories(_lines(members, held_out)))
    else:
        training, validation = training[:border], training[border:]
    if split == "validation":
        return _without(validation, test)
    return _without(training, [*validation, *test])


def _without(stories: list[Story], others: list[Story]) -> list[Story]:
    known = set(others)
    return [story for story in stories if story not in known]


def babilong_indices(library: Library | None = None) -> dict[str, list[int]]:
    """Of each task the 100 test questions of the published sets."""
    path = (library or Library()).find("babilong").paths[0]
    found: dict[str, list[int]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def book_texts(split: str, library: Library | None = None) -> Iterator[tuple[str, str]]:
    """Name and text of every book of a split."""
    check_split(split)
    for path in (library or Library()).find(f"books/{split}").paths:
        yield from archived_texts(path)


def essay_texts(library: Library | None = None) -> Iterator[tuple[str, str]]:
    """Name and text of every essay."""
    yield from archived_texts((library or Library()).find("essays").paths[0])


def json_lines(name: str, library: Library | None = None) -> list[dict[str, Any]]:
    """The records of an item that is a file of JSON lines."""
    path = (library or Library()).find(name).paths[0]
    with _whole(path), lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def wikitext(split: str, library: Library | None = None) -> str:
    """The raw text of WikiText's test or validation split."""
    parts = {"test": ".test.", "validation": ".valid."}
    if split not in parts:
        raise ValueError(f"WikiText's split is {split!r}, wanted test or validation")
    paths = (library or Library()).find("wikitext").paths
    chosen = [path for path in paths if parts[split] in path.name]
    if not chosen:
        raise ValueError(
            f"WikiText's {split} file is not beside {paths[0]}; `atlas data` says where to get it"
        )
    with _whole(chosen[0]), lzma.open(chosen[0], "rt", encoding="utf-8", newline="") as file:
        return file.read()


def enwik8(library: Library | None = None) -> bytes:
    """The whole of enwik8, or of the sample."""
    path = (library or Library()).find("enwik8").paths[0]
    with _whole(path), lzma.open(path) as file:
        return file.read()


def archived_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every file in a tar archive, by name."""
    with _whole(path), tarfile.open(path) as archive:
        members = sorted((m for m in archive if m.isfile()), key=lambda m: m.name)
        for member in members:
            file = archive.extractfile(member)
            assert file is not None
            yield Path(member.name).stem, file.read().decode("utf-8")


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Say of which file it is that reading fails."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(
            f"{path} is damaged ({error}); get it anew, `atlas data --check` says from where"
        ) from error


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, wanted one of {', '.join(SPLITS)}")


@functools.cache
def _babi_members(path: Path) -> dict[str, str]:
    """Every file of the bAbI archive by its name below the archive's folder."""
    with _whole(path), tarfile.open(path) as archive:
        files = [(m.name.partition("/")[2], archive.extractfile(m)) for m in archive if m.isfile()]
        return {name: file.read().decode() for name, file in files if file is not None}


def _lines(members: dict[str, str], name: str) -> list[str]:
    if name not in members:
        raise ValueError(
            f"the sample of bAbI in the package has no {name}; for the whole set see `atlas data`"
        )
    return members[name].splitlines()
