"""All monomials at once: gather `degree` columns of [1, x] and multiply them."""

import functools
import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atlas_lm.ops.poly_features.reference import EPS
from atlas_lm.ops.poly_features.tables import root


def poly_width(size: int, degree: int) -> int:
    """Number of monomials of degree <= `degree` in `size` variables: C(size + degree, degree)."""
    return math.comb(size + degree, degree)


def poly_features_parallel(
    x: Tensor, amplitudes: Tensor, degree: int, unit: bool = False
) -> Tensor:
    """What `poly_features` documents, on any device and dtype, with all derivatives."""
    if unit:
        x = normalize(x, dim=-1, eps=EPS)
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
    roots = [root(tuple(index - 1 for index in monomial)) for monomial in chosen]
    columns = torch.tensor(chosen, dtype=torch.long).reshape(len(chosen), degree).T.contiguous()
    return columns, torch.tensor(degrees), torch.tensor(roots, dtype=torch.float64)
