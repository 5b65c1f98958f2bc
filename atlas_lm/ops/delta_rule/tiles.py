"""How a call is cut into tiles: sizes, buffers and launches that all kernels of the delta rule share."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from atlas_lm.ops.backend import HALVES
from atlas_lm.ops.sequences import Sequences

TOKENS = {1: 64, 2: 32, 3: 16, 4: 16}  # per tile, by window: 64 rows (token, place in its window)
HALO = 16  # pairs before a tile that its windows may reach, with a window above one
WIDEST = 256  # features and values


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """Columns that a kernel holds at once, at most, and how it is compiled."""

    features: int
    values: int
    warps: int
    stages: int = 1


# By kernel and bytes per number.
BLOCKINGS = {
    ("solve_kernel", 2): Blocking(features=128, values=128, warps=4),
    ("solve_kernel", 4): Blocking(features=64, values=64, warps=4),
    ("read_kernel", 2): Blocking(features=128, values=128, warps=4),
    ("read_kernel", 4): Blocking(features=64, values=64, warps=4),
    ("borders_kernel", 2): Blocking(features=128, values=64, warps=8, stages=2),
    ("borders_kernel", 4): Blocking(features=64, values=32, warps=4),
    ("unsolve_kernel", 2): Blocking(features=128, values=128, warps=8),
    ("unsolve_kernel", 4): Blocking(features=32, values=32, warps=4),
    ("halo_kernel", 2): Blocking(features=WIDEST, values=WIDEST, warps=1),
    ("halo_kernel", 4): Blocking(features=WIDEST, values=WIDEST, warps=1),
}


@dataclass(frozen=True, eq=False)
class Tiles:
    """One call: where its tokens lie and how large everything is."""

    sequences: Sequences
    heads: int
    features: int
    values: int
    window: int
    after: bool  # slopes are taken after retention
    dtype: torch.dtype

    @property
    def halo(self) -> int:
        return 0 if self.window == 1 else HALO

    @property
    def pairs(self) -> int:
        """Distinct pairs of a tile."""
        return self.halo + self.sequences.chunk

    @property
    def rows(self) -> int:
        return self.sequences.chunk * triton.next_power_of_2(self.window)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor [NC, H, ...], one part per tile and head."""
        size = (self.sequences.chunks, self.heads, *shape)
        return torch.empty(size, dtype=dtype or self.dtype, device=self.sequences.start.device)

    def blocks(self, kernel: Any, width: int) -> int:
        """Programs that share `width` features of a tile."""
        return -(-width // self._sizes(kernel)["BF"])

    def launch(self, kernel: Any, *tensors: Tensor | None, split: int = 1) -> None:
        """One program per tile and head, or `split` of them."""
        s = self.sequences
        kernel[(s.chunks * self.heads, split)](
            *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
            **self._sizes(kernel),
        )  # fmt: skip
