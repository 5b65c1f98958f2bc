"""Monomial by monomial, from its exponents: the definition."""

import itertools
import math

import torch
from torch import Tensor

EPS = 1e-6  # shorter vectors are not brought to unit length, but divided by this


def poly_features_reference(
    x: Tensor, amplitudes: Tensor, degree: int, unit: bool = False
) -> Tensor:
    """phi(x)_n = c_{|n|} sqrt(|n|! / prod n_k!) prod x_k^{n_k} over all exponents n, |n| <= degree.

    x: [..., K]   amplitudes: c [..., degree+1]   returns [..., C(K+degree, degree)], ordered as the
    sorted index tuples of `poly_features` are. unit: of x / max(|x|, EPS)
    """
    if unit:
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(EPS)
    size = x.shape[-1]
    columns = []
    for chosen in itertools.combinations_with_replacement(range(size + 1), degree):
        exponents = [chosen.count(k + 1) for k in range(size)]
        total = sum(exponents)
        multinomial = math.factorial(total) / math.prod(math.factorial(n) for n in exponents)
        monomial = math.sqrt(multinomial) * amplitudes[..., total]
        for k, exponent in enumerate(exponents):
            monomial = monomial * x[..., k] ** exponent
        columns.append(monomial)
    return torch.stack(columns, dim=-1)
