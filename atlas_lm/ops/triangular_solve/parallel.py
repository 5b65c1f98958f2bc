"""The same system through the library's unit-triangular solver."""

import torch
from torch import Tensor


def triangular_solve(coupling: Tensor, right: Tensor) -> Tensor:
    """Solve X = R + N X for X, i.e. (I - N) X = R.

    coupling: N [..., n, n], entries on and above the diagonal are ignored   right: R [..., n, V]
    returns X: [..., n, V]
    """
    system = -coupling.tril(-1)
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
