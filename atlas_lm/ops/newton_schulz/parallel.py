"""Newton-Schulz as batched matrix products, differentiable everywhere, zero included."""

import torch
from torch import Tensor

from atlas_lm.ops.newton_schulz.schedules import schedule


def newton_schulz_parallel(
    matrix: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7
) -> Tensor:
    """What `newton_schulz` documents, on any device and dtype, with all derivatives."""
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
