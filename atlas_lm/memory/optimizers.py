"""Inner optimizers: from the window's gradient G_t to the step that the memory takes.

Each part says its rule twice: `update` on the weights, one token (the definition), and `unroll` on
coefficients over a chunk's basis (docs/mathematics.md, section 2).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atlas_lm.memory.basis import MOMENTUM, unit_column
from atlas_lm.memory.gates import ETA, THETA, Gate, Gates
from atlas_lm.ops.decay_scan import decay_scan
from atlas_lm.ops.newton_schulz import newton_schulz, schedule


@dataclass(frozen=True, kw_only=True)
class Descent:
    """step = -eta_t G_t."""

    kind: ClassVar[str] = "descent"
    has_momentum: ClassVar[bool] = False
    step: float | None = None  # a fixed eta; None: the gate eta

    def __post_init__(self) -> None:
        if self.step is not None and not self.step > 0:
            raise ValueError(f"step is {self.step}, wanted a positive number or None (gate eta)")

    def gates(self) -> tuple[Gate, ...]:
        return (ETA,) if self.step is None else ()

    def rate(self, gates: Gates, energy: Tensor) -> Tensor:
        """eta_t. energy: |phi(k_t)|^2 [B, H, ...]"""
        return gates["eta"] if self.step is None else torch.full_like(energy, self.step)

    def at_border(self, momentum: Tensor) -> Tensor:
        """S as a new chunk finds it."""
        return momentum

    def carry(self, gates: Gates, first: Tensor) -> Tensor | None:
        """theta_t. first: bool, this token opens a Newton-Schulz period"""
        return None

    def update(
        self, grad: Tensor, momentum: Tensor | None, eta: Tensor, theta: Tensor | None, due: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """grad, momentum: [B, H, O, I]   eta, theta: [B, H, 1, 1]   due: bool [B, 1, 1, 1], Newton-Schulz
        moves the memory at this token   returns the step and the next momentum"""
        return -eta * grad, None

    def unroll(self, writes: Tensor, eta: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Coefficients [B, H, T, N] of momentum and step, from those of the gradient."""
        steps = -eta.unsqueeze(-1) * writes
        return torch.zeros_like(steps), steps


@dataclass(frozen=True, kw_only=True)
class ImplicitDescent(Descent):
    """The step that solves min |M - M_{t-1}|^2 + eta |M phi - v|^2: eta / (1 + eta |phi|^2) (Longhorn)."""

    kind: ClassVar[str] = "implicit_descent"

    def rate(self, gates: Gates, energy: Tensor) -> Tensor:
        eta = super().rate(gates, energy)
        return eta / (1 + eta * energy)


@dataclass(frozen=True, kw_only=True)
class Momentum(Descent):
    """S_t = theta_t S_{t-1} - eta_t G_t, step = S_t (Titans)."""

    kind: ClassVar[str] = "momentum"
    has_momentum: ClassVar[bool] = True
    truncate: bool = False  # cut the outer gradient through S at chunk borders

    def gates(self) -> tuple[Gate, ...]:
        return (*super().gates(), THETA)

    def at_border(self, momentum: Tensor) -> Tensor:
        return momentum.detach() if self.truncate else momentum

    def carry(self, gates: Gates, first: Tensor) -> Tensor | None:
        return gates["theta"]

    def update(
        self, grad: Tensor, momentum: Tensor | None, eta: Tensor, theta: Tensor | None, due: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        assert momentum is not None and theta is not None
        momentum = theta * momentum - eta * grad
        return momentum, momentum

    def unroll(self, writes: Tensor, eta: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
        momentum = _accumulate(-eta.unsqueeze(-1) * writes, theta)
        return momentum, momentum


@dataclass(frozen=True, kw_only=True)
class Muon(Momentum):
    """S_t = theta_t S_{t-1} + G_t, step = -eta_t NS(S_t) whenever a period ends (Atlas, eq. 32).

    NS is never stored back into S. `steps` = 0 switches it off: step = -eta_t S_t.
    `carry_per` = "period" applies theta once per period, at its first token (LaCT's chunk momentum).
    """

    kind: ClassVar[str] = "muon"
    steps: int = 5
    schedule: Literal["muon", "cubic", "polar_express"] = "muon"
    eps: float = 1e-3  # added to |S|_F: below it the step fades instead of amplifying noise
    carry_per: Literal["token", "period"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule(self.schedule, self.steps)
        if self.carry_per not in ("token", "period"):
            raise ValueError(f"carry_per is {self.carry_per!r}, wanted 'token' or 'period'")
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}, wanted a positive number: S = 0 must give 0")

    def carry(self, gates: Gates, first: Tensor) -> Tensor | None:
        theta = gates["theta"]
        return theta if self.carry_per == "token" else torch.where(first, theta, 1.0)

    def update(
        self, grad: Tensor, momentum: Tensor | None, eta: Tensor, theta: Tensor | None, due: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        assert momentum is not None and theta is not None
        momentum = theta * momentum + grad
        return torch.where(due, -eta * self.orthogonalise(momentum), 0.0), momentum

    def orthogonalise(self, momentum: Tensor) -> Tensor:
        return newton_schulz(momentum, self.steps, name=self.schedule, eps=self.eps)

    def unroll(self, writes: Tensor, eta: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The momentum alone is linear; its steps are not, and are taken on dense matrices."""
        momentum = _accumulate(writes, theta)
        return momentum, torch.zeros_like(momentum)


Optimizer = Descent | ImplicitDescent | Momentum | Muon


def _accumulate(inputs: Tensor, theta: Tensor | None) -> Tensor:
    assert theta is not None
    return decay_scan(inputs, unit_column(inputs, MOMENTUM), decay=theta)
