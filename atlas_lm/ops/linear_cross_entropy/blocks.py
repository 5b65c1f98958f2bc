"""The walk over blocks of rows: logits, loss and both gradients of a block before the next one's logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 1 << 27  # that exist at once
EVEN = (
    128  # rows of a block are a multiple of it where there are so many: products want whole tiles
)

# (logits [r, V], labels [r], ignored [r] bool, gradient wanted) -> losses [r] and, in the memory of the
# logits where possible, their gradient [r, V]; both zero in ignored rows. Logits are not used again.
Softmax = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def walk(
    softmax: Softmax, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int
) -> Tensor:
    """The summed loss, with the softmax of a block given."""
    loss: Tensor = _Walk.apply(softmax, hidden, weight, labels, ignore_index)
    return loss


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        softmax: Softmax,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
    ) -> Tensor:
        _, wants_hidden, wants_weight, _, _ = ctx.needs_input_grad
        device, dtype = hidden.device.type, _product_dtype(hidden, weight)
        exact = torch.promote_types(dtype, torch.float32)
        x, w = hidden.to(dtype), weight.to(dtype)
        ignored = labels == ignore_index
        labels = labels.masked_fill(ignored, 0)
        losses = torch.empty(len(x), dtype=exact, device=x.device)
        dx = torch.empty_like(x) if wants_hidden else None
        dw = torch.zeros(w.shape, dtype=exact, device=w.device) if wants_weight else None
        size = _rows(len(w))
        with torch.autocast(device, enabled=False):
            for first in range(0, len(x), size):
                rows = slice(first, first + size)
                losses[rows], slopes = softmax(
                    x[rows] @ w.mT, labels[rows], ignored[rows], wants_hidden or wants_weight
                )
                if dx is not None:
                    dx[rows] = slopes @ w
                if dw is not None:
                    _add_product(dw, slopes.mT, x[rows])
        ctx.save_for_backward(dx, dw)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = (
            None if slopes is None else _scaled(slopes, grad, dtype)
            for slopes, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, dx, dw, None, None


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, wanted one dtype; cast one of them"
        )
    return hidden.dtype


def _rows(vocabulary: int) -> int:
    """Rows of a block."""
    rows = max(1, LOGITS // vocabulary)
    return rows if rows < EVEN else rows // EVEN * EVEN


def _scaled(slopes: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """slopes grad in a dtype, rounded once."""
    wide = torch.promote_types(slopes.dtype, dtype)
    return (slopes.to(wide) * grad).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, with the sum in the dtype of the total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # halves summed in fp32 by the product itself
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
