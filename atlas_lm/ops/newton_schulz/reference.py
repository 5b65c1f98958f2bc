"""Newton-Schulz through the singular values: what the iteration does, read off its definition."""

import torch
from torch import Tensor

from atlas_lm.ops.newton_schulz.schedules import schedule


def newton_schulz_reference(
    matrix: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7
) -> Tensor:
    """U f(sigma / (||S||_F + eps)) V^T with f the composed polynomials. No gradients: SVD has none
    where singular values meet. matrix: [..., O, I]; steps = 0 returns the matrix unchanged."""
    if steps == 0:
        return matrix
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    sigma = sigma / (matrix.square().sum((-2, -1)).sqrt().unsqueeze(-1) + eps)
    for a, b, c in schedule(name, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return (u * sigma.unsqueeze(-2)) @ vh
