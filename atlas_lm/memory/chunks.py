"""One chunk of a memory that takes its slopes at an anchor: descent, momentum and Muon."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.architectures import Maps, dense
from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import initial_memory
from atlas_lm.memory.trajectory import Pace, Trajectory, norms, pace, pad, unroll

Fast = dict[str, Tensor]


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
        halo = self.x.shape[2] - self.valid.shape[1]
        energy = self.x[:, :, halo:].square().sum(-1)
        return pace(spec, self.gates, energy, self.valid, self.offset)


@dataclass(frozen=True)
class Passage:
    """What comes out of a chunk."""

    y: Tensor  # [B, H, T, V]
    memory: Fast
    momentum: Fast
    norms: dict[str, Tensor]  # [B, H, T] each, when asked for


def anchored(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    memory: Fast,
    anchor: Fast,
    momentum: Fast,
    stretch: Stretch,
    trace: bool,
) -> Passage:
    """Slopes of all pairs, halo included, at the anchor; then the rule on their coefficients."""
    architecture = spec.network
    prediction, tape = architecture.predict(dense(anchor), stretch.x, weights)
    error = spec.objective.slope(prediction, stretch.pairs["v"], stretch.pairs)
    slopes = architecture.slopes(anchor, tape, error, weights)
    writes, at = stretch.writes(spec), stretch.pace(spec)
    of_memory, of_momentum = unroll(spec, writes, at)
    start = initial_memory(spec, weights) if spec.retention.reads_start else {}

    def along(coefficients: Tensor, *bases: Fast) -> dict[str, Trajectory]:
        return {
            n: Trajectory([base.get(n) for base in bases], coefficients, *slopes[n]) for n in memory
        }

    momenta = along(of_momentum, {}, momentum, {})
    if isinstance(spec.optimizer, Muon):
        maps: dict[str, Trajectory] | dict[str, Grouped] = {
            n: grouped(spec, momenta[n], memory[n], start.get(n), stretch, at) for n in memory
        }
    else:
        maps = along(of_memory, memory, momentum, start)
    y, _ = architecture.predict(_as_maps(maps), stretch.q, weights)
    seen = {}
    if trace:
        seen = {"surprise": norms(along(pad(writes), {}, {}, {})), "memory_norm": norms(maps)}  # type: ignore[arg-type]
        seen |= {"momentum_norm": norms(momenta)} if momentum else {}
    return Passage(
        y=y,
        memory={n: one.at(-1) for n, one in maps.items()},
        momentum={n: momenta[n].at(-1) for n in momentum},
        norms=seen,
    )


def _as_maps(maps: Mapping[str, "Trajectory | Grouped"]) -> Maps:
    return maps


@dataclass(frozen=True)
class Grouped:
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

    def at(self, t: int) -> Tensor:
        assert t == -1, "a grouped memory is dense at its end only"
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


def grouped(
    spec: MemorySpec,
    momenta: Trajectory,
    memory: Tensor,
    start: Tensor | None,
    stretch: Stretch,
    at: Pace,
) -> Grouped:
    """M_t = retain(M_{t-1}) - eta_t NS(S_t) at the end of each period, retention alone between."""
    assert isinstance(spec.optimizer, Muon)
    period, width = spec.timing.period, at.eta.shape[-1]
    jumps = [t for t in range(width) if (stretch.offset + t + 1) % period == 0]
    front = (stretch.offset + 1) % period
    steps = None
    if jumps:
        where = torch.tensor(jumps, device=memory.device)
        steps = spec.optimizer.orthogonalise(momenta.at(where))  # [B, H, n, O, I]
        steps = at.eta[..., where, None, None] * at.moves[:, :, where, :, None] * steps
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
    return Grouped(
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
