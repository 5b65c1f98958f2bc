"""Host side of the fused form: the walk, then all chunks at once; backwards the same."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES
from atlas_lm.ops.chunk_walk.fused import Walk, WalkedBack
from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights
from atlas_lm.ops.linear_memory.kernels import (
    forward_kernel,
    halo_kernel,
    reads_backward_kernel,
    writes_backward_kernel,
)
from atlas_lm.ops.linear_memory.record import LinearState, Problem
from atlas_lm.ops.sequences import Sequences
from atlas_lm.ops.tiles import Tile, pick

# Measured with 128 features; those for wide features (more than 128) and fp32 were chosen by registers and
# spills, and seen right.
TILES = {
    "forward_kernel": Tile(64, 4, 2),
    "forward_kernel wide": Tile(64, 8, 1),
    "forward_kernel fp32": Tile(32, 16, 1),
    "writes_backward_kernel": Tile(64, 4, 2),
    "writes_backward_kernel momentum": Tile(32, 4, 2),
    "writes_backward_kernel wide": Tile(64, 8, 1),
    "writes_backward_kernel fp32": Tile(32, 16, 1),
    "reads_backward_kernel": Tile(64, 4, 2),
    "reads_backward_kernel wide": Tile(64, 8, 1),
    "reads_backward_kernel fp32": Tile(32, 16, 1),
}


def linear_memory_fused(problem: Problem) -> tuple[Tensor, LinearState]:
    """`linear_memory` by Triton kernels."""
    p, s = problem, problem.sequences
    halo = 0 if p.window == 1 else max(16, triton.next_power_of_2(p.window - 1))
    with torch.cuda.device_of(p.q):  # kernels run on the current device
        weights = chunk_weights(p.eta, p.log_alpha, p.theta, p.gamma, s, halo=halo)
        y, *state = _LinearMemory.apply(
            p.q.contiguous(), p.k.contiguous(), p.v.contiguous(), *weights, p.memory, p.momentum,
            s, halo, p.objective == "l2", p.keep == "states",
        )  # fmt: skip
    if not s.full:  # a row without tokens passes no border
        idle = (s.length == 0)[:, None, None, None]
        state[1] = torch.where(idle, p.memory, state[1])
    return y, LinearState(*state, *[None] * (3 - len(state)))


class _LinearMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        weights, (memory, momentum) = ChunkWeights(*rest[:5]), rest[5:7]
        sequences, halo, feedback, keep_borders = rest[7:]
        walk = _walk(k, v, weights, sequences, halo, feedback)
        walked = walk.forward(memory, momentum)
        make = torch.empty if sequences.full else torch.zeros
        y = make(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        queries = torch.empty_like(q)
        _launch(
            forward_kernel, walk, q, v,
            (q, k, v, weights.mix, weights.keep, weights.push, walked.borders, walked.momentum_borders,
             y, queries),
        )  # fmt: skip
        borders = [walked.borders, walked.momentum_borders] if keep_borders else [None, None]
        ctx.save_for_backward(
            q, k, v, *weights, queries, *borders, *walked.starts, walked.transition
        )
        ctx.rest = (sequences, halo, feedback)
        ctx.set_materialize_grads(False)
        state = (walked.memory, walked.anchor)
        return (y, *state) if momentum is None else (y, *state, walked.momentum)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> tuple[Any, ...]:
        q, k, v, *saved = ctx.saved_tensors
        weights, queries = ChunkWeights(*saved[:5]), saved[5]
        borders, starts, transition = saved[6:8], saved[8:10], saved[10]
        walk = _walk(k, v, weights, *ctx.rest)
        if borders[0] is None:
            borders = walk.again(starts)
        dy = torch.zeros_like(v[: q.shape[0]]) if dy is None else dy.contiguous()
        dmemory, danchor, *dmomentum = dstate
        dends = _filled([dmemory, *dmomentum])
        danchor = None if danchor is None else danchor.contiguous()
        back = walk.backward(transition, queries, q, dy, dends, danchor, borders)
        dq, dk, dv, dweights = _chunks_backward(walk, q, k, v, weights, borders, back, dy)
        return dq, dk, dv, *dweights, *back.starts, *[None] * 4


def _chunks_backward(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: ChunkWeights,
    borders: Any,
    back: WalkedBack,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    s, edge = walk.sequences, walk.halo
    covered = s.full and k.shape[0] == q.shape[0]
    dq = torch.empty_like(q) if s.full else torch.zeros_like(q)
    dk, dv = (torch.empty_like(x) if covered else torch.zeros_like(x) for x in (k, v))
    halos = [x.new_empty(s.chunks, x.shape[1], edge, x.shape[2]) for x in (k, v)]
    dmix, dkeep, dpush, dtail_mix = (
        None if w is None else torch.empty_like(w) for w in weights[:4]
    )
    dend = torch.empty_like(weights.mix[:, :, 0])
    _launch(
        writes_backward_kernel, walk, q, v,
        (k, v, weights.mix, weights.tail_mix, borders[0], *back.borders, dk, dv, *halos, dend, dtail_mix),
    )  # fmt: skip
    _launch(
        reads_backward_kernel, walk, q, v,
        (q, k, v, weights.mix, weights.keep, weights.push, *borders, dy, dend, back.keep, back.push,
         dq, dk, dv, *halos, dmix, dkeep, dpush),
    )  # fmt: skip
    if edge:
        for grad, halo in ((dk, halos[0]), (dv, halos[1])):
            halo_kernel[(s.chunks, q.shape[1])](
                grad, halo, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
                H=q.shape[1], WIDTH=grad.shape[2], BLOCK=triton.next_power_of_2(grad.shape[2]),
                CHUNK=s.chunk, EDGE=edge,
            )  # fmt: skip
    return dq, dk, dv, [dmix, dkeep, dpush, dtail_mix, back.tail_keep]


def _walk(
    k: Tensor, v: Tensor, weights: ChunkWeights, sequences: Sequences, halo: int, feedback: bool
) -> Walk:
    return Walk(sequences, k, v, weights.keep, halo, weights=weights, feedback=feedback)


def _launch(kernel: Any, walk: Walk, q: Tensor, v: Tensor, tensors: tuple[Any, ...]) -> None:
    s, (_, h, f) = walk.sequences, q.shape
    half = q.dtype in HALVES
    traits = dict(momentum=walk.has_momentum, wide=f > 128, fp32=not half)
    kernel[(s.chunks, h)](
        *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
        H=h, F=f, V=v.shape[-1], BF=max(16, triton.next_power_of_2(f)), CHUNK=s.chunk, HALO=walk.halo,
        FEEDBACK=walk.feedback, MOMENTUM=walk.has_momentum, PRECISION="tf32" if half else "ieee",
        **pick(TILES, kernel.__name__, traits).options(v.shape[-1]),
    )  # fmt: skip


def _filled(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of memory and momentum: both, contiguous, or none."""
    known = [g for g in grads if g is not None]
    if not known:
        return [None, None]
    whole = [torch.zeros_like(known[0]) if g is None else g.contiguous() for g in grads]
    return [*whole, None][:2]
