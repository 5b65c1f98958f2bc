"""The causal short convolution: every channel mixes its own last few tokens."""

import torch
from torch import Tensor, nn

from atlas_lm.layers.tail import extend


class ShortConv(nn.Module):
    """y_t = sum_j w_j x_{t-size+1+j}, per channel, zeros before the stream."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, channels))

    def start(self, batch: int, like: Tensor) -> Tensor:
        size, channels = self.weight.shape
        return like.new_zeros(batch, size - 1, channels)

    def forward(
        self, x: Tensor, tail: Tensor | None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, C], tail: [B, size-1, C] or None at the start of a stream."""
        return short_conv(x, self.weight, tail, count)


def short_conv(
    x: Tensor, weight: Tensor, tail: Tensor | None, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The convolution as a function, weight [size, C]; returns y [B, T, C] and the next tail."""
    size, tokens = weight.shape[0], x.shape[1]
    tail = x.new_zeros(x.shape[0], size - 1, x.shape[2]) if tail is None else tail
    columns, tail = extend(tail, x, count, keep=size - 1)
    y = columns[:, :tokens] * weight[0]
    for j in range(1, size):
        y = y + columns[:, j : j + tokens] * weight[j]
    return y, tail
