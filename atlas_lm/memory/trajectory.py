"""A memory at every token of a chunk, without a weight matrix per token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.basis import DENSE, MEMORY, START, unit_column
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.trace import total_norm


@dataclass(frozen=True)
class Trajectory:
    """M_t = sum_r coefficients[t, r] bases_r + sum_i coefficients[t, 3 + i] left_i right_i^T."""

    bases: Sequence[Tensor | None]  # DENSE matrices [B, H, O, I]; None: not in this rule
    coefficients: Tensor  # [B, H, T, DENSE + n]
    left: Tensor  # [B, H, n, O]
    right: Tensor  # [B, H, n, I]

    def __call__(self, x: Tensor) -> Tensor:
        """M_t x_t for every t. x: [B, H, T, I] -> [B, H, T, O]"""
        y = (self.coefficients[..., DENSE:] * (x @ self.right.mT)) @ self.left
        for r, base in enumerate(self.bases):
            if base is not None:
                y = y + self.coefficients[..., r, None] * (x @ base.mT)
        return y

    def at(self, t: int | Tensor) -> Tensor:
        """M_t itself, [B, H, O, I]; for several tokens at once, [B, H, n, O, I]."""
        c = self.coefficients[..., t, :]
        many = c.dim() == 4
        left, right = (
            (self.left, self.right) if not many else (self.left[:, :, None], self.right[:, :, None])
        )
        matrix = (c[..., DENSE:, None] * left).mT @ right
        for r, base in enumerate(self.bases):
            if base is not None:
                matrix = matrix + c[..., r, None, None] * (base[:, :, None] if many else base)
        return matrix

    def norms(self) -> Tensor:
        """|M_t| for every t, [B, H, T], from inner products alone."""
        dense = [(r, base) for r, base in enumerate(self.bases) if base is not None]
        columns = [r for r, _ in dense] + list(range(DENSE, self.coefficients.shape[-1]))
        n, size = len(dense), len(columns)
        gram = self.left.new_zeros(*self.left.shape[:2], size, size)
        gram[..., n:, n:] = (self.left @ self.left.mT) * (self.right @ self.right.mT)
        for i, (_, base) in enumerate(dense):
            cross = ((self.left @ base) * self.right).sum(-1)
            gram[..., i, n:], gram[..., n:, i] = cross, cross
            for j, (_, other) in enumerate(dense):
                gram[..., i, j] = (base * other).sum((-2, -1))
        c = self.coefficients[..., columns]
        return ((c @ gram) * c).sum(-1).clamp_min(0).sqrt()


def norms(trajectories: dict[str, Trajectory]) -> Tensor:
    """Over all fast weights together, [B, H, T]."""
    return total_norm([one.norms() for one in trajectories.values()])


@dataclass(frozen=True)
class Pace:
    """The gates of a chunk as the rule uses them: empty columns hold everything still."""

    eta: Tensor  # [B, H, T]
    theta: Tensor | None  # [B, H, T]
    log_alpha: Tensor  # [B, H, T]
    moves: Tensor  # [B, 1, T, 1], 1 where a token is written


def pace(
    spec: MemorySpec, gates: dict[str, Tensor], energy: Tensor, valid: Tensor, offset: int
) -> Pace:
    """gates: [B, H, T, ...]   energy: |phi(k_t)|^2 [B, H, T]   valid: [B, T]   offset: of the first token
    in its chunk"""
    held = valid.unsqueeze(1)  # [B, 1, T]
    tokens = torch.arange(valid.shape[1], device=valid.device) + offset
    theta = spec.optimizer.carry(gates, tokens % spec.timing.period == 0)
    log_alpha = gates.get("log_alpha", torch.zeros_like(energy))
    return Pace(
        eta=spec.optimizer.rate(gates, energy),
        theta=None if theta is None else torch.where(held, theta, 1.0),
        log_alpha=torch.where(held, log_alpha, 0.0),
        moves=held.unsqueeze(-1).to(energy.dtype),
    )


def unroll(spec: MemorySpec, writes: Tensor, at: Pace) -> tuple[Tensor, Tensor]:
    """Run the rule on coefficients: those of M_t and of S_t, [B, H, T, DENSE + n].

    writes: [B, H, T, n], the weight of slope n in the gradient of token t, zero in empty columns
    """
    momentum, steps = spec.optimizer.unroll(pad(writes), at.eta, at.theta)
    return spec.retention.unroll(steps * at.moves, at.log_alpha), momentum


def pad(writes: Tensor) -> Tensor:
    """Slopes' columns behind the dense ones, which a gradient does not contain."""
    return torch.nn.functional.pad(writes, (DENSE, 0))


def points(spec: MemorySpec, coefficients: Tensor, at: Pace) -> Tensor:
    """Coefficients of the memory at which the slopes of an online rule are taken, [B, H, T, N].

    M_{t-1}, or what retention leaves of it, from the coefficients of M_t.
    """
    before = unit_column(coefficients, MEMORY).unsqueeze(-2)
    point = torch.cat([before, coefficients[..., :-1, :]], dim=-2)
    if not spec.timing.after_retention:
        return point
    start = unit_column(coefficients, START).unsqueeze(-2)
    return spec.retention.keep(point, at.log_alpha.unsqueeze(-1), start)
