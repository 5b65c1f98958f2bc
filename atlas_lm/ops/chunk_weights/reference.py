"""The recurrence of a chunk's coefficients as a loop over its tokens, all chunks at once."""

import torch
from torch import Tensor

from atlas_lm.ops.chunk_weights.record import ChunkWeights
from atlas_lm.ops.sequences import Sequences


def chunk_weights_reference(
    eta: Tensor,
    log_alpha: Tensor | None,
    theta: Tensor | None,
    gamma: Tensor | None,
    sequences: Sequences,
    *,
    halo: int = 0,
    retain: Tensor | None = None,
) -> ChunkWeights:
    """Token by token: s = theta s + eta gamma, m = alpha m + s, each a row over the chunk's pairs."""
    if log_alpha is not None:
        retain = log_alpha.exp()
    b, count = sequences.chunk, sequences.sequence
    number = torch.arange(sequences.chunks, device=eta.device)
    t0 = (number - sequences.first_chunk[count]) * b  # [NC]
    columns = torch.arange(halo + b, device=eta.device)
    shape = (sequences.chunks, eta.shape[1])
    m = s = eta.new_zeros(*shape, halo + b)
    keep, push, carry = eta.new_ones(shape), eta.new_zeros(shape), eta.new_ones(shape)
    rows, keeps, pushes = [], [], []
    for t in range(b):
        valid = (t0 + t < sequences.length[count]).unsqueeze(1)  # [NC, 1]
        row = torch.where(valid[:, 0], sequences.start[count] + t0 + t, 0)
        alpha = torch.ones_like(keep)
        if retain is not None:
            alpha = torch.where(valid, retain[row], alpha)
        write = torch.where(valid, eta[row], 0.0).unsqueeze(-1) * _window(
            gamma, row, t, t0, sequences, columns - halo
        )
        if theta is None:
            step = write
        else:
            momentum = torch.where(valid, theta[row], 1.0)
            s, carry = momentum.unsqueeze(-1) * s + write, momentum * carry
            step = torch.where(valid.unsqueeze(-1), s, 0.0)
            push = alpha * push + torch.where(valid, carry, 0.0)
        m, keep = alpha.unsqueeze(-1) * m + step, alpha * keep
        rows.append(m)
        keeps.append(keep)
        pushes.append(push)
    mix, keep = torch.stack(rows, dim=2), torch.stack(keeps, dim=2)
    if theta is None:
        return ChunkWeights(mix, keep, None, None, None)
    return ChunkWeights(mix, keep, torch.stack(pushes, dim=2), s, carry)


def _window(
    gamma: Tensor | None, row: Tensor, t: int, t0: Tensor, sequences: Sequences, pair: Tensor
) -> Tensor:
    """gamma of each pair of the chunk as token t sees it, [NC, H or 1, halo + b]."""
    size = 1 if gamma is None else gamma.shape[-1]
    age = t - pair  # [halo + b]
    there = t0.unsqueeze(1) + pair >= -sequences.past[sequences.sequence].unsqueeze(1)
    inside = ((age >= 0) & (age < size) & there).unsqueeze(1)
    if gamma is None:
        return inside.float()
    return torch.where(inside, gamma[row][..., age.clamp(0, size - 1)], 0.0)
