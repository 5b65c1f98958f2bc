"""Small models on rows of tokens: MQAR, MAD, and the cued pairs."""

from typing import Any

from atlas_lm.data.cued import Cued
from atlas_lm.data.mad import BASELINES, variations
from atlas_lm.data.mqar import PAIRS, dense_mqar
from atlas_lm.data.row_source import RowSource
from atlas_lm.data.rows import RowTask
from atlas_lm.memory.windows import Window
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.sizes import Size, configure, configure_equal
from atlas_lm.train.recipe import Optimizer, Recipe, Schedule

SPREAD = 0.1  # of first weights: at such widths 0.02 learns recall ten times later
SCHEDULE = Schedule(curve="cosine", warm=0.1)


def _size(width: int, layers: int) -> Size:
    if width % 4 or width < 32:
        raise ValueError(
            f"width is {width}, wanted 32 or more and a multiple of 4: two heads, each even"
        )
    return Size(width, layers, 2, 2 * width, 32, 8, small=True)


def mqar(
    preset: str = "titans",
    block: str | None = None,
    width: int = 64,
    layers: int = 2,
    steps: int = 3000,
    tokens: int = 2048,
    rate: float = 3e-3,
    pairs: tuple[int, ...] = PAIRS,
    seed: int = 0,
) -> Recipe:
    """Many pairs, each asked once: from few pairs to many, all sizes in one model."""
    tasks: dict[str, RowTask] = {str(number): dense_mqar(number) for number in pairs}
    vocabulary = next(iter(tasks.values())).vocab_size
    return Recipe(
        name="mqar",
        model=configure_equal(
            preset,
            block=block,
            size=_size(width, layers),
            vocab_size=vocabulary,
            initializer_range=SPREAD,
        ),
        source=RowSource(tasks=tasks, steps=steps, tokens=tokens, seed=seed),
        steps=steps,
        optimizer=Optimizer(rate=rate),
        schedule=SCHEDULE,
        seed=seed,
    )


def mad(
    preset: str = "titans",
    task: str = "in-context-recall",
    block: str | None = None,
    width: int = 64,
    layers: int = 2,
    steps: int = 3000,
    tokens: int = 2048,
    rate: float = 3e-3,
    setting: int = 0,
    exam_rows: int = 256,
    seed: int = 0,
) -> Recipe:
    """One of MAD's six tasks; setting: 0 is its baseline, the others its changes, in their order."""
    settings = list(variations(task))
    if not 0 <= setting < len(settings):
        raise ValueError(f"setting of {task} is {setting}, wanted 0 to {len(settings) - 1}")
    chosen = settings[setting]
    model = configure_equal(
        preset,
        block=block,
        size=_size(width, layers),
        vocab_size=chosen.vocab_size,
        initializer_range=SPREAD,
    )
    return Recipe(
        name="mad",
        model=model,
        source=RowSource(
            tasks={task: chosen}, steps=steps, tokens=tokens, seed=seed, exam_rows=exam_rows
        ),
        steps=steps,
        optimizer=Optimizer(rate=rate),
        schedule=SCHEDULE,
        head="auto-encoder" if chosen.from_last else "next token",
        seed=seed,
    )


def mad_paper(preset: str = "titans", task: str = "in-context-recall", **changes: Any) -> Recipe:
    """MAD as published: width 128, batches of 128 rows, 200 epochs of the training rows, 1,280 test rows.

    The published protocol also takes the best of a grid of rates and the mean over all settings: give
    rate=… and setting=….
    """
    chosen = list(variations(task))[int(changes.get("setting", 0))]
    epochs, rows = 200, 128
    published = {
        "width": 128,
        "tokens": rows * chosen.length,
        "steps": max(1, epochs * chosen.train_examples // rows),
        "rate": 5e-4,
        "exam_rows": chosen.test_examples,
    }
    return mad(preset=preset, task=task, **(published | changes))


def cued(
    preset: str = "window_5", width: int = 64, steps: int = 3000, rate: float = 3e-3, seed: int = 0
) -> Recipe:
    """Which pair to keep is told after it (atlas_lm/data/cued.py).

    preset: window_1 or window_5, the two sides of the proof: one block without convolution, linear attention
    that writes the last 1 or 5 pairs; or any other preset, as a tiny model of two blocks.
    """
    task = Cued()
    source = RowSource(tasks={"cued": task}, steps=steps, tokens=2048, seed=seed)
    return Recipe(
        name="cued",
        model=_cued_model(preset, width, task.vocab_size),
        source=source,
        steps=steps,
        optimizer=Optimizer(rate=rate),
        schedule=SCHEDULE,
        seed=seed,
    )


def _cued_model(preset: str, width: int, vocab_size: int) -> AtlasConfig:
    fields: dict[str, Any] = {"vocab_size": vocab_size, "initializer_range": SPREAD}
    if not preset.startswith("window_"):
        return configure(preset, size=_size(width, 2), **fields)
    window = Window(size=int(preset.removeprefix("window_")), gate="offset")
    return configure(
        "linear_attention",
        size=_size(width, 1),
        memory={"window": window},
        conv_size=1,
        **fields,
    )


TASKS = tuple(BASELINES)
