"""The end of a stream that the next tokens still need: of a convolution, of attention.

In a batch with padding the tokens that count stand first in each row, `count` of them; None: all do.
"""

import torch
from torch import Tensor


def extend(tail: Tensor, x: Tensor, count: Tensor | None, keep: int) -> tuple[Tensor, Tensor]:
    """The columns [tail, x], and the last `keep` of them that count.

    tail: [B, n, ...], its last column the newest.  x: [B, T, ...].  count: [B] int64.
    Returns columns [B, n + T, ...] and the next tail [B, keep, ...].
    """
    columns = torch.cat([tail, x], dim=1)
    if keep == 0:
        return columns, columns[:, :0]
    if count is None:
        return columns, columns[:, columns.shape[1] - keep :]
    end = tail.shape[1] + count.unsqueeze(1)  # [B, 1]
    # a tail that grows with the longest row has slots from before the others began: anything may stand there
    index = (end - keep + torch.arange(keep, device=x.device)).clamp_min(0)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return columns, columns.gather(1, index)


def advance(position: Tensor, tokens: int, count: Tensor | None) -> Tensor:
    """Where each row stands after these tokens. position: [B] int64"""
    return position + (tokens if count is None else count)


def counted(count: Tensor | None, tokens: int) -> Tensor | None:
    """`count` as a mask [B, T], True for tokens that count."""
    if count is None:
        return None
    return torch.arange(tokens, device=count.device) < count.unsqueeze(1)
