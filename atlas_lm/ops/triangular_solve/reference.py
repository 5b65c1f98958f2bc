"""Forward substitution as a loop: the definition."""

import torch
from torch import Tensor


def triangular_solve_reference(coupling: Tensor, right: Tensor) -> Tensor:
    """Row by row, X_n = R_n + sum_{m<n} N[n, m] X_m.

    coupling: N [..., n, n], entries on and above the diagonal are ignored   right: R [..., n, V]
    """
    rows: list[Tensor] = []
    for n in range(right.shape[-2]):
        row = right[..., n, :]
        for m in range(n):
            row = row + coupling[..., n, m, None] * rows[m]
        rows.append(row)
    return torch.stack(rows, dim=-2)
