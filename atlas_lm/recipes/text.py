"""Models of text: language modelling on books and Wikipedia, needles, and stories hidden in books."""

from typing import Any

from atlas_lm.data.documents import Documents, Packed
from atlas_lm.data.lessons import BABILongLesson, LessonSource, NeedleLesson
from atlas_lm.data.shards import find_shards
from atlas_lm.data.source import Stage
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.models.sizes import configure_equal
from atlas_lm.text import Tokenizer
from atlas_lm.train.recipe import Optimizer, Recipe, Schedule

WSD = Schedule(curve="wsd", warm=0.05, fall=0.2)


def lm(
    preset: str = "titans",
    block: str | None = None,
    size: str = "20M",
    tokenizer: str = "gpt2",
    steps: int = 2000,
    rows: int = 32,
    length: int = 1024,
    corpora: tuple[str, ...] = ("books/train", "enwik8/train"),
    packed: bool = False,
    optimizer: str = "adamw",
    rate: float = 1e-3,
    seed: int = 0,
) -> Recipe:
    """Language modelling: documents in order, each row reading on with its memory, gradients cut between.

    packed: short documents side by side in a row instead, nothing carried. A model whose state grows (full
    attention) reads every piece by itself.
    """
    words = find_tokenizer(tokenizer)
    model = configure_equal(preset, block=block, size=size, **_vocabulary(words))
    shards = {
        "train": find_shards(corpora, tokenizer),
        "validation": find_shards(("books/validation",), tokenizer),
    }
    carries = model.grows is None
    given: dict[str, Any] = {**shards, "length": length, "rows": rows, "seed": seed}
    return Recipe(
        name="lm",
        model=model,
        source=Packed(**given)
        if packed
        else Documents(**given, carries=carries, exam_length=8 * length),
        steps=steps,
        # what is examined is 8 times as long as what is learned: read as it was learned, piece by piece
        segment=None if packed else length,
        optimizer=Optimizer(kind=optimizer, rate=rate),
        schedule=WSD,
        tokenizer=words,
        seed=seed,
    )


def lm_bytes(**changes: Any) -> Recipe:
    """`lm` for a laptop: a tiny model of bytes, a few minutes."""
    small: dict[str, Any] = {
        "size": "tiny",
        "tokenizer": "bytes",
        "steps": 400,
        "rows": 8,
        "length": 256,
    }
    return lm(**(small | changes))


def babilong(
    preset: str = "titans",
    block: str | None = None,
    size: str = "20M",
    tokenizer: str = "bpe-8192",
    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5"),
    lengths: tuple[int, ...] = (1024, 4096),
    segment: int | None = None,
    steps: int = 1000,
    tokens: int = 65536,
    exam_rows: int = 64,
    silent: float = 0.2,
    optimizer: str = "adamw",
    rate: float = 1e-3,
    seed: int = 0,
) -> Recipe:
    """Stories of bAbI hidden in books, qa1 to qa5 in one model, ever longer rows; loss on the answers alone.

    lengths: of the rows, each for an equal share of the steps.  silent: share of rows whose facts are all
    told at the beginning.  segment: tokens after which gradients are cut, for rows that do not fit.
    """
    words = find_tokenizer(tokenizer)
    lesson = BABILongLesson(tasks=tasks, tokenizer=words, silent=silent)
    source = LessonSource(
        lesson=lesson,
        stages=_stages(lengths),
        steps=steps,
        tokens=tokens,
        seed=seed,
        exam_rows=exam_rows,
    )
    return Recipe(
        name="babilong",
        model=configure_equal(preset, block=block, size=size, **_vocabulary(words)),
        source=source,
        steps=steps,
        segment=segment,
        optimizer=Optimizer(kind=optimizer, rate=rate),
        schedule=WSD,
        tokenizer=words,
        seed=seed,
    )


def needle(
    preset: str = "titans",
    block: str | None = None,
    size: str = "20M",
    tokenizer: str = "bpe-8192",
    kinds: tuple[str, ...] = ("single_1", "single_2"),
    lengths: tuple[int, ...] = (1024, 4096),
    segment: int | None = None,
    steps: int = 1000,
    tokens: int = 65536,
    exam_rows: int = 64,
    rate: float = 1e-3,
    seed: int = 0,
) -> Recipe:
    """Needles in a haystack, as RULER has them, ever longer rows; loss on the answers alone."""
    words = find_tokenizer(tokenizer)
    lesson = NeedleLesson(kinds=kinds, tokenizer=words)
    source = LessonSource(
        lesson=lesson,
        stages=_stages(lengths),
        steps=steps,
        tokens=tokens,
        seed=seed,
        exam_rows=exam_rows,
    )
    return Recipe(
        name="needle",
        model=configure_equal(preset, block=block, size=size, **_vocabulary(words)),
        source=source,
        steps=steps,
        segment=segment,
        optimizer=Optimizer(rate=rate),
        schedule=WSD,
        tokenizer=words,
        seed=seed,
    )


def _vocabulary(words: Tokenizer) -> dict[str, int]:
    return {"vocab_size": words.vocab_size, **words.special}


def _stages(lengths: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(begin=i / len(lengths), length=length) for i, length in enumerate(lengths))
