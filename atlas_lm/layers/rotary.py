"""Rotary position embedding that stays exact at positions of many millions."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Turn each pair of dimensions (i, i + D/2) by the angle position * base^(-2i/D).

    x: [B, T, H, D], position: [B or 1, T] int64. Angles are formed in fp64: in fp32 a position of
    ten million leaves an error of half a radian.
    """
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angle = position.to(torch.float64).unsqueeze(-1) * base**-steps  # [B, T, D/2]
    cos, sin = (f(angle).to(x.dtype).unsqueeze(2) for f in (torch.cos, torch.sin))
    a, b = x.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
