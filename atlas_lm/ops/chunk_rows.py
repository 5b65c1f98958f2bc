"""Rows of flat tensors by chunk, and back, in plain PyTorch: kernels find their way themselves."""

import torch
from torch import Tensor

from atlas_lm.ops.sequences import Sequences


def gather_rows(x: Tensor, start: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Rows start + index of x [rows, H, W], zero where not there: [NC, H, n, W]"""
    found = x[torch.where(there, start.unsqueeze(1) + index, 0)]
    return torch.where(there[..., None, None], found, 0.0).transpose(1, 2)


def scatter_rows(
    reads: Tensor, chunk: Tensor, tokens: Tensor, sequences: Sequences, rows: int
) -> Tensor:
    """reads: [chunks, H, b, V], in the order of `chunk` -> [rows, H, V], zero at rows without token"""
    sequence, index = sequences.sequence[chunk], tokens[chunk]
    there = index < sequences.length[sequence, None]
    place = (sequences.start[sequence].unsqueeze(1) + index)[there]
    y = reads.new_zeros(rows, reads.shape[1], reads.shape[-1])
    return y.index_copy(0, place, reads.transpose(1, 2)[there])
