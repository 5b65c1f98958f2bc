"""What a matrix memory with a chunk anchor is asked, flat, and what it leaves behind."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from atlas_lm.ops.sequences import Sequences


class LinearState(NamedTuple):
    """All [N, H, V, F] fp32."""

    memory: Tensor
    anchor: Tensor  # the memory at the last chunk border that was crossed
    momentum: Tensor | None  # None for descent


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked inputs, rows of all sequences end to end."""

    q: Tensor  # [R, H, F]
    k: Tensor  # [R', H, F]
    v: Tensor  # [R', H, V]
    eta: Tensor  # [R, H] fp32
    log_alpha: Tensor | None  # [R, H] fp32
    theta: Tensor | None  # [R, H] fp32
    gamma: Tensor | None  # [R, H, c] fp32
    memory: Tensor  # [N, H, V, F] fp32
    momentum: Tensor | None  # [N, H, V, F] fp32
    sequences: Sequences
    objective: Literal["l2", "dot"]
    keep: Literal["states", "checkpoints"]

    @property
    def window(self) -> int:
        return 1 if self.gamma is None else self.gamma.shape[-1]
