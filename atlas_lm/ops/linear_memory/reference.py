"""Token by token, from the equations: the definition."""

import torch
from torch import Tensor

from atlas_lm.ops.linear_memory.record import LinearState, Problem


def linear_memory_reference(problem: Problem) -> tuple[Tensor, LinearState]:
    """Each sequence by itself, each token in turn."""
    p, s = problem, problem.sequences
    y = torch.zeros(*p.q.shape[:2], p.v.shape[-1], dtype=p.q.dtype, device=p.q.device)
    ends = []
    for n in range(s.count):
        start, length = int(s.start[n]), int(s.length[n])
        reads, end = _one(p, n, start, length)
        if reads:
            y = y.index_copy(
                0, torch.arange(start, start + length, device=y.device), torch.stack(reads)
            )
        ends.append(end)
    memory, anchor, momentum = (
        None if column[0] is None else torch.stack(column) for column in zip(*ends, strict=True)
    )
    assert memory is not None and anchor is not None
    return y, LinearState(memory, anchor, momentum)


def _one(p: Problem, n: int, start: int, length: int) -> tuple[list[Tensor], LinearState]:
    pair, past = int(p.sequences.pair_start[n]), int(p.sequences.past[n])
    memory = anchor = p.memory[n]
    momentum = None if p.momentum is None else p.momentum[n]
    reads = []
    for t in range(length):
        if t % p.sequences.chunk == 0:
            anchor = memory
        step = torch.zeros_like(memory)
        for j in range(min(p.window, t + past + 1)):
            k, v = p.k[pair + t - j].to(memory), p.v[pair + t - j].to(memory)  # [H, .]
            error = -v if p.objective == "dot" else torch.einsum("hvf,hf->hv", anchor, k) - v
            weight = (
                p.eta[start + t] if p.gamma is None else p.eta[start + t] * p.gamma[start + t, :, j]
            )
            step = step - weight[:, None, None] * torch.einsum("hv,hf->hvf", error, k)
        if momentum is not None and p.theta is not None:
            momentum = p.theta[start + t][:, None, None] * momentum + step
            step = momentum
        alpha = 1.0 if p.log_alpha is None else p.log_alpha[start + t].exp()[:, None, None]
        memory = alpha * memory + step
        reads.append(torch.einsum("hvf,hf->hv", memory, p.q[start + t].to(memory)).to(p.q.dtype))
    return reads, LinearState(memory, anchor, momentum)
