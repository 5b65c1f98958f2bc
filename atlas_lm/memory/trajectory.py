"""A memory at every token of a chunk, without a weight matrix per token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atlas_lm.memory.basis import DENSE, MEMORY, START, unit_column
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.stretch import Pace
from atlas_lm.memory.trace import total_norm


@dataclass(frozen=True, eq=False)
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

    def end(self) -> Tensor:
        """M at the last token, [B, H, O, I]."""
        return self._dense(self.coefficients[:, :, -1:]).squeeze(2)

    def at(self, tokens: list[int]) -> Tensor:
        """M at some tokens, [B, H, n, O, I]."""
        return self._dense(self.coefficients[:, :, tokens])

    def _dense(self, c: Tensor) -> Tensor:
        """The matrices that some rows of coefficients stand for. c: [B, H, n, DENSE + terms]"""
        matrix = (c[..., DENSE:, None] * self.left.unsqueeze(2)).mT @ self.right.unsqueeze(2)
        for r, base in enumerate(self.bases):
            if base is not None:
                matrix = matrix + c[..., r, None, None] * base.unsqueeze(2)
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


class Moving(Protocol):
    """A weight matrix at every token of a chunk."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def end(self) -> Tensor: ...

    def norms(self) -> Tensor: ...


def norms(weights: Mapping[str, Moving]) -> Tensor:
    """|M_t| over all fast weights together, [B, H, T]."""
    return total_norm([weight.norms() for weight in weights.values()])


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
