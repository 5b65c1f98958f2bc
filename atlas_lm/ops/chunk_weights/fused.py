"""Host side of the coefficients of a chunk: one program per chunk and head."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.chunk_weights.kernels import weights_backward_kernel, weights_forward_kernel
from atlas_lm.ops.chunk_weights.record import ChunkWeights
from atlas_lm.ops.sequences import Sequences


class _ChunkWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eta: Tensor,
        retain: Tensor | None,
        theta: Tensor | None,
        gamma: Tensor | None,
        sequences: Sequences,
        halo: int,
    ) -> tuple[Tensor, ...]:
        gates = [None if g is None else g.contiguous() for g in (eta, retain, theta, gamma)]
        shape = (sequences.chunks, eta.shape[1], sequences.chunk)
        mix = eta.new_empty(*shape, halo + sequences.chunk)
        keep = eta.new_empty(shape)
        momentum: list[Tensor | None] = [None] * 3
        if theta is not None:
            momentum = [eta.new_empty(shape), eta.new_empty(shape), torch.empty_like(mix)]
        made = (mix, keep, *momentum)
        _launch(weights_forward_kernel, gates, made, (), sequences, halo)
        ctx.sequences, ctx.halo = sequences, halo
        ctx.save_for_backward(*gates, *made)
        if theta is None:
            return mix, keep
        push, carry, momentum_mix = (x for x in momentum if x is not None)
        return mix, keep, push, momentum_mix[:, :, -1].clone(), carry[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gates, made = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        given = [g.contiguous() for g in grads] + [None] * (5 - len(grads))
        fill = (
            torch.empty_like if ctx.sequences.full else torch.zeros_like
        )  # a row that is no token: zero
        found = [None if g is None else fill(g) for g in gates]
        _launch(weights_backward_kernel, gates, made, (*given, *found), ctx.sequences, ctx.halo)
        return (*found, None, None)


def chunk_weights_fused(
    eta: Tensor,
    log_alpha: Tensor | None,
    theta: Tensor | None,
    gamma: Tensor | None,
    sequences: Sequences,
    halo: int,
    retain: Tensor | None = None,
) -> ChunkWeights:
    # torch's exp: the kernels' own is off by some 1e-7, which grows over the tokens of a chunk
    if log_alpha is not None:
        retain = log_alpha.exp()
    made = _ChunkWeights.apply(eta, retain, theta, gamma, sequences, halo)
    return ChunkWeights(*made, *[None] * (5 - len(made)))


def _launch(kernel: Any, gates: Any, made: Any, more: Any, sequences: Sequences, halo: int) -> None:
    _, retain, theta, gamma = gates
    kernel[(sequences.chunks, made[0].shape[1])](
        *gates,
        *made,
        *more,
        sequences.start,
        sequences.length,
        sequences.past,
        sequences.first_chunk,
        sequences.sequence,
        H=made[0].shape[1],
        CHUNK=sequences.chunk,
        HALO=halo,
        C=1 if gamma is None else gamma.shape[-1],
        WIDTH=triton.next_power_of_2(halo + sequences.chunk),
        DECAYS=retain is not None,
        MOMENTUM=theta is not None,
        GATED=gamma is not None,
        num_warps=1,
    )
