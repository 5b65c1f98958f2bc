"""Token by token, slopes by autograd: the definition."""

import torch
from torch import Tensor

from atlas_lm.ops.mlp_memory.plain import ACTIVATIONS, EPS, orthogonal
from atlas_lm.ops.mlp_memory.record import MLPState, Muon, Problem, Weights


def mlp_memory_reference(problem: Problem) -> tuple[Tensor, MLPState]:
    """Each sequence by itself, each token in turn."""
    p, s = problem, problem.sequences
    y = torch.zeros(*p.q.shape[:2], p.v.shape[-1], dtype=p.q.dtype, device=p.q.device)
    ends = []
    for n in range(s.count):
        start, length = int(s.start[n]), int(s.length[n])
        reads, end = _one(p, n, start, length)
        if reads:
            place = torch.arange(start, start + length, device=y.device)
            y = y.index_copy(0, place, torch.stack(reads))
        ends.append(end)
    memory, anchor, momentum = zip(*ends, strict=True)
    return y, MLPState(
        _stack(memory), _stack(anchor), None if p.momentum is None else _stack(momentum)
    )


def predict(p: Problem, memory: Weights, x: Tensor) -> Tensor:
    """memory: [H, ...], x: [H, F] -> [H, V]"""
    hidden = ACTIVATIONS[p.activation](torch.einsum("hdf,hf->hd", memory.w0, x))
    if memory.gate is not None:
        hidden = hidden * torch.einsum("hdf,hf->hd", memory.gate, x)
    read = torch.einsum("hvd,hd->hv", memory.w1, hidden)
    if p.norm is not None:
        centred = read - read.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
        return x + normal * p.norm.scale + p.norm.bias
    return read + x if p.skip else read


def _one(p: Problem, n: int, start: int, length: int) -> tuple[list[Tensor], MLPState]:
    pair, past = int(p.sequences.pair_start[n]), int(p.sequences.past[n])
    memory = anchor = p.memory.map(lambda w: w[n])
    momentum = None if p.momentum is None else p.momentum.map(lambda w: w[n])
    zero = memory.map(torch.zeros_like)
    reads = []
    for t in range(length):
        if t % p.sequences.chunk == 0:
            anchor = memory
        eta, write = p.eta[start + t][:, None, None], zero
        for j in range(min(p.window, t + past + 1)):
            slope = _slope(p, anchor, p.k[pair + t - j].to(eta), p.v[pair + t - j].to(eta))
            gamma = 1.0 if p.gamma is None else p.gamma[start + t, :, j, None, None]
            write = write.map(lambda w, g, gamma=gamma: w + gamma * g, slope)
        if p.muon is None:
            step = write.map(lambda g, eta=eta: -eta * g)
        else:
            step = write
        if momentum is not None and p.theta is not None:
            theta = p.theta[start + t][:, None, None]
            momentum = step = momentum.map(lambda s, g, theta=theta: theta * s + g, step)
        if p.muon is not None:
            due = (t + 1) % p.muon.period == 0
            step = _jump(p.muon, step, eta) if due else zero
        alpha = 1.0 if p.log_alpha is None else p.log_alpha[start + t].exp()[:, None, None]
        toward = zero if p.start is None else p.start
        memory = memory.map(lambda m, z, g, alpha=alpha: z + alpha * (m - z) + g, toward, step)
        reads.append(predict(p, memory, p.q[start + t].to(eta)).to(p.q.dtype))
    return reads, MLPState(memory, anchor, momentum)


def _slope(p: Problem, anchor: Weights, k: Tensor, v: Tensor) -> Weights:
    """d/dW of the loss of one pair, by autograd, itself differentiable."""

    def loss(*weights: Tensor) -> Tensor:
        read = predict(p, Weights(*weights), k)
        return -(read * v).sum() if p.objective == "dot" else (read - v).square().sum() / 2

    slopes = torch.func.grad(loss, argnums=tuple(range(len(anchor.given))))(*anchor.given)
    return Weights(*slopes)


def _jump(muon: Muon, momentum: Weights, eta: Tensor) -> Weights:
    return momentum.map(lambda s: -eta * orthogonal(muon, s))


def _stack(found: tuple[Weights, ...]) -> Weights:
    return found[0].map(lambda *w: torch.stack(w), *found[1:])
