"""The exact online Omega rule in parallel, for matrix memories and any window.

Every token takes its slopes at the memory just before it, so the errors depend on each other, but
linearly: they solve one unit-lower-triangular system per tile (docs/mathematics.md, section 2).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from atlas_lm.memory.basis import DENSE, MOMENTUM
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import initial_memory
from atlas_lm.memory.stretch import Fast, Passage, Stretch
from atlas_lm.memory.trajectory import Trajectory, pad, points, unroll
from atlas_lm.ops.triangular_solve import triangular_solve

WEIGHT = "w0"  # the one fast weight of a matrix memory


def tile_size(spec: MemorySpec) -> int:
    """Tokens per tile, so that a tile has about 128 unknown errors. Never changes results."""
    return max(1, 128 // spec.window.size)


def online(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    memory: Fast,
    anchor: Fast,
    momentum: Fast,
    stretch: Stretch,
    trace: bool,
) -> Passage:
    """Solve the errors e_{t,j} = M_{t-1} phi_{t-j} - v_{t-j} of a tile, then read it like any chunk.

    Takes what `anchored` takes; an online rule has no anchor, so it is not read.
    """
    rows = pair_rows(spec.window.size, stretch.valid.shape[1], stretch.x.device)
    x, v = stretch.x[:, :, rows], stretch.pairs["v"][:, :, rows]  # [B, H, T*c, .]
    writes, at = row_writes(spec, stretch), stretch.pace(spec)
    of_memory, of_momentum = unroll(spec, writes, at)
    start = initial_memory(spec, weights)[WEIGHT] if spec.retention.reads_start else None
    bases = (memory[WEIGHT], momentum.get(WEIGHT), start)
    point = points(spec, of_memory, at).repeat_interleave(spec.window.size, dim=2)
    known = -v
    for r, base in enumerate(bases):
        if base is not None:
            known = known + point[..., r, None] * (x @ base.mT)
    error = triangular_solve(point[..., DENSE:] * (x @ x.mT), known)

    path = Trajectory(bases, of_memory, error, x)
    momenta = Trajectory((None, bases[MOMENTUM], None), of_momentum, error, x)
    seen = {}
    if trace:
        gradients = Trajectory((None, None, None), pad(writes), error, x)
        seen = {"surprise": gradients.norms(), "memory_norm": path.norms()}
        seen |= {"momentum_norm": momenta.norms()} if momentum else {}
    return Passage(
        y=path(stretch.q),
        memory={WEIGHT: path.end()},
        momentum={WEIGHT: momenta.end()} if momentum else {},
        norms=seen,
    )


def pair_rows(size: int, tokens: int, device: torch.device) -> Tensor:
    """The pair of each row (t, i) of a tile's system, [tokens * size]: windows laid end to end."""
    t = torch.arange(tokens, device=device).unsqueeze(1)
    return (t + torch.arange(size, device=device)).flatten()


def row_writes(spec: MemorySpec, stretch: Stretch) -> Tensor:
    """Weight of row (s, i) in the gradient of token t: gamma for s = t, else 0. [B, H, T, T*c]"""
    tokens, size = stretch.valid.shape[1], spec.window.size
    rows = pair_rows(size, tokens, stretch.x.device).reshape(1, 1, tokens, size)
    matrix = stretch.writes(spec)
    gamma = matrix.gather(-1, rows.expand(*matrix.shape[:2], -1, -1))  # [B, H, T, c], oldest first
    own = torch.eye(tokens, dtype=gamma.dtype, device=gamma.device)
    return (own.unsqueeze(-1) * gamma.unsqueeze(3)).flatten(3)
