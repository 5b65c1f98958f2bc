"""The convolution as a sum of shifted columns."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

EPS = 1e-6  # the length below which a head is no longer brought to unit length


def short_conv_parallel(
    parts: Sequence[Tensor],
    weight: Tensor,
    tail: Tensor | None,
    count: Tensor | None,
    units: Sequence[int | None],
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `short_conv` documents, on any device and dtype, with all derivatives."""
    x, size = torch.cat(list(parts), dim=-1), weight.shape[0]
    batch, tokens, channels = x.shape
    before = x.new_zeros(batch, size - 1, channels) if tail is None else tail
    columns = torch.cat([before, x], dim=1)
    after = _last(columns, size - 1, count)
    y = columns[:, :tokens] * weight[0]
    for j in range(1, size):
        y = y + columns[:, j : j + tokens] * weight[j]
    made = silu(y).to(x.dtype).split([part.shape[2] for part in parts], dim=-1)
    found = (_at_unit_length(part, unit) for part, unit in zip(made, units, strict=True))
    return tuple(found), after


def _at_unit_length(x: Tensor, unit: int | None) -> Tensor:
    if unit is None:
        return x
    return normalize(x.unflatten(-1, (-1, unit)), dim=-1, eps=EPS).flatten(-2)


def _last(columns: Tensor, keep: int, count: Tensor | None) -> Tensor:
    """The last `keep` columns that count. columns: [B, keep + T, C]"""
    if count is None:
        return columns[:, columns.shape[1] - keep :]
    index = count.unsqueeze(1) + torch.arange(keep, device=columns.device)  # [B, keep]
    return columns.gather(1, index.unsqueeze(-1).expand(-1, -1, columns.shape[2]))
