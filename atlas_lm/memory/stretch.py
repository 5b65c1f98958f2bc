"""What a chunk or tile works on, and what comes out of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.spec import MemorySpec

Fast = dict[str, Tensor]  # fast weights by name, [B, H, O, I]


@dataclass(frozen=True)
class Pace:
    """The gates of a chunk as the rule uses them: empty columns hold everything still."""

    eta: Tensor  # [B, H, T]
    theta: Tensor | None  # [B, H, T]
    log_alpha: Tensor  # [B, H, T]
    moves: Tensor  # [B, 1, T, 1], 1 where a token is written


@dataclass(frozen=True)
class Stretch:
    """The columns of one chunk or tile, with the halo of its window."""

    q: Tensor  # phi(q) [B, H, T, F]
    x: Tensor  # phi(k) of the pairs [B, H, c-1 + T, F]
    pairs: dict[str, Tensor]  # k, v, gates of pairs [B, H, c-1 + T, ...]
    gates: dict[str, Tensor]  # [B, H, T, ...]
    valid: Tensor  # [B, T]
    present: Tensor  # [B, c-1 + T]
    offset: int  # of the first token in its chunk

    def writes(self, spec: MemorySpec) -> Tensor:
        """Ms: the weight of each pair in the gradient of each token, [B, H, T, c-1 + T]."""
        both = self.valid.unsqueeze(2) & self.present.unsqueeze(1)
        return spec.window.weight_matrix(self.gates, self.pairs, both)

    def pace(self, spec: MemorySpec) -> Pace:
        tokens, held = self.valid.shape[1], self.valid.unsqueeze(1)  # held: [B, 1, T]
        energy = self.x[:, :, self.x.shape[2] - tokens :].square().sum(-1)  # |phi(k_t)|^2 [B, H, T]
        place = torch.arange(tokens, device=held.device) + self.offset
        theta = spec.optimizer.carry(self.gates, place % spec.timing.period == 0)
        log_alpha = self.gates.get("log_alpha", torch.zeros_like(energy))
        return Pace(
            eta=spec.optimizer.rate(self.gates, energy),
            theta=None if theta is None else torch.where(held, theta, 1.0),
            log_alpha=torch.where(held, log_alpha, 0.0),
            moves=held.unsqueeze(-1).to(energy.dtype),
        )


@dataclass(frozen=True)
class Passage:
    """What comes out of a chunk."""

    y: Tensor  # [B, H, T, V]
    memory: Fast
    momentum: Fast
    norms: dict[str, Tensor]  # [B, H, T] each, when asked for
