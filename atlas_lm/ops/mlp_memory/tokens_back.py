"""What is left when the walk back is done, and needs sums over all hidden units: queries, keys and
coefficients of a chunk. With G0 = dW0^T P, G1 = dW1 H, dW asked of the state after the chunk, and for
momentum the same of dS:

    dX = W0^T dA - w G0 + Q dmixed0,   dQ = keep (W0^T dA_q) + ... + X dmixed0^T
    dmixed0 = -(dA_q^T P) * mix,   dmix = (dmixed0 / mix) * (Q^T X) - (dY^T E) * (h^T H)
    to the last row of dmix  -(columns of X * G0 + E * G1)
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import (
    block_of,
    blocks_of,
    chunk_tiles,
    feature_tiles,
    gained,
    size_of,
    store_tile,
    store_vector,
    times,
    token_tile,
    vectors,
)
from atlas_lm.ops.mlp_memory.reads import (
    against,
    both,
    mix_at,
    mix_tiles,
    narrowed,
    place_of,
    query_tiles,
    scores,
    token_rows,
)


@triton.jit
def none_of(tiles, ROWS: tl.constexpr):
    """Zeros [ROWS, pairs] for each tile."""
    found = ()
    for j in tl.static_range(len(tiles)):
        found = found + (tl.zeros([ROWS, tiles[j].shape[1]], tl.float32),)
    return found


@triton.jit
def less_columns(totals, tiles, others):
    """total - column sums of products, of each"""
    found = ()
    for j in tl.static_range(len(tiles)):
        found = found + (totals[j] - tl.sum(tiles[j].to(tl.float32) * others[j], axis=0),)
    return found


@triton.jit
def less_weighted(totals, tiles, w):
    """total - tile with weighted columns, of each"""
    found = ()
    for j in tl.static_range(len(tiles)):
        found = found + (totals[j] - tiles[j] * w[j][None, :],)
    return found


@triton.jit
def through_state(
    dx, dw, dweight, d, slopes, xs, w,
    F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX - w G0 by blocks of features, and dw - columns of X * G0, for one first layer and block of units"""
    found = ()
    blocks = blocks_of(dweight, d, D, F, BF)
    for f in tl.static_range(len(blocks)):
        way = times(tl.trans(blocks[f]), slopes, PRECISION)
        dw = less_columns(dw, xs[f], way)
        found = found + (less_weighted(dx[f], way, w),)
    return found, dw


