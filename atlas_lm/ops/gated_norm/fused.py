"""Host side of the gated norm: one launch each way, and the sum of the weight's gradient."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.gated_norm.kernels import backward_kernel, forward_kernel

WIDEST = 4096  # values of a row
ELEMENTS, WARPS = 4096, 8  # of a program at a time
TURNS = 4  # blocks of rows that a program of the backward pass takes, one after the other


def declines(x: Tensor) -> str | None:
    """Why kernels do not take this; None: they do."""
    if x.shape[-1] > WIDEST:
        return f"rows have {x.shape[-1]} values, kernels hold at most {WIDEST}"
    return None


def gated_norm_fused(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `gated_norm` documents."""
    y: Tensor = _GatedNorm.apply(x, gate, weight, eps)
    return y


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, gate.dtype))
        tile = _tile(x)
        forward_kernel[(triton.cdiv(_rows(x), tile["ROWS"]),)](
            x, gate, weight, y, _rows(x), eps, V=len(weight), **tile
        )
        ctx.eps = eps
        ctx.save_for_backward(x, gate, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        dx, dgate, tile = torch.empty_like(x), torch.empty_like(gate), _tile(x)
        programs = triton.cdiv(_rows(x), TURNS * tile["ROWS"])
        # a share of each program; summed afterwards, always in one order
        shares = weight.new_empty(programs, len(weight), dtype=torch.float32)
        backward_kernel[(programs,)](
            x, gate, weight, grad.contiguous(), dx, dgate, shares, _rows(x), ctx.eps,
            V=len(weight), TURNS=TURNS, **tile,
        )  # fmt: skip
        return dx, dgate, shares.sum(0).to(weight.dtype), None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _tile(x: Tensor) -> dict[str, Any]:
    """Whole rows of x, as many as a program holds at a time."""
    width = triton.next_power_of_2(x.shape[-1])
    rows = max(1, min(ELEMENTS // width, triton.next_power_of_2(_rows(x))))
    return {"ROWS": rows, "WIDTH": width, "num_warps": WARPS, "num_stages": 1}
