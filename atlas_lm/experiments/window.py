"""One pass over a stream: the newest pair alone (window 1) against the last c pairs (Omega rule).

    G_t = (1/c) sum_{j<c} d/dM l(M k_{t-j}, v_{t-j})     M_t = M_{t-1} - eta G_t

The gates of a window sum to one, so the total step eta sum_j gamma_{t,j} = eta is the same for every
c. It is compared twice: all windows at total step 1, and every window at its own best total step.
A window of c takes c slopes per token: more work per pair, not more weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.experiments.pairs import Pairs, draw_pairs, recalled, write_then_recall
from atlas_lm.memory import MemorySpec
from atlas_lm.memory.features import Unit
from atlas_lm.memory.windows import Window


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    key_dim: int = 16
    value_dim: int = 16
    count: int = 64  # pairs in the stream, each seen once
    recent: int = 16  # the newest pairs, scored apart: as many as the matrix can hold
    windows: tuple[int, ...] = (1, 2, 4, 8, 16)
    steps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # total steps tried
    tuning_draws: int = 64  # draws on which the best total step is chosen
    draws: int = 192  # fresh draws that are reported

    @property
    def ticks(self) -> int:
        """How often `advance` is called: once per window."""
        return len(self.windows)


QUICK = WindowSettings(windows=(1, 4, 16), tuning_draws=8, draws=16)


@dataclass(frozen=True, kw_only=True)
class Recalls:
    """What one window remembers at one total step, mean over draws."""

    window: int
    step: float  # eta sum_j gamma_{t,j}
    by_age: tuple[float, ...]  # share recalled of the pair seen 0, 1, 2, ... tokens before the end
    newest: float
    recent: float  # share of the last `recent` pairs
    all: float


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    settings: WindowSettings
    equal: tuple[Recalls, ...]  # total step 1 for all
    tuned: tuple[Recalls, ...]  # the best total step of each, by recall of the recent pairs

    @property
    def finding(self) -> str:
        (one, wide), (first, last) = (
            (results[0], results[-1]) for results in (self.tuned, self.equal)
        )
        return (
            f"Of the last {self.settings.recent} pairs, window 1 recalls {one.recent:.0%} and window "
            f"{wide.window} {wide.recent:.0%}, each at its best total step ({one.step:g} and "
            f"{wide.step:g}); at equal step the newest pair goes from {first.newest:.0%} to "
            f"{last.newest:.0%}."
        )


def measure_windows(
    settings: WindowSettings, seed: int, advance: Callable[[], None] = lambda: None
) -> WindowResult:
    """Every window on the same streams."""
    generator = torch.Generator().manual_seed(seed)
    draws = settings.tuning_draws + settings.draws
    pairs = draw_pairs(generator, draws, settings.count, settings.key_dim, settings.value_dim)
    equal: list[Recalls] = []
    tuned: list[Recalls] = []
    for size in settings.windows:
        right = _recalled(settings, size, pairs)  # [E, D, n]
        recent = right[:, : settings.tuning_draws, -settings.recent :].mean((1, 2))
        fresh = right[:, settings.tuning_draws :].mean(1)  # [E, n]
        for results, row in ((equal, settings.steps.index(1.0)), (tuned, int(recent.argmax()))):
            results.append(_summary(settings, size, settings.steps[row], fresh[row]))
        advance()
    return WindowResult(settings=settings, equal=tuple(equal), tuned=tuple(tuned))


def _recalled(settings: WindowSettings, size: int, pairs: Pairs) -> Tensor:
    spec = MemorySpec(
        heads=1,
        key_dim=settings.key_dim,
        value_dim=settings.value_dim,
        features=Unit(),
        window=Window(size=size),
    )
    return recalled(write_then_recall(spec, pairs, settings.steps), pairs.values)


def _summary(settings: WindowSettings, size: int, step: float, share: Tensor) -> Recalls:
    """share: [n], the share recalled of each place in the stream"""
    return Recalls(
        window=size,
        step=step,
        by_age=tuple(share.flip(0).tolist()),
        newest=share[-1].item(),
        recent=share[-settings.recent :].mean().item(),
        all=share.mean().item(),
    )
