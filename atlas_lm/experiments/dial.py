"""Newton-Schulz steps as a dial of test-time compute: how even a write is, by how much work.

    S = sum_i d/dM l(M k_i, v_i)     M <- M - eta NS_k(S)     once per pass over the pairs

Where keys crowd into a few directions, plain descent (k = 0) learns those and starves the others: its
slope in a direction is scaled by the variance of the keys there. Newton-Schulz gives every direction
of S the same step, the better the more steps it takes. `muon` never converges (singular values end in
about [0.7, 1.13]); `cubic` and `polar_express` do, the second much sooner.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atlas_lm.experiments.pairs import Pairs, draw_pairs, relative_error, write_then_recall
from atlas_lm.memory import MemorySpec, Timing
from atlas_lm.memory.optimizers import Muon
from atlas_lm.ops.newton_schulz import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class DialSettings:
    key_dim: int = 32
    value_dim: int = 32
    count: int = 24  # pairs, fewer than key_dim: all could be stored exactly
    condition: float = 1000.0  # largest over smallest variance of a key's coordinates
    passes: int = 20  # writes of the memory; the step falls linearly to its last
    iterations: tuple[int, ...] = tuple(range(11))  # k
    steps: tuple[float, ...] = tuple(2.0 ** (i / 2) for i in range(-4, 9))  # 1/4 ... 16
    draws: int = 10  # each schedule and k takes the step with the least mean error over them

    @property
    def ticks(self) -> int:
        """How often `advance` is called: once per schedule and k."""
        return len(SCHEDULES) * len(self.iterations)


QUICK = DialSettings(iterations=(0, 2, 5, 10), steps=(0.35, 0.5, 1.0, 2.0), draws=4)


@dataclass(frozen=True, kw_only=True)
class Course:
    """One schedule: error and chosen step for every number of Newton-Schulz steps."""

    schedule: str
    error: tuple[float, ...]  # relative error of the reads, mean over draws
    spread: tuple[float, ...]  # its standard deviation over draws
    step: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Dial:
    settings: DialSettings
    courses: tuple[Course, ...]

    @property
    def finding(self) -> str:
        last = self.settings.iterations[-1]
        ends = ", ".join(f"{c.schedule} {c.error[-1]:.2f}" for c in self.courses)
        start = self.courses[0].error[0]
        return f"Read error without Newton-Schulz: {start:.2f}; with {last} steps of it: {ends}."


def measure_dial(
    settings: DialSettings, seed: int, advance: Callable[[], None] = lambda: None
) -> Dial:
    """Every schedule at every k on the same pairs."""
    generator = torch.Generator().manual_seed(seed)
    variances = torch.logspace(0, -1, settings.key_dim, base=settings.condition)
    pairs = draw_pairs(
        generator,
        settings.draws,
        settings.count,
        settings.key_dim,
        settings.value_dim,
        scale=variances.sqrt(),
    )
    courses = []
    for schedule in SCHEDULES:
        points = []
        for k in settings.iterations:
            points.append(_measure(settings, schedule, k, pairs))
            advance()
        error, spread, step = zip(*points, strict=True)
        courses.append(Course(schedule=schedule, error=error, spread=spread, step=step))
    return Dial(settings=settings, courses=tuple(courses))


def _measure(
    settings: DialSettings, schedule: str, iterations: int, pairs: Pairs
) -> tuple[float, float, float]:
    """Error, its spread and the step chosen, at one setting of the dial."""
    spec = MemorySpec(
        heads=1,
        key_dim=settings.key_dim,
        value_dim=settings.value_dim,
        optimizer=Muon(steps=iterations, schedule=schedule, carry_per="period"),  # type: ignore[arg-type]
        timing=Timing(chunk=settings.count, period=settings.count),  # one write per pass
    )
    course = 1 - torch.arange(settings.passes) / settings.passes
    reads = write_then_recall(spec, pairs, settings.steps, passes=settings.passes, course=course)
    error = relative_error(reads, pairs.values)  # [E, D]
    best = int(error.mean(1).argmin())
    return error[best].mean().item(), error[best].std().item(), settings.steps[best]
