"""The causal short convolution: every channel mixes its own last few tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atlas_lm.ops.short_conv import short_conv


class ShortConv(nn.Module):
    """silu(sum_j w_j x_{t-size+1+j}), per channel, zeros before the stream."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, channels))

    def start(self, batch: int, like: Tensor) -> Tensor:
        size, channels = self.weight.shape
        return like.new_zeros(batch, size - 1, channels)

    def forward(
        self,
        parts: Sequence[Tensor],
        tail: Tensor | None,
        count: Tensor | None = None,
        units: Sequence[int | None] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """parts: each [B, T, C_i], together the first C of the channels; tail: [B, size-1, C] or None at
        the start of a stream; units: of each part, the size of heads that leave at unit length.
        Returns the parts [B, T, C_i] and the next tail."""
        channels = sum(part.shape[2] for part in parts)
        return short_conv(parts, self.weight[:, :channels], tail, count, units=units)
