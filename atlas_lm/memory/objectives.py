"""Attentional bias: what the memory tries to do with a pair, as a value and its slope.

The slope is taken in the prediction: e = d l(p, v) / dp. All losses carry the 1/2, so no factor 2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atlas_lm.memory.gates import DELTA, Gate, Gates


@dataclass(frozen=True, kw_only=True)
class L2:
    """l = 1/2 |p - v|^2, e = p - v."""

    kind: ClassVar[str] = "l2"

    def gates(self) -> tuple[Gate, ...]:
        return ()

    def value(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        return 0.5 * (prediction - v).square().sum(-1)

    def slope(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        return prediction - v


@dataclass(frozen=True, kw_only=True)
class Dot:
    """l = -<p, v>, e = -v: Hebbian, blind to what is already stored."""

    kind: ClassVar[str] = "dot"

    def gates(self) -> tuple[Gate, ...]:
        return ()

    def value(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        return -(prediction * v).sum(-1)

    def slope(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        return -v


@dataclass(frozen=True, kw_only=True)
class Huber:
    """1/2 |e|^2 up to |e| = delta, delta (|e| - delta/2) beyond: e min(1, delta / |e|), e = p - v."""

    kind: ClassVar[str] = "huber"
    delta: float | None = None  # where the loss turns linear; None: a gate of the pair

    def __post_init__(self) -> None:
        if self.delta is not None and not self.delta > 0:
            raise ValueError(
                f"Huber delta is {self.delta}, wanted a positive number or None (gate)"
            )

    def gates(self) -> tuple[Gate, ...]:
        return (DELTA,) if self.delta is None else ()

    def _delta(self, gates: Gates) -> Tensor | float:
        return gates["delta"] if self.delta is None else self.delta

    def value(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        norm, delta = (prediction - v).norm(dim=-1), self._delta(gates)
        return torch.where(norm <= delta, 0.5 * norm.square(), delta * (norm - 0.5 * delta))

    def slope(self, prediction: Tensor, v: Tensor, gates: Gates) -> Tensor:
        error = prediction - v
        square, delta = error.square().sum(-1), self._delta(gates)
        outside = square > delta * delta
        norm = torch.where(outside, square, 1.0).sqrt()  # never the root of zero
        return error * torch.where(outside, delta / norm, 1.0).unsqueeze(-1)


Objective = L2 | Dot | Huber
