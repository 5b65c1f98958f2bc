"""Plain PyTorch, a chunk of all sequences at a time, products in the dtype of the inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from atlas_lm.ops.chunk_rows import gather_rows, scatter_rows
from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights_reference
from atlas_lm.ops.mlp_memory.plain import ACTIVATIONS, normed, orthogonal, standardised
from atlas_lm.ops.mlp_memory.record import MLPState, Muon, Norm, Problem, Weights

Pairs = dict[str, tuple[Tensor, Tensor]]  # of each weight the factors of all slopes: left right^T


def mlp_memory_parallel(problem: Problem) -> tuple[Tensor, MLPState]:
    """`mlp_memory` without kernels; states and weights in the precision of the gates (fp32, fp64)."""
    p, s = problem, problem.sequences
    halo = p.window - 1
    if p.muon is None:
        weights = chunk_weights_reference(p.eta, p.log_alpha, p.theta, p.gamma, s, halo=halo)
    else:  # of the momentum: S_t = keep_t S + sum_n mix[t, n] slope_n
        one = torch.ones_like(p.eta)
        weights = chunk_weights_reference(one, None, None, p.gamma, s, halo=halo, retain=p.theta)
    number = torch.arange(s.chunks, device=p.q.device)
    t0 = (number - s.first_chunk[s.sequence]) * s.chunk
    tokens = t0.unsqueeze(1) + torch.arange(s.chunk, device=p.q.device)
    pairs = t0.unsqueeze(1) + torch.arange(-halo, s.chunk, device=p.q.device)
    valid = tokens < s.length[s.sequence, None]
    there = (pairs >= -s.past[s.sequence, None]) & (pairs < s.length[s.sequence, None])
    q = gather_rows(p.q, s.start[s.sequence], tokens, valid)
    k = gather_rows(p.k, s.pair_start[s.sequence], pairs, there)
    v = gather_rows(p.v, s.pair_start[s.sequence], pairs, there)
    gates = {
        n: gather_rows(g.unsqueeze(-1), s.start[s.sequence], tokens, valid).squeeze(-1)
        for n, g in (("eta", p.eta), ("log_alpha", p.log_alpha))
        if g is not None
    }

    state = MLPState(p.memory, p.memory, p.momentum)
    reads: list[Tensor] = []
    order: list[Tensor] = []
    for step in range(s.most):
        chunk = s.first_chunk[:-1] + step
        active = (chunk < s.first_chunk[1:]) & (step * s.chunk < s.length)
        here = torch.where(active, chunk, s.first_chunk[:-1]).long()
        at = ChunkWeights(*(None if w is None else w[here] for w in weights))  # type: ignore[arg-type]
        given = (q[here], k[here], v[here], there[here, None, :, None])
        if p.muon is None:
            y, after = _chunk(p, state, *given, at)
        else:
            y, after = _jumps(
                p, p.muon, state, *given, at, {n: g[here] for n, g in gates.items()}, valid[here]
            )
        rows = active[:, None, None, None]
        state = _moved(rows, after, state)
        reads.append(y[active])
        order.append(here[active])
    return scatter_rows(torch.cat(reads), torch.cat(order), tokens, s, p.q.shape[0]), state


def _moved(rows: Tensor, after: MLPState, before: MLPState) -> MLPState:
    """Where a row took part, what came after; else what was before."""

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows, new, old)

    momentum = before.momentum
    if momentum is not None and after.momentum is not None:
        momentum = after.momentum.map(chosen, momentum)
    return MLPState(
        after.memory.map(chosen, before.memory), after.anchor.map(chosen, before.anchor), momentum
    )


def _chunk(
    p: Problem,
    state: MLPState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    there: Tensor,
    w: ChunkWeights,
) -> tuple[Tensor, MLPState]:
    """Descent or momentum. q: [N, H, b, F]   k: [N, H, halo + b, F]   v: [N, H, halo + b, V]"""
    memory, momentum = state.memory, state.momentum
    slopes = _slopes(p, memory, k, v, there)
    narrow, push = memory.map(lambda m: m.to(q.dtype)), w.push

    def moving(name: str, x: Tensor) -> Tensor:
        left, right = slopes[name]
        score = ((x @ right.mT) * w.mix).to(x.dtype)
        read = w.keep.unsqueeze(-1) * (x @ getattr(narrow, name).mT) - score @ left
        if push is not None and momentum is not None:
            read = read + push.unsqueeze(-1) * (x @ getattr(momentum, name).to(x.dtype).mT)
        if p.start is not None:
            start = getattr(p.start, name).to(x.dtype)
            read = read + (1 - w.keep).unsqueeze(-1) * (x @ start.mT)
        return read.to(x.dtype)

    y = _predict(p, moving, q)
    new = _kept(p, memory, w.keep[:, :, -1]).map(
        lambda m, d: m - d, _outer(slopes, w.mix[:, :, -1], memory)
    )
    if push is None or w.tail_mix is None or w.tail_keep is None or momentum is None:
        return y, MLPState(new, memory, None)
    last, carry = push[:, :, -1, None, None], w.tail_keep[..., None, None]
    new = new.map(lambda m, s: m + last * s, momentum)
    pushed = _outer(slopes, w.tail_mix, memory)
    return y, MLPState(new, memory, momentum.map(lambda s, d: carry * s - d, pushed))


def _jumps(
    p: Problem,
    muon: Muon,
    state: MLPState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    there: Tensor,
    w: ChunkWeights,
    gates: dict[str, Tensor],
    valid: Tensor,
) -> tuple[Tensor, MLPState]:
    """Muon: Newton-Schulz moves the memory at the last token of each period; between, it only fades."""
    memory, momentum = state.memory, state.momentum
    assert momentum is not None
    slopes = _slopes(p, memory, k, v, there)
    log_alpha = gates.get("log_alpha", torch.zeros_like(gates["eta"]))
    reads = []
    now = memory
    for first in range(0, q.shape[2], muon.period):
        last = first + muon.period - 1
        fade = log_alpha[:, :, first : last + 1].cumsum(-1).exp()
        reads.append(_faded(p, now, q[:, :, first:last], fade[:, :, :-1]))
        moved = _at(momentum, slopes, w, last)
        eta = (gates["eta"][:, :, last] * valid[:, last, None])[..., None, None]
        now = _kept(p, now, fade[:, :, -1]).map(
            lambda m, s, eta=eta: m - eta * orthogonal(muon, s.to(q.dtype)).to(m.dtype), moved
        )
        reads.append(_faded(p, now, q[:, :, last : last + 1], torch.ones_like(fade[:, :, :1])))
    y = torch.cat(reads, dim=2)
    return y, MLPState(now, memory, _at(momentum, slopes, w, -1))


def _at(momentum: Weights, slopes: Pairs, w: ChunkWeights, t: int) -> Weights:
    """The momentum after token t of the chunk."""
    keep = w.keep[:, :, t, None, None]
    return momentum.map(lambda s, d: keep * s + d, _outer(slopes, w.mix[:, :, t], momentum))


def _faded(p: Problem, memory: Weights, q: Tensor, fade: Tensor) -> Tensor:
    """Reads of a memory that has faded since. fade: [N, H, n]"""
    fade = fade.unsqueeze(-1)

    def moving(name: str, x: Tensor) -> Tensor:
        read = fade * (x @ getattr(memory, name).to(x.dtype).mT)
        if p.start is not None:
            read = read + (1 - fade) * (x @ getattr(p.start, name).to(x.dtype).mT)
        return read.to(x.dtype)

    return _predict(p, moving, q)


def _kept(p: Problem, memory: Weights, keep: Tensor) -> Weights:
    """keep: [N, H]"""
    keep = keep[..., None, None]
    if p.start is None:
        return memory.map(lambda m: keep * m)
    return memory.map(lambda m, z: keep * m + (1 - keep) * z, p.start)


def _predict(p: Problem, maps: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
    hidden = ACTIVATIONS[p.activation](maps("w0", x))
    if p.memory.gate is not None:
        hidden = hidden * maps("gate", x)
    read = maps("w1", hidden)
    if p.norm is not None:
        return normed(read.to(p.norm.scale), x, Norm(*(w.unsqueeze(1) for w in p.norm))).to(x.dtype)
    return read + x if p.skip else read


def _slopes(p: Problem, memory: Weights, k: Tensor, v: Tensor, there: Tensor) -> Pairs:
    """Of every pair at this memory; a pair that is not there (zero) has none."""
    narrow = memory.map(lambda m: m.to(k.dtype))
    a = k @ narrow.w0.mT
    s, ds = ACTIVATIONS[p.activation](a), _derivative(p.activation, a)
    g = None if narrow.gate is None else k @ narrow.gate.mT
    h = s if g is None else s * g
    error = torch.where(there, _error(p, narrow, h, k, v), 0.0)
    u = error @ narrow.w1
    if g is None:
        return {"w0": (u * ds, k), "w1": (error, h)}
    return {"w0": (u * ds * g, k), "w1": (error, h), "gate": (u * s, k)}


def _error(p: Problem, narrow: Weights, h: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slope that the last layer gets."""
    if p.norm is None:
        return -v if p.objective == "dot" else h @ narrow.w1.mT - v + (k if p.skip else 0)
    scale, bias = (w.unsqueeze(1) for w in p.norm)
    normal, inverse = standardised((h @ narrow.w1.mT).to(scale))
    error = -v if p.objective == "dot" else k - v + normal * scale + bias
    g = error * scale
    along = (g * normal).mean(-1, keepdim=True)
    return (inverse * (g - g.mean(-1, keepdim=True) - normal * along)).to(k.dtype)


def _derivative(activation: str, a: Tensor) -> Tensor:
    if activation == "silu":
        s = torch.sigmoid(a)
        return s * (1 + a * (1 - s))
    return (
        0.5 * (1 + torch.erf(a * 0.5**0.5))
        + a * torch.exp(-0.5 * a.square()) / (2 * torch.pi) ** 0.5
    )


def _outer(slopes: Pairs, weight: Tensor, like: Weights) -> Weights:
    """sum_n weight_n left_n right_n^T of each weight, [N, H, O, I]. weight: [N, H, pairs]"""

    def one(left: Tensor, right: Tensor, to: Tensor) -> Tensor:
        return ((left * weight.unsqueeze(-1)).to(right.dtype).mT @ right).to(to.dtype)

    return Weights(**{n: one(*slopes[n], getattr(like, n)) for n in slopes})
