"""Which columns of x a monomial multiplies, and with what number: made once per size and degree."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Monomials:
    """What kernels read. F: monomials of degree <= p; M: those of degree < p, by degree; -1: no factor."""

    columns: Tensor  # int32 [p, F]
    totals: Tensor  # int32 [F], degrees
    roots: Tensor  # fp32 [F], sqrt(multinomial)
    lower: Tensor  # int32 [p-1, M], columns of the lower ones
    raised: Tensor  # int32 [M, K], the feature that a lower one times x_k is
    slopes: Tensor  # fp32 [M, K], its derivative by x_k, in units of the lower one


@functools.lru_cache(maxsize=64)
def monomials(size: int, degree: int, device: torch.device) -> Monomials:
    """Copied to the device once: a copy at every call would wait, and cannot be captured in a graph."""
    chosen = list(itertools.combinations_with_replacement(range(-1, size), degree))
    place = {one: f for f, one in enumerate(chosen)}
    lower = [
        one
        for d in range(degree)
        for one in itertools.combinations_with_replacement(range(size), d)
    ]
    raised, slopes = [], []
    for one in lower:
        for k in range(size):
            whole = tuple(sorted((*one, k)))
            raised.append(place[(-1,) * (degree - len(whole)) + whole])
            slopes.append(whole.count(k) * root(whole))

    def whole_numbers(rows: list[int], *shape: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(shape).to(device)

    padded = [(*one, *[-1] * (degree - 1 - len(one))) for one in lower]
    return Monomials(
        columns=whole_numbers([one[i] for i in range(degree) for one in chosen], degree, -1),
        totals=whole_numbers([sum(k >= 0 for k in one) for one in chosen], -1),
        roots=torch.tensor([root(one) for one in chosen], dtype=torch.float32).to(device),
        lower=whole_numbers([one[i] for i in range(degree - 1) for one in padded], -1, len(lower)),
        raised=whole_numbers(raised, -1, size),
        slopes=torch.tensor(slopes, dtype=torch.float32).reshape(-1, size).to(device),
    )


def root(columns: tuple[int, ...]) -> float:
    """sqrt(n! / prod n_k!) of the monomial with these factors; -1 is no factor."""
    factors = [k for k in columns if k >= 0]
    repeats = math.prod(math.factorial(factors.count(k)) for k in set(factors))
    return math.sqrt(math.factorial(len(factors)) / repeats)
