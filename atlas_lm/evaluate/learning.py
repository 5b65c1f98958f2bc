"""Train small models on the tasks of a vocabulary of their own, all alike, and examine them.

For a picture within minutes of what a rule can learn: one loop, fresh rows, loss at the labelled places.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from atlas_lm.data.draws import draw
from atlas_lm.data.rows import NOTHING, Rows, RowTask
from atlas_lm.evaluate.intervals import wilson
from atlas_lm.evaluate.results import check_pictures, open_journal, write_results
from atlas_lm.evaluate.runner import Outcome
from atlas_lm.evaluate.task import Record, Row
from atlas_lm.memory.windows import Window
from atlas_lm.models import AtlasConfig, AtlasForCausalLM, AtlasModel, configure

FOREVER = 10_000.0  # the longest wave of the decoder's positions
# beside the presets: one block without convolution, linear attention that writes the last 1 or 5 pairs,
# the two sides of the proof in atlas_lm/data/cued.py
BARE: dict[str, dict[str, Any]] = {
    f"window_{size}": {
        "preset": "linear_attention",
        "memory": {"window": Window(size=size, gate="offset")},
        "conv_size": 1,
        "num_hidden_layers": 1,
    }
    for size in (1, 5)
}
AXES = {"mqar": "pairs"}  # tasks whose cells stand on an axis, and are learned together


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every model is trained."""

    steps: int = 3000
    tokens: int = 2048  # of a step, as whole rows
    rate: float = 3e-3  # learning rate at its highest
    warm: float = 0.1  # share of the steps in which it rises; then it falls as a cosine
    decay: float = 0.1  # weight decay
    clip: float = 1.0  # norm of a gradient
    tests: int = 256  # rows that are asked in the end
    width: int = 64
    layers: int = 2
    spread: float = 0.1  # of the initial weights; at this width 0.02 learns recall ten times later

    def __post_init__(self) -> None:
        if self.width % 4:
            raise ValueError(f"width is {self.width}, wanted a multiple of 4: two heads, each even")


