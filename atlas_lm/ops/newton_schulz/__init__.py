"""Orthogonalise a batch of small matrices by matrix products alone (Muon's inner step)."""

from typing import Literal

from torch import Tensor

from atlas_lm.ops.backend import say_once, why_not_triton
from atlas_lm.ops.newton_schulz.parallel import newton_schulz_parallel
from atlas_lm.ops.newton_schulz.reference import newton_schulz_reference
from atlas_lm.ops.newton_schulz.schedules import SCHEDULES, schedule

__all__ = [
    "SCHEDULES",
    "newton_schulz",
    "newton_schulz_parallel",
    "newton_schulz_reference",
    "schedule",
]

FORMS = ("auto", "parallel", "fused")


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
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, wanted one of {', '.join(FORMS)}")
    if _fused(matrix, form):
        from atlas_lm.ops.newton_schulz.fused import newton_schulz_fused

        return newton_schulz_fused(matrix, steps, name=name, eps=eps)
    return newton_schulz_parallel(matrix, steps, name=name, eps=eps)


def _fused(matrix: Tensor, form: str) -> bool:
    """Whether the kernels run; raises where they were asked for and cannot."""
    if form == "parallel" or (form == "auto" and not matrix.is_cuda):
        return False
    reason = why_not_triton(matrix)
    if reason is None:
        from atlas_lm.ops.newton_schulz.fused import declines

        reason = declines(matrix)
        if reason is not None and form == "auto":
            say_once(f"newton_schulz runs its parallel form: {reason}")
    if reason is not None and form == "fused":
        raise ValueError(f"newton_schulz has no fused form here: {reason}; use form='parallel'")
    return reason is None
