"""What the exact online rule is asked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from atlas_lm.ops.sequences import read_borders


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked inputs; meanings as in `delta_rule`."""

    q: Tensor  # [B, T, H, F]
    k: Tensor  # [B, P + T, H, F]
    v: Tensor  # [B, P + T, H, V]
    eta: Tensor  # [B, T, H]
    log_alpha: Tensor | None  # [B, T, H]
    gamma: Tensor | None  # [B, T, H, c]
    memory: Tensor  # [N, H, V, F] fp32, or fp64 with the inputs
    after_retention: bool
    past: Tensor | None  # [B]
    cu_seqlens: Tensor | None  # [N + 1]

    @property
    def window(self) -> int:
        return 1 if self.gamma is None else self.gamma.shape[-1]

    @property
    def before(self) -> int:
        """P, the pairs in front of the first token."""
        return self.k.shape[1] - self.q.shape[1]

    def apart(self) -> Iterator["Problem"]:
        """Each packed sequence as a row by itself."""
        assert self.cu_seqlens is not None
        borders = read_borders(self.cu_seqlens, self.q.shape[1])
        for n, (first, end) in enumerate(pairwise(borders)):
            yield replace(
                self,
                q=self.q[:, first:end],
                k=self.k[:, first:end],
                v=self.v[:, first:end],
                eta=self.eta[:, first:end],
                log_alpha=None if self.log_alpha is None else self.log_alpha[:, first:end],
                gamma=None if self.gamma is None else self.gamma[:, first:end],
                memory=self.memory[n : n + 1],
                cu_seqlens=None,
            )


Form = Callable[[Problem], tuple[Tensor, Tensor]]


def each_sequence(form: Form) -> Form:
    """For forms that know only rows of a batch: packed sequences one by one."""

    def run(problem: Problem) -> tuple[Tensor, Tensor]:
        if problem.cu_seqlens is None:
            return form(problem)
        reads, ends = zip(*map(form, problem.apart()), strict=True)
        return torch.cat(reads, dim=1), torch.cat(ends)

    return run
