"""Orthogonalise a batch of small matrices by matrix products alone (Muon's inner step)."""

from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.newton_schulz.parallel import newton_schulz_parallel
from atlas_lm.ops.newton_schulz.reference import newton_schulz_reference
from atlas_lm.ops.newton_schulz.schedules import SCHEDULES, schedule

__all__ = [
    "SCHEDULES",
    "newton_schulz",
    "newton_schulz_backward",
    "newton_schulz_parallel",
    "newton_schulz_reference",
    "schedule",
]

FORMS = ("parallel", "fused")


def newton_schulz(
    matrix: Tensor,
    steps: int,
    *,
    name: str = "muon",
    eps: float = 1e-7,
    form: Literal["auto", "parallel", "fused"] = "auto",
) -> Tensor:
    """Push the singular values of each matrix toward one, keeping its singular vectors.

    X_0 = S / (||S||_F + eps), transposed if tall; X <- aX + (bA + cA^2)X with A = X X^T.
    matrix: [..., O, I]; returns the same shape. steps = 0 switches it off: the matrix unchanged.
    A zero matrix gives zero, with the finite gradient of S / eps through the polynomial.
    form: "auto" takes the kernels on a CUDA device where they fit. They have no second derivatives:
    ask for "parallel" where a gradient is differentiated again.

    >>> import torch
    >>> newton_schulz(torch.diag(torch.tensor([3.0, 0.3])), 12, name="cubic").round(decimals=3)
    tensor([[1., 0.],
            [0., 1.]])
    """
    chosen = choose("newton_schulz", form, FORMS, matrix, lambda: _why_not_fused(matrix))
    if chosen == "fused":
        from atlas_lm.ops.newton_schulz.fused import newton_schulz_fused

        return newton_schulz_fused(matrix, steps, name=name, eps=eps)
    return newton_schulz_parallel(matrix, steps, name=name, eps=eps)


def newton_schulz_backward(
    matrix: Tensor, grad: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7
) -> Tensor:
    """What a gradient of `newton_schulz(matrix, ...)` asks of the matrix, for those who keep no graph."""
    if not schedule(name, steps):
        return grad
    if choose("newton_schulz", "auto", FORMS, matrix, lambda: _why_not_fused(matrix)) == "fused":
        from atlas_lm.ops.newton_schulz.fused import backward

        return backward(matrix, grad, steps, name, eps)
    with torch.enable_grad():
        matrix = matrix.detach().requires_grad_()
        result = newton_schulz_parallel(matrix, steps, name=name, eps=eps)
    return torch.autograd.grad(result, matrix, grad)[0]


def _why_not_fused(matrix: Tensor) -> str | None:
    reason = why_not_triton(matrix)
    if reason is None:
        from atlas_lm.ops.newton_schulz.fused import declines

        reason = declines(matrix)
    return reason
