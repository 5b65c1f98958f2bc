"""The exact online rule in Triton: solve every tile at once, walk its borders, read; and true gradients.

Saved for the backward pass: left and queries (as large as k and q), the inverse (half of k at 128 features)
and the borders (two times k at 128 x 128 and a window of one). Solving and walking again would cost more than
reading them; products of queries, keys and borders are cheap and made again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.chunk_walk.fused import Walk
from atlas_lm.ops.chunk_weights import chunk_weights
from atlas_lm.ops.delta_rule.record import Problem
from atlas_lm.ops.delta_rule.solve import read_kernel, solve_kernel
from atlas_lm.ops.delta_rule.tiles import TOKENS, Tiles
from atlas_lm.ops.delta_rule.unsolve import halo_kernel, unsolve_kernel
from atlas_lm.ops.sequences import Sequences, even_rows, packed


def delta_rule_fused(problem: Problem) -> tuple[Tensor, Tensor]:
    """`delta_rule` by Triton kernels."""
    p = problem
    batch, tokens, heads, _ = p.q.shape
    eta, gamma = p.eta, p.gamma
    if gamma is not None and p.window == 1:
        eta, gamma = eta * gamma.squeeze(-1), None
    size = TOKENS[p.window]
    if p.cu_seqlens is None:
        sequences = even_rows(batch, tokens, size, p.q.device, before=p.before, past=p.past)
    else:
        sequences = packed(p.cu_seqlens, size, tokens)
    if sequences.chunks == 0:
        return p.q.new_zeros(batch, tokens, heads, p.v.shape[-1]), p.memory
    with torch.cuda.device_of(p.q):  # kernels run on the current device
        weights = chunk_weights(
            _flat(eta).float(),
            None if p.log_alpha is None else _flat(p.log_alpha).float(),
            None,
            None,
            sequences,
        )
        y, memory = _DeltaRule.apply(
            _flat(p.q),
            _flat(p.k),
            _flat(p.v),
            None if gamma is None else _flat(gamma).float(),
            weights.mix,
            weights.keep,
            p.memory,
            sequences,
            p.after_retention or p.log_alpha is None,
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
        """q, k, v: [rows, H, .], gamma: [rows, H, c], mix, keep: of `chunk_weights` -> y, memory."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        gamma = None if gamma is None else gamma.contiguous()
        features, values = q.shape[-1], v.shape[-1]
        window = 1 if gamma is None else gamma.shape[-1]
        tiles = Tiles(sequences, q.shape[1], features, values, window, after, q.dtype)
        left, right = tiles.new(tiles.pairs, features), tiles.new(tiles.pairs, values)
        inverse = tiles.new(tiles.rows, tiles.rows)
        queries, y = torch.empty_like(q), _rows(sequences, v[: q.shape[0]])
        tiles.launch(solve_kernel, q, k, v, gamma, mix, keep, left, right, queries, y, inverse)
        walk = Walk(sequences, k, right, keep, tiles.halo, left)
        walked = walk.forward(memory)
        blocks = tiles.value_blocks(read_kernel)
        tiles.launch(read_kernel, queries, walked.borders, y, split=blocks)
        ctx.tiles = tiles
        ctx.save_for_backward(
            q, k, v, gamma, mix, keep, left, queries, inverse, walked.borders, walked.transition
        )  # fmt: skip
        return y, walked.memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        tiles: Tiles = ctx.tiles
        q, k, v, gamma, mix, keep, left, queries, inverse, borders, transition = ctx.saved_tensors
        s, dy = tiles.sequences, dy.contiguous()
        walk = Walk(s, k, v, keep, tiles.halo, left)  # v: its width alone
        back = walk.backward(transition, queries, None, dy, [dmemory, None], None, [borders, None])
        spare = k.shape[0] - q.shape[0]  # pairs before first tokens, some of which may not exist
        dq, dk, dv = _rows(s, q), _rows(s, k, spare), _rows(s, v, spare)
        dgamma = None if gamma is None else _rows(s, gamma)
        blocks = tiles.feature_blocks(unsolve_kernel)
        dmix, dkeep = torch.empty_like(mix), tiles.new(blocks, s.chunk, dtype=torch.float32)
        halo = [tiles.new(tiles.window - 1, x.shape[-1]) for x in (k, v)]
        tiles.launch(
            unsolve_kernel, q, k, v, gamma, mix, keep, inverse, borders, dy, back.borders[0], back.keep,
            dq, dk, dv, dmix, dkeep, dgamma, *halo, split=blocks,
        )  # fmt: skip
        if tiles.window > 1:
            tiles.launch(halo_kernel, dk, dv, *halo)
        return dq, dk, dv, dgamma, dmix, dkeep.sum(2), back.starts[0], None, None


def _flat(x: Tensor) -> Tensor:
    """[B, T, H, ...] -> [B * T, H, ...]"""
    return x.flatten(0, 1)


def _rows(sequences: Sequences, like: Tensor, spare: int = 0) -> Tensor:
    """To be filled by tiles; zero first where they leave out rows: no token, or one of `spare` pairs."""
    return torch.empty_like(like) if sequences.full and not spare else torch.zeros_like(like)
