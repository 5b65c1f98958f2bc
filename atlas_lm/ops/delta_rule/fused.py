"""The exact online rule in Triton: solve every tile at once, walk its borders, read; and true gradients.

Saved for the backward pass: left, right and queries (as large as k, v, q), the inverse (half of k at 128
features) and the borders (two times k at 128 x 128). Solving and walking again would cost more than reading them;
the products of queries and keys are cheap and made again.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES
from atlas_lm.ops.chunk_walk.fused import Walk
from atlas_lm.ops.chunk_weights import chunk_weights
from atlas_lm.ops.delta_rule.solve import read_kernel, solve_kernel
from atlas_lm.ops.delta_rule.unsolve import borders_kernel, halo_kernel, unsolve_kernel
from atlas_lm.ops.sequences import Sequences, even_rows, packed

TOKENS = {1: 64, 2: 32, 3: 16, 4: 16}  # per tile, by window: 64 rows (token, place in its window)


def delta_rule_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    *,
    log_alpha: Tensor | None = None,
    gamma: Tensor | None = None,
    memory: Tensor | None = None,
    after_retention: bool = False,
    past: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes and meanings as in `delta_rule`."""
    batch, tokens, heads, features = q.shape
    window = 1 if gamma is None else gamma.shape[-1]
    if gamma is not None and window == 1:
        eta, gamma = eta * gamma.squeeze(-1), None
    if cu_seqlens is None:
        before = k.shape[1] - tokens
        sequences = even_rows(
            batch, tokens, TOKENS[window], q.device, before=before, past=past
        )
    else:
        sequences = packed(cu_seqlens, TOKENS[window])
    if memory is None:
        memory = q.new_zeros(sequences.count, heads, v.shape[-1], features, dtype=torch.float32)
    if sequences.chunks == 0:
        return q.new_zeros(batch, tokens, heads, v.shape[-1]), memory.float()
    weights = chunk_weights(
        _flat(eta).float(),
        None if log_alpha is None else _flat(log_alpha).float(),
        None,
        None,
        sequences,
    )
    y, memory = _DeltaRule.apply(
        _flat(q),
        _flat(k),
        _flat(v),
        None if gamma is None else _flat(gamma).float(),
        weights.mix,
        weights.keep,
        memory.float(),
        sequences,
        after_retention or log_alpha is None,
    )
    return y.view(batch, tokens, heads, -1), memory


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        mix: Tensor,
        keep: Tensor,
        memory: Tensor,
        sequences: Sequences,
        after: bool,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        gamma = None if gamma is None else gamma.contiguous()
        tiles = _Tiles(sequences, q, v, gamma, after)
        left, right = tiles.per_pair(q.shape[-1], q), tiles.per_pair(v.shape[-1], q)
        queries, y = tiles.per_row(q), tiles.per_row(q.new_empty(q.shape[0], *v.shape[1:]))
        inverse = tiles.per_tile(tiles.rows, tiles.rows, q)
        tiles.launch(
            solve_kernel, q, k, v, gamma, mix, keep, left, right, queries, y, inverse,
            **tiles.wide(4), **tiles.window(), **tiles.gated(),
        )  # fmt: skip
        walk = Walk(sequences, k, right, keep[..., -1].contiguous(), tiles.halo, left)
        walked = walk.forward(memory)
        tiles.launch(
            read_kernel, queries, walked.borders, y, blocks=("V",), **tiles.wide(4), CHUNK=sequences.chunk
        )
        ctx.tiles, ctx.walk_again = tiles, walked.transition
        ctx.save_for_backward(
            q, k, v, gamma, mix, keep, left, right, queries, inverse, walked.borders
        )
        return y, walked.memory
