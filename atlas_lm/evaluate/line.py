"""One row of token ids of any length, in pieces that are not copied, and several of them side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from atlas_lm.data.prompt import Ids


@dataclass(frozen=True)
class Line:
    """Ids [n] in pieces; pieces may be mapped files."""

    pieces: tuple[Ids, ...]
    left_out: int = 0  # ids of its middle that a model had no room for

    @classmethod
    def of(cls, *pieces: Ids | Sequence[int]) -> "Line":
        """From arrays and lists; empty ones are left out."""
        return cls(tuple(np.asarray(piece) for piece in pieces if len(piece)))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _starts(self) -> Ids:
        return np.cumsum([0, *map(len, self.pieces)], dtype=np.int64)

    def read(self, first: int, last: int) -> Ids:
        """Ids first to last - 1, int64."""
        found = []
        begin = max(0, int(np.searchsorted(self._starts, first, side="right")) - 1)
        for piece, start in zip(self.pieces[begin:], self._starts[begin:], strict=False):
            if start >= last:
                break
            found.append(piece[max(0, first - start) : last - start])
        return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)

    def cut(self, first: int, last: int) -> "Line":
        """The ids first to last - 1 as a line of their own."""
        return self if first == 0 and last == len(self) else Line.of(self.read(first, last))

    def ending(self, most: int) -> "Line":
        """At most so many ids, the last ones."""
        left_out = max(0, len(self) - most)
        return replace(self.cut(left_out, len(self)), left_out=self.left_out + left_out)

    def shortened(self, most: int) -> "Line":
        """At most so many ids: the middle is left out, beginning and end stay."""
        if len(self) <= most:
            return self
        left = most // 2
        ends = Line.of(self.read(0, left), self.read(len(self) - (most - left), len(self)))
        return replace(ends, left_out=self.left_out + len(self) - most)


def columns(
    lines: Sequence[Line], first: int, last: int, *, at_end: bool
) -> tuple[Tensor, Tensor | None]:
    """Columns first to last - 1 of lines that stand side by side, [B, n], and which ids count, [B, n].

    Args:
        at_end: the lines end together, and shorter ones begin later; else they begin together.

    Returns None in place of a mask of ones. Ids that do not count are 0.
    """
    longest = max(map(len, lines))
    ids = np.zeros((len(lines), last - first), np.int64)
    valid = np.zeros(ids.shape, bool)
    for row, line in enumerate(lines):
        shift = longest - len(line) if at_end else 0
        found = line.read(max(0, first - shift), max(0, last - shift))
        start = max(0, shift - first)
        ids[row, start : start + len(found)] = found
        valid[row, start : start + len(found)] = True
    mask = None if valid.all() else torch.from_numpy(valid)
    return torch.from_numpy(ids), mask
