"""Host side of the features: one launch each way; nothing as wide as they are is kept for backward."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.poly_features.kernels import backward_kernel, forward_kernel
from atlas_lm.ops.poly_features.parallel import poly_width
from atlas_lm.ops.poly_features.reference import EPS
from atlas_lm.ops.poly_features.tables import monomials

DEGREES = (1, 2, 3)
WIDEST, MOST = 128, 65536  # values of a row of x; features
FEATURES = 256  # of a row at a time
ELEMENTS, WARPS = 2048, 8  # of a program forward, at a time
SLOPES, SLOPE_WARPS = 1024, 4  # of a program backward


def declines(x: Tensor, amplitudes: Tensor, degree: int) -> str | None:
    """Why kernels do not take this; None: they do."""
    if degree not in DEGREES:
        return f"degree is {degree}, kernels take 1 to {DEGREES[-1]}"
    if x.shape[-1] > WIDEST or poly_width(x.shape[-1], degree) > MOST:
        return (
            f"x has {x.shape[-1]} values, kernels take at most {WIDEST}, "
            f"and {MOST} monomials of degree {degree}"
        )
    shape = list(amplitudes.shape)
    if len(shape) > 2 or (len(shape) == 2 and (x.dim() < 2 or shape[0] not in (1, x.shape[-2]))):
        return (
            f"amplitudes have shape {shape}, kernels take one row, or one per head of x [.., H, K]"
        )
    if x.numel() == 0:
        return f"x has shape {list(x.shape)}, which is empty"
    return None


def poly_features_fused(
    x: Tensor, amplitudes: Tensor, degree: int, unit: bool, width: int, dtype: torch.dtype
) -> Tensor:
    """What `poly_features` documents; first derivatives only."""
    heads = 1 if amplitudes.numel() == degree + 1 else len(amplitudes)
    rows = x if x.dim() == 4 else x.reshape(1, -1, heads, x.shape[-1])
    each = amplitudes.to(torch.float32).expand(rows.shape[2], -1)
    y: Tensor = _PolyFeatures.apply(rows, each, degree, unit, width, dtype)
    return y if x.dim() == 4 else y.reshape(*x.shape[:-1], width)


class _PolyFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        amplitudes: Tensor,
        degree: int,
        unit: bool,
        width: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """x: [B, T, H, K], any strides   amplitudes: fp32 [H, p+1]"""
        x, amplitudes = x if x.stride(-1) == 1 else x.contiguous(), amplitudes.contiguous()
        table = monomials(x.shape[-1], degree, x.device)
        y = x.new_empty(*x.shape[:-1], width, dtype=dtype)
        features = min(FEATURES, triton.next_power_of_2(width))
        tile = _tile(x, ELEMENTS // features)
        forward_kernel[_grid(x, tile)](
            x, amplitudes, table.columns, table.totals, table.roots, y, *x.shape[1:3],
            *x.stride()[:3], width, **_fixed(x, degree, unit), F=len(table.roots), **tile,
            FEATURES=features, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, amplitudes)
        ctx.degree, ctx.unit = degree, unit
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, amplitudes = ctx.saved_tensors
        grad, dx = grad.contiguous(), x.new_empty(x.shape)
        table = monomials(x.shape[-1], ctx.degree, x.device)
        tile = _tile(x, SLOPES // triton.next_power_of_2(x.shape[-1]))
        grid = _grid(x, tile)
        # of every program its own, summed afterwards, always in one order
        shares = amplitudes.new_empty(grid[0] // len(amplitudes), *amplitudes.shape)
        backward_kernel[grid](
            x, amplitudes, table.lower, table.raised, table.slopes, grad, dx, shares,
            *x.shape[1:3], *x.stride()[:3], grad.shape[-1],
            **_fixed(x, ctx.degree, ctx.unit), M=len(table.raised), **tile, num_warps=SLOPE_WARPS,
        )  # fmt: skip
        return dx, shares.sum(0), None, None, None, None


def _fixed(x: Tensor, degree: int, unit: bool) -> dict[str, Any]:
    return {"EPS": EPS, "K": x.shape[-1], "DEGREE": degree, "UNIT": unit, "num_stages": 1}


def _tile(x: Tensor, rows: int) -> dict[str, int]:
    """So many tokens of x [B, T, H, K], or all."""
    return {
        "ROWS": max(1, min(rows, triton.next_power_of_2(x.shape[1]))),
        "KEYS": triton.next_power_of_2(x.shape[-1]),
    }


def _grid(x: Tensor, tile: dict[str, int]) -> tuple[int]:
    return (len(x) * triton.cdiv(x.shape[1], tile["ROWS"]) * x.shape[2],)
