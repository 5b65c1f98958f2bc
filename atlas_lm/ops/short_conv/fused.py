"""Host side of the convolution: one launch per part forward, two backward; nothing is laid side by side."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.short_conv.kernels import dx_kernel, dz_kernel, forward_kernel
from atlas_lm.ops.short_conv.parallel import EPS

LONGEST, WIDEST = 8, 4096  # taps, channels of a head
CHANNELS = 128  # of a program, where no head must lie in it
ELEMENTS, WARPS = 4096, 8  # of a program
REGISTERS = 128  # per thread, so that two programs share a multiprocessor where a tail wants more


def declines(weight: Tensor, units: Sequence[int | None]) -> str | None:
    """Why kernels do not take this; None: they do."""
    if len(weight) > LONGEST:
        return f"weight has {len(weight)} taps, kernels take at most {LONGEST}"
    widest = max(unit or 0 for unit in units)
    if widest > WIDEST:
        return f"heads of unit length have {widest} channels, kernels hold at most {WIDEST}"
    return None


def short_conv_fused(
    parts: Sequence[Tensor],
    weight: Tensor,
    tail: Tensor | None,
    count: Tensor | None,
    units: Sequence[int | None],
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `short_conv` documents; first derivatives only."""
    *made, after = _ShortConv.apply(weight, tail, count, tuple(units), *parts)
    return tuple(made), after


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        tail: Tensor | None,
        count: Tensor | None,
        units: tuple[int | None, ...],
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        weight = weight.contiguous()
        tail = None if tail is None else tail.contiguous()
        parts = tuple(part.contiguous() for part in parts)
        size, channels = weight.shape
        dtype = parts[0].dtype if tail is None else torch.promote_types(tail.dtype, parts[0].dtype)
        after = parts[0].new_empty(len(parts[0]), size - 1, channels, dtype=dtype)
        made = tuple(torch.empty_like(part) for part in parts)
        first = 0
        for x, y, unit in zip(parts, made, units, strict=True):
            tile = _tile(x, unit)
            forward_kernel[_grid(x, tile, x.shape[1])](
                x, weight, tail, count, y, after, *x.shape[1:], first, channels,
                SIZE=size, EPS=EPS, UNIT=unit is not None, **tile,
            )  # fmt: skip
            first += x.shape[2]
        ctx.units = units
        ctx.save_for_backward(weight, tail, count, *parts)
        return *made, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, tail, count, *parts = ctx.saved_tensors
        *dys, dafter = (grad.contiguous() for grad in grads)
        size, channels = weight.shape
        dtail = None if tail is None else torch.empty_like(tail)
        dxs, dweights, first = [], [], 0
        for x, dy, unit in zip(parts, dys, ctx.units, strict=True):
            dx, dz, tile = torch.empty_like(x), torch.empty_like(x), _tile(x, unit)
            grid = _grid(x, tile, x.shape[1])
            # a share of each tile of tokens; summed afterwards, always in one order
            shares = weight.new_empty(grid[0], size, x.shape[2], dtype=torch.float32)
            dz_kernel[grid](
                x, weight, tail, dy, dz, shares, *x.shape[1:], first, channels,
                SIZE=size, EPS=EPS, UNIT=unit is not None,
                maxnreg=None if tail is None else REGISTERS, **tile,
            )  # fmt: skip
            tile = _tile(x, None)
            dx_kernel[_grid(x, tile, x.shape[1] + size - 1)](
                dz, weight, dafter, count, dx, dtail, *x.shape[1:], first, channels,
                SIZE=size, **tile,
            )  # fmt: skip
            dxs.append(dx)
            dweights.append(shares.sum(0))
            first += x.shape[2]
        return torch.cat(dweights, dim=1).to(weight.dtype), dtail, None, None, *dxs


def _tile(x: Tensor, unit: int | None) -> dict[str, Any]:
    """What a program holds of x [B, T, C]: some tokens, and a stretch of channels or one head."""
    step = min(CHANNELS, triton.next_power_of_2(x.shape[2])) if unit is None else unit
    width = triton.next_power_of_2(step)
    tokens = max(1, min(ELEMENTS // width, triton.next_power_of_2(x.shape[1])))
    return {"STEP": step, "WIDTH": width, "TOKENS": tokens, "num_warps": WARPS, "num_stages": 1}


def _grid(x: Tensor, tile: dict[str, Any], columns: int) -> tuple[int, int]:
    """Programs for so many columns of each row of x."""
    return len(x) * triton.cdiv(columns, tile["TOKENS"]), triton.cdiv(x.shape[2], tile["STEP"])
