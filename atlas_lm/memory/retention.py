"""How the memory forgets: what is left of M_{t-1} when token t arrives.

Each part says it twice: `keep` on the weights themselves, one token (the definition), and `unroll` on
coefficients over a chunk's basis (docs/mathematics.md, section 2).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atlas_lm.memory.basis import MEMORY, START, unit_column
from atlas_lm.memory.gates import LOG_ALPHA, Gate
from atlas_lm.ops.decay_scan import decay_scan


@dataclass(frozen=True, kw_only=True)
class Keep:
    """alpha = 1: nothing is forgotten."""

    kind: ClassVar[str] = "keep"
    reads_start: ClassVar[bool] = False  # True: the initial memory takes part in every step

    def gates(self) -> tuple[Gate, ...]:
        return ()

    def keep(self, memory: Tensor, log_alpha: Tensor, start: Tensor) -> Tensor:
        """memory, start: [B, H, O, I]   log_alpha: [B, H, 1, 1]   returns what is left of memory."""
        return memory

    def settle(self, memory: Tensor, start: Tensor) -> Tensor:
        """What happens to the memory after it was moved."""
        return memory

    def unroll(self, steps: Tensor, log_alpha: Tensor) -> Tensor:
        """Coefficients of M_t from those of the steps. steps: [B, H, T, N], log_alpha: [B, H, T]."""
        return decay_scan(steps, unit_column(steps, MEMORY), log_decay=log_alpha)


@dataclass(frozen=True, kw_only=True)
class Decay(Keep):
    """M <- alpha_t M: toward zero, as printed in the papers."""

    kind: ClassVar[str] = "decay"

    def gates(self) -> tuple[Gate, ...]:
        return (LOG_ALPHA,)

    def keep(self, memory: Tensor, log_alpha: Tensor, start: Tensor) -> Tensor:
        return log_alpha.exp() * memory


@dataclass(frozen=True, kw_only=True)
class DecayToStart(Decay):
    """M <- M_0 + alpha_t (M - M_0): toward the learned start. Toward zero a deep memory dies."""

    kind: ClassVar[str] = "decay_to_start"
    reads_start: ClassVar[bool] = True

    def keep(self, memory: Tensor, log_alpha: Tensor, start: Tensor) -> Tensor:
        return start + log_alpha.exp() * (memory - start)

    def unroll(self, steps: Tensor, log_alpha: Tensor) -> Tensor:
        pull = -torch.expm1(log_alpha).unsqueeze(-1) * unit_column(steps, START).unsqueeze(-2)
        return super().unroll(steps + pull, log_alpha)


@dataclass(frozen=True, kw_only=True)
class Renormalise(Keep):
    """After each move every row of a weight returns to the length it started with (LaCT)."""

    kind: ClassVar[str] = "renormalise"
    reads_start: ClassVar[bool] = True

    def settle(self, memory: Tensor, start: Tensor) -> Tensor:
        length = memory.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return memory * (start.norm(dim=-1, keepdim=True) / length)


Retention = Keep | Decay | DecayToStart | Renormalise
