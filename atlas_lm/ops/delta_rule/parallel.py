"""The exact online rule tile by tile in plain PyTorch: one triangular system per tile.

Matmuls run in the dtype of the inputs; gates, the system and the memory in fp32 or wider. Derivation:
docs/mathematics.md, section 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.ops.decay_scan import decay_scan
from atlas_lm.ops.delta_rule.record import Problem, each_sequence
from atlas_lm.ops.triangular_solve import triangular_solve

ROWS = 64  # unknown errors per tile, about


@each_sequence
def delta_rule_parallel(problem: Problem) -> tuple[Tensor, Tensor]:
    """`delta_rule` without kernels."""
    p, memory = problem, problem.memory
    batch, tokens = p.q.shape[:2]
    wide = torch.promote_types(p.q.dtype, torch.float32)
    windows = _windows(p.before, tokens, p.window, p.k.device)
    there = (windows.relative >= -p.before).expand(batch, -1, -1)  # [B, T, c]
    if p.past is not None:
        there = there & (windows.relative >= -p.past[:, None, None])
    weight = p.eta.new_ones(1) if p.gamma is None else p.gamma
    gamma = torch.where(there.unsqueeze(2), weight.to(wide), 0.0).transpose(1, 2)  # [B, H, T, c]
    eta = p.eta.to(wide).transpose(1, 2)
    log_alpha = torch.zeros_like(eta)
    if p.log_alpha is not None:
        log_alpha = p.log_alpha.to(wide).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    reads, step = [v[:, :, :0]], max(1, ROWS // p.window)
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        rows = windows.place[part].flatten()
        tile = _Tile(q[:, :, part], k[:, :, rows], v[:, :, rows], gamma[:, :, part].flatten(2))
        y, memory = tile.pass_through(
            memory, eta[..., part], log_alpha[..., part], p.after_retention
        )
        reads.append(y)
    return torch.cat(reads, dim=2).transpose(1, 2), memory


@dataclass(frozen=True)
class _Windows:
    relative: Tensor  # [T, c], number t - j of the pair, negative before the first token
    place: Tensor  # [T, c], where it stands in k and v


def _windows(before: int, tokens: int, size: int, device: torch.device) -> _Windows:
    relative = torch.arange(tokens, device=device).unsqueeze(1) - torch.arange(size, device=device)
    return _Windows(relative, (relative + before).clamp_min(0))


@dataclass(frozen=True)
class _Tile:
    """b tokens and their n = b * c rows (t, j), one per unknown error."""

    q: Tensor  # [B, H, b, F]
    x: Tensor  # [B, H, n, F]
    v: Tensor  # [B, H, n, V]
    gamma: Tensor  # [B, H, n], zero where there is no pair

    def pass_through(
        self, memory: Tensor, eta: Tensor, log_alpha: Tensor, after_retention: bool
    ) -> tuple[Tensor, Tensor]:
        """memory: [B, H, V, F], eta, log_alpha: [B, H, b] -> y [B, H, b, V] and the memory after."""
        size = self.x.shape[2] // self.q.shape[2]
        made, point = _coefficients(eta, log_alpha, after_retention)
        made, point = (_widen(x, self.gamma, size) for x in (made, point))
        point = point.repeat_interleave(size, dim=2)
        narrow = memory.to(self.x.dtype)
        known = point[..., :1] * (self.x @ narrow.mT) - self.v
        error = triangular_solve(-point[..., 1:] * (self.x @ self.x.mT), known)
        write = made[..., 1:] * (self.q @ self.x.mT)
        y = made[..., :1] * (self.q @ narrow.mT) - write.to(self.x.dtype) @ error.to(self.x.dtype)
        last = (made[:, :, -1, 1:, None] * error).to(self.x.dtype)
        return y.to(self.q.dtype), made[:, :, -1, :1, None] * memory - last.mT @ self.x


def _coefficients(eta: Tensor, log_alpha: Tensor, after_retention: bool) -> tuple[Tensor, Tensor]:
    """Weights [B, H, b, 1 + b] of (M before the tile, gradient of each token) in M_t and in the memory
    at which token t takes its slope."""
    steps = torch.nn.functional.pad(torch.diag_embed(eta), (1, 0))
    initial = torch.zeros_like(steps[..., 0, :])
    initial[..., 0] = 1.0
    made = decay_scan(steps, initial, log_decay=log_alpha)
    point = torch.cat([initial.unsqueeze(-2), made[..., :-1, :]], dim=-2)
    return made, log_alpha.exp().unsqueeze(-1) * point if after_retention else point


def _widen(weights: Tensor, gamma: Tensor, size: int) -> Tensor:
    """Columns (M, tokens) -> (M, rows): each token's gradient is gamma times its rows' errors."""
    return torch.cat(
        [weights[..., :1], weights[..., 1:].repeat_interleave(size, dim=-1) * gamma.unsqueeze(2)],
        dim=-1,
    )
