"""How much of the bare step the training loop reaches, and how long it waits for data.

    python -m benchmarks.training mqar preset=titans width=64 --steps 40
    python -m benchmarks.training lm preset=titans size=60M --device cuda --steps 30

The bare step is forward, backward and optimizer on one batch that is there already: no data, no clipping, no
checks, no records. Both are timed in turns, in one process, and compared by their medians.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from atlas_lm.recipes.finding import build_recipe, parse_arguments
from atlas_lm.train.feed import Feed
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import Machine, join
from atlas_lm.train.parts import Share
from atlas_lm.train.place import Place

WARM = 3  # turns that are not counted


def now(machine: Machine) -> float:
    if machine.device.type == "cuda":
        torch.cuda.synchronize(machine.device)
    return time.perf_counter()


def bare_step(run: Run, share: Share) -> None:
    """What must be done in any case."""
    state = None
    for parts in share.batches:
        for part in parts:
            with torch.autocast(
                run.machine.device.type, dtype=run.dtype, enabled=run.dtype != torch.float32
            ):
                said = run.module(part, state)
            (said.nats.sum() / share.labelled).backward()
            state = said.state
    for optimizer in run.trained.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def moved(share: Share, device: torch.device) -> Share:
    """The share on the device, all its streams begun anew."""
    batches = [[replace(part.to(device), fresh=None) for part in some] for some in share.batches]
    return Share(batches=batches, tokens=share.tokens, labelled=share.labelled)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("recipe")
parser.add_argument("arguments", nargs="*")
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--compile", action="store_true")


def main() -> None:
    given = parser.parse_args()
    recipe = build_recipe(given.recipe, parse_arguments(given.recipe, given.arguments))
    with tempfile.TemporaryDirectory() as folder, join(given.device) as machine:
        place = Place(
            out=Path(folder), device=given.device, workers=given.workers, compiled=given.compile
        )
        run = Run(recipe, place, machine)
        feed = Feed(
            recipe.source,
            machine,
            range(given.steps + WARM),
            micro=None,
            segment=recipe.segment,
            workers=given.workers,
        )
        fixed = None
        loop, bare, tokens = [], [], []
        for turn, share in enumerate(feed):
            fixed = fixed or moved(share, machine.device)
            if turn == WARM:
                feed.waited = 0.0
            began = now(machine)
            run.step(share)
            middle = now(machine)
            bare_step(run, fixed)
            end = now(machine)
            loop.append(middle - began)
            bare.append(end - middle)
            tokens.append(share.tokens)
        waited = feed.waited / sum(loop[WARM:])
    report(given, run.module, loop[WARM:], bare[WARM:], tokens[WARM:], waited)


def report(
    given: argparse.Namespace,
    module: nn.Module,
    loop: list[float],
    bare: list[float],
    tokens: list[int],
    waited: float,
) -> None:
    weights = sum(weight.numel() for weight in module.parameters())
    middle, plain = statistics.median(loop), statistics.median(bare)
    ratios = [b / a for a, b in zip(loop, bare, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"{given.recipe} {' '.join(given.arguments)}: {weights:,} weights, {len(loop)} turns")
    print(
        f"loop        {1e3 * middle:.1f} ms a step, {statistics.mean(tokens) / middle:,.0f} tokens/s"
    )
    print(f"bare step   {1e3 * plain:.1f} ms")
    spread = f"quartiles {100 * low:.1f}-{100 * high:.1f}"
    print(f"the loop reaches {100 * plain / middle:.1f} % of the bare step ({spread})")
    print(f"waiting for data: {100 * waited:.2f} % of the loop's time")


if __name__ == "__main__":
    main()
