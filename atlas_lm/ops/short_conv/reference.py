"""The convolution typed out, token by token and row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor


def short_conv_reference(
    parts: Sequence[Tensor],
    weight: Tensor,
    tail: Tensor | None,
    count: Tensor | None,
    units: Sequence[int | None],
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `short_conv` documents."""
    x, size = torch.cat(list(parts), dim=2), len(weight)
    batch, tokens, channels = x.shape
    before = x.new_zeros(batch, size - 1, channels) if tail is None else tail
    columns = torch.cat([before, x], dim=1)
    mixed = [(columns[:, t : t + size] * weight).sum(1) for t in range(tokens)]
    z = torch.stack(mixed, dim=1)
    y = z / (1 + (-z).exp())
    ends = [tokens] * batch if count is None else count.tolist()
    after = torch.stack([columns[row, end : end + size - 1] for row, end in enumerate(ends)])
    made = []
    for part, unit in zip(y.split([p.shape[2] for p in parts], dim=2), units, strict=True):
        if unit is not None:
            heads = part.unflatten(-1, (-1, unit))
            lengths = heads.square().sum(-1, keepdim=True)
            lengths = torch.where(lengths > 0, lengths, 1.0).sqrt()
            part = (heads / lengths).flatten(-2)
        made.append(part.to(x.dtype))
    return tuple(made), after
