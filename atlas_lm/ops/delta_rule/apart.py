"""Packed sequences taken one by one, for the forms that know only rows of a batch."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def each_sequence(
    form: Callable[..., tuple[Tensor, Tensor]],
    cu_seqlens: Tensor,
    inputs: tuple[Tensor, ...],
    gates: dict[str, Tensor | None],
    memory: Tensor | None,
    after_retention: bool,
) -> tuple[Tensor, Tensor]:
    """Run `form` on every sequence between two borders."""
    borders = cu_seqlens.tolist()
    reads, ends = [], []
    for n, (first, end) in enumerate(pairwise(borders)):
        y, state = form(
            *(x[:, first:end] for x in inputs),
            **{name: None if x is None else x[:, first:end] for name, x in gates.items()},
            memory=None if memory is None else memory[n : n + 1],
            after_retention=after_retention,
        )
        reads.append(y)
        ends.append(state)
    return torch.cat(reads, dim=1), torch.cat(ends)
