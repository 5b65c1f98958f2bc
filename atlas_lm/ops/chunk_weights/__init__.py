"""From gates to the coefficients of a chunk: window, step, momentum and retention folded into one matrix."""

from torch import Tensor

from atlas_lm.ops.backend import why_not_triton
from atlas_lm.ops.chunk_weights.record import ChunkWeights
from atlas_lm.ops.chunk_weights.reference import chunk_weights_reference
from atlas_lm.ops.sequences import Sequences

__all__ = ["ChunkWeights", "chunk_weights", "chunk_weights_reference"]


def chunk_weights(
    eta: Tensor,
    log_alpha: Tensor | None,
    theta: Tensor | None,
    gamma: Tensor | None,
    sequences: Sequences,
    *,
    halo: int = 0,
    retain: Tensor | None = None,
) -> ChunkWeights:
    """W = La [Lth] diag(eta) Ms of every chunk (docs/mathematics.md, section 2), by one recurrence.

    eta: [R, H] fp32, R rows of tokens   log_alpha, theta: [R, H] fp32 or None (1; no momentum)
    gamma: [R, H, c] fp32 or None: a window of one pair, weight 1
    halo: columns for pairs before the chunk, at least c - 1   retain: alpha itself, for log_alpha
    """
    if why_not_triton(eta) is None:
        from atlas_lm.ops.chunk_weights.fused import chunk_weights_fused

        return chunk_weights_fused(eta, log_alpha, theta, gamma, sequences, halo, retain)
    return chunk_weights_reference(
        eta, log_alpha, theta, gamma, sequences, halo=halo, retain=retain
    )
