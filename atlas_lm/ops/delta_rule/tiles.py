"""How a call is cut into tiles: sizes, buffers and launches that all kernels of the delta rule share."""

from dataclasses import dataclass, replace
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
    ("unsolve_kernel", 2): Blocking(features=128, values=64, warps=4),
    ("unsolve_kernel", 4): Blocking(features=64, values=32, warps=4),
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

    def feature_blocks(self, kernel: Any) -> int:
        return -(-self.features // self._blocking(kernel).features)

    def value_blocks(self, kernel: Any) -> int:
        return -(-self.values // self._blocking(kernel).values)

    def launch(self, kernel: Any, *tensors: Tensor | None, split: int = 1) -> None:
        """One program per tile and head, or `split` of them."""
        s, wide = self.sequences, self._blocking(kernel)
        kernel[(s.chunks * self.heads, split)](
            *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
            H=self.heads, F=self.features, V=self.values, BF=wide.features, BV=wide.values,
            CHUNK=s.chunk, HALO=self.halo, C=self.window, CP=self.rows // s.chunk,
            PAIRS=triton.next_power_of_2(self.pairs), AFTER=self.after,
            PRECISION="tf32" if self.dtype in HALVES else "tf32x3",
            SHARP="bf16x3" if self.dtype == torch.bfloat16 else "tf32x3",
            num_warps=wide.warps, num_stages=wide.stages,
        )  # fmt: skip

    def _blocking(self, kernel: Any) -> Blocking:
        """The kernel's blocking, no wider than the tile itself."""
        found = BLOCKINGS[kernel.__name__, self.dtype.itemsize]
        narrow = (max(16, triton.next_power_of_2(n)) for n in (self.features, self.values))
        features, values = map(min, narrow, (found.features, found.values))
        return replace(found, features=features, values=values)
