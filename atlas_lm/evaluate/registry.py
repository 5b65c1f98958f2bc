"""Tasks by name, as they are given on the command line."""

from collections.abc import Callable, Sequence

from atlas_lm.evaluate.task import Task
from atlas_lm.evaluate.tasks.babilong import BABILong
from atlas_lm.evaluate.tasks.harness import GROUPS, SOURCES, Harness
from atlas_lm.evaluate.tasks.options import Options
from atlas_lm.evaluate.tasks.robustness import Robustness
from atlas_lm.evaluate.tasks.ruler import Ruler
from atlas_lm.evaluate.tasks.texts import BooksByContext, BooksByPosition, Enwik8
from atlas_lm.evaluate.tasks.tokens import Tokens

ROW_TASKS = ("mqar", "mad", "cued")  # of a vocabulary of their own
BOOKS: dict[str, Callable[[Options], Task]] = {
    "position": BooksByPosition,
    "context": BooksByContext,
}
ASKING: dict[str, Callable[[Sequence[str], Options], Task]] = {
    "babilong": BABILong,
    "ruler": Ruler,
    "robustness": Robustness,
}
DESCRIPTIONS = {
    "babilong": "facts hidden in books; babilong/qa1 … qa10",
    "ruler": "needles in a haystack, and variables; ruler/single_1, …",
    "robustness": "facts under attack; robustness/noise, …",
    "books": "loss by position and by context; books/position, books/context",
    "enwik8": "bits per byte",
    "mqar": "many pairs, each asked once; mqar/16 has 16",
    "mad": "six small tasks; mad/in-context-recall, …",
    "cued": "which pair to keep is told after it",
    **dict.fromkeys(SOURCES, "through lm-evaluation-harness"),
    **{name: f"the group {', '.join(tasks)}" for name, tasks in GROUPS.items()},
}


def build(
    names: Sequence[str], options: Options, chat: Callable[..., str] | None = None
) -> list[Task]:
    """The tasks of names like `babilong`, `babilong/qa1` or `commonsense`; parts of one task are joined.

    chat: renders messages for the tasks of the harness; None: no chat.
    """
    found = _parts(names).items()
    return [task for name, chosen in found for task in _build(name, chosen, options, chat)]


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Tasks, each with the parts that are named; groups are taken apart."""
    parts: dict[str, list[str]] = {}
    for name in names:
        head, _, part = name.partition("/")
        for task in GROUPS.get(head, (head,)):
            known = parts.setdefault(task, [])
            known += [part] if part and part not in known else []
    return parts


def _build(
    name: str, parts: list[str], options: Options, chat: Callable[..., str] | None
) -> list[Task]:
    if name in SOURCES and not parts:
        return [Harness(name, options, chat)]
    if name in ROW_TASKS:
        return [Tokens(name, parts, options)]
    if name == "books":
        unknown = [part for part in parts if part not in BOOKS]
        if unknown:
            raise ValueError(f"books has no {unknown[0]!r}, wanted some of {', '.join(BOOKS)}")
        return [BOOKS[part](options) for part in parts or BOOKS]
    if name == "enwik8" and not parts:
        return [Enwik8(options)]
    if name in ASKING:
        return [ASKING[name](parts, options)]
    if name in DESCRIPTIONS:
        raise ValueError(f"{name} has no parts, got {name}/{parts[0]}")
    raise ValueError(f"task is {name!r}, wanted some of {', '.join(DESCRIPTIONS)}")