@triton.jit
def through_layer(
    dx, dq, dmixed, dkept, dpushed, layer: tl.constexpr, d, q, token, there, place, h, borders,
    momentum_borders, start, dunits, asked, slopes, keep, push,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX, dQ, dmixed0 / mix, and what is asked of keep and push, through one first layer, a block of units"""
    PAIRS: tl.constexpr = CHUNK + EDGE
    t = tl.arange(0, CHUNK)
    da = chunk_tiles(dunits + place * (D * PAIRS), d, D, CHUNK, EDGE, BE)
    mask = (d < D)[:, None]
    queried = tl.trans(
        tl.load(asked + (place * D + d)[:, None] * CHUNK + t[None, :], mask=mask, other=0.0)
    )
    w = blocks_of(borders[layer] + place * (D * F), d, D, F, BF)
    dkeys, dqueries = (), ()
    for f in tl.static_range(len(w)):
        dkeys = dkeys + (gained(dx[f], tl.trans(w[f]), da, PRECISION),)
        way = tl.dot(queried, w[f], input_precision=PRECISION)
        total = dq[f]
        if len(start) > 0:
            still = block_of(start[layer] + h * (D * F), f, d, D, F, BF)
            rest = tl.dot(queried, still, input_precision=PRECISION)
            way -= rest
            total += rest
        total += keep[:, None] * way
        at, asking = token_rows(q, token, there, h, f * BF + tl.arange(0, size_of(f, F, BF)), H, F)
        rows = tl.load(at, mask=asking, other=0.0)
        dkept += tl.sum(way * rows, axis=1)
        if len(momentum_borders) > 0:
            moving = block_of(momentum_borders[layer] + place * (D * F), f, d, D, F, BF)
            way = tl.dot(queried, moving, input_precision=PRECISION)
            total += push[:, None] * way
            dpushed += tl.sum(way * rows, axis=1)
        dqueries = dqueries + (total,)
    return dkeys, dqueries, gained(dmixed, queried, slopes, PRECISION), dkept, dpushed


@triton.jit
def tokens_backward_kernel(
    q, x, mix, keep, push, tail_mix, borders, momentum_borders, start, errors, score, dy,
    dborders, dmomentum_borders, hidden, slopes, dunits, asked, dq, dmix, dtail_mix, dx, dgates,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr,
    PARTS: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dborders, dmomentum_borders: asked of the state after each chunk   slopes, dunits, asked: tuples, of
    the first layer and of the gate   filled: dq, dmix, dtail_mix, by chunk dx [NC, H, F, PAIRS],
    and the last part of dgates [NC, H, PARTS, 2, CHUNK]"""
    PAIRS: tl.constexpr = CHUNK + EDGE
    dtype: tl.constexpr = q.dtype.element_ty
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    t0, token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    place, bound = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1))
    t, c = tl.arange(0, CHUNK), tl.arange(0, BV)
    there = t0 + t < end
    kept = tl.load(keep + place * CHUNK + t)
    w = vectors(mix + (place * CHUNK + CHUNK - 1) * PAIRS, CHUNK, EDGE, BE)
    pushing, u = kept, w
    if len(momentum_borders) > 0:
        pushing = tl.load(push + place * CHUNK + t)
        u = vectors(tail_mix + place * PAIRS, CHUNK, EDGE, BE)
    xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
    error = chunk_tiles(errors + place * (V * PAIRS), c, V, CHUNK, EDGE, BE)
    dmixed, dw, dkeys, dqueries = none_of(error, CHUNK), (), (), ()
    for j in tl.static_range(len(error)):
        dw = dw + (tl.zeros([error[j].shape[1]], tl.float32),)
    dt = dw
    for f in tl.static_range(len(xs)):
        dkeys = dkeys + (none_of(error, size_of(f, F, BF)),)
        dqueries = dqueries + (tl.zeros([CHUNK, size_of(f, F, BF)], tl.float32),)
    dkept = tl.zeros([CHUNK], tl.float32)
    dpushed = dkept
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        for g in tl.static_range(len(slopes)):
            steep = chunk_tiles(slopes[g] + place * (D * PAIRS), d, D, CHUNK, EDGE, BE)
            dkeys, dqueries, dmixed, dkept, dpushed = through_layer(
                dkeys, dqueries, dmixed, dkept, dpushed, 2 * g, d, q, token, there, place, h, borders,
                momentum_borders, start, dunits[g], asked[g], steep, kept, pushing, H, F, D, BF, CHUNK, EDGE,
                BE, PRECISION,
            )  # fmt: skip
            at = place * (D * F)
            dkeys, dw = through_state(
                dkeys, dw, dborders[2 * g] + at, d, steep, xs, w, F, D, BF, PRECISION
            )
            if len(momentum_borders) > 0:
                dkeys, dt = through_state(
                    dkeys, dt, dmomentum_borders[2 * g] + at, d, steep, xs, u, F, D, BF, PRECISION
                )
        h_ = chunk_tiles(hidden + place * (D * PAIRS), d, D, CHUNK, EDGE, BE)
        (last,) = blocks_of(dborders[1] + place * (D * V), d, D, V, BV)
        dw = less_columns(dw, error, times(tl.trans(last), h_, PRECISION))
        if len(momentum_borders) > 0:
            (last,) = blocks_of(dmomentum_borders[1] + place * (D * V), d, D, V, BV)
            dt = less_columns(dt, error, times(tl.trans(last), h_, PRECISION))

    at = dgates + (place * PARTS + PARTS - 1) * (2 * CHUNK) + t
    tl.store(at, dkept)
    if len(momentum_borders) > 0:
        tl.store(at + CHUNK, dpushed)

    # the weights of pairs
    queries = query_tiles(q, token, there, h, H, F, BF)
    out = token_tile(dy, token, there, h, c, H, V)
    plain, dscore = scores(queries, xs, PRECISION), times(tl.trans(out), error, PRECISION)
    scored = chunk_tiles(score + place * (CHUNK * PAIRS), t, CHUNK, CHUNK, EDGE, BE)
    for j in tl.static_range(len(error)):
        at, mask = mix_at(dmix, place, j, CHUNK, EDGE, BE)
        total = -dmixed[j] * plain[j] - dscore[j] * scored[j]
        total += tl.where(t == CHUNK - 1, 1.0, 0.0)[:, None] * dw[j][None, :]
        tl.store(at, total, mask=mask)
        if len(momentum_borders) > 0:
            store_vector(dtail_mix + place * PAIRS, dt[j], j, CHUNK, EDGE, BE)

    # queries and keys
    dmixed = narrowed(both(dmixed, mix_tiles(mix, place, CHUNK, EDGE, BE)), dtype)
    for f in tl.static_range(len(queries)):
        row = f * BF + tl.arange(0, size_of(f, F, BF))
        total = dqueries[f] - against(dmixed, xs[f], PRECISION)
        if SKIP:
            at, mask = token_rows(dy, token, there, h, row, H, V)
            total += tl.load(at, mask=mask, other=0.0)
        at, mask = token_rows(dq, token, there, h, row, H, F)
        tl.store(at, total.to(dtype), mask=mask)
        for j in tl.static_range(len(error)):
            found = dkeys[f][j] - tl.dot(queries[f][0], dmixed[j], input_precision=PRECISION)
            store_tile(dx + place * (F * PAIRS), found, row, j, F, CHUNK, EDGE, BE)
