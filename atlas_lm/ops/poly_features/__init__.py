"""All monomials up to degree p, weighted so that their inner product is a polynomial of q.k."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.poly_features.parallel import poly_features_parallel, poly_width
from atlas_lm.ops.poly_features.reference import poly_features_reference

__all__ = [
    "poly_features",
    "poly_features_parallel",
    "poly_features_reference",
    "poly_width",
    "why_not_fused",
]

FORMS = ("reference", "parallel", "fused")


def poly_features(
    x: Tensor,
    amplitudes: Tensor,
    degree: int,
    *,
    unit: bool = False,
    width: int | None = None,
    dtype: torch.dtype | None = None,
    form: Literal["auto", "reference", "parallel", "fused"] = "auto",
) -> Tensor:
    """Features with phi(q) . phi(k) = sum_i c_i^2 (q . k)^i.

    x: [..., K]   amplitudes: c [..., degree+1], broadcast against x's leading axes
    unit: x / max(|x|, 1e-6) instead of x: zeros stay zeros, with finite gradients
    width: of the result, zero beyond the features, so that rows begin at even places; None: no more
    dtype: of the result; None: that of x
    Returns [..., width or C(K + degree, degree)], features in the order of sorted index tuples.

    "fused" wants c [degree+1] or [H, degree+1] for x [..., H, K] and degrees up to 3, reckons in fp32 and
    rounds once; first derivatives only.

    >>> q, k, c = torch.randn(3), torch.randn(3), torch.tensor([1.0, 0.5, 2.0])
    >>> torch.allclose(poly_features(q, c, 2) @ poly_features(k, c, 2),
    ...                1 + 0.25 * (q @ k) + 4 * (q @ k) ** 2, atol=1e-4)
    True
    """
    features = poly_width(x.shape[-1], degree)
    width, dtype = features if width is None else width, dtype or x.dtype
    _check(amplitudes, degree, features, width)
    chosen = choose("poly_features", form, FORMS, x, lambda: why_not_fused(x, amplitudes, degree))
    if chosen == "fused":
        from atlas_lm.ops.poly_features.fused import poly_features_fused

        return poly_features_fused(x, amplitudes, degree, unit, width, dtype)
    plain = poly_features_parallel if chosen == "parallel" else poly_features_reference
    phi = plain(x, amplitudes, degree, unit).to(dtype)
    return phi if width == features else pad(phi, (0, width - features))


def why_not_fused(x: Tensor, amplitudes: Tensor, degree: int) -> str | None:
    """Why the fused form cannot run on these; None: it can."""
    reason = why_not_triton(x, amplitudes)
    if reason is None:
        from atlas_lm.ops.poly_features.fused import declines

        reason = declines(x, amplitudes, degree)
    return reason


def _check(amplitudes: Tensor, degree: int, features: int, width: int) -> None:
    if amplitudes.shape[-1] != degree + 1:
        raise ValueError(
            f"amplitudes have shape {list(amplitudes.shape)}, wanted {degree + 1} in the last axis: one "
            f"for each degree from 0 to {degree}"
        )
    if width < features:
        raise ValueError(f"width is {width}, which does not hold the {features} features")
