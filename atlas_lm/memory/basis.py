"""The columns in which a chunk-parallel form counts.

Inside a chunk every memory is a combination of a few dense matrices and of rank-one slopes, so the
rule is run on the coefficients: [M at the chunk's start, S there, the initial memory, slope 1, 2, ...].
"""

from torch import Tensor

MEMORY, MOMENTUM, START = 0, 1, 2
DENSE = 3  # number of dense columns; slopes follow


def unit_column(like: Tensor, column: int) -> Tensor:
    """The coefficients [..., N] of one basis element alone, shaped after like: [..., T, N]."""
    row = like.new_zeros(like.shape[-1])
    row[column] = 1
    return row.expand(*like.shape[:-2], -1)
