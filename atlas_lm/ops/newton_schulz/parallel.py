"""Newton-Schulz as batched matrix products, differentiable everywhere, zero included."""

import torch
from torch import Tensor

from atlas_lm.ops.newton_schulz.schedules import schedule


def newton_schulz(matrix: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7) -> Tensor:
    """Push the singular values of each matrix toward one, keeping its singular vectors.

    X_0 = S / (||S||_F + eps), transposed if tall; X <- aX + (bA + cA^2)X with A = X X^T.
    matrix: [..., O, I]; returns the same shape. steps = 0 switches it off: the matrix unchanged.
    A zero matrix gives zero, with the finite gradient of S / eps through the polynomial.

    >>> newton_schulz(torch.diag(torch.tensor([3.0, 0.3])), 12, name="cubic").round(decimals=3)
    tensor([[1., 0.],
            [0., 1.]])
    """
    coefficients = schedule(name, steps)
    if not coefficients:
        return matrix
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (_norm(x) + eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _norm(matrix: Tensor) -> Tensor:
    """Frobenius norm [..., 1, 1] whose gradient at zero is zero instead of NaN."""
    square = matrix.square().sum((-2, -1), keepdim=True)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
