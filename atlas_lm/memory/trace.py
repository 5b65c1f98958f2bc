"""What a memory can tell on request, per token and head: surprise, norms, gates."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All [B, T, H], detached, zero at tokens that are not valid.

    For kept pairs the norms are those of the coefficients in value space.
    """

    surprise: Tensor  # |G_t|, the size of the window's gradient, over all fast weights
    memory_norm: Tensor  # |M_t| after the write
    momentum_norm: Tensor | None  # |S_t|; None for rules without momentum
    gates: dict[str, Tensor]  # every gate, averaged over offsets; retention as `alpha`, not its log


def total_norm(norms: list[Tensor]) -> Tensor:
    """The norm over all fast weights from the norm of each."""
    return torch.stack(norms).square().sum(0).sqrt()


def gate_means(gates: dict[str, Tensor], valid: Tensor | None) -> dict[str, Tensor]:
    """gates: [B, H, T(, offsets)] -> [B, H, T], zero at invalid tokens."""
    means = {}
    for name, gate in gates.items():
        gate = gate.detach()
        mean = gate.mean(-1) if gate.dim() == 4 else gate
        if name == "log_alpha":
            name, mean = "alpha", mean.exp()
        means[name] = mean if valid is None else mean * valid.unsqueeze(1)
    return means