class AutoEncoder(nn.Module):
    """A model that says a whole row from the encoding of its last token, as MAD's compression wants it.

    The decoder sees that encoding and a position, nothing else, and widens nothing.
    """

    def __init__(self, config: AtlasConfig, length: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.encoder = AtlasModel(config)
        self.decoder = nn.Sequential(
            nn.RMSNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.RMSNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.RMSNorm(width),
            nn.Linear(width, config.vocab_size),
        )
        self.register_buffer("positions", _waves(length, width))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [N, V] of the rows' tokens at places [N, 2] (row, column)."""
        last = self.encoder(ids, use_cache=False).last_hidden_state[:, -1]
        positions: Tensor = self.positions  # type: ignore[assignment]
        logits: Tensor = self.decoder(last[places[:, 0]] + positions[places[:, 1]])
        return logits


class Causal(nn.Module):
    """A language model whose logits are made only where they are asked for."""

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__()
        self.model = AtlasForCausalLM(config)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [N, V] after the tokens at places [N, 2] (row, column)."""
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[places[:, 0], places[:, 1]])
        return logits


def learn_all(
    tasks: Mapping[str, Mapping[str, RowTask]],
    presets: Sequence[str],
    folder: Path,
    *,
    recipe: Recipe,
    seeds: int = 1,
    device: str = "cpu",
    tell: Callable[[str, float], object] = lambda run, share: None,
) -> Outcome:
    """Train every preset on every task with every seed, and write all to a folder, as `evaluate` does.

    Args:
        tasks: by name and cell.
        tell: called with the name of a run and the share of it that was just done.
    """
    for preset in presets:
        _configure(preset)  # unknown ones are refused before anything is trained
    settings: Any = {n: {c: _settings(t) for c, t in cells.items()} for n, cells in tasks.items()}
    what = {"presets": list(presets), "tasks": settings, "recipe": asdict(recipe)}
    check_pictures(any(name in AXES for name in tasks))
    journal = open_journal(folder, what)
    wanted = []
    for (name, cells), preset, seed in product(learned_together(tasks), presets, range(seeds)):
        run = f"{name}/{'+'.join(cells)}/{preset}/{seed}"
        wanted.append(run)
        if run in journal.records:
            tell(run, 1.0)
            continue
        found = train(preset, cells, recipe, seed, device, partial(tell, run))
        journal.add([{"id": run, "task": name, "model": preset, "seed": seed, **found}])
    outcome = Outcome(rows=_rows([journal.records[run] for run in wanted]), refusals=[])
    about = {
        "model": f"trained on the spot, {recipe.layers} layers of width {recipe.width}",
        "presets": ", ".join(presets),
        **asdict(recipe),
        "seeds": seeds,
    }
    write_results(outcome, about, {name: AXES.get(name) for name in tasks}, folder)
    return outcome


def learned_together(
    tasks: Mapping[str, Mapping[str, RowTask]],
) -> list[tuple[str, Mapping[str, RowTask]]]:
    """What is learned together: MQAR of all sizes by one model, other tasks each by its own."""
    found: list[tuple[str, Mapping[str, RowTask]]] = []
    for name, cells in tasks.items():
        together = [cells] if name in AXES else [{cell: task} for cell, task in cells.items()]
        found += [(name, group) for group in together]
    return found


def _settings(task: Any) -> dict[str, Any]:
    return asdict(task)


def train(
    preset: str,
    tasks: Mapping[str, RowTask],
    recipe: Recipe,
    seed: int,
    device: str = "cpu",
    tell: Callable[[float], object] = lambda share: None,
) -> Record:
    """Train one small model on tasks of one vocabulary, and ask it rows that it has not seen.

    Of several tasks the first comes alone, then more and more of them, in turn by chance.
    """
    torch.manual_seed(seed)
    model = _build(preset, list(tasks.values()), recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    began, losses = time.perf_counter(), []
    model.train()
    for step, rows in enumerate(_batches(list(tasks.values()), recipe, seed)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _rate(step, recipe)
        loss, _ = _ask(model, rows, device)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
        tell(1 / recipe.steps)
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"{preset} on {', '.join(tasks)}: the loss is {losses[-1]} at step {step}"
            )
    return {
        "scores": {
            cell: _examine(model, task, recipe, seed, device) for cell, task in tasks.items()
        },
        "rows": recipe.tests,
        "losses": [
            round(float(np.mean(losses[i : i + 100])), 4) for i in range(0, len(losses), 100)
        ],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _build(preset: str, tasks: Sequence[RowTask], recipe: Recipe) -> nn.Module:
    """The preset at the size of the recipe."""
    changes: dict[str, Any] = {
        "vocab_size": tasks[0].vocab_size,
        "hidden_size": recipe.width,
        "intermediate_size": 2 * recipe.width,
        "num_hidden_layers": recipe.layers,
        "initializer_range": recipe.spread,
    }
    config = _configure(preset, **changes)
    if getattr(tasks[0], "from_last", False):
        return AutoEncoder(config, tasks[0].length)
    return Causal(config)


def _configure(preset: str, **changes: Any) -> AtlasConfig:
    return configure(**({"preset": preset, "size": "tiny"} | changes | BARE.get(preset, {})))


def _batches(tasks: Sequence[RowTask], recipe: Recipe, seed: int) -> Iterator[Rows]:
    """Rows for every step: fresh ones, or those that a task has for training, in ever new order."""
    known: dict[str, Rows] = {}
    for step in range(recipe.steps):
        random = draw("learning", seed, step)
        reach = 1 + int(2 * len(tasks) * step / recipe.steps)  # all of them after half of the steps
        task = tasks[int(random.randint(min(reach, len(tasks)), dtype=np.int64))]
        count = max(1, recipe.tokens // task.length)
        there = getattr(task, "train_examples", None)
        if there is None:
            yield task.rows("train", step * count, count, seed)
            continue
        if task.name not in known:
            known[task.name] = task.rows("train", 0, there, seed)
        chosen = random.randint(there, size=count, dtype=np.int64)
        rows = known[task.name]
        yield Rows(inputs=rows.inputs[chosen], labels=rows.labels[chosen])


def _ask(model: nn.Module, rows: Rows, device: str) -> tuple[Tensor, Tensor]:
    """The loss at the labelled places, and which of them were right."""
    labels = torch.from_numpy(rows.labels).to(device)
    places = (labels != NOTHING).nonzero()
    logits = model(torch.from_numpy(rows.inputs).to(device), places)
    wanted = labels[places[:, 0], places[:, 1]]
    return cross_entropy(logits.float(), wanted), logits.argmax(-1) == wanted


@torch.no_grad()
def _examine(model: nn.Module, task: RowTask, recipe: Recipe, seed: int, device: str) -> float:
    """The share of labelled places that a model says right."""
    model.eval()
    found = []
    count = max(1, recipe.tokens // task.length)
    for first in range(0, recipe.tests, count):
        rows = task.rows("test", first, min(count, recipe.tests - first), seed)
        found.append(_ask(model, rows, device)[1])
    return float(torch.cat(found).float().mean())


def _rate(step: int, recipe: Recipe) -> float:
    warm = max(1, int(recipe.warm * recipe.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


def _waves(length: int, width: int) -> Tensor:
    """Sines and cosines of positions [T, D]."""
    rates = FOREVER ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _rows(records: Sequence[Record]) -> list[Row]:
    """Of every model and cell the median of its runs and their ends; of a single run its interval."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        for cell in record["scores"]:
            found.setdefault((record["task"], record["model"], cell), []).append(record)
    return [_row(task, model, cell, group) for (task, model, cell), group in found.items()]


def _row(task: str, model: str, cell: str, records: Sequence[Record]) -> Row:
    scores = [float(record["scores"][cell]) for record in records]
    count = records[0]["rows"]
    if len(scores) > 1:
        low, high, range = min(scores), max(scores), f"the worst and best of {len(scores)} runs"
    else:
        (low, high), range = wilson(scores[0], count), Row.range
    return Row(
        task=task,
        cell={"model": model, AXES.get(task, "task"): cell},
        metric="accuracy" if len(scores) == 1 else "median accuracy",
        value=float(np.median(scores)),  # a run in a few never leaves its first plateau
        count=count * len(scores),
        low=low,
        high=high,
        range=range,
    )
