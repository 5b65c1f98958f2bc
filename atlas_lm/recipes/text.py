"""Models of text: language modelling on books and Wikipedia, needles, and stories hidden in books."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from atlas_lm.data.documents import Documents, Packed
from atlas_lm.data.lessons import BABILongLesson, LessonSource, NeedleLesson
from atlas_lm.data.shards import find_shards
from atlas_lm.data.source import Stage
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.sizes import TRANSFORMER, configure_equal
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
    tokenizer: str = "stories-8192",
    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5"),
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 4096),
    shares: tuple[float, ...] | None = None,
    segment: int | None = None,
    steps: int = 1000,
    tokens: int = 65536,
    exam_rows: int = 64,
    mixed: float = 0.7,
    lured: float = 0.2,
    silent: float = 0.1,
    margin: float = 0.0,
    price: float = 0.0,
    conv: int = 4,
    spread: float = 0.02,
    optimizer: str = "muon",
    rate: float = 2e-3,
    seed: int = 0,
) -> Recipe:
    """Stories of bAbI hidden in books, qa1 to qa5 in one model, ever longer rows; loss on the answers alone.

    lengths: of the rows; a task waits until its stories fit.  shares: of the steps that each length gets, all
    alike by default.  segment: tokens after which gradients are cut, for rows that do not fit.  mixed: share
    of new stories that are asked what easier tasks ask, too.  lured: share of rows in sentences of books
    that name people and things of the stories.  silent: share of rows whose facts are all told at the
    beginning.  margin: below which gates are closed; price: of writing, which closes them
    (docs/mathematics.md, 9).  block: one for all layers, or one for each: sliding,lmm,lmm,lmm.
    """
    words = find_tokenizer(tokenizer)
    lesson = BABILongLesson(
        tasks=tasks, tokenizer=words, mixed=mixed, lured=lured, silent=silent, written=0.3
    )
    source = LessonSource(
        lesson=lesson,
        stages=_stages(lengths, shares),
        steps=steps,
        tokens=tokens,
        seed=seed,
        exam_rows=exam_rows,
    )
    gates = {} if preset == TRANSFORMER else {"gate_margin": margin}
    model = configure_equal(
        preset,
        block=block.split(",") if block and "," in block else block,
        size=size,
        conv_size=conv,
        initializer_range=spread,
        **gates,
        **_vocabulary(words),
    )
    return Recipe(
        name="babilong",
        model=model,
        source=source,
        steps=steps,
        segment=segment,
        optimizer=Optimizer(kind=optimizer, rate=rate),
        schedule=WSD,
        price=price,
        tokenizer=words,
        seed=seed,
    )


def reader(preset: str = "gated_deltanet", **changes: Any) -> Recipe:
    """`babilong` for one CPU core, an hour: memories behind one block of sliding attention."""
    small: dict[str, Any] = {
        "block": "attention" if preset == TRANSFORMER else "sliding,lmm,lmm,lmm",
        "size": "1M",
        "lengths": (128, 256, 512, 1024, 2048),
        "shares": (0.03, 0.07, 0.45, 0.25, 0.2),
        "steps": 4500,
        "tokens": 8192,
        "exam_rows": 32,
        "lured": 0.3,
        "conv": 8,
        "spread": 0.05,
    }
    return babilong(preset=preset, **(small | changes))


def keeper(
    start: str, margin: float = 0.1, price: float = 0.2, steps: int = 3000, **changes: Any
) -> Recipe:
    """A trained `reader` of matrix memories, gone on with: it forgets no more, and its gates learn to close.

    What it makes is the model that comes along (atlas_lm/pretrained/babilong).
    """
    given: dict[str, Any] = {
        "lengths": (512, 1024, 2048),
        "shares": (0.4, 0.35, 0.25),
        "rate": 1.5e-3,
        "margin": margin,
        "price": price,
        "steps": steps,
    }
    made = reader(preset="deltanet", **(given | changes))
    trained = AtlasConfig.from_pretrained(start, local_files_only=True)
    changed = made.model.to_dict() | {"intermediate_size": trained.intermediate_size}
    return replace(made, model=AtlasConfig.from_dict(changed), start=start)


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


def _stages(lengths: tuple[int, ...], shares: tuple[float, ...] | None = None) -> tuple[Stage, ...]:
    shares = shares or (1 / len(lengths),) * len(lengths)
    if len(shares) != len(lengths) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"shares is {shares}, wanted one for each of the {len(lengths)} lengths, above 0 and 1 in all"
        )
    begins = accumulate(shares[:-1], initial=0.0)
    return tuple(Stage(begin=at, length=n) for at, n in zip(begins, lengths, strict=True))
