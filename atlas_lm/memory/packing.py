"""Sequences packed end to end in one row, and the same sequences one per row.

In rows every sequence is as long as the longest, so lengths that differ much cost accordingly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.ops.sequences import read_borders


@dataclass(frozen=True)
class Packing:
    source: Tensor  # [N, L] where each token of each sequence stands in the packed row
    valid: Tensor  # [N, L] bool, L the longest length
    home: tuple[Tensor, Tensor]  # [T] sequence and place of each packed token

    def spread(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [N, L, ...]; what stands behind a sequence's end is not valid."""
        return x[0][self.source]

    def join(self, x: Tensor) -> Tensor:
        """[N, L, ...] -> [1, T, ...]"""
        return x[self.home].unsqueeze(0)


def pack(cu_seqlens: Tensor, batch: int, tokens: int) -> Packing:
    """Read the borders [N+1] = 0, end of the first sequence, ..., tokens."""
    if batch != 1:
        raise ValueError(f"with cu_seqlens the batch is {batch}, wanted 1; pack all rows into one")
    read_borders(cu_seqlens, tokens)
    borders = cu_seqlens.to(torch.int64)
    lengths = borders.diff()
    place = torch.arange(int(lengths.max()), device=borders.device)
    valid = place < lengths.unsqueeze(1)
    source = torch.where(valid, borders[:-1].unsqueeze(1) + place, 0)
    row = torch.arange(len(lengths), device=borders.device).repeat_interleave(lengths)
    column = torch.arange(tokens, device=borders.device) - borders[:-1][row]
    return Packing(source, valid, (row, column))
