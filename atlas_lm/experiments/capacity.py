"""How many pairs does a memory hold? Five memories of one size, the same keys.

A matrix reads keys of K dimensions through K columns only, so it fits about K pairs, however many
weights it is given: here its keys are lifted by a fixed linear map to as many features as the others
have, and the rank stays K. Monomials of degree <= p raise the rank to C(K+p, p).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.experiments.pairs import (
    Pairs,
    draw_pairs,
    recalled,
    relative_error,
    write_then_recall,
)
from atlas_lm.memory import MemorySpec, Timing
from atlas_lm.memory.architectures import MLP, Architecture, GatedMLP, Matrix
from atlas_lm.memory.features import Features, Polynomial, Unit

MEMORIES = 5
HELD = 0.9  # a count of pairs is held when this share of them is recalled


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    key_dim: int = 14  # K; C(14+2, 2) = C(7+3, 3) = 120 features
    value_dim: int = 16
    counts: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 192, 256)
    passes: int = 60  # how often the stream of pairs is written
    chunk: int = 8  # tokens that share an anchor
    steps: tuple[float, ...] = (0.03125, 0.0625, 0.125, 0.25, 0.5)
    tuning_draws: int = 2  # draws on which the step is chosen
    draws: int = 4  # fresh draws that are reported

    @property
    def ticks(self) -> int:
        """How often `advance` is called: once per memory and count."""
        return MEMORIES * len(self.counts)


QUICK = CapacitySettings(counts=(16, 64), passes=20, steps=(0.125, 0.25), tuning_draws=1, draws=2)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One memory: its size, its step, and its scores for every count of pairs."""

    name: str
    floats: int  # fast weights
    directions: int | None  # linearly independent features of a key; None: it learns its features
    step: float
    recall: tuple[float, ...]  # share of pairs recalled, mean over draws
    recall_low: tuple[float, ...]  # the worst draw
    recall_high: tuple[float, ...]  # the best draw
    error: tuple[float, ...]  # relative error, mean over draws

    def held(self, counts: tuple[int, ...]) -> int:
        """The largest count up to which recall stays at HELD or above; 0 if none."""
        last = 0
        for count, share in zip(counts, self.recall, strict=True):
            if share < HELD:
                break
            last = count
        return last


@dataclass(frozen=True, kw_only=True)
class Capacity:
    settings: CapacitySettings
    curves: tuple[Curve, ...]

    @property
    def finding(self) -> str:
        counts = self.settings.counts
        held = ", ".join(f"{curve.held(counts)} ({curve.name})" for curve in self.curves)
        size = self.curves[0].floats
        return f"Same keys, {size:,} floats each: pairs held at {HELD:.0%} recall: {held}."


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A memory and the fixed linear map through which it sees the keys."""

    name: str
    spec: MemorySpec
    view: Tensor  # [K, spec.key_dim]
    directions: int | None

    @property
    def floats(self) -> int:
        return sum(rows * columns for rows, columns in self.spec.fast_shapes.values())

    def sees(self, pairs: Pairs) -> Pairs:
        return Pairs(keys=pairs.keys @ self.view, values=pairs.values)


def candidates(settings: CapacitySettings, generator: torch.Generator) -> tuple[Candidate, ...]:
    """Five memories of F V floats, F = C(K+2, 2).

    To meet that size with the default K and V, degree 3 sees a projection of the keys to K/2
    dimensions and the gated memory one to K - 2.
    """
    K = settings.key_dim
    squares, cubes = Polynomial(degree=2), Polynomial(degree=3)
    wide, half = squares.width(K), K // 2
    return (
        _candidate("matrix", Matrix(), Unit(), wide, K, settings, generator),
        _candidate("polynomial p=2", Matrix(), squares, K, wide, settings, generator),
        _candidate("polynomial p=3", Matrix(), cubes, half, cubes.width(half), settings, generator),
        _candidate("deep", MLP(expansion=4), Unit(), K, None, settings, generator),
        _candidate("gated deep", GatedMLP(expansion=3), Unit(), K - 2, None, settings, generator),
    )


def _candidate(
    name: str,
    architecture: Architecture,
    features: Features,
    width: int,
    directions: int | None,
    settings: CapacitySettings,
    generator: torch.Generator,
) -> Candidate:
    """width: dimensions of a key as this memory sees it"""
    spec = MemorySpec(
        heads=1,
        key_dim=width,
        value_dim=settings.value_dim,
        architecture=architecture,
        features=features,
        timing=Timing(chunk=settings.chunk),
    )
    view = linear_view(settings.key_dim, width, generator)
    return Candidate(name=name, spec=spec, view=view, directions=directions)


def linear_view(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A [rows, columns] piece of a random rotation; the identity where nothing has to change."""
    if rows == columns:
        return torch.eye(rows)
    size = max(rows, columns)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return rotation[:rows, :columns]


def measure_capacity(
    settings: CapacitySettings, seed: int, advance: Callable[[], None] = lambda: None
) -> Capacity:
    """Every memory against every count."""
    generator = torch.Generator().manual_seed(seed)
    memories = candidates(settings, generator)
    draws = settings.tuning_draws + settings.draws
    pools = [
        draw_pairs(generator, draws, count, settings.key_dim, settings.value_dim)
        for count in settings.counts
    ]
    curves = tuple(_measure(settings, memory, pools, advance) for memory in memories)
    return Capacity(settings=settings, curves=curves)


def _measure(
    settings: CapacitySettings, memory: Candidate, pools: list[Pairs], advance: Callable[[], None]
) -> Curve:
    shares, errors = [], []  # per count, [E, D] each
    for pairs in pools:
        reads = write_then_recall(
            memory.spec, memory.sees(pairs), settings.steps, passes=settings.passes
        )
        shares.append(recalled(reads, pairs.values).mean(-1))
        errors.append(relative_error(reads, pairs.values))
        advance()
    share, error = torch.stack(shares, dim=-1), torch.stack(errors, dim=-1)  # [E, D, counts]
    tuning = settings.tuning_draws
    best = int(share[:, :tuning].mean((1, 2)).argmax())
    share, error = share[best, tuning:], error[best, tuning:]
    return Curve(
        name=memory.name,
        floats=memory.floats,
        directions=memory.directions,
        step=settings.steps[best],
        recall=tuple(share.mean(0).tolist()),
        recall_low=tuple(share.amin(0).tolist()),
        recall_high=tuple(share.amax(0).tolist()),
        error=tuple(error.mean(0).tolist()),
    )
