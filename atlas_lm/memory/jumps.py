"""A memory that moves only when Newton-Schulz does, once per period (Muon)."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.stretch import Pace, Stretch
from atlas_lm.memory.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Jumps:
    """A memory that jumps at a few tokens of the chunk and only fades between them (Muon).

    Tokens are grouped by the jump they come after; the j-th group holds those from jump j-1 on.
    """

    memories: Tensor  # [B, H, G, O, I], after each jump
    start: Tensor | None  # the initial memory, where retention pulls toward it
    fade: Tensor  # [B, H, T], what is left of the group's memory at each token
    period: int
    front: int  # empty slots before the first token of its group

    def __call__(self, x: Tensor) -> Tensor:
        y = self._ungroup(self._group(x) @ self.memories.mT)
        y = self.fade.unsqueeze(-1) * y
        if self.start is not None:
            y = y + (1 - self.fade).unsqueeze(-1) * (x @ self.start.mT)
        return y

    def end(self) -> Tensor:
        fade = self.fade[..., -1, None, None]
        last = fade * self.memories[:, :, -1]
        return last if self.start is None else last + (1 - fade) * self.start

    def norms(self) -> Tensor:
        def per_token(group_values: Tensor) -> Tensor:  # [B, H, G] -> [B, H, T]
            spread = group_values[..., None, None].expand(-1, -1, -1, self.period, 1)
            return self._ungroup(spread).squeeze(-1)

        square = self.fade.square() * per_token(self.memories.square().sum((-2, -1)))
        if self.start is not None:
            rest = 1 - self.fade
            cross = per_token((self.memories * self.start.unsqueeze(2)).sum((-2, -1)))
            own = self.start.square().sum((-2, -1)).unsqueeze(-1)
            square = square + 2 * self.fade * rest * cross + rest.square() * own
        return square.clamp_min(0).sqrt()

    def _group(self, x: Tensor) -> Tensor:
        """[B, H, T, I] -> [B, H, G, period, I]"""
        back = self.memories.shape[2] * self.period - self.front - x.shape[2]
        x = torch.nn.functional.pad(x, (0, 0, self.front, back))
        return x.unflatten(2, (-1, self.period))

    def _ungroup(self, y: Tensor) -> Tensor:
        """[B, H, G, period, O] -> [B, H, T, O]"""
        return y.flatten(2, 3)[:, :, self.front : self.front + self.fade.shape[-1]]


def jump(
    spec: MemorySpec,
    momenta: Trajectory,
    memory: Tensor,
    start: Tensor | None,
    stretch: Stretch,
    at: Pace,
) -> Jumps:
    """M_t = retain(M_{t-1}) - eta_t NS(S_t) at the end of each period, retention alone between."""
    assert isinstance(spec.optimizer, Muon)
    period, width = spec.timing.period, at.eta.shape[-1]
    jumps = [t for t in range(width) if (stretch.offset + t + 1) % period == 0]
    front = (stretch.offset + 1) % period
    steps = None
    if jumps:
        steps = spec.optimizer.orthogonalise(momenta.at(jumps))  # [B, H, n, O, I]
        steps = at.eta[:, :, jumps, None, None] * at.moves[:, :, jumps, :, None] * steps
    memories = [memory] if front else []
    since, pull = 0, memory if start is None else start
    for n, t in enumerate(jumps):
        assert steps is not None
        log_alpha = at.log_alpha[..., since : t + 1].sum(-1)[..., None, None]
        memory = spec.retention.keep(memory, log_alpha, pull) - steps[:, :, n]
        settled = spec.retention.settle(memory, pull)
        memory = torch.where(stretch.valid[:, t, None, None, None], settled, memory)
        memories.append(memory)
        since = t + 1
    return Jumps(
        memories=torch.stack(memories, dim=2),
        start=start if "log_alpha" in spec.gates else None,
        fade=_fade(at.log_alpha, jumps),
        period=period,
        front=front,
    )


def _fade(log_alpha: Tensor, jumps: list[int]) -> Tensor:
    """The product of alpha since the last jump, [B, H, T]; one at the jump itself."""
    ends = [0, *jumps, log_alpha.shape[-1]]
    pieces = []
    for n, (start, stop) in enumerate(itertools.pairwise(ends)):
        piece = log_alpha[..., start:stop]
        if n > 0:  # the jump's own token already counts in its memory
            piece = torch.cat([torch.zeros_like(piece[..., :1]), piece[..., 1:]], dim=-1)
        pieces.append(piece.cumsum(-1))
    return torch.cat(pieces, dim=-1).exp()
