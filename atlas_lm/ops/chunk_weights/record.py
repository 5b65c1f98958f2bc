"""The coefficients of a chunk: what its memories are made of."""

from typing import NamedTuple

from torch import Tensor


class ChunkWeights(NamedTuple):
    """M_t = keep_t M + push_t S - sum_n mix[t, n] e_n phi_n^T, from memory M and momentum S before
    the chunk; S after it = tail_keep S - sum_n tail_mix[n] e_n phi_n^T. Column n of a chunk that begins
    at token t0 is pair t0 - halo + n. All fp32; behind a sequence's end rows repeat the last one.
    A token has no weight for pairs after it: those places of mix are zero, or left unwritten by kernels.
    """

    mix: Tensor  # [NC, H, b, halo + b]
    keep: Tensor  # [NC, H, b]
    push: Tensor | None  # [NC, H, b]; None: descent, no momentum
    tail_mix: Tensor | None  # [NC, H, halo + b]
    tail_keep: Tensor | None  # [NC, H]
