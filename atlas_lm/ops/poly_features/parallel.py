"""All monomials at once: gather `degree` columns of [1, x] and multiply them."""

import functools
import itertools
import math

import torch
from torch import Tensor


def poly_width(size: int, degree: int) -> int:
    """Number of monomials of degree <= `degree` in `size` variables: C(size + degree, degree)."""
    return math.comb(size + degree, degree)


def poly_features(x: Tensor, amplitudes: Tensor, degree: int) -> Tensor:
    """Features with phi(q) . phi(k) = sum_i c_i^2 (q . k)^i.

    x: [..., K]   amplitudes: c [..., degree+1], broadcast against x's leading axes
    returns [..., C(K + degree, degree)]

    >>> q, k, c = torch.randn(3), torch.randn(3), torch.tensor([1.0, 0.5, 2.0])
    >>> torch.allclose(poly_features(q, c, 2) @ poly_features(k, c, 2),
    ...                1 + 0.25 * (q @ k) + 4 * (q @ k) ** 2, atol=1e-4)
    True
    """
    columns, degrees, roots = _table(x.shape[-1], degree, x.device, x.dtype)
    padded = torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)
    phi = amplitudes[..., degrees] * roots
    for factor in columns:
        phi = phi * padded[..., factor]
    return phi


@torch.compiler.assume_constant_result
def _table(
    size: int, degree: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of [1, x] to multiply [degree, F], degree of each monomial [F], sqrt(multinomial) [F]."""
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        return _table_on(size, degree, device, dtype)


@functools.lru_cache(maxsize=64)
def _table_on(
    size: int, degree: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Copied to the device once: a copy at every call would wait, and cannot be captured in a graph."""
    columns, degrees, roots = _make_table(size, degree)
    return columns.to(device), degrees.to(device), roots.to(device, dtype)


def _make_table(size: int, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = list(itertools.combinations_with_replacement(range(size + 1), degree))
    degrees = [sum(index > 0 for index in monomial) for monomial in chosen]
    roots = []
    for monomial, total in zip(chosen, degrees, strict=True):
        repeats = [monomial.count(index) for index in set(monomial) if index > 0]
        roots.append(math.sqrt(math.factorial(total) / math.prod(map(math.factorial, repeats))))
    columns = torch.tensor(chosen, dtype=torch.long).reshape(len(chosen), degree).T.contiguous()
    return columns, torch.tensor(degrees), torch.tensor(roots, dtype=torch.float64)
