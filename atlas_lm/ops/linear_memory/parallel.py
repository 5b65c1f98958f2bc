"""Plain PyTorch, a chunk of all sequences at a time, products in the dtype of the inputs."""

import torch
from torch import Tensor

from atlas_lm.ops.chunk_rows import gather_rows, scatter_rows
from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights_reference
from atlas_lm.ops.linear_memory.record import LinearState, Problem


def linear_memory_parallel(problem: Problem) -> tuple[Tensor, LinearState]:
    """`linear_memory` without kernels; states and weights in the precision of the gates (fp32, fp64)."""
    p, s = problem, problem.sequences
    halo = p.window - 1
    weights = chunk_weights_reference(p.eta, p.log_alpha, p.theta, p.gamma, s, halo=halo)
    number = torch.arange(s.chunks, device=p.q.device)
    t0 = (number - s.first_chunk[s.sequence]) * s.chunk
    tokens = t0.unsqueeze(1) + torch.arange(s.chunk, device=p.q.device)
    pairs = t0.unsqueeze(1) + torch.arange(-halo, s.chunk, device=p.q.device)
    q = gather_rows(
        p.q, s.start[s.sequence], tokens, (tokens >= 0) & (tokens < s.length[s.sequence, None])
    )
    there = (pairs >= -s.past[s.sequence, None]) & (pairs < s.length[s.sequence, None])
    k = gather_rows(p.k, s.pair_start[s.sequence], pairs, there)
    v = gather_rows(p.v, s.pair_start[s.sequence], pairs, there)

    state = LinearState(p.memory, p.memory, p.momentum)
    reads: list[Tensor] = []
    order: list[Tensor] = []
    for step in range(s.most):
        chunk = s.first_chunk[:-1] + step
        active = (chunk < s.first_chunk[1:]) & (step * s.chunk < s.length)
        here = torch.where(active, chunk, s.first_chunk[:-1]).long()
        at = [None if w is None else w[here] for w in weights]
        y, after = _chunk(p, state, q[here], k[here], v[here], ChunkWeights(*at))  # type: ignore[arg-type]
        rows = active[:, None, None, None]
        moved = [
            None if new is None or old is None else torch.where(rows, new, old)
            for new, old in zip(after, state, strict=True)
        ]
        state = LinearState(*moved)  # type: ignore[arg-type]
        reads.append(y[active])
        order.append(here[active])
    return scatter_rows(torch.cat(reads), torch.cat(order), tokens, s, p.q.shape[0]), state


def _chunk(
    p: Problem, state: LinearState, q: Tensor, k: Tensor, v: Tensor, w: ChunkWeights
) -> tuple[Tensor, LinearState]:
    """One chunk of every sequence. q: [N, H, b, F]   k: [N, H, halo + b, F]   v: [N, H, halo + b, V]"""
    memory = state.memory.to(q.dtype)
    error = -v if p.objective == "dot" else k @ memory.mT - v
    scores = (q @ k.mT) * w.mix
    y = w.keep.unsqueeze(-1) * (q @ memory.mT) - scores.to(q.dtype) @ error
    new = w.keep[:, :, -1, None, None] * state.memory - _outer(error, w.mix[:, :, -1], k)
    if w.push is None or w.tail_mix is None or w.tail_keep is None:
        return y.to(p.q.dtype), LinearState(new, state.memory, None)
    assert state.momentum is not None
    y = y + w.push.unsqueeze(-1) * (q @ state.momentum.to(q.dtype).mT)
    new = new + w.push[:, :, -1, None, None] * state.momentum
    momentum = w.tail_keep[..., None, None] * state.momentum - _outer(error, w.tail_mix, k)
    return y.to(p.q.dtype), LinearState(new, state.memory, momentum)


def _outer(error: Tensor, weight: Tensor, k: Tensor) -> Tensor:
    """sum_n weight_n error_n k_n^T, [N, H, V, F]"""
    return ((error * weight.unsqueeze(-1)).to(k.dtype).mT @ k).to(weight.dtype)
